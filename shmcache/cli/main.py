"""The `shmcache` command: one file per group of commands, gathered here."""

from __future__ import annotations

import click

from shmcache.cli import (
    arena,
    demo,
    doctor,
    export,
    listing,
    plan,
    pools,
    prompt,
    replay,
    stress,
    supervise,
    top,
)
from shmcache.cli.answers import Commands


@click.group("shmcache", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shmcache")
def main() -> None:
    """Look at, make and remove pools of cache memory that processes of this host share.

    \b
    A first round:
      shmcache doctor
      shmcache create llm --device 8GiB --host 32GiB --transfer 1GiB
      shmcache report llm
      shmcache supervise llm          # gives back what killed workers held
      shmcache destroy llm

    Exit codes: 0 done, 1 a finding or a refusal, 2 a wrong command line. A name that starts with
    "-" is written after "--".
    """


for _command in (
    pools.create,
    listing.list_,
    pools.report,
    pools.owners,
    arena.arena,
    pools.verify,
    pools.dump,
    pools.reclaim,
    pools.destroy,
    supervise.supervise,
    top.top,
    plan.plan,
    export.export,
    doctor.doctor,
    stress.stress,
    replay.replay,
    demo.demo,
    prompt.prompt,
):
    main.add_command(_command)

if __name__ == "__main__":
    main()
