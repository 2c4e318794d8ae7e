"""The cost model: a hit is loaded only if that is expected to be faster than computing it.

A load costs a fixed number of steps, and time for its bytes; computing costs time for its tokens.
The break-even depends on the model, the machine and the load, so both are measured while requests
are served: the time of a step by its tokens, and the time of a load by its tokens. Both are
measured from plan to plan, as a request experiences them: with queueing, other steps and vLLM's
pauses. There is no clock in this module: callers pass times.

A load delays its own request. Computing lengthens a step for all requests, and counts for each:
under load, where a load takes as long as a step of other prompts, computing fills queue and pool.

Most steps only decode; only steps that compute a prompt are timed, and estimates are computed when
a hit is found.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from safe_offload.scheduler.requests import RequestBook

KEPT_SAMPLES = 15
"""Per power of two of sizes; their median counts, so that a single slow step has no effect."""
SAMPLES_MIN = 4
"""Of each kind; with fewer, every hit is offered."""
PROBE_EVERY = 32
"""One refused hit in 32 is loaded, to keep the estimate of loads current; and one offered hit in 32
is computed, unless that takes more than `PROBE_REACH` times as long."""
PROBE_REACH = 2.0
REFRESH_EVERY_MAX = 7
"""Samples between updates of the estimates; fewer at first."""
FAR = 4
"""Extrapolation is valid up to four times the largest measured step."""
GAUGES_EVERY_MAX = 64
"""Samples between updates of the gauges; while there are few, when they double."""


class Curve:
    """Seconds by size: a moving median for each power of two, straight lines between them.

    It never falls: where medians do, which is noise, their weighted mean counts. Outside the
    measured sizes it is extrapolated from the two nearest. With one size only, it is the line
    through zero, or, with `is_cheap_beyond`, level beyond that size. Without `is_cheap_beyond`, it
    is proportional to the size beyond `FAR` times the largest: equal times of small sizes say
    nothing about much larger ones.

    Bound: fifteen samples for each power of two.
    """

    def __init__(self, *, is_cheap_beyond: bool) -> None:
        self._is_cheap_beyond = is_cheap_beyond
        self._samples: dict[int, tuple[deque[int], deque[float]]] = {}
        self._medians: dict[int, tuple[float, float, int]] = {}
        self._stale: set[int] = set()
        self._sizes: list[float] = []
        self._seconds: list[float] = []
        self._refresh_due = 1
        self.num_samples = 0

    def add(self, size: int, seconds: float) -> None:
        """Record the time of a size."""
        power = size.bit_length()
        kept = self._samples.get(power)
        if kept is None:
            kept = self._samples[power] = deque(maxlen=KEPT_SAMPLES), deque(maxlen=KEPT_SAMPLES)
        kept[0].append(size)
        kept[1].append(seconds)
        self._stale.add(power)
        self.num_samples += 1

    def _refresh(self) -> None:
        for power in self._stale:
            sizes, seconds = self._samples[power]
            count = len(sizes)
            # The lower one of two: what disturbs a measurement only ever makes it longer.
            self._medians[power] = sum(sizes) / count, sorted(seconds)[(count - 1) // 2], count
        self._stale.clear()
        self._refresh_due = self.num_samples + 1 + min(self.num_samples // 8, REFRESH_EVERY_MAX)
        medians = [median for _, median in sorted(self._medians.items())]
        self._sizes = [size for size, _, _ in medians]
        self._seconds = _never_falling([(seconds, count) for _, seconds, count in medians])

    def measured_at(self, size: float) -> float:
        """Return the seconds of the nearest measured size; see `at`."""
        points = self.points
        if size <= 0 or not points:
            return 0.0
        return self.at(min(max(size, points[0][0]), points[-1][0]))

    @property
    def points(self) -> list[tuple[float, float]]:
        """Return sizes and seconds, the smallest first."""
        if self._stale:
            self._refresh()
        return list(zip(self._sizes, self._seconds, strict=True))

    def at(self, size: float) -> float:
        """Return the expected seconds of a size, as of a few samples ago."""
        if self.num_samples >= self._refresh_due:
            self._refresh()
        sizes, seconds = self._sizes, self._seconds
        if size <= 0 or not sizes:
            return 0.0
        if len(sizes) == 1:
            is_level = self._is_cheap_beyond and size > sizes[0]
            return seconds[0] if is_level else seconds[0] * size / sizes[0]
        far = FAR * sizes[-1]
        if size > far and not self._is_cheap_beyond:
            return self._along(far) * size / far
        return self._along(size)

    def _along(self, size: float) -> float:
        """Return the seconds on the line through the two sizes around or next to one."""
        sizes, seconds = self._sizes, self._seconds
        index = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        size_before, before_s = sizes[index - 1], seconds[index - 1]
        rise = (seconds[index] - before_s) / (sizes[index] - size_before)
        return max(0.0, before_s + rise * (size - size_before))


def _never_falling(values: list[tuple[float, int]]) -> list[float]:
    """Return the isotonic regression of weighted values, by pooling adjacent violators."""
    pools: list[tuple[float, int, int]] = []
    for value, weight in values:
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            other, other_total, other_count = pools.pop()
            mean = (mean * total + other * other_total) / (total + other_total)
            total += other_total
            count += other_count
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Offer:
    """The costs of a hit.

    Attributes:
        num_tokens: to be loaded.
        num_tokens_left: to be computed in any case.
        loading_s: the age of another request's load of these tokens, which costs its remaining
            time only; None for a load of its own.
    """

    num_tokens: int
    num_tokens_left: int
    loading_s: float | None = None


NOTHING_MEASURED: dict[str, float] = {
    "compute_tokens_per_second": 0,
    "load_tokens_per_second": 0,
    "load_latency_seconds": 0,
}


class Costs:
    """Measured times of loads and steps, and estimates from them.

    Bound: the requests of one step, and the loads that have landed in it.

    Args:
        min_load_tokens: offer hits of at least this many tokens; None to use the measurements.
        num_step_tokens_max: the maximum number of tokens of a step.
        book: the requests, for their number; None if there is only one.
    """

    def __init__(
        self, min_load_tokens: int | None, num_step_tokens_max: int, book: RequestBook | None = None
    ) -> None:
        self._book = book
        self._min_load_tokens = min_load_tokens
        self._num_step_tokens_max = num_step_tokens_max
        self._num_refused = 0
        self._num_close = 0
        self.scheduled: Mapping[str, int] = {}
        """Tokens by request of the last step that was of interest; each adds one to the next."""
        self.landed: list[tuple[int, float]] = []
        """Loads since the last plan: their tokens, and when the plan was made that named them."""
        self._gauges, self._gauges_due = NOTHING_MEASURED, 1
        # What has not been measured is taken as cheap to load and dear to compute: that ends with
        # the first load. The other way round nothing would ever be measured.
        self.steps = Curve(is_cheap_beyond=False)
        self.loads = Curve(is_cheap_beyond=True)

    @property
    def is_measuring(self) -> bool:
        """Return whether measurements have any effect."""
        return self._min_load_tokens is None

    @property
    def offers_all(self) -> bool:
        """Return whether every hit is offered."""
        return self._min_load_tokens == 0

    @property
    def knows_steps(self) -> bool:
        """Return whether any compute time has been measured."""
        return self.is_measuring and self.steps.num_samples > 0

    def pays(self, offer: Offer) -> bool:
        """Return whether to offer a hit, or to wait for another request's load."""
        if self._min_load_tokens is not None:
            return offer.num_tokens >= self._min_load_tokens
        if min(self.steps.num_samples, self.loads.num_samples) < SAMPLES_MIN:
            return True
        load_s, num_delayed = self.load_s(offer), self.num_delayed
        if load_s > num_delayed * self.compute_s(offer):
            self._num_refused += 1
            return self._num_refused % PROBE_EVERY == 0
        if offer.loading_s is None and num_delayed * self.saved_s(offer) <= PROBE_REACH * load_s:
            self._num_close += 1
            return self._num_close % PROBE_EVERY != 0
        return True

    @property
    def num_delayed(self) -> int:
        """Return the number of requests that computing delays: all, including running ones."""
        return max(1, self._book.num_live) if self._book else 1

    def load_s(self, offer: Offer) -> float:
        """Return the expected seconds until the tokens of a hit are loaded.

        A late load is expected to take as long again as it is late.
        """
        expected_s = self.loads.at(offer.num_tokens)
        return expected_s if offer.loading_s is None else abs(expected_s - offer.loading_s)

    def compute_s(self, offer: Offer) -> float:
        """Return the seconds that computing a hit's tokens would add."""
        return self._added_s(offer, self.steps.at)

    def saved_s(self, offer: Offer) -> float:
        """Return a lower bound of the seconds that computing them would have added.

        A step larger than all measured ones counts as the largest of these.
        """
        return self._added_s(offer, self.steps.measured_at)

    def _added_s(self, offer: Offer, step_s: Callable[[int], float]) -> float:
        num_rest = offer.num_tokens_left + len(self.scheduled)
        return self._steps_s(num_rest + offer.num_tokens, step_s) - self._steps_s(num_rest, step_s)

    def _steps_s(self, num_tokens: int, step_s: Callable[[int], float]) -> float:
        num_full, num_rest = divmod(num_tokens, self._num_step_tokens_max)
        return num_full * step_s(self._num_step_tokens_max) + step_s(num_rest)

    def gauges(self) -> dict[str, float]:
        """Return the measurements, as of a few samples ago; see `observe.metrics.GAUGES`."""
        num_samples = self.steps.num_samples + self.loads.num_samples
        if self.is_measuring and num_samples >= self._gauges_due:
            self._gauges_due = num_samples + min(num_samples, GAUGES_EVERY_MAX)
            steps, loads = self.steps.points, self.loads.points
            self._gauges = {
                "compute_tokens_per_second": rate(steps) if self._knows_speed else 0,
                "load_tokens_per_second": rate(loads),
                "load_latency_seconds": round(loads[0][1], 6) if loads else 0,
            }
        return self._gauges

    @property
    def _knows_speed(self) -> bool:
        """Return whether the largest measured steps are representative of computing a hit.

        If only the tails of hits are computed, their tokens take many times as long.
        """
        steps, loads = self.steps.points, self.loads.points
        needed = min(loads[-1][0], self._num_step_tokens_max) if loads else 0
        return bool(steps) and FAR * steps[-1][0] >= needed


