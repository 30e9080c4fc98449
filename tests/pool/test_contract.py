"""contract/pool.md on every implementation: its worked examples A-G and its checks P1-P17.

The numbers of the checks stand in the names. Beside this file: values alone are in test_values.py
(P1, P13, P14 for constructors and decoders), every error variant in tests/test_errors.py (P16).
"""

import itertools
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shmcache import (
    CachePoolError,
    CachePoolLimits,
    CachePoolReport,
    CachePoolResource,
    CachePoolUsage,
    CacheResidencyPool,
)
from shmcache.bounds import U64_MAX
from tests.pool import raw
from tests.pool.drivers import IMPLEMENTATIONS, Driver, Maker, start_workers, value_of
from tests.support import Worker

DEVICE, HOST, TRANSFER, DISK = CachePoolResource
BudgetExceeded = CachePoolError.BudgetExceeded
Overflow = CachePoolError.AccountingOverflow
Usage = CachePoolUsage

LIMITS = CachePoolLimits(100, 100, 100, 100)
NOTHING = (0, 0, 0, 0)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    """Processes for the third implementation."""
    started = start_workers()
    yield started
    for worker in started:
        worker.close()


@pytest.fixture(params=IMPLEMENTATIONS)
def make(request: pytest.FixtureRequest, pool_name: str, workers: list[Worker]) -> Iterator[Maker]:
    """Makes pools of one implementation; see drivers.py."""
    maker = Maker(request.param, pool_name, workers)
    yield maker
    maker.close()


def refusal_of(pool: Driver, *axes: int) -> CachePoolError:
    with pytest.raises(CachePoolError) as caught:
        pool.reserve(*axes)
    return caught.value


# ---- worked examples -----------------------------------------------------------------------------


def test_example_a_row_by_row_p2(make: Maker) -> None:
    pool = make(CachePoolLimits(200, 80, 60, 0))
    member = pool.register(41)
    assert pool.update(41, 150, 30, 0, 0) == Usage(150, 30, 0, 0)
    pool.expect((150, 30, 0, 0), (150, 30, 0, 0), 1)
    first = pool.reserve(40, 0, 0, 0)
    pool.expect((190, 30, 0, 0), (190, 30, 0, 0), 1)
    assert refusal_of(pool, 20, 0, 0, 0) == BudgetExceeded(DEVICE, 210, 200)
    pool.expect((190, 30, 0, 0), (190, 30, 0, 0), 1)
    assert pool.update(41, 230, 30, 0, 0) == Usage(270, 30, 0, 0)
    pool.expect((270, 30, 0, 0), (190, 30, 0, 0), 1)
    assert refusal_of(pool, 1, 0, 0, 0) == BudgetExceeded(DEVICE, 271, 200)
    pool.expect((270, 30, 0, 0), (190, 30, 0, 0), 1)
    second = pool.reserve(0, 10, 0, 0)
    pool.expect((270, 40, 0, 0), (190, 40, 0, 0), 1)
    first.release()
    pool.expect((230, 40, 0, 0), (190, 40, 0, 0), 1)
    assert pool.update(41, 195, 30, 0, 0) == Usage(195, 40, 0, 0)
    pool.expect((195, 40, 0, 0), (195, 40, 0, 0), 1)
    assert refusal_of(pool, 0, 0, 0, 1) == BudgetExceeded(DISK, 1, 0)
    pool.expect((195, 40, 0, 0), (195, 40, 0, 0), 1)
    third = pool.reserve(0, 40, 0, 0)
    pool.expect((195, 80, 0, 0), (195, 80, 0, 0), 1)
    for charge in (third, second, member):
        charge.release()
    pool.expect(NOTHING, (195, 80, 0, 0))


def test_example_b_the_peak_lags_p3(make: Maker) -> None:
    pool = make(CachePoolLimits(100, 1, 1, 0))
    pool.register(1)
    half = pool.reserve(50, 0, 0, 0)
    pool.expect((50, 0, 0, 0), (50, 0, 0, 0), 1)
    assert pool.update(1, 70, 0, 0, 0) == Usage(120)
    pool.expect((120, 0, 0, 0), (50, 0, 0, 0), 1)
    half.release()
    pool.expect((70, 0, 0, 0), (50, 0, 0, 0), 1)
    report = pool.report()
    assert report.current_device_bytes > report.peak_device_bytes
    assert pool.update(1, 70, 0, 0, 0) == Usage(70)
    pool.expect((70, 0, 0, 0), (70, 0, 0, 0), 1)


