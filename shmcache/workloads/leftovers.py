"""What a run has left in its pool, seen by an observer when all its workers have gone."""

from __future__ import annotations

from typing import Final, NamedTuple

from shmcache import CachePoolResource, CacheResidencyPool, ContractError

_AXES: Final = tuple(CachePoolResource)


class Leftovers(NamedTuple):
    """Bytes that are charged or leased but published by nobody, what the pool has evicted since it
    was made, and what else is wrong; None where that left no answer.
    """

    leaked_bytes: int | None
    evictions: int | None
    violations: list[str]


def leftovers(pool: CacheResidencyPool) -> Leftovers:
    """Sweep, count, verify (G1, G5). Published blocks are meant to stay (G7)."""
    try:
        pool.sweep()
        report, arena, owners = pool.report(), pool.arena_report(), pool.owners()
        leaked = sum(getattr(report, f"current_{axis.value}_bytes") for axis in _AXES)
        leaked += arena.leased_bytes - arena.published_bytes - arena.doomed_bytes
        violations = [f"{len(owners)} owners are left"] if owners else []
        violations += [
            f"{problem.kind} (index {problem.index}, expected {problem.expected}, "
            f"found {problem.actual})"
            for problem in pool.verify().problems
        ]
    except ContractError as error:
        met = f"the observer met {type(error).__qualname__}: {error}"
        return Leftovers(None, None, [met])
    return Leftovers(leaked, arena.evicted, violations)