def pays_in_step(
    copy_s: float, num_running: int, num_waiting: int, steps_s: Sequence[float]
) -> bool:
    """Return whether a hit is loaded in the step that computes its rest, not ahead of it.

    On the device, that step comes after the copy. A load ahead runs beside steps of others, but is
    only noticed when the steps in flight have ended.

    1. No request runs: yes, the step would wait for nothing else.
    2. No load was timed, as on the CPU, where the host would wait; or no step was: no.
    3. Another request waits: no. While a load in the step is in flight, it may have to put off its
       own (`step_loads`), while loads ahead follow one another.
    4. Else, if the requests of the step together wait less for the copy than that of the hit saves.
       The shortest of the last steps counts, so that a slow one has no effect.

    Args:
        copy_s: that the copy is expected to take; 0 if unknown.
        num_waiting: requests that do not run, except that of the hit.
        steps_s: that the last steps of a busy engine took, one more than it has in flight.
    """
    if not num_running:
        return True
    if not (copy_s and steps_s) or num_waiting:
        return False
    return (num_running + 1) * copy_s < (len(steps_s) - 1) * min(steps_s)


def busy_steps_s(
    last_steps: Sequence[tuple[float, SchedulerOutput]], now_s: float, book: RequestBook
) -> list[float]:
    """Return what each of the last steps took until the next one was planned, or is now.

    Empty if the engine has not been busy since, as no request of the first of them still runs; or
    if one of them has waited for a copy.

    Args:
        last_steps: each with the time of its plan.
    """
    outputs = [output for _, output in last_steps]
    request_ids = outputs[0].num_scheduled_tokens if outputs else ()
    if not any(book.runs(request_id) for request_id in request_ids):
        return []
    if any(map(_waits_for_copies, outputs)):
        return []
    times = [*(planned_s for planned_s, _ in last_steps), now_s]
    return [end_s - begin_s for begin_s, end_s in pairwise(times)]


