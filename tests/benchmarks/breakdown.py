"""Where the time of a hit goes: spans that follow one another, from arrival to first token.

Prompts A, B, C, A, B, C, C go one by one to an engine with the connector, as in `bench engine`; the
last is a hit in the GPU's own cache. Scheduler, steps and copies are watched. A request that is
computed in several steps has no spans. With async scheduling, or a GPU, the hook that ends a step
returns before the device has computed: then the rest of the forward is in the span after it. The
limit is a GPU hit and one copy of as many bytes.
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
from safe_offload.commands.bench.report import Report, publish
from tests.benchmarks.engine_watch import MATCHED, PLANNED, SETTLED, start_watching
from tests.benchmarks.engines import TIMEOUT_S, ours, with_model
from tests.benchmarks.report import describe_machine, table
from tests.gpu import shapes

PROBE = "tests.gpu.weights.Probe"
WATCHED = "tests.benchmarks.watched"
"""Has our connector; imported by name, as vLLM imports it: here it would change vLLM."""
HOST_HIT, GPU_HIT = "host hit", "GPU hit"
SPANS = (
    FRONT := "front end, until the scheduler has it",
    MATCH := "step of the match, until the hit is found",
    PLAN := "blocks allocated, load planned",
    TO_WORKER := "until the worker has the load",
    START := "our loop and descriptors, until the first copy is given to the driver",
    COPY := "copies, until the last has ended",
    REPORT := "report, until a step of the worker has it",
    SETTLE := "until the scheduler has settled it",
    NEXT := "next step, until it is planned",
    TO_FORWARD := "until the forward begins",
    FORWARD := "forward of the tokens that are computed",
    TOKEN := "until the scheduler has the token",
    RETURNED := "front end, until the token is returned",
)

SPANS_IN_STEP = FRONT, MATCH, PLAN, TO_FORWARD, TO_WORKER, START, COPY, FORWARD, TOKEN, RETURNED
"""Of a load in the step that computes the rest; the hooks before its forward count as its own."""

Spans = dict[str, float]


@dataclass(frozen=True)
class Seen:
    """When a request came to the points that vLLM notes, in monotonic time, and the rest.

    Attributes:
        moments: of the scheduler side, see `watched`.
        probe: of the worker, see `Recorder`.
    """

    arrival_s: float
    queued_s: float
    scheduler_token_s: float
    returned_s: float
    moments: Sequence[tuple[str, float]]
    probe: dict[str, Any]


@dataclass(frozen=True)
class Load:
    """What was copied for a hit."""

    size_bytes: int
    num_steps: int  # of the worker, from the one that got the load to the one that computed
    one_copy_s: float = 0.0


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
        config |= {"kv_connector_module_path": WATCHED}
        how = engine_options(replace(options, kv_transfer_config=config))[OURS]
        engine = on.enter_context(EngineProcess("ours", how, folder / "ours.log"))
        engine.wait_until_started(TIMEOUT_S)
        engine.call(start_watching, None, TIMEOUT_S)
        hits: dict[str, list[Spans]] = {HOST_HIT: [], GPU_HIT: []}
        loads: list[Load] = []
        for index in range(options.rounds + 1):
            questions = [bench_engine.make_question(options, index, i) for i in range(NUM_PROMPTS)]
            seen = [
                engine.call(watch, one, TIMEOUT_S)
                for one in [*questions, *questions, questions[-1]]
            ]
            if index:
                found = [one for one in seen[NUM_PROMPTS:-1] if COPY in spans(one)]
                hits[HOST_HIT] += map(spans, found)
                loads += map(load_of, found)
                hits[GPU_HIT] += [s for s in (spans(seen[-1]),) if s and COPY not in s]
        sizes = sorted({load.size_bytes for load in loads})
        copies_s = {size: engine.call(time_one_copy_of, size, TIMEOUT_S) for size in sizes}
        loads = [replace(load, one_copy_s=copies_s[load.size_bytes]) for load in loads]
    publish(make_report(hits, loads, options, machine), arguments)
    return int(not hits[HOST_HIT])


def watch(engine: Any, question: Question) -> Seen:
    """Run one request alone."""
    core = engine.llm_engine.engine_core
    engine.collective_rpc("take_probe")
    core.call_utility("take_moments")
    (output,) = generate(engine, [question.prompt_token_ids], [question.num_answer_tokens])
    (probe, *_) = engine.collective_rpc("take_probe")
    moments = [(name, at_s) for name, at_s in core.call_utility("take_moments")]
    times = output.metrics
    arrival_s = times.arrival_time - time.time() + time.monotonic()  # of vLLM's, in wall time
    returned_s = arrival_s + times.first_token_latency
    return Seen(arrival_s, times.queued_ts, times.first_token_ts, returned_s, moments, probe)


def time_one_copy_of(engine: Any, size_bytes: int) -> float:
    (taken_s, *_) = engine.collective_rpc("time_one_copy", args=(size_bytes,))
    return float(taken_s)


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
    points = [("", seen.arrival_s), (FRONT, seen.queued_s)]
    loads = [copy for copy in probe["copies"] if copy[0] == "load"]
    if loads:
        submits = {key: at_s for at_s, name, key in probe["submits"] if name == "load"}
        submit_s, end_s = min(submits.values()), max(end_s for _, _, end_s, _ in loads)
        given_s = [at_s for at_s in probe["given"] if submit_s < at_s < end_s]
        # On a CPU no driver takes it: the copy begins when it is issued.
        start_s = min(given_s or [begin_s for _, begin_s, *_ in loads])
        points += [
            (MATCH, _last(seen.moments, MATCHED, submit_s)),
            (PLAN, _last(seen.moments, PLANNED, submit_s)),
        ]
        if is_in_step := submit_s >= forward_s:
            points += [(TO_FORWARD, forward_s)]
        points += [(TO_WORKER, submit_s), (START, start_s)]
        if is_in_step:
            points += [(COPY, min(end_s, forwarded_s))]
        else:
            report_s = max(at_s for at_s, keys in probe["reports"] if submits.keys() & {*keys})
            settled_s = _last(seen.moments, SETTLED, forward_s)
            points += [(COPY, end_s), (REPORT, report_s), (SETTLE, settled_s)]
    if TO_FORWARD not in dict(points):
        next_s = _last(seen.moments, PLANNED, forward_s)
        points += [(NEXT, next_s), (TO_FORWARD, forward_s)]
    points += [
        (FORWARD, min(forwarded_s, seen.scheduler_token_s)),
        (TOKEN, seen.scheduler_token_s),
        (RETURNED, seen.returned_s),
    ]
    return {name: end_s - begin_s for (_, begin_s), (name, end_s) in pairwise(points)}


def load_of(seen: Seen) -> Load:
    """Return what was copied for a hit that has spans."""
    submits = [at_s for at_s, name, _ in seen.probe["submits"] if name == "load"]
    size_bytes = sum(size for way, _, _, size in seen.probe["copies"] if way == "load")
    (forward_s, *_), *_ = (step for step in seen.probe["steps"] if step[2] > 0)
    steps = [step for step in seen.probe["steps"] if min(submits) < step[1] and step[0] < forward_s]
    return Load(size_bytes, len(steps))


def _last(moments: Sequence[tuple[str, float]], wanted: str, before_s: float) -> float:
    return max(at_s for name, at_s in moments if name == wanted and at_s <= before_s)


def make_report(
    hits: dict[str, list[Spans]],
    loads: list[Load],
    options: BenchOptions,
    machine: dict[str, Any],
) -> Report:
    figures = {"hits": hits, "loads": [asdict(load) for load in loads]}
    assert __doc__ is not None
    sections = [spans_table(hits), *describe_limit(hits, loads)]
    return Report(__doc__.strip(), sections, figures, asdict(options), machine)


def spans_table(hits: dict[str, list[Spans]]) -> str:
    rows = [["ms", *(head for kind, found in hits.items() for head in heads(kind, found))]]
    for name in SPANS:
        cells = [in_ms([s[name] for s in found if name in s]) for found in hits.values()]
        rows.append([name, *(cell for pair in cells for cell in pair)])
    totals = [in_ms([sum(s.values()) for s in found]) for found in hits.values()]
    return table([*rows, ["time to first token", *(cell for pair in totals for cell in pair)]])


def describe_limit(hits: dict[str, list[Spans]], loads: list[Load]) -> list[str]:
    """Say what was copied, and how far the hits are from the limit."""
    totals = [[sum(s.values()) for s in found] for found in hits.values()]
    if not loads or not all(totals):
        return []
    load, copy_s = loads[-1], statistics.median(load.one_copy_s for load in loads)
    steps = statistics.median(load.num_steps for load in loads)
    medians, leasts = ([of(found) for found in totals] for of in (statistics.median, min))
    shares = [hit_s / (on_gpu_s + copy_s) for hit_s, on_gpu_s in (medians, leasts)]
    return [
        f"{load.size_bytes:,} bytes; {steps:g} steps before the one that computes. "
        f"One copy: {1e3 * copy_s:.2f} ms.\n"
        f"A host hit takes {shares[0]:.3f} of the limit, by the medians; {shares[1]:.3f} by the "
        "least."
    ]


def heads(kind: str, found: Sequence[Spans]) -> tuple[str, str]:
    return f"{kind}: median of {len(found)}", "least"


def in_ms(values_s: Sequence[float]) -> tuple[str, str]:
    """Return the median and the least."""
    if not values_s:
        return "", ""
    return f"{1e3 * statistics.median(values_s):.2f}", f"{1e3 * min(values_s):.2f}"
