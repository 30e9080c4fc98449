"""What a workload needs beyond the package and does not find."""

from __future__ import annotations

from dataclasses import field
from typing import TypeAlias

from shmcache.errors.base import ContractError, variant


class WorkloadError(ContractError):
    """Optional packages, models and their configs."""

    PackageMissing: TypeAlias = "_WorkloadPackageMissing"
    ModelUnsupported: TypeAlias = "_WorkloadModelUnsupported"
    ConfigUnreadable: TypeAlias = "_WorkloadConfigUnreadable"
    ConfigUnsupported: TypeAlias = "_WorkloadConfigUnsupported"
    PagesMissing: TypeAlias = "_WorkloadPagesMissing"


@variant("the optional package {package} is not installed", hint="run `{command}`")
class _WorkloadPackageMissing(WorkloadError):
    package: str
    command: str


@variant("the model {path} cannot be run here: {reason}", hint="use another one")
class _WorkloadModelUnsupported(WorkloadError):
    path: str
    reason: str


@variant(
    "the model's config {path!r} cannot be read",
    hint="give the config.json of a decoder, its folder, or the name of a built-in geometry",
)
class _WorkloadConfigUnreadable(WorkloadError):
    path: str
    message: str = field(default="", compare=False)


@variant(
    "the config of a {model_type!r} model cannot be planned with, for its {field_name}",
    hint="say what a token costs: --bytes-per-token",
)
class _WorkloadConfigUnsupported(WorkloadError):
    model_type: str
    field_name: str
    message: str = field(default="", compare=False)


@variant("there is no page to talk about in {folder}", hint="name a folder of *.md files")
class _WorkloadPagesMissing(WorkloadError):
    folder: str