def _waits_for_copies(output: SchedulerOutput) -> bool:
    return getattr(output, "has_sync_kv_loads", False)


def rate(points: list[tuple[float, float]]) -> int:
    """Return the tokens a second at the largest size that was measured."""
    return round(points[-1][0] / points[-1][1]) if points and points[-1][1] > 0 else 0


WAIT_SHARE = 0.08
"""Share of the compute time that a request may wait for a tier in vain. The limit is a tenth; the
rest is a margin for the estimate."""
SURE_SHARE = 0.95
"""Share of the expected savings of what has arrived; the rest is a margin for the estimate."""
WAIT_SLACK_S = 0.01

NOTHING_FETCHED: dict[str, float] = {"fetch_bytes_per_second": 0, "fetch_latency_seconds": 0}


class TierCosts:
    """Measured times of probes and fetches, and estimates from them.

    The curves are by number of keys and by filled slots, from the plan that names them to the one
    after their last report.

    Bound: a curve for each tier.

    Args:
        num_tiers: the nearest first; a fetch counts for the farthest tier that it reads.
    """

    def __init__(self, costs: Costs, num_tiers: int) -> None:
        self._costs = costs
        self._probes = Curve(is_cheap_beyond=True)
        self._fetches = [Curve(is_cheap_beyond=True) for _ in range(num_tiers)]
        self._num_refused = 0
        self._gauges = NOTHING_FETCHED
        self._gauges_of = 0

    def __repr__(self) -> str:
        return f"TierCosts({[curve.num_samples for curve in self._fetches]} fetches)"

    def add_probe(self, num_keys: int, seconds: float) -> None:
        """Record the time of a probe."""
        self._probes.add(num_keys, seconds)

    def add_fetch(self, tier: int, num_slots: int, seconds: float) -> None:
        """Record the time of a fetch."""
        self._fetches[tier - 1].add(num_slots, seconds)

    def probe_pays(self, offer: Offer, num_slots: int) -> bool:
        """Return whether to probe tiers for blocks that would fill this many slots."""
        return any(
            self._pays(offer, fetch_s + self._probes.at(num_slots))
            for fetch_s in [curve.at(num_slots) for curve in self._fetches]
        )

    def fetch_pays(self, offer: Offer, num_slots: int, tier: int) -> bool:
        """Return whether to fetch this many slots from a tier."""
        return self._pays(offer, self._fetches[tier - 1].at(num_slots))

    def is_soon(self, offer: Offer, num_slots: int, tier: int, waited_s: float) -> bool:
        """Return whether slots are certain to be filled within a request's wait limit.

        Args:
            tier: the farthest that they come from.
            waited_s: by the request so far.
        """
        fetches, limit_s = self._fetches[tier - 1], self.wait_max_s(offer, 0.0)
        if limit_s is None:
            return True  # there is no such limit
        return fetches.num_samples > 0 and fetches.at(num_slots) <= (limit_s - waited_s) / 2

    def tries_all_the_same(self) -> bool:
        """Return whether to fetch although it does not pay, to keep the estimates current."""
        self._num_refused += self._costs.is_measuring
        return self._num_refused % PROBE_EVERY == PROBE_EVERY - 1

    def _pays(self, offer: Offer, tier_s: float) -> bool:
        costs = self._costs
        if not costs.is_measuring:
            return costs.pays(offer)
        if not costs.knows_steps:
            return True
        return tier_s + costs.load_s(offer) <= costs.compute_s(offer)

    def wait_max_s(self, offer: Offer, share: float) -> float | None:
        """Return the wait limit of a request for a tier.

        At the limit, it loads the part that has arrived and computes the rest, so a stalled tier
        delays the request only a little.

        Args:
            share: the part that has arrived.

        Returns:
            None while no compute time is known.
        """
        if not self._costs.knows_steps:
            return None
        compute_s = self._costs.compute_s(offer)
        come = Offer(int(share * offer.num_tokens), offer.num_tokens_left)
        saved_s = share * compute_s - self._costs.load_s(come)
        return SURE_SHARE * max(0.0, saved_s) + WAIT_SHARE * compute_s + WAIT_SLACK_S

    def gauges(self, slot_bytes: int) -> dict[str, float]:
        """Return the measurements of the slowest tier; see `observe.metrics.GAUGES`."""
        num_samples = sum(curve.num_samples for curve in self._fetches)
        if num_samples != self._gauges_of:
            self._gauges_of = num_samples
            points = [curve.points for curve in self._fetches if curve.num_samples]
            self._gauges = {
                "fetch_bytes_per_second": slot_bytes * min(map(rate, points)),
                "fetch_latency_seconds": max(round(p[0][1], 6) for p in points),
            }
        return self._gauges


