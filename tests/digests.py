"""Print what must stay as it is when code is tidied up, as text that `diff` compares.

One digest for each profile of the simulator: over what happened in some seeds, and over what was
counted. No names of ours are in it, so that renaming changes nothing. Then what the hooks of the
scheduler side execute on the traces of `bench scheduler`, which may only become less.

    python -m tests.digests > before
    python -m tests.digests | diff before -
"""

import argparse
import hashlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

CONNECTORS = ("ours-eager", "ours-lazy")


def digest_of(profile: str, seeds: Iterable[int]) -> str:
    """Return the line of a profile; a run that breaks a promise shows in it."""
    from tests.simulator.run import run

    events, counts, findings = hashlib.sha256(), hashlib.sha256(), ""
    for seed in seeds:
        result = run(profile, seed)
        events.update(result.digest.encode())
        # By size, since the names of counters are names of ours.
        counts.update(repr(sorted(number for number in result.counts.values() if number)).encode())
        if result.finding is not None:
            findings += f" seed {seed} breaks {result.finding.promise}"
    return f"{profile:24} {events.hexdigest()[:16]} counted {counts.hexdigest()[:8]}{findings}"


def digests(profiles: list[str], seeds: range, num_processes: int) -> Iterator[str]:
    """Yield the line of each profile, in order."""
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.structured_output  # noqa: F401

    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        yield from pool.map(partial(digest_of, seeds=seeds), profiles)


def counts() -> Iterator[str]:
    """Yield a line for each trace, connector and hook: instructions, calls of functions."""
    from tests.benchmarks.scheduler import SchedulerOptions, measure
    from tests.benchmarks.scheduler_traces import TRACES

    options = SchedulerOptions(
        traces=tuple(TRACES),
        connectors=CONNECTORS,
        rounds=1,
        seed=0,
        is_quick=True,
        is_counting=True,
    )
    for name, trace in measure(options, lambda _: None).items():
        for connector in CONNECTORS:
            hooks = {**trace.counts[connector], "all": trace.total_counts(connector)}
            for hook, count in sorted(hooks.items()):
                what = f"{name} {connector} {hook}"
                yield f"{what:56} {count.instructions:9} {count.functions:8}"


def main() -> int:
    """Print it; return 1 if a run breaks a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.digests", description=__doc__)
    parser.add_argument("--profile", default="all", help="one, several with commas, or all")
    parser.add_argument("--seeds", type=int, default=40, help="of each profile (%(default)s)")
    parser.add_argument("--no-counts", action="store_true", help="digests only")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    from tests.simulator.profiles import PROFILES

    logging.disable(logging.CRITICAL)
    profiles = list(PROFILES) if arguments.profile == "all" else arguments.profile.split(",")
    print(f"== digests of {arguments.seeds} seeds: events, counters", flush=True)
    is_good = True
    for line in digests(profiles, range(arguments.seeds), arguments.processes):
        is_good &= " breaks " not in line
        print(line, flush=True)
    if not arguments.no_counts:
        print("== inside hooks: bytecode instructions, calls of functions", flush=True)
        for line in counts():
            print(line, flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
