"""Promise G5 for the arena: blocks, leases, claims and slabs, killed at every instruction.

As test_kill_sweep.py, in a world where others lease and write: see arena.c.
"""

import pytest

from tests.crash.conftest import CLEAN, VIOLATED, Experiment, Outcome

# Operations that commit several words at once: without the redo record a death must show.
CHANGES = """
    allocate_free allocate_new_slab allocate_reserved allocate_evicting allocate_burying
    allocate_class_change publish_new publish_present discard evict invalidate invalidate_leased
    protect claim release_claim reclaim detach
""".split()
OTHERS = "seal drain_ring match match_absent release".split()


def expect_swept(outcome: Outcome) -> None:
    assert outcome.code == CLEAN, outcome.text
    swept = {line["operation"]: line for line in outcome.figures}
    assert set(swept) == {*CHANGES, *OTHERS}
    for name in CHANGES:
        assert int(swept[name]["kill_points"]) > 500, swept[name]
        assert int(swept[name]["snapshots"]) > 20, swept[name]
    assert int(swept["allocate_class_change"]["kill_points"]) > 5000, "a slab was emptied"
    assert int(swept["match"]["snapshots"]) >= 3, "a pin, a ring entry"


def test_every_operation_on_blocks_killed_at_every_instruction(crash: Experiment) -> None:
    """C16, C21; recoverers and cleaners are killed after a sample of these deaths."""
    outcome = crash("blocks", "--every", 4)
    expect_swept(outcome)
    assert outcome.total("recoverer_kill_points") > 20_000
    assert outcome.total("cleaner_kill_points") > 5000


@pytest.mark.ci
@pytest.mark.watchdog(600)
def test_every_recoverer_and_cleaner_of_blocks_killed_at_every_instruction(
    crash: Experiment,
) -> None:
    """C16, C21, without sampling: after every death of the first, every death of the next."""
    outcome = crash("blocks", "--all-cleaners")
    expect_swept(outcome)
    assert outcome.total("cleaner_kill_points") > 1_000_000


@pytest.mark.parametrize("operation", CHANGES)
def test_without_the_redo_record_deaths_show(crash: Experiment, operation: str) -> None:
    """Mutant NO_REDO: words are stored one by one."""
    outcome = crash("blocks", "--only", operation, "--every", 10**9, mutant="NO_REDO")
    assert outcome.code == VIOLATED, outcome.text
