"""How a state machine is written down: one row per transition that is legal.

Why: the table is the one home of what may follow what. The code looks the next state up in it, a
test walks it against every other pair, and `tools/draw_states.py` draws it into docs/states.md, so
that the three cannot drift apart.

Contract: a module of this folder that holds a machine exposes its rows as a constant
`TRANSITIONS` (several machines: `SOMETHING_TRANSITIONS` each). Nothing else registers it.
"""

from __future__ import annotations

from enum import Enum
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State", bound=Enum)


class Transition(NamedTuple, Generic[State]):
    """`source` may become `target` by `event`; any pair of source and event not listed is refused.

    None is absence: the source of what makes a thing, the target of what forgets it. `when` tells
    rows apart that share source and event, `result` is what the caller is answered.
    """

    source: State | None
    event: str
    target: State | None
    when: str = ""
    result: str = ""
