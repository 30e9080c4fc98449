"""Promise G5: a process may die between any two instructions.

Each operation of the engine is stepped through; after every instruction, what a death there leaves
is recovered by another process and judged: the state before or the state after, nothing of the dead
that cannot be reclaimed, no entry lost. Then those who recover and those who reclaim die as well.
"""

import pytest

from tests.crash.conftest import CLEAN, REFUSED, VIOLATED, Experiment, Outcome

# Operations of the sweep that commit something: without the redo record each must be caught.
CHANGES = """
    join register_id register_any update_grow update_shrink reserve_listed reserve_unused
    release_reservation release_manager publish_and_release detach reclaim set_paths
""".split()
REFUSALS = """
    register_duplicate update_unknown reserve_budget release_stale set_relative_path
    files_gone_alive
""".split()
READS = "report held check".split()


def expect_swept(outcome: Outcome) -> None:
    """Every operation was swept, at a plausible number of instructions."""
    assert outcome.code == CLEAN, outcome.text
    swept = {line["operation"]: line for line in outcome.figures}
    assert set(swept) == {*CHANGES, *REFUSALS, *READS, "retire", "set_no_paths"}
    for line in swept.values():
        assert int(line["kill_points"]) > 100, line
        assert int(line["snapshots"]) > 5, line
    for name in CHANGES:
        assert int(swept[name]["snapshots"]) > 20, swept[name]


def test_every_operation_killed_at_every_instruction(crash: Experiment) -> None:
    """C03, C21, C44, C46; recoverers and cleaners are killed after a sample of these deaths."""
    outcome = crash("sweep", "--every", 7)
    expect_swept(outcome)
    assert outcome.total("recoverer_kill_points") > 1000
    assert outcome.total("cleaner_kill_points") > 1000


@pytest.mark.ci
@pytest.mark.watchdog(600)
def test_every_recoverer_and_cleaner_killed_at_every_instruction(crash: Experiment) -> None:
    """C21, C44, C46, without sampling: after every death of the first, every death of the next."""
    outcome = crash("sweep", "--all-cleaners")
    expect_swept(outcome)
    for line in outcome.figures:
        changes = line["operation"] in {*CHANGES, "set_no_paths"}
        assert (int(line["recoverer_kill_points"]) > 1000) == changes, line
        assert int(line["cleaner_kill_points"]) > 10_000, line


@pytest.mark.parametrize("waiter", [[], ["--waiter"]], ids=["alone", "waiter"])
def test_real_sigkills(crash: Experiment, waiter: list[str]) -> None:
    """C44, C47: the kernel's own part, with and without a process that waits for the lock."""
    outcome = crash("kill", "--kills", 30, *waiter)
    assert outcome.code == CLEAN, outcome.text
    assert len(outcome.figures) == 6
    assert all(int(line["kills"]) >= 25 for line in outcome.figures)


@pytest.mark.ci
@pytest.mark.watchdog(600)
@pytest.mark.parametrize(
    ("kills", "waiter"), [(1200, []), (400, ["--waiter"])], ids=["alone", "waiter"]
)
def test_many_real_sigkills(crash: Experiment, kills: int, waiter: list[str]) -> None:
    """C44, C47: alone, at every instruction of all but the longest operation."""
    outcome = crash("kill", "--kills", kills, *waiter)
    assert outcome.code == CLEAN, outcome.text
    for line in outcome.figures:
        assert int(line["kills"]) > min(kills, int(line["kill_points"])) / 2, line


@pytest.mark.parametrize("operation", CHANGES)
def test_without_the_redo_record_deaths_show(crash: Experiment, operation: str) -> None:
    """Mutant NO_REDO: words are stored one by one."""
    outcome = crash("sweep", "--only", operation, "--every", 10**9, mutant="NO_REDO")
    assert outcome.code == VIOLATED, outcome.text


def test_an_engine_without_robust_mutexes_refuses_to_start(crash: Experiment) -> None:
    """Mutant NON_ROBUST: the self-test at format notices."""
    outcome = crash("sweep", mutant="NON_ROBUST")
    assert outcome.code == REFUSED, outcome.text
    assert "ROBUST_MUTEX" in outcome.text


@pytest.mark.parametrize("experiment", ["sweep", "kill"])
def test_a_lock_that_forgets_its_dead_is_caught(crash: Experiment, experiment: str) -> None:
    """Mutant NON_ROBUST, past its self-test: the lock of a dead holder is never free again."""
    options = ("--only", "reserve_listed", "--kills", 7, "--waiter")
    outcome = crash(experiment, *options, mutant="NON_ROBUST", past_self_test=True)
    assert outcome.code == VIOLATED, outcome.text
    assert "BUSY" in outcome.text
