"""Finds which of many objects a store has, by few requests for one object each.

Names are sorted by group, each in the order of a prefix. Of most groups, a store has all blocks up
to some block and none after it: this searches for that end, by several requests at a time. An
object before the end that is missing after all is merely a miss when it is fetched.

Without the first block, no later one helps: rules that expire old objects take the first blocks
first. The exception are groups of which a hit needs only the last blocks (windows, Mamba states):
these are searched just before the end of the other groups.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final

from safe_offload.tiers.base import Name

REQUESTS_MAX: Final = 40
"""For the names of one probe."""

_GROUPS_MAX: Final = 10
_POINTS_MAX: Final = 8
_TAIL: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_TAIL_DENSE: Final = 4
_RUN_REQUESTS, _TAIL_REQUESTS = 3, 6  # kept for each other group while the first is searched

Ask = Callable[[Sequence[Name]], Awaitable[list[bool]]]


async def find_present(names: Sequence[Name], ask: Ask) -> list[bool]:
    """Return whether the store is assumed to have each name.

    `ask` returns whether the store has some of them, by one request for each; its OSError is
    raised.
    """
    if len(names) <= REQUESTS_MAX:
        return await ask(names)
    groups = [_Group(list(members)) for _, members in groupby(names, key=lambda n: n.group_idx)]
    await _Search(ask).run(groups)
    return [is_there for group in groups for is_there in group.found()]


class _Group:
    """The knowledge about one group.

    Attributes:
        answers: by place in the group, whether the object exists.
        low: the last place assumed to exist, with all before it; -1 for none.
        high: the first place after `low` known to be missing, or the length.
        tail: existing places after a gap.
    """

    def __init__(self, names: Sequence[Name]) -> None:
        self.names = names
        self.answers: dict[int, bool] = {}
        self.low, self.high = -1, len(names)
        self.tail: range | list[int] = []

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_run(self) -> bool:
        """Return whether its first block exists."""
        return self.answers.get(0, False)

    def found(self) -> list[bool]:
        """Return whether each name is assumed to exist."""
        found = [True] * (self.low + 1) + [False] * (len(self) - self.low - 1)
        for place in self.tail:
            found[place] = True
        return found

    def record(self, answers: dict[int, bool]) -> None:
        self.answers |= answers
        self.low, self.high = -1, len(self)
        for place in sorted(self.answers):
            if not self.answers[place]:
                self.high = place
                return
            self.low = place

    def between(self, number: int) -> list[int]:
        """Return at most `number` places between `low` and `high`, evenly spaced."""
        return _spread(self.low, self.high, number)

    def end_at(self, share: float) -> int:
        """Return the place after a share of the names."""
        return round(share * len(self))

    def judge_tail(self, end: int) -> None:
        """Judge the blocks just before a place: all of a window, or single states."""
        distances = [d for d in _TAIL if self.answers.get(end - d) is not None]
        run = 0
        for distance in distances:
            if not self.answers[end - distance]:
                break
            run = distance
        self.tail = [place for place, is_there in self.answers.items() if is_there]
        if run >= _TAIL_DENSE:
            self.tail += range(end - run, end)


class _Search:
    """One search of at most `REQUESTS_MAX` requests."""

    def __init__(self, ask: Ask) -> None:
        self._ask_names = ask
        self._num_left = REQUESTS_MAX

    async def run(self, groups: Sequence[_Group]) -> None:
        asked = groups[:_GROUPS_MAX]
        ends = {group: {0, len(group) - 1} for group in asked}
        if len(asked) == 1:
            ends[asked[0]] |= set(_spread(0, len(asked[0]) - 1, _POINTS_MAX))
        await self._ask(ends)
        runs = [group for group in asked if group.is_run]
        others = [group for group in asked if not group.is_run]
        share = 1.0
        if runs:
            lead = min(runs, key=lambda group: group.answers[len(group) - 1])
            runs.remove(lead)
            await self._find_end(lead, _RUN_REQUESTS * len(runs) + _TAIL_REQUESTS * len(others))
            share = (lead.low + 1) / len(lead)
        else:
            others = [group for group in others if group.answers[len(group) - 1]]
        await self._find_others(runs, others, share)
        for group in groups[_GROUPS_MAX:]:
            group.low = group.end_at(share) - 1 if runs else -1

    async def _find_end(self, group: _Group, num_kept: int) -> None:
        """Find the end of a group; keep `num_kept` requests for others."""
        if group.high == len(group) and len(group.answers) == 2:
            await self._ask({group: _spread(0, len(group) - 1, _POINTS_MAX)})
        while (gap := group.high - group.low - 1) > 0 and self._num_left > num_kept:
            number = _points_for(gap, self._num_left - num_kept)
            await self._ask({group: group.between(number)})

    async def _find_others(self, runs: list[_Group], others: list[_Group], share: float) -> None:
        """Find the ends of groups near that of the first."""
        wanted: dict[_Group, Iterable[int]] = {}
        num_each = self._num_left // max(1, len(runs) + len(others))
        for group in runs:
            end = group.end_at(share)
            wanted[group] = {end - 1, *_spread(0, end - 1, min(_RUN_REQUESTS, num_each) - 1)}
        for group in others:
            end = group.end_at(share)
            places = [end - distance for distance in _TAIL if distance <= end]
            wanted[group] = places[: max(0, num_each)]
        await self._ask(wanted)
        for group in others:
            group.low = -1
            group.judge_tail(group.end_at(share))
        while self._num_left > 0:
            short = [g for g in runs if g.low + 1 < min(g.high, g.end_at(share))]
            if not short:
                break
            number = max(1, min(_POINTS_MAX, self._num_left // (2 * len(short))))
            await self._ask({group: group.between(number) for group in short})

    async def _ask(self, wanted: Mapping[_Group, Iterable[int]]) -> None:
        """Ask for places in groups, all at once."""
        places = [
            (group, place)
            for group, some in wanted.items()
            for place in sorted(set(some))
            if place not in group.answers and 0 <= place < len(group)
        ][: self._num_left]
        if not places:
            return
        self._num_left -= len(places)
        found = await self._ask_names([group.names[place] for group, place in places])
        answers: dict[_Group, dict[int, bool]] = {}
        for (group, place), is_there in zip(places, found, strict=True):
            answers.setdefault(group, {})[place] = is_there
        for group, some_answers in answers.items():
            group.record(some_answers)


def _spread(low: int, high: int, number: int) -> list[int]:
    """Return at most `number` places between two, evenly spaced."""
    gap = high - low - 1
    number = max(0, min(number, gap))
    return [low + (gap + 1) * step // (number + 1) for step in range(1, number + 1)]


def _points_for(gap: int, num_left: int) -> int:
    """Return how many places of a gap to ask at a time, so that few rounds find the end."""
    for number in range(min(_POINTS_MAX, gap, num_left), 1, -1):
        num_rounds, covered = 0, 1
        while covered <= gap:
            num_rounds, covered = num_rounds + 1, covered * (number + 1)
        if number * num_rounds <= num_left:
            return number
    return 1
