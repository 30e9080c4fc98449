"""The outsider of a stress run: looks at the pool without being an owner, and notes violations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shmcache import CachePoolResource, CacheResidencyPool, ContractError


class Auditor:
    """Looks at the pool from outside, and writes down what must not be."""

    def __init__(self, observer: CacheResidencyPool) -> None:
        self.observer = observer
        self.audits = 0
        self.violations: list[str] = []

    def glance(self) -> None:
        """G2: no total and no peak is above its limit."""
        with self.complaints():
            report = self.observer.report()
            for axis in (resource.value for resource in CachePoolResource):
                limit = getattr(report.limits, f"{axis}_bytes")
                for what in ("current", "peak"):
                    found = getattr(report, f"{what}_{axis}_bytes")
                    if found > limit:
                        self.violations.append(f"G2: {what} {axis} {found} is above {limit}")

    def audit(self) -> None:
        """G1: everything adds up."""
        self.audits += 1
        with self.complaints():
            report = self.observer.verify()
            self.violations += [
                f"G1: {problem.kind} (index {problem.index}, expected {problem.expected}, "
                f"found {problem.actual})"
                for problem in report.problems
            ]
            if not report.ok and not report.problems:
                self.violations.append(f"G1: the pool is {report.state}")

    def left(self) -> tuple[int, int]:
        """After all have gone: (bytes still charged, owners still there), once the dead are swept.

        A manager or a reservation of nothing at all would still hold its owner's slot.
        """
        self.observer.sweep()
        report = self.observer.report()
        charged = sum(getattr(report, f"current_{axis.value}_bytes") for axis in CachePoolResource)
        return charged, len(self.observer.owners())

    @contextlib.contextmanager
    def complaints(self) -> Iterator[None]:
        """An error met by the observer is a violation, not the end of the run."""
        try:
            yield
        except ContractError as error:
            self.violations.append(f"the observer met {type(error).__qualname__}: {error}")