class StepWatch:
    """Measures steps from the times of their plans.

    With n steps in flight, the next is planned when the first of them has ended. This holds while
    the engine is busy, when consecutive steps have a request in common; otherwise the time between
    them is meaningless. One step is timed at a time.

    Args:
        num_in_flight: steps that a busy engine has in flight.
        num_decode_tokens_max: per request in a step that computes no prompt of it.
    """

    def __init__(self, costs: Costs, num_in_flight: int, num_decode_tokens_max: int) -> None:
        self._costs = costs
        self._num_in_flight = num_in_flight
        self._num_decode_tokens_max = num_decode_tokens_max
        self._num_plans_left = 0
        self._num_tokens = 0
        self.last_planned_s = 0.0

    def planned(self, scheduler_output: SchedulerOutput, now_s: float) -> None:
        """A step is planned at this time of a monotonic clock."""
        costs, scheduled = self._costs, scheduler_output.num_scheduled_tokens
        num_tokens = scheduler_output.total_num_scheduled_tokens
        computes_prompt = (
            scheduler_output.scheduled_new_reqs
            or num_tokens > self._num_decode_tokens_max * len(scheduled)
        )
        num_left = self._num_plans_left
        if not (computes_prompt or num_left or costs.landed):
            return  # most steps
        for num_loaded, sent_s in costs.landed:
            costs.loads.add(num_loaded, now_s - sent_s)
        costs.landed.clear()
        if num_left:
            num_left -= 1
            if scheduled.keys().isdisjoint(costs.scheduled):
                num_left = 0
            elif not num_left:
                costs.steps.add(self._num_tokens, now_s - self.last_planned_s)
        if not num_left and computes_prompt and not _waits_for_copies(scheduler_output):
            self._num_tokens, num_left = num_tokens, self._num_in_flight
        costs.scheduled = scheduled
        self._num_plans_left, self.last_planned_s = num_left, now_s
