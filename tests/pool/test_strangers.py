"""Another user of the file's group may use a pool, and cannot take its name away."""

from __future__ import annotations

import os

import pytest

import shmcache as sc

LIMITS = sc.CachePoolLimits(1, 1, 1, 1)


def outcome_as(uid: int, name: str) -> int:
    """What a child of that user gets from `destroy`: 0 done, 3 refused with EPERM, 1 else."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        os.seteuid(uid)
        sc.CacheResidencyPool.destroy(name)
        code = 0
    except sc.SegmentError.HostError as error:
        code = 3 if error == sc.SegmentError.HostError("unlink", "EPERM") else 1
    finally:
        os._exit(code)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_destroy_by_a_group_member_is_refused_before_the_pool_is_retired(pool_name: str) -> None:
    """/dev/shm is sticky: retired but still named, the pool would be lost for nothing."""
    pool = sc.CacheResidencyPool.create(pool_name, LIMITS, mode=0o660)
    pool.close()
    assert outcome_as(65534, pool_name) == 3
    with sc.CacheResidencyPool.observe(pool_name) as observer:
        assert observer.state == "active"
    assert outcome_as(0, pool_name) == 0
