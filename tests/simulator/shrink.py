"""Make a failing run small: leave out events, as long as the same promise is broken."""

import itertools
import time
from collections.abc import Sequence

from tests.simulator.run import Result, run


def shrink(
    failed: Result,  # a run with a finding
    *,
    internal_checks: bool,  # as in that run
    seconds_max: float = 60.0,  # wall time after which the best run so far is taken
) -> Result:
    """The shortest failing run that is found in the time.

    Halves, quarters, eighths ... of the events are left out in turn (delta debugging: Zeller and
    Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002). Returns a run that
    breaks the same promise, with as many events or fewer.
    """
    assert failed.finding is not None
    deadline = time.monotonic() + seconds_max
    best, names = failed, [event.name for event in failed.events]
    num_parts = 2
    while len(names) > 1 and time.monotonic() < deadline:
        for part in _parts(names, num_parts):
            kept = [name for name in names if name not in part]
            result = run(failed.profile, failed.seed, only=kept, internal_checks=internal_checks)
            if result.finding is not None and result.finding.promise == failed.finding.promise:
                best, names = result, kept
                num_parts = max(num_parts - 1, 2)
                break
            if time.monotonic() > deadline:
                break
        else:
            if num_parts >= len(names):
                break
            num_parts = min(num_parts * 2, len(names))
    return best


def _parts(names: Sequence[str], count: int) -> list[set[str]]:
    """The names in `count` parts of about equal size."""
    bounds = [index * len(names) // count for index in range(count + 1)]
    return [set(names[low:high]) for low, high in itertools.pairwise(bounds)]
