"""What a workload needs beyond the package and does not find."""

from __future__ import annotations

from typing import TypeAlias

from shmcache.errors.base import ContractError, variant


class WorkloadError(ContractError):
    """Optional packages and models of the workloads."""

    PackageMissing: TypeAlias = "_WorkloadPackageMissing"
    ModelUnsupported: TypeAlias = "_WorkloadModelUnsupported"


@variant("the optional package {package} is not installed", hint="run `{command}`")
class _WorkloadPackageMissing(WorkloadError):
    package: str
    command: str


@variant("the model {path} cannot be run here: {reason}", hint="use another one")
class _WorkloadModelUnsupported(WorkloadError):
    path: str
    reason: str
