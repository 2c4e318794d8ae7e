"""Where the time of a hit goes: spans that follow one another, from arrival to first token.

Prompts A, B, C, A, B, C, C go one by one to an engine with the connector, as in `bench engine`; the
last is a hit in the GPU's own cache. Steps and copies are watched in the worker. A request that is
computed in several steps has no spans. With async scheduling, or a GPU, the hook that ends a step
returns before the device has computed: then the rest of the forward is in the span after it.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from safe_offload.commands.bench import engine as bench_engine
from safe_offload.commands.bench.engine import OURS, BenchOptions, engine_options
from safe_offload.commands.bench.engine_process import EngineProcess, Question, generate
from safe_offload.commands.bench.engine_report import NUM_PROMPTS
from safe_offload.commands.bench.report import Report, describe_machine, publish, table
from tests.benchmarks.engine_watch import start_watching
from tests.benchmarks.engines import TIMEOUT_S, ours, with_model
from tests.gpu import shapes

PROBE = "tests.benchmarks.engine_watch.WorkerProbe"
HOST_HIT, GPU_HIT = "host hit", "GPU hit"
SPANS = (
    "front end, until the scheduler has it",
    TO_WORKER := "scheduler, until the worker has the load",
    TO_COPY := "our loop, until the copy is issued",
    COPY := "copy, its thread woken",
    TO_STEP := "until a step of the worker collects it",
    "scheduler, until the forward begins",
    "forward of the tokens that are computed",
    "until the scheduler has the token",
    "front end, until the token is told",
)

Spans = dict[str, float]


@dataclass(frozen=True)
class Seen:
    """When a request came to the points that vLLM notes, in monotonic time, and the worker."""

    arrival_s: float
    queued_s: float
    scheduler_token_s: float
    told_s: float
    probe: dict[str, Any]  # see `Recorder`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_engine.add_arguments(parser)
    shapes.add_arguments(parser)
    parser.set_defaults(model="llama")


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks breakdown`; return 1 if no hit of the host could be seen."""
    machine = describe_machine()
    options = bench_engine.read_options(arguments)
    with ExitStack() as on:
        args = {"worker_extension_cls": PROBE}
        options, folder = on.enter_context(with_model(options, arguments, **args))
        config = ours(**options.host_size, min_load_tokens=0)
        how = engine_options(replace(options, kv_transfer_config=config))[OURS]
        engine = on.enter_context(EngineProcess("ours", how, folder / "ours.log"))
        engine.wait_until_started(TIMEOUT_S)
        engine.call(start_watching, None, TIMEOUT_S)
        hits: dict[str, list[Spans]] = {HOST_HIT: [], GPU_HIT: []}
        for index in range(options.rounds + 1):
            asked = [bench_engine.make_question(options, index, i) for i in range(NUM_PROMPTS)]
            seen = [engine.call(watch, one, TIMEOUT_S) for one in [*asked, *asked, asked[-1]]]
            if index:
                hits[HOST_HIT] += [s for one in seen[NUM_PROMPTS:-1] if COPY in (s := spans(one))]
                hits[GPU_HIT] += [s for s in (spans(seen[-1]),) if s and COPY not in s]
    publish(make_report(hits, options, machine), arguments)
    return int(not hits[HOST_HIT])


def watch(engine: Any, question: Question) -> Seen:
    """Run one request alone."""
    engine.collective_rpc("take_probe")
    (output,) = generate(engine, [question.prompt_token_ids], [question.num_answer_tokens])
    (probe, *_) = engine.collective_rpc("take_probe")
    times = output.metrics
    arrival_s = times.arrival_time - time.time() + time.monotonic()  # of vLLM's, in wall time
    told_s = arrival_s + times.first_token_latency
    return Seen(arrival_s, times.queued_ts, times.first_token_ts, told_s, probe)


def spans(seen: Seen) -> Spans:
    """Take a hit apart: seconds by span, without those that it did not have.

    Whatever the request waits for is in one of them, because each begins where the one before
    ends. The step after the first may begin before the scheduler has the first token.
    """
    probe = seen.probe
    forwards = [step for step in probe["steps"] if step[2] > 0]
    if not forwards or any(step[2] > 1 for step in forwards[1:]):
        return {}
    forward_s, forwarded_s, _ = forwards[0]
    moments = [("", seen.arrival_s), (SPANS[0], seen.queued_s)]
    loads = [copy for copy in probe["copies"] if copy[0] == "load"]
    if loads:
        submits = {key: at_s for at_s, name, key in probe["submits"] if name == "load"}
        reports_s = [at_s for at_s, keys in probe["reports"] if submits.keys() & {*keys}]
        moments += [
            (TO_WORKER, min(submits.values())),
            (TO_COPY, min(begin_s for _, begin_s, *_ in loads)),
            (COPY, max(end_s for _, _, end_s, _ in loads)),
            (TO_STEP, max(reports_s)),
        ]
    ends = (
        forward_s,
        min(forwarded_s, seen.scheduler_token_s),
        seen.scheduler_token_s,
        seen.told_s,
    )
    moments += zip(SPANS[5:], ends, strict=True)
    return {name: end_s - begin_s for (_, begin_s), (name, end_s) in pairwise(moments)}


def make_report(
    hits: dict[str, list[Spans]], options: BenchOptions, machine: dict[str, Any]
) -> Report:
    rows = [["ms, median", *(f"{kind} ({len(found)})" for kind, found in hits.items())]]
    for name in SPANS:
        rows.append([name, *(median_ms([s.get(name) for s in found]) for found in hits.values())])
    totals = [median_ms([sum(s.values()) for s in found]) for found in hits.values()]
    assert __doc__ is not None
    sections = [table([*rows, ["time to first token", *totals]])]
    return Report(__doc__.strip(), sections, {"hits": hits}, asdict(options), machine)


def median_ms(values_s: Sequence[float | None]) -> str:
    known_s = [value_s for value_s in values_s if value_s is not None]
    return f"{1e3 * statistics.median(known_s):.2f}" if known_s else ""