def test_example_c_the_first_axis_is_named_p4(make: Maker) -> None:
    pool = make(CachePoolLimits(10, 10, 10, 10))
    assert refusal_of(pool, 0, 11, 0, 11) == BudgetExceeded(HOST, 11, 10)
    assert refusal_of(pool, 0, 0, 12, 12) == BudgetExceeded(TRANSFER, 12, 10)
    assert refusal_of(pool, 11, U64_MAX, 0, 0) == BudgetExceeded(DEVICE, 11, 10)
    pool.expect(NOTHING, NOTHING)


def test_example_d_overflow_comes_before_any_budget_p4(make: Maker) -> None:
    pool = make(CachePoolLimits(100, 1, 1, 0))
    pool.reserve(5, 0, 0, 0)
    assert refusal_of(pool, U64_MAX, 0, 0, 0) == Overflow("admission_validation")
    assert refusal_of(pool, U64_MAX - 5, 0, 0, 0) == BudgetExceeded(DEVICE, U64_MAX, 100)
    assert refusal_of(pool, U64_MAX, 500, 0, 0) == Overflow("admission_validation")
    pool.expect((5, 0, 0, 0), (5, 0, 0, 0))


@pytest.mark.parametrize(("host_limit", "host_peak"), [(48, 48), (30, 24)])
def test_example_e_reserve_publish_release(make: Maker, host_limit: int, host_peak: int) -> None:
    pool = make(CachePoolLimits(64, host_limit, 96, 0))
    pool.register(3)
    pool.update(3, 40, 0, 0, 0)
    charge = pool.reserve(0, 24, 24, 0)
    pool.expect((40, 24, 24, 0), (40, 24, 24, 0), 1)
    assert pool.update(3, 40, 24, 24, 0) == Usage(40, 48, 48, 0)
    pool.expect((40, 48, 48, 0), (40, host_peak, 48, 0), 1)
    charge.release()
    pool.expect((40, 24, 24, 0), (40, host_peak, 48, 0), 1)
    assert pool.update(3, 0, 24, 0, 0) == Usage(0, 24, 0, 0)
    pool.expect((0, 24, 0, 0), (40, host_peak, 48, 0), 1)


def test_example_f_a_reservation_outlives_the_manager(make: Maker) -> None:
    pool = make(LIMITS)
    member = pool.register(8)
    pool.update(8, 6, 2, 0, 1)
    charge = pool.reserve(0, 3, 0, 0)
    member.release()
    pool.expect((0, 3, 0, 0), (6, 5, 0, 1), 0)
    charge.release()
    pool.expect(NOTHING, (6, 5, 0, 1), 0)
    pool.register(8)
    pool.expect(NOTHING, (6, 5, 0, 1), 1)


