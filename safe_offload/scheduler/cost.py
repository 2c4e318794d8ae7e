"""Whether a hit is worth loading: only if that is expected to be faster than computing it.

A load costs a few steps that wait for one another, whatever its size, and then its bytes; computing
costs the tokens. Where the one overtakes the other depends on model, machine and load, so both are
measured while requests are served: the time of a step by the tokens computed in it, and the time of
a load by its tokens, from the plan that sends it to the report that settles it. That is what a
request feels, queues and steps in between included. There is no clock in here: times are handed in.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

KEPT_SAMPLES = 15
"""Of sizes within a factor of two; their median counts, so that one slow step decides nothing."""
SAMPLES_MIN = 4
"""Of each kind; before that every hit is offered."""
PROBE_EVERY = 32
"""So many hits are refused, then one is offered all the same, to measure how loads fare now."""


class Curve:
    """Seconds by size: a moving median for each power of two, straight lines between them.

    More takes no less: where the medians say otherwise, which is noise, their neighbours' mean
    counts. Below the smallest size that was measured it goes through zero. Beyond the largest it
    goes on like the last two, or, where `is_cheap_beyond`, stays level if there is but one.
    """

    def __init__(self, *, is_cheap_beyond: bool) -> None:
        self._is_cheap_beyond = is_cheap_beyond
        self._samples: dict[int, deque[tuple[int, float]]] = {}
        self._points: list[tuple[float, float]] | None = []
        self.num_samples = 0

    def add(self, size: int, seconds: float) -> None:
        """Note how long something of a size took."""
        kept = self._samples.setdefault(size.bit_length(), deque(maxlen=KEPT_SAMPLES))
        kept.append((size, seconds))
        self._points = None
        self.num_samples += 1

    @property
    def points(self) -> list[tuple[float, float]]:
        """Sizes and seconds, the smallest first."""
        if self._points is None:
            kept_by_size = [kept for _, kept in sorted(self._samples.items())]
            sizes = [statistics.fmean(size for size, _ in kept) for kept in kept_by_size]
            medians = [statistics.median(seconds for _, seconds in kept) for kept in kept_by_size]
            self._points = list(zip(sizes, _never_falling(medians), strict=True))
        return self._points

    def at(self, size: int) -> float:
        """Seconds that something of a size is expected to take."""
        points = self.points
        if size <= 0 or not points:
            return 0.0
        before = (0.0, 0.0)
        for point in points:
            if size <= point[0]:
                return _between(before, point, size)
            before = point
        last = points[-1]
        if len(points) > 1:
            return max(last[1], _between(points[-2], last, size))
        return last[1] if self._is_cheap_beyond else last[1] * size / last[0]


def _never_falling(values: list[float]) -> list[float]:
    """The nearest to some values that never falls: neighbours that do are replaced by their mean.

    It is the isotonic regression, by pooling adjacent violators.
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            other, other_count = pools.pop()
            mean = (mean * count + other * other_count) / (count + other_count)
            count += other_count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _between(first: tuple[float, float], second: tuple[float, float], size: float) -> float:
    """The height over `size` of the line through two points."""
    share = (size - first[0]) / (second[0] - first[0])
    return first[1] + share * (second[1] - first[1])


@dataclass(frozen=True, slots=True)
class Offer:
    """A hit, as far as its cost goes.

    Attributes:
        num_tokens: that would be loaded.
        num_tokens_left: to be computed in any case.
        loading_s: a load of another request brings them, which began so long ago; it costs what is
            left of it, however many wait for it. None for a load of its own.
    """

    num_tokens: int
    num_tokens_left: int
    loading_s: float | None = None


NOTHING_MEASURED = {"compute_tokens_per_s": 0, "load_tokens_per_s": 0, "load_latency_us": 0}


class Costs:
    """What loads and steps have taken, and what follows from it.

    Args:
        min_load_tokens: offer every hit of so many tokens and no other, whatever was measured; None
            to go by what was measured.
        num_step_tokens_max: a step computes no more.
    """

    def __init__(self, min_load_tokens: int | None, num_step_tokens_max: int) -> None:
        self._min_load_tokens = min_load_tokens
        self._num_step_tokens_max = num_step_tokens_max
        self._num_refused = 0
        # What has not been measured is taken as cheap to load and dear to compute: that ends with
        # the first load. The other way round nothing would ever be measured.
        self.steps = Curve(is_cheap_beyond=False)
        self.loads = Curve(is_cheap_beyond=True)

    @property
    def is_measuring(self) -> bool:
        """Whether what steps and loads take decides anything."""
        return self._min_load_tokens is None

    def pays(self, offer: Offer) -> bool:
        """Whether a hit is to be offered, or another's load to be waited for."""
        if self._min_load_tokens is not None:
            return offer.num_tokens >= self._min_load_tokens
        if min(self.steps.num_samples, self.loads.num_samples) < SAMPLES_MIN:
            return True
        if self.load_s(offer) <= self.compute_s(offer):
            return True
        self._num_refused += 1
        return self._num_refused % PROBE_EVERY == 0

    def load_s(self, offer: Offer) -> float:
        """Seconds until the tokens of a hit are expected to be there.

        A load that is late is expected to take as long again as it is late.
        """
        expected_s = self.loads.at(offer.num_tokens)
        return expected_s if offer.loading_s is None else abs(expected_s - offer.loading_s)

    def compute_s(self, offer: Offer) -> float:
        """Seconds that computing them would add to what is computed in any case."""
        num_left = offer.num_tokens_left
        return self._steps_s(num_left + offer.num_tokens) - self._steps_s(num_left)

    def _steps_s(self, num_tokens: int) -> float:
        num_full, num_rest = divmod(num_tokens, self._num_step_tokens_max)
        return num_full * self.steps.at(self._num_step_tokens_max) + self.steps.at(num_rest)

    def gauges(self) -> dict[str, int]:
        """What was measured; see `observe.metrics.GAUGES`."""
        if not self.is_measuring:
            return NOTHING_MEASURED
        steps, loads = self.steps.points, self.loads.points
        return {
            "compute_tokens_per_s": _rate(steps),
            "load_tokens_per_s": _rate(loads),
            "load_latency_us": round(loads[0][1] * 1e6) if loads else 0,
        }


def _rate(points: list[tuple[float, float]]) -> int:
    """Tokens a second at the largest size that was measured."""
    return round(points[-1][0] / points[-1][1]) if points and points[-1][1] > 0 else 0


class StepWatch:
    """From the times at which steps are planned to how long each took.

    With n steps in flight, the next is planned when the first of them has ended. That is so while
    the engine is busy: steps that follow one another have a request in common. Otherwise the time
    between them says nothing.

    Args:
        steps: where it is noted.
        num_in_flight: steps that the engine has in flight while it is busy.
    """

    def __init__(self, steps: Curve, num_in_flight: int) -> None:
        self._steps = steps
        self._num_in_flight = num_in_flight
        self._running: deque[int] = deque()
        self._last: Mapping[str, int] = {}
        self._last_s = 0.0

    def planned(self, scheduled: Mapping[str, int], num_tokens: int, now_s: float) -> None:
        """A step is planned.

        Args:
            scheduled: its tokens by request id.
            num_tokens: of all requests.
            now_s: of a clock that never goes back.
        """
        if scheduled.keys().isdisjoint(self._last):
            self._running.clear()
        elif len(self._running) == self._num_in_flight:
            self._steps.add(self._running.popleft(), now_s - self._last_s)
        self._running.append(num_tokens)
        self._last, self._last_s = scheduled, now_s
