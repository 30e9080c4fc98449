"""The supervisor process of a stress run: says "ready", then watches until its input closes.

python -m shmcache.workloads.stress_supervisor POOL
"""

from __future__ import annotations

import sys

from shmcache import CacheResidencyPool, Supervisor
from shmcache.workloads.children import say_ready, when_dismissed


def main(name: str) -> None:
    """Supervise the pool until dismissed."""
    with CacheResidencyPool.observe(name) as pool:
        supervisor = Supervisor(pool)
        when_dismissed(supervisor.stop)
        say_ready()
        supervisor.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