def test_example_g_of_two_that_fit_singly_one_is_admitted_p17(make: Maker, tmp_path: Path) -> None:
    pool = make(CachePoolLimits(1, 20, 1, 0))
    places = [*pool.places, *pool.places][:2]
    for number in range(20):
        barrier = tmp_path / str(number)
        barrier.write_bytes(bytes(2))
        answers: dict[int, dict[str, object]] = {}

        def race(k: int, path: str, found: dict[int, dict[str, object]]) -> None:
            found[k] = places[k].ask("race", path, k, len(places), (0, 13, 0, 0))

        threads = [threading.Thread(target=race, args=(k, str(barrier), answers)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [contender for contender, answer in answers.items() if "value" in answer]
        assert len(winners) == 1
        with pytest.raises(BudgetExceeded) as caught:
            value_of(answers[1 - winners[0]])
        assert caught.value == BudgetExceeded(HOST, 26, 20)
        pool.expect((0, 13, 0, 0), (0, 13, 0, 0))
        places[winners[0]].ask("release", answers[winners[0]]["value"])
        pool.expect(NOTHING, (0, 13, 0, 0))


# ---- checks --------------------------------------------------------------------------------------


def test_limits_name_what_is_zero_p1(make: Maker) -> None:
    with pytest.raises(CachePoolError.InvalidLimits) as caught:
        make(CachePoolLimits(0, 1, 0, 1))
    assert caught.value == CachePoolError.InvalidLimits("device_bytes_zero")
    assert make(CachePoolLimits(1, 0, 1, 0)).everywhere("state")[0] == "active"


def test_a_publication_returns_the_aggregate_p5(make: Maker) -> None:
    pool = make(LIMITS)
    pool.reserve(4, 0, 0, 0)
    pool.register(1)
    assert pool.update(1, 9, 0, 0, 0) == Usage(13)


def test_a_publication_replaces_p6(make: Maker) -> None:
    pool = make(LIMITS)
    pool.register(1)
    pool.update(1, 9, 9, 9, 9)
    assert pool.update(1, 2, 0, 0, 0) == Usage(2)
    pool.expect((2, 0, 0, 0), (9, 9, 9, 9), 1)


@pytest.mark.parametrize("manager", [0, 41, U64_MAX])
def test_managers_are_registered_once_p7(make: Maker, manager: int) -> None:
    pool = make(LIMITS)
    with pytest.raises(CachePoolError.UnknownManager) as unknown:
        pool.update(manager, 1, 0, 0, 0)
    assert unknown.value == CachePoolError.UnknownManager(manager)
    member = pool.register(manager)
    pool.update(manager, 7, 0, 0, 0)
    with pytest.raises(CachePoolError.DuplicateManager) as duplicate:
        pool.register(manager)
    assert duplicate.value == CachePoolError.DuplicateManager(manager)
    pool.expect((7, 0, 0, 0), (7, 0, 0, 0), 1)
    member.release()
    with pytest.raises(CachePoolError.UnknownManager):
        pool.update(manager, 1, 0, 0, 0)
    pool.register(manager)
    pool.expect(NOTHING, (7, 0, 0, 0), 1)


def test_a_publication_that_leaves_u64_changes_nothing(make: Maker) -> None:
    pool = make(LIMITS)
    pool.register(1)
    pool.register(2)
    assert pool.update(1, 0, U64_MAX, 0, 5) == Usage(0, U64_MAX, 0, 5)
    with pytest.raises(Overflow) as caught:
        pool.update(2, 3, 1, 0, 0)
    assert caught.value == Overflow("manager_publication")
    pool.expect((0, U64_MAX, 0, 5), (0, 0, 0, 5), 2)
    assert pool.update(1, 0, 4, 0, 5) == Usage(0, 4, 0, 5)


def test_a_publication_above_one_limit_moves_the_other_peaks(make: Maker) -> None:
    pool = make(LIMITS)
    pool.register(1)
    pool.update(1, 101, 50, 0, 100)
    pool.expect((101, 50, 0, 100), (0, 50, 0, 100), 1)


def test_nothing_can_be_reserved_on_a_full_pool_p8(make: Maker) -> None:
    pool = make(LIMITS)
    pool.register(1)
    pool.update(1, 101, 101, 101, 101)
    empty = pool.reserve(0, 0, 0, 0)
    pool.expect((101, 101, 101, 101), NOTHING, 1)
    empty.release()
    pool.expect((101, 101, 101, 101), NOTHING, 1)


def test_every_way_of_releasing_subtracts_once_p9(make: Maker) -> None:
    pool = make(LIMITS)
    pool.reserve(1, 1, 1, 1)  # what a second subtraction would take away
    for kind, twice in itertools.product(("reserve", "transfer", "member"), range(3)):
        if kind == "reserve":
            charge = pool.reserve(2, 3, 4, 5)
        elif kind == "transfer":
            charge = pool.reserve_transfer(6)
        else:
            charge = pool.register(1)
            pool.update(1, 7, 7, 7, 7)
        for way in (charge.release, charge.use)[twice % 2 :]:
            way()
        if twice < 2:
            charge.release()
        charge.drop()
        report = pool.report()
        assert (report.current_device_bytes, report.current_disk_bytes) == (1, 1)
        assert report.managers == 0
    pool.expect((1, 1, 1, 1), (8, 8, 8, 8))
    assert not any(pool.everywhere("problems"))


def test_dropping_the_last_reference_releases_p9(make: Maker) -> None:
    pool = make(LIMITS)
    charge, member = pool.reserve(2, 3, 4, 5), pool.register(1)
    pool.update(1, 1, 1, 1, 1)
    charge.drop()
    pool.expect((1, 1, 1, 1), (3, 4, 5, 6), 1)
    member.drop()
    pool.expect(NOTHING, (3, 4, 5, 6))


def test_a_token_collected_inside_a_call_p10(make: Maker) -> None:
    pool = make(LIMITS)
    pool.reserve(2, 3, 4, 5).collect_inside_calls()
    report = pool.report()
    assert report.current_disk_bytes == report.current_device_bytes == 0
    assert report.managers == 0
    assert not any(pool.everywhere("problems"))


@pytest.mark.parametrize("how", ["released", "dropped", "attached"])
def test_a_forked_child_ends_with_copies_of_tokens_p11(make: Maker, how: str) -> None:
    pool = make(LIMITS)
    for place in pool.places:
        number = value_of(place.ask("reserve", (1, 0, 0, 0)))
        other = value_of(place.ask("reserve", (1, 0, 0, 0)))
        before = pool.report()
        assert value_of(place.ask("fork", [number, other], how)) == 0
        assert pool.report() == before
        place.ask("release", number)
    assert pool.report().current_device_bytes == len(pool.places)
    assert not any(pool.everywhere("problems"))


def test_pools_are_equal_when_they_share_one_state_p12(make: Maker) -> None:
    pool, twin = make(LIMITS), make(LIMITS)
    assert pool.here != twin.here
    assert set(pool.everywhere("id")) == {pool.here.id} != set(twin.everywhere("id"))
    assert all(pool.everywhere("knows_itself"))
    assert pool.here != object()
    if pool.here.name:
        with CacheResidencyPool.attach(pool.here.name) as other:
            assert other is not pool.here
            assert other == pool.here
            assert hash(other) == hash(pool.here)


def test_report_and_limits_survive_serialisation_p13(make: Maker) -> None:
    limits = CachePoolLimits(U64_MAX, 1, 1, U64_MAX)
    pool = make(limits)
    pool.reserve(U64_MAX, 0, 0, U64_MAX)
    report = pool.report()
    assert report.current_device_bytes == report.peak_disk_bytes == U64_MAX
    for value in (report, limits):
        for format_ in (msgspec.json, msgspec.msgpack):
            decoder = type(value)
            assert format_.decode(format_.encode(value), type=decoder) == value
    assert isinstance(report, CachePoolReport)
    assert set(map(tuple, pool.everywhere("limits"))) == {tuple(msgspec.to_builtins(limits))}


@pytest.mark.parametrize(
    ("value", "error"),
    [(U64_MAX + 1, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError)],
)
def test_values_outside_the_domain_p14(make: Maker, value: int, error: type[Exception]) -> None:
    pool = make(LIMITS)
    pool.register(1)
    for call in (
        lambda: pool.reserve(value, 0, 0, 0),
        lambda: pool.reserve(0, 0, 0, value),
        lambda: pool.reserve_transfer(value),
        lambda: pool.update(1, 0, value, 0, 0),
        lambda: pool.update(value, 1, 0, 0, 0),
        lambda: pool.register(value),
    ):
        with pytest.raises(error):
            call()
    pool.expect(NOTHING, NOTHING, 1)


@pytest.mark.parametrize("damage", ["total", "free_list", "redo"])
def test_a_poisoned_pool_refuses_everything_p15(make: Maker, damage: str) -> None:
    pool = make(LIMITS)
    member, charge, dropped = pool.register(1), pool.reserve(1, 1, 1, 1), pool.reserve(1, 1, 1, 1)
    with raw.Segment(pool.here.fileno()) as segment:
        getattr(segment, f"damage_{damage}")()
    if damage == "redo":  # is met by the next call, whatever it is
        with pytest.raises(CachePoolError.Poisoned):
            pool.report()
    assert pool.ask("problems"), "verify must find it"
    assert set(pool.everywhere("state")) == {"poisoned"}
    for place in pool.places:
        for request in (
            ("register", 2),
            ("register", None),
            ("update", 1, NOTHING),
            ("reserve", NOTHING),
            ("reserve_transfer", 0),
            ("report",),
        ):
            with pytest.raises(CachePoolError.Poisoned):
                value_of(place.ask(*request))
    with pytest.raises(CachePoolError.Poisoned):
        pool.publish_and_release(1, NOTHING, charge)
    for end in (charge.release, charge.release, member.use, dropped.drop):
        end()
    pool.close()
    pool.close()


def test_errors_of_every_call_survive_pickle_p16(make: Maker) -> None:
    pool = make(CachePoolLimits(1, 1, 1, 1))
    pool.register(1)
    errors = [refusal_of(pool, 2, 0, 0, 0), refusal_of(pool, 0, 0, 0, 2)]
    pool.update(1, U64_MAX, 0, 0, 0)
    errors.append(refusal_of(pool, 1, 0, 0, 0))
    for call in (lambda: pool.register(1), lambda: pool.update(2, 0, 0, 0, 0)):
        with pytest.raises(CachePoolError) as caught:
            call()
        errors.append(caught.value)
    assert len({type(error) for error in errors}) == 4
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert again == error
        assert type(again) is type(error)
        assert str(again) == str(error)


def test_publishing_and_releasing_in_one_step_moves_peaks_once(make: Maker) -> None:
    pool = make(LIMITS)
    pool.register(3)
    charge = pool.reserve(60, 60, 0, 0)
    assert pool.publish_and_release(3, (60, 101, 0, 5), charge) == Usage(60, 101, 0, 5)
    pool.expect((60, 101, 0, 5), (60, 60, 0, 5), 1)
    charge.release()
    charge.drop()
    pool.expect((60, 101, 0, 5), (60, 60, 0, 5), 1)
