"""Run vLLM's real scheduler and this connector over simulated workers, seed by seed.

Every seed is a run: its requests, aborts, resets and faults, when copies move and how far ranks lag
behind follow from it alone. Checkers outside the connector watch the promises of
docs/guarantees.md. A run that breaks one is made as small as possible and printed, with the command
that repeats it.
"""

import argparse
import hashlib
import logging
import sys
import time
from collections import Counter

from safe_offload.commands.cli import run
from safe_offload.errors import ConfigError
from tests.benchmarks.report import commit_of


def main() -> int:
    """Run the seeds that were asked for; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, help="one run")
    parser.add_argument("--seeds", metavar="A..B", help="the runs from A to B - 1 (default 0..20)")
    parser.add_argument(
        "--profile",
        default="all",
        help="a kind of run, several with commas between them, or all (see --list)",
    )
    parser.add_argument(
        "--priority", action="store_true", help="schedule by priority, in every kind of run"
    )
    parser.add_argument("--only", metavar="NAMES", help="keep only these events, as r1,a0,f2")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    parser.add_argument(
        "--internal-checks",
        action="store_true",
        help="let the connector's own consistency checks run too",
    )
    parser.add_argument(
        "--shrink-seconds", type=float, default=60.0, help="for making a failing run small"
    )
    parser.add_argument("--list", action="store_true", help="list the profiles")
    parser.set_defaults(run=_run)
    return run(parser)


def _run(arguments: argparse.Namespace) -> int:
    from tests.simulator.swarm import BY_PRIORITY, NAMES, profile_of

    if arguments.list:
        for name in NAMES:
            print(f"{name:24} {profile_of(name, 0).about}")
        return 0
    names = list(NAMES) if arguments.profile == "all" else arguments.profile.split(",")
    for name in names:
        if name.removeprefix(BY_PRIORITY) not in NAMES:
            raise ConfigError(
                f"--profile {name}: there is no such profile. Allowed: all, {', '.join(NAMES)}"
            )
    if arguments.priority:
        names = [BY_PRIORITY + name for name in names]
    first, end = _seed_range(arguments)
    # vLLM logs about every engine that is made; what matters here is in the trace.
    logging.disable(logging.ERROR)
    print(
        f"seeds {first} to {end - 1}, profiles {' '.join(names)}, commit {commit_of()}", flush=True
    )
    for name in names:
        if not _run_profile(name, range(first, end), arguments):
            return 1
    return 0


def _seed_range(arguments: argparse.Namespace) -> tuple[int, int]:
    if arguments.seed is not None:
        return arguments.seed, arguments.seed + 1
    try:
        first, end = map(int, (arguments.seeds or "0..20").split(".."))
    except ValueError:
        first, end = 0, 0
    if first >= end:
        raise ConfigError(f"--seeds {arguments.seeds}: expected A..B with A less than B, as 0..100")
    return first, end


def _run_profile(name: str, seeds: range, arguments: argparse.Namespace) -> bool:
    from tests.simulator.earnings import Earned
    from tests.simulator.floors import FLOORS, num_floor_seeds
    from tests.simulator.profiles import PROFILES
    from tests.simulator.run import never_injected
    from tests.simulator.run import run as run_seed
    from tests.simulator.swarm import described

    only = arguments.only.split(",") if arguments.only else None
    started, num_steps, earned, injected = time.monotonic(), 0, Earned(), Counter[str]()
    digest = hashlib.sha256()
    for seed in seeds:
        result = run_seed(name, seed, only=only, internal_checks=arguments.internal_checks)
        num_steps += result.num_steps
        earned += result.earned
        injected += result.injected
        digest.update(result.digest.encode())
        if arguments.trace:
            print(*described(name, seed), *result.trace, sep="\n")
        if result.finding is not None:
            _report(result, arguments)
            return False
    rate = len(seeds) / (time.monotonic() - started)
    print(
        f"{name:18} {len(seeds)} seeds, no finding; {num_steps // len(seeds)} steps each, "
        f"{rate:.1f} seeds/s, {earned.shares()}, trace {digest.hexdigest()[:16]}",
        flush=True,
    )
    below = earned.what_is_below(FLOORS[name]) if name in FLOORS else ""
    if below and only is None and len(seeds) >= num_floor_seeds(name):
        print(f"{name}: no promise is broken, and too little is earned: {below}")
        return False
    never = never_injected(name, seeds, injected) if name in PROFILES and only is None else []
    if never and len(seeds) >= num_floor_seeds(name):
        print(f"{name}: no promise is broken, and these faults never happened: {never}")
        return False
    return True


def _report(failed: object, arguments: argparse.Namespace) -> None:
    from tests.simulator.run import Result
    from tests.simulator.shrink import shrink
    from tests.simulator.swarm import described

    assert isinstance(failed, Result)
    print(f"profile {failed.profile}, seed {failed.seed}: {failed.finding}", flush=True)
    print(*described(failed.profile, failed.seed), sep="\n", flush=True)
    small = shrink(
        failed, internal_checks=arguments.internal_checks, seconds_max=arguments.shrink_seconds
    )
    print(f"\nThe smallest run that was found has {len(small.events)} events:")
    for event in small.events:
        print(f"  {event}")
    print("\n".join(small.trace))
    names = ",".join(event.name for event in small.events)
    checks = " --internal-checks" if arguments.internal_checks else ""
    print(f"{small.finding}\n\nTo repeat it:")
    print(
        f"  python -m tests.simulator --profile {failed.profile} --seed {failed.seed} "
        f"--only {names}{checks} --trace"
    )


if __name__ == "__main__":
    sys.exit(main())
