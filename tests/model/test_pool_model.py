"""Real processes against a plain dict: any order of the pool's operations, kills and sweeps.

Goal: G1, G2, G5, G6 hold in every order that hypothesis can think of. Method: up to three agents
(processes) do what the rules say; a dict does the same; an observer outside compares after each.
"""

from __future__ import annotations

import contextlib
import itertools
import signal

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import shmcache as sc
from tests.conftest import RUN
from tests.model.agent import Agent

LIMITS = [60, 50, 40, 30]
AXES = st.lists(st.integers(0, 25), min_size=4, max_size=4)
MANAGERS = st.integers(1, 4)
SIZES = {"owners_max": 16, "managers_max": 4, "reservations_max": 6, "arena_bytes": 0}

_numbers = itertools.count()


class Model:
    """The contract in a few lines: what is charged, by whom, and the peaks."""

    def __init__(self) -> None:
        self.managers: dict[int, tuple[Agent, int, list[int]]] = {}
        self.reservations: dict[int, tuple[Agent, list[int]]] = {}
        self.peak = [0] * 4
        self.dead: set[Agent] = set()

    def current(self) -> list[int]:
        charges = [usage for *_, usage in self.managers.values()]
        charges += [usage for _, usage in self.reservations.values()]
        return [sum(axis) for axis in zip(*charges, strict=True)] if charges else [0] * 4

    def raise_peaks(self) -> None:
        for axis, level in enumerate(self.current()):
            if level <= LIMITS[axis]:
                self.peak[axis] = max(self.peak[axis], level)

    def fits(self, axes: list[int]) -> bool:
        levels = zip(self.current(), axes, LIMITS, strict=True)
        return all(want == 0 or have + want <= limit for have, want, limit in levels)

    def sweep(self) -> None:
        """What the dead held is free."""
        self.managers = {k: m for k, m in self.managers.items() if m[0] not in self.dead}
        self.reservations = {k: r for k, r in self.reservations.items() if r[0] not in self.dead}
        for agent in self.dead:
            agent.close()
        self.dead = set()


