"""Hit rates of the eviction policies, and what they cost the scheduler.

Block-level traces are replayed on a small model of the host cache, for several sizes of it. The
hit rates are the same on every machine and every time; the times are not.
"""

import argparse
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from safe_offload.commands.bench.report import add_output_arguments, describe_machine, publish
from safe_offload.scheduler.cache.hit_curve import FACTORS, NO_RATES, HitCurve
from safe_offload.scheduler.eviction.policies import POLICIES
from tests.benchmarks.plots import add_plot_argument, save_plot
from tests.benchmarks.policy_replay import NUM_RUNNING, Replay, best_possible, replay
from tests.benchmarks.policy_report import Cost, Curve, by_trace, draw, make_report
from tests.benchmarks.policy_traces import (
    GENERATORS,
    SEED,
    Trace,
    make_trace,
    read_agents,
    read_trace,
)
from tests.benchmarks.s3_fifo import S3Fifo

CONTESTANTS = {**POLICIES, "s3-fifo": S3Fifo}

SIZES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
"""Of the host cache, as shares of the working set."""
GPU_SHARE = 0.01
"""Of the working set, that the GPU's prefix cache holds."""
COST_NUM_SLOTS = (10_000, 100_000)
COST_BATCHES = (16, 256, 4000)
COST_ROUNDS = 15
COST_SLOTS_PER_ROUND = 20_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--traces", nargs="+", choices=list(GENERATORS), help="(default: all)", metavar="NAME")
    add("--file", type=Path, nargs="+", help="JSON lines with hash_ids, as Mooncake's traces")
    add("--agents", type=Path, help="recorded conversations (see policy_traces.read_agents)")
    add("--users", type=int, default=32, help="agents at a time (%(default)s)")
    add("--skip", type=int, default=0, help="recorded conversations to leave out first")
    add("--gpu-share", type=float, default=GPU_SHARE, help="of the working set (%(default)s)")
    add("--running", type=int, default=NUM_RUNNING, help="prompts with leases (%(default)s)")
    add("--prompts", type=int, default=3000, help="of each trace (%(default)s)")
    add("--seed", type=int, default=SEED, help="draws the traces (%(default)s)")
    add("--sizes", type=float, nargs="+", default=SIZES, help="shares of the working set")
    add_output_arguments(parser)
    add_plot_argument(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks policies`."""
    files = arguments.file or []
    names = arguments.traces or ([] if files or arguments.agents else list(GENERATORS))
    traces = [read_trace(path) for path in files]
    if arguments.agents:
        how = arguments.users, arguments.prompts, arguments.skip
        traces.append(read_agents(arguments.agents, *how))
    traces += [make_trace(name, arguments.prompts, arguments.seed) for name in names]
    gpu_share, num_running = arguments.gpu_share, arguments.running
    curves = measure_hit_rates(traces, arguments.sizes, print, gpu_share, num_running)
    options = {"prompts": arguments.prompts, "seed": arguments.seed}
    options |= {"gpu_share": gpu_share, "running": num_running}
    if not gpu_share and not num_running:
        for curve, trace in zip(by_trace(curves), traces, strict=True):
            print(check_estimates(trace, curve["lru"]))
    publish(make_report(curves, measure_costs(), options, describe_machine()), arguments)
    save_plot(arguments.plot, lambda figure: draw(figure, curves), (11, 4.8))
    return 0


def measure_hit_rates(
    traces: Iterable[Trace],
    sizes: Sequence[float],
    say: Callable[[str], None],
    gpu_share: float = GPU_SHARE,
    num_running: int = NUM_RUNNING,
) -> list[Curve]:
    """Replay every trace with every policy at every size, and what is possible without a GPU."""
    curves = []
    for trace in traces:
        say(f"{trace.name}: {len(trace.prompts):,} prompts")
        working_set = trace.unit or trace.working_set
        num_gpu = int(gpu_share * trace.working_set)
        for policy, make in CONTESTANTS.items():
            replays = {
                size: replay(trace, make, max(1, int(size * working_set)), num_gpu, num_running)
                for size in sizes
            }
            curves.append(Curve(trace.name, trace.what, policy, working_set, replays))
        if not gpu_share:
            best = {}
            for size in sizes:
                num_slots = max(1, int(size * working_set))
                num_hit = round(best_possible(trace, num_slots) * trace.num_blocks)
                best[size] = Replay(num_slots, num_hit, 0, trace.num_blocks)
            curves.append(Curve(trace.name, trace.what, "possible", working_set, best))
    return curves


def check_estimates(trace: Trace, lru: Curve) -> str:
    """Return what `HitCurve` says of other sizes, beside replays of these sizes."""
    hashes = [[hashlib.sha256(key).digest() for key in prompt] for prompt in trace.prompts]
    lines = [f"{trace.name}: estimated (replayed) for {', '.join(NO_RATES)}"]
    for size, present in lru.replays.items():
        curve = HitCurve(present.num_slots)
        for prompt in hashes:
            curve.see(prompt)
        sizes = [int(factor * present.num_slots) for factor in FACTORS.values()]
        cells = [
            f"{rate:.3f} ({replay(trace, POLICIES['lru'], num_slots, 0, 0).hit_rate:.3f})"
            for rate, num_slots in zip(
                curve.rates().values(), [*sizes, trace.working_set], strict=True
            )
        ]
        lines.append(f"{size:6.1%}  {'  '.join(cells)}")
    return "\n".join(lines)


def measure_costs() -> list[Cost]:
    """Time every policy on pools of several sizes, in batches of several sizes."""
    return [
        _time_policy(policy, num_slots, batch)
        for num_slots in COST_NUM_SLOTS
        for batch in COST_BATCHES
        for policy in POLICIES
    ]


def _time_policy(name: str, num_slots: int, batch: int) -> Cost:
    """Take turns at prompts that are new, and at hits of prompts that are there.

    All slots are evictable at first. Each prompt leases, or evicts, as many slots as a batch has,
    and releases them.
    """
    policy = POLICIES[name](num_slots)
    scattered = [slot * 7919 % num_slots for slot in range(num_slots)]  # a prime: each slot once
    for start in range(0, num_slots, batch):
        policy.release(scattered[start : start + batch], 0.0)
    num_batches = max(1, COST_SLOTS_PER_ROUND // batch)
    new_ns: list[float] = []
    hit_ns: list[float] = []
    for round_ in range(COST_ROUNDS):
        start_s = time.perf_counter()
        for _ in range(num_batches):
            policy.release(policy.evict(batch, 0.0), 0.0)
        middle_s = time.perf_counter()
        for index in range(num_batches):
            start = (round_ * num_batches + index) * batch % (num_slots - batch + 1)
            slots = scattered[start : start + batch]
            policy.lease(slots)
            policy.release(slots, 0.0)
        end_s = time.perf_counter()
        new_ns.append((middle_s - start_s) / (num_batches * batch) * 1e9)
        hit_ns.append((end_s - middle_s) / (num_batches * batch) * 1e9)
    return Cost(name, num_slots, batch, new_ns, hit_ns)
