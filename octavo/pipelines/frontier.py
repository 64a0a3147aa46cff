"""The knapsack of mixed precision: one option for every group of layers, the least loss for every weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# States kept while groups are added. With fewer distinct sums of weights the result is exact: layers of a model repeat,
# so their sums do. With more, no choice weighs over a MOST-th of the range more than the best one of its loss.
MOST = 4096

# (weight, loss, option, state before): what the groups so far add up to
_State = tuple[int, float, int, "_State | None"]


@dataclass(frozen=True)
class Option:
    """One way to treat a group. weight: an integer, of any sign. loss: what it costs in quality, finite."""

    name: str
    weight: int
    loss: float


@dataclass(frozen=True)
class Choice:
    """One option for every group, by position."""

    weight: int
    loss: float
    picks: tuple[int, ...]


def frontier(groups: Sequence[Sequence[Option]], capacity: int | None = None) -> list[Choice]:
    """Every choice of total weight within `capacity` that no other one beats in both weight and loss, lightest first.

    Empty where even the lightest options do not fit. Losses add.
    """
    lightest = [min(option.weight for option in group) for group in groups]
    room = None if capacity is None else capacity - sum(lightest)
    states: list[_State] = [(0, 0.0, -1, None)] if room is None or room >= 0 else []
    for group, least in zip(groups, lightest, strict=True):
        grown = (
            (state[0] + option.weight - least, state[1] + option.loss, index, state)
            for state in states
            for index, option in enumerate(group)
        )
        states = _thinned(_undominated(state for state in grown if room is None or state[0] <= room))
    return [Choice(state[0] + sum(lightest), state[1], _picks(state)) for state in states]


def _undominated(states: Iterable[_State]) -> list[_State]:
    best: list[_State] = []
    for state in sorted(states, key=lambda s: (s[0], s[1])):
        if not best or state[1] < best[-1][1]:
            best.append(state)
    return best


def _thinned(states: list[_State]) -> list[_State]:
    """The lightest, and of every MOST-th of the range of weights the one of least loss."""
    if len(states) <= MOST:
        return states
    step = states[-1][0] / (MOST - 1)
    last = {int(state[0] / step): state for state in states}
    return [states[0], *(state for state in last.values() if state is not states[0])]


def _picks(state: _State) -> tuple[int, ...]:
    picks: list[int] = []
    here: _State | None = state
    while here is not None and here[3] is not None:
        picks.append(here[2])
        here = here[3]
    return tuple(reversed(picks))