class PoolMachine(RuleBasedStateMachine):
    """Rules choose among living, running agents by number."""

    @initialize()
    def create(self) -> None:
        self.name = f"{RUN}model-{next(_numbers)}"
        self.keys = itertools.count()
        self.model = Model()
        limits = sc.CachePoolLimits(*LIMITS)
        sc.CacheResidencyPool.create(self.name, limits, **SIZES).close()
        self.observer = sc.CacheResidencyPool.observe(self.name)
        self.agents = [Agent(self.name)]

    def teardown(self) -> None:
        if not hasattr(self, "agents"):
            return
        for agent in [*self.agents, *self.model.dead]:
            agent.close()
        self.observer.close()
        with contextlib.suppress(sc.SegmentError.NotFound):
            sc.CacheResidencyPool.destroy(self.name, force=True)

    def running(self) -> list[Agent]:
        return [agent for agent in self.agents if not agent.stopped]

    def agent(self, number: int) -> Agent:
        running = self.running()
        return running[number % len(running)]

    # -- what workers do

    @precondition(lambda self: len(self.agents) < 3)
    @rule()
    def attach(self) -> None:
        agent = Agent(self.name)
        agent("sweep")  # has attached, which sweeps, once it answers
        self.agents.append(agent)
        self.model.sweep()

    @precondition(lambda self: self.running())
    @rule(number=st.integers(0, 2), manager=MANAGERS)
    def register(self, number: int, manager: int) -> None:
        agent, key = self.agent(number), next(self.keys)
        answer = agent("register", key, manager)
        if manager in self.model.managers:
            assert answer == "DuplicateManager"
        else:
            assert answer == "ok"
            self.model.managers[manager] = (agent, key, [0] * 4)

    @precondition(lambda self: self.running())
    @rule(number=st.integers(0, 2), manager=MANAGERS, axes=AXES)
    def update(self, number: int, manager: int, axes: list[int]) -> None:
        answer = self.agent(number)("update", manager, axes)
        if manager not in self.model.managers:
            assert answer == "UnknownManager"
            return
        owner, key, _ = self.model.managers[manager]
        self.model.managers[manager] = (owner, key, axes)
        self.model.raise_peaks()
        assert answer == self.model.current()

    @precondition(lambda self: self.running())
    @rule(number=st.integers(0, 2), axes=AXES)
    def reserve(self, number: int, axes: list[int]) -> None:
        agent, key = self.agent(number), next(self.keys)
        answer = agent("reserve", key, axes)
        full = len(self.model.reservations) == SIZES["reservations_max"]
        if not self.model.fits(axes) or full:
            self.model.sweep()  # a refusal sweeps first
        if not self.model.fits(axes):
            assert answer == "BudgetExceeded"
        elif len(self.model.reservations) == SIZES["reservations_max"]:
            assert answer == "TableFull"
        else:
            assert answer == "ok"
            self.model.reservations[key] = (agent, axes)
            self.model.raise_peaks()

    @precondition(lambda self: self.model.reservations)
    @rule(number=st.integers(0, 5), drop=st.booleans())
    def release(self, number: int, drop: bool) -> None:
        keys = [k for k, (agent, _) in self.model.reservations.items() if agent in self.running()]
        if keys:
            key = keys[number % len(keys)]
            agent, _ = self.model.reservations.pop(key)
            assert agent("drop" if drop else "release", key) == "ok"

    @precondition(lambda self: self.model.managers)
    @rule(manager=MANAGERS)
    def leave(self, manager: int) -> None:
        agent, key, _ = self.model.managers.get(manager, (None, 0, []))
        if agent in self.running():
            del self.model.managers[manager]
            assert agent("release", key) == "ok"

    @precondition(lambda self: self.model.managers and self.model.reservations)
    @rule(number=st.integers(0, 5), manager=MANAGERS, axes=AXES)
    def publish_and_release(self, number: int, manager: int, axes: list[int]) -> None:
        keys = [k for k, (agent, _) in self.model.reservations.items() if agent in self.running()]
        if not keys or manager not in self.model.managers:
            return
        key = keys[number % len(keys)]
        agent, _ = self.model.reservations.pop(key)
        owner, membership, _ = self.model.managers[manager]
        self.model.managers[manager] = (owner, membership, axes)
        answer = agent("publish_and_release", manager, axes, key)
        self.model.raise_peaks()
        assert answer == self.model.current()

    @precondition(lambda self: self.running())
    @rule(number=st.integers(0, 2), axes=AXES)
    def fork(self, number: int, axes: list[int]) -> None:
        exit_code = self.agent(number)("fork", axes)
        if not self.model.fits(axes) or len(self.model.reservations) == SIZES["reservations_max"]:
            self.model.sweep()
        if not self.model.fits(axes):
            assert exit_code == 3
        elif len(self.model.reservations) < SIZES["reservations_max"]:
            assert exit_code == 0
            key = -1
            self.model.reservations[key] = (self.agent(number), axes)
            self.model.raise_peaks()
            del self.model.reservations[key]

    # -- what happens to workers

    @precondition(lambda self: len(self.agents) > 1)
    @rule(number=st.integers(0, 2), reap=st.booleans())
    def kill(self, number: int, reap: bool) -> None:
        agent = self.agents.pop(number % len(self.agents))
        agent.kill(reap=reap)
        self.model.dead.add(agent)

    @precondition(lambda self: len(self.running()) > 1)
    @rule(number=st.integers(0, 2))
    def stop(self, number: int) -> None:
        self.agent(number).signal(signal.SIGSTOP)

    @rule()
    def go_on(self) -> None:
        for agent in self.agents:
            agent.signal(signal.SIGCONT)

    @precondition(lambda self: self.running())
    @rule(number=st.integers(0, 2))
    def sweep(self, number: int) -> None:
        self.agent(number)("sweep")
        self.model.sweep()

    # -- what must always hold

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "observer"):
            return
        report = self.observer.report()
        assert self.model.current() == [
            report.current_device_bytes,
            report.current_host_bytes,
            report.current_transfer_in_flight_bytes,
            report.current_disk_bytes,
        ]
        assert self.model.peak == [
            report.peak_device_bytes,
            report.peak_host_bytes,
            report.peak_transfer_in_flight_bytes,
            report.peak_disk_bytes,
        ]
        assert report.managers == len(self.model.managers)
        assert self.observer.verify().ok


def test_any_order_agrees_with_a_dict() -> None:
    """The short form, for every contributor."""
    run_state_machine_as_test(PoolMachine, settings=_settings(max_examples=40, steps=40))


@pytest.mark.ci
@pytest.mark.watchdog(600)
def test_many_orders_agree_with_a_dict() -> None:
    """The long form."""
    run_state_machine_as_test(PoolMachine, settings=_settings(max_examples=200, steps=60))


def _settings(*, max_examples: int, steps: int) -> settings:
    """Without shrinking, which would start thousands of processes: the failing run is printed."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
        report_multiple_bugs=False,
    )
