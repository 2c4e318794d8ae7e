"""No connector, ours, SimpleCPUOffloadConnector and OffloadingConnector on one model, in turns.

All engines start at once and live beside each other, and each round is run on one after the other;
which one begins changes from round to round. An engine that does not start here is named and left
out.

return: prompts A, B, C go one by one, and when the GPU's own cache was emptied again: hits of the
host; then C four times: hits of the GPU, of which the last two count. At the end ours loads a
prompt one block of which is spoiled on purpose: its answer has to change, or equal answers prove
nothing.
busy: a prompt that is only on the host comes back among three new ones of its length, at once.
tiers: an engine writes each prompt to a directory, Valkey and Mooncake Store, all on this machine;
then an engine with one of them each answers it, as if it paid, and once more from the GPU.
sleep: a prompt, sleep and wake-up, the prompt again, and once more from the GPU.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safe_offload.commands.bench import engine as bench_engine
from safe_offload.commands.bench.engine import DEFAULT_CPU_BYTES, BenchOptions, engine_options
from safe_offload.commands.bench.engine_process import (
    Answer,
    EngineProcess,
    Question,
    answer,
    generate,
)
from safe_offload.commands.bench.engine_report import BASELINE
from safe_offload.commands.bench.report import Report, publish
from safe_offload.config.settings import size
from safe_offload.errors import SafeOffloadError
from tests.benchmarks.engines import TIMEOUT_S, ours, random_prompt, with_model
from tests.benchmarks.report import describe_machine, median_and_spread, table
from tests.benchmarks.tier_servers import tier_servers
from tests.gpu import shapes

NONE, OURS_HERE = "none", "ours"
PEERS = {"SCO": "SimpleCPUOffloadConnector", "OC": "OffloadingConnector"}
ENGINES = (NONE, OURS_HERE, *PEERS)
NUM_PROMPTS, NUM_OTHERS, NUM_OWN_HITS = 3, 3, 4
SETTLE_S = 0.5
"""After a prompt was seen for the first time, for its stores."""
TIER_BYTES, TIER_WAITS_S = 12 << 30, {"wait_s": 60, "timeout_s": 30}
WRITER = "writer"
WRITTEN, WAITED = "vllm:safe_offload_tier_written_objects", "vllm:safe_offload_tier_wait_seconds"

CAUSE = re.compile(r"\b(?!RuntimeError: Engine core)\w+(?:Error|Exception): .+")

NO_TIERS: Mapping[str, Sequence[dict[str, Any]]] = {}
Samples = dict[str, dict[str, list[float]]]
"""By engine: the samples of each figure, in seconds or tokens."""


class Found(NamedTuple):
    samples: Samples
    absent: dict[str, str]  # engines that did not start, with the reason
    num_different: int  # answers of ours that differ from vLLM's own hit
    spoiled: tuple[bool, ...] = ()  # of blocks spoiled on purpose: whether the answer changed

    @property
    def is_good(self) -> bool:
        return not self.num_different and bool(self.samples) and all(self.spoiled)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_engine.add_arguments(parser)
    parser.set_defaults(model="llama")
    shapes.add_arguments(parser)
    add = parser.add_argument
    add("--scenario", choices=list(SCENARIOS), default="return", help="(%(default)s)")
    add("--only", nargs="+", choices=ENGINES, default=list(ENGINES), help="(default: all)")
    several = "`return` or `busy` with prompts of each of these, on the same engines"
    add("--lengths", nargs="+", type=int, default=[], metavar="TOKENS", help=several)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks connectors`; return 1 if tokens are wrong or say nothing."""
    machine = describe_machine()
    options = bench_engine.read_options(arguments)
    with with_model(options, arguments) as (options, folder):
        if not arguments.lengths:
            found = SCENARIOS[arguments.scenario](options, arguments.only, folder)
            publish(make_report(arguments.scenario, found, options, machine), arguments)
            return int(not found.is_good)
        is_good = True
        with running(arguments.only, options, folder) as (engines, absent):
            for length in arguments.lengths:
                shorter = replace(options, prompt_tokens=length)
                found = ON_ENGINES[arguments.scenario](engines, shorter)._replace(absent=absent)
                is_good &= found.is_good
                report = make_report(arguments.scenario, found, shorter, machine)
                publish_part(report, arguments, str(length))
    return int(not is_good)


def publish_part(report: Report, arguments: argparse.Namespace, name: str) -> None:
    """Publish a part beside the file of the whole: a campaign may cut off the rest."""
    file = arguments.json and arguments.json.with_stem(f"{arguments.json.stem}-{name}")
    publish(report, argparse.Namespace(json=file))


def make_config(engine: str, options: BenchOptions, **extra: Any) -> dict[str, Any] | None:
    """Return vLLM's `kv_transfer_config` of an engine; None for no connector.

    Peers take the host memory as a number only. `--kv-transfer-config` has more settings of ours.
    """
    size_bytes = size(1 << 50).read("--cpu-bytes", options.cpu_bytes or DEFAULT_CPU_BYTES)
    sized = {"cpu_bytes_to_use": size_bytes}
    if engine == NONE:
        return None
    if engine in PEERS:
        return {
            "kv_connector": PEERS[engine],
            "kv_role": "kv_both",
            "kv_connector_extra_config": sized,
        }
    more = (options.kv_transfer_config or {}).get("kv_connector_extra_config", {})
    return ours(**sized, **(more | extra))


@contextmanager
def running(
    names: Sequence[str],
    options: BenchOptions,
    folder: Path,
    tiers: Mapping[str, Sequence[dict[str, Any]]] = NO_TIERS,
) -> Iterator[tuple[dict[str, EngineProcess], dict[str, str]]]:
    """Start engines, all at once; yield those that did, and why others did not."""
    processes: dict[str, EngineProcess] = {}
    engines, absent = {}, {}
    with ExitStack() as on:
        for name in names:
            more = {"tiers": [*tiers[name]], "min_load_tokens": 0} if name in tiers else {}
            config = make_config(name, options, **more)
            choices = engine_options(replace(options, kv_transfer_config=config or ours()))
            how = choices[config["kv_connector"] if config else BASELINE]
            processes[name] = on.enter_context(EngineProcess(name, how, folder / f"{name}.log"))
        for name, process in processes.items():
            try:
                started = process.wait_until_started(TIMEOUT_S)
            except SafeOffloadError as error:
                log = (folder / f"{name}.log").read_text(errors="replace")
                absent[name] = (CAUSE.findall(log) or str(error).split("\n"))[-1]
                process.stop()
                print(f"{name}: does not start ({absent[name]})")
                continue
            engines[name] = process
            on.callback(process.tell_to_stop)  # all of them, before the first is waited for
            print(f"{name}: ready after {started.start_s:.0f} s", flush=True)
        yield engines, absent


def in_turns(
    engines: Mapping[str, EngineProcess], rounds: int, first: int = 0
) -> Iterator[tuple[int, str]]:
    """Yield rounds and engines; round 0 is a warm-up."""
    order = list(engines)
    for index in range(first, rounds + 1):
        order.reverse()
        for name in order:
            print(f"round {index} of {rounds}, {name}", flush=True)
            yield index, name


def record(samples: Samples, engine: str, **figures: float) -> None:
    for name, value in figures.items():
        samples.setdefault(engine, {}).setdefault(name.replace("_", " "), []).append(value)


# ---- the scenarios -------------------------------------------------------------------------------


def measure_on(
    scenario: Callable[..., Found], options: BenchOptions, names: Sequence[str], folder: Path
) -> Found:
    """Run a scenario that takes running engines on some of its own."""
    with running(names, options, folder) as (engines, absent):
        found: Found = scenario(engines, options)
        return found._replace(absent=absent)


def return_on(engines: Mapping[str, EngineProcess], options: BenchOptions) -> Found:
    samples: Samples = {}
    num_different = 0
    for index, name in in_turns(engines, options.rounds):
        prompts = [bench_engine.make_question(options, index, i) for i in range(NUM_PROMPTS)]
        first = [engines[name].call(answer, one, TIMEOUT_S) for one in prompts]
        engines[name].call(forget, None, TIMEOUT_S)
        second = [engines[name].call(answer, one, TIMEOUT_S) for one in prompts]
        own = [engines[name].call(answer, prompts[-1], TIMEOUT_S) for _ in range(NUM_OWN_HITS)]
        if not index:
            continue
        num_different += name == OURS_HERE and differs(second[-1], own[0])
        record(
            samples,
            name,
            first_pass=statistics.fmean(one.ttft_s for one in first),
            second_pass=statistics.fmean(one.ttft_s for one in second),
            own_hit=statistics.fmean(one.ttft_s for one in own[NUM_OWN_HITS // 2 :]),
            tokens_from_the_host=sum(one.num_host_tokens for one in second),
        )
    spoiled = []
    if OURS_HERE in engines:
        long = 4 * options.answer_tokens  # each token of an answer looks at other blocks
        num_tokens = options.prompt_tokens + options.answer_tokens - long
        longer = replace(options, prompt_tokens=num_tokens, answer_tokens=long)
        question = bench_engine.make_question(longer, options.rounds + 1, 0)
        spoiled.append(engines[OURS_HERE].call(changes_if_spoiled, question, TIMEOUT_S))
    return Found(samples, {}, num_different, tuple(spoiled))


def changes_if_spoiled(engine: Any, question: Question) -> bool:
    """Return whether an answer shows that one block of its prompt was loaded wrong."""
    engine.collective_rpc("spoil_next_load")  # first: the host forgets what it held
    answer(engine, question)
    own = answer(engine, question)
    forget(engine, None)
    spoiled = answer(engine, question)
    forget(engine, None)
    return spoiled.num_host_tokens > 0 and spoiled.token_ids != own.token_ids


def differs(back: Answer, own: Answer) -> bool:
    """Whether a hit of the host has another answer than vLLM's own hit of the same length."""
    is_same_hit = num_hit(back) == num_hit(own) and back.num_host_tokens > 0
    return is_same_hit and back.token_ids != own.token_ids


def num_hit(found: Answer) -> int:
    return found.num_gpu_tokens + found.num_host_tokens


def forget(engine: Any, _: None) -> None:
    """Empty the GPU's own cache, when stores have let go of their blocks."""
    end_s = time.monotonic() + TIMEOUT_S / 2
    time.sleep(SETTLE_S)
    while not engine.reset_prefix_cache():
        if time.monotonic() > end_s:
            raise SafeOffloadError("expected vLLM to forget its prefix cache, it did not")
        time.sleep(SETTLE_S)


def busy_on(engines: Mapping[str, EngineProcess], options: BenchOptions) -> Found:
    samples: Samples = {}
    for index, name in in_turns(engines, options.rounds):
        generator = random.Random(f"{options.seed}/busy/{index}")
        prompts = [random_prompt(generator, options.prompt_tokens) for _ in range(1 + NUM_OTHERS)]
        batch = (prompts, options.answer_tokens)
        back_s, others_s, all_s = engines[name].call(answer_busy, batch, TIMEOUT_S)
        if index:
            record(samples, name, comes_back=back_s, new_ones=others_s, all_answers=all_s)
    return Found(samples, {}, 0)


def answer_busy(
    engine: Any, batch: tuple[list[tuple[int, ...]], int]
) -> tuple[float, float, float]:
    """Return times to first token of the prompt that comes back and of new ones, and of it all."""
    back, *others = batch[0]
    generate(engine, [back], [batch[1]])
    forget(engine, None)
    prompts = [*others[:2], back, *others[2:]]
    begin_s = time.perf_counter()
    outputs = generate(engine, prompts, [batch[1]] * len(prompts))
    times_s = [output.metrics.first_token_latency for output in outputs]
    return times_s.pop(2), statistics.fmean(times_s), time.perf_counter() - begin_s


def measure_tiers(options: BenchOptions, _: Sequence[str], folder: Path) -> Found:
    samples: Samples = {}
    num_different = 0
    with tier_servers(TIER_BYTES) as (urls, left_out):
        tiers = {kind: {"url": url, **TIER_WAITS_S} for kind, url in urls.items()}
        tiers["directory"]["capacity"] = str(TIER_BYTES)
        of_engines = {WRITER: [*tiers.values()], **{kind: [tier] for kind, tier in tiers.items()}}
        with running([*of_engines], options, folder, of_engines) as (engines, absent):
            writer = engines.pop(WRITER)
            for index in range(options.rounds + 1):
                print(f"round {index} of {options.rounds}", flush=True)
                question = bench_engine.make_question(options, index, 0)
                computed = writer.call(answer, question, TIMEOUT_S)
                writer.call(wait_until_written, None, TIMEOUT_S)
                if index:
                    record(
                        samples, "computed", first_token=computed.ttft_s, waited=0, from_a_tier=0
                    )
                for kind, engine in engines.items():
                    back, waited_s = engine.call(answer_from_tier, question, TIMEOUT_S)
                    own = engine.call(answer, question, TIMEOUT_S)
                    if index:
                        num_different += differs(back, own) or not back.num_host_tokens
                        record(samples, kind, first_token=back.ttft_s, waited=waited_s)
                        record(samples, kind, from_a_tier=back.num_host_tokens)
    return Found(samples, left_out | absent, num_different)


def wait_until_written(engine: Any, _: None) -> None:
    """Wait until tiers have had nothing more for a while."""
    before, end_s = -1.0, time.monotonic() + TIMEOUT_S / 2
    while before != (written := read_metric(engine, WRITTEN)) and time.monotonic() < end_s:
        before = written
        time.sleep(2 * SETTLE_S)


def answer_from_tier(engine: Any, question: Question) -> tuple[Answer, float]:
    """Return the answer, and how long the request waited for tiers."""
    before_s = read_waits(engine)
    return answer(engine, question), read_waits(engine) - before_s


def read_waits(engine: Any) -> float:
    return float(sum(one.sum for one in engine.get_metrics() if one.name == WAITED))


def read_metric(engine: Any, *names: str) -> float:
    return float(sum(one.value for one in engine.get_metrics() if one.name in names))


def measure_sleep(options: BenchOptions, _: Sequence[str], folder: Path) -> Found:
    samples: Samples = {}
    num_different = 0
    with running(["ours"], options, folder) as (engines, absent):
        for index, name in in_turns(engines, options.rounds):
            question = bench_engine.make_question(options, index, 0)
            first = engines[name].call(answer, question, TIMEOUT_S)
            took_s = engines[name].call(sleep_and_wake, SETTLE_S, TIMEOUT_S)
            woken, own = (engines[name].call(answer, question, TIMEOUT_S) for _ in range(2))
            num_different += woken.token_ids != own.token_ids
            record(samples, name, first=first.ttft_s, sleep_and_wake=took_s, woken=woken.ttft_s)
            record(samples, name, tokens_from_the_host=woken.num_host_tokens)
    return Found(samples, absent, num_different)


def sleep_and_wake(engine: Any, settle_s: float) -> float:
    time.sleep(settle_s)
    begin_s = time.perf_counter()
    engine.sleep(level=1)
    engine.wake_up()
    return time.perf_counter() - begin_s


ON_ENGINES = {"return": return_on, "busy": busy_on}
"""Scenarios for engines that run for others, too."""
SCENARIOS: dict[str, Callable[..., Found]] = {
    **{name: partial(measure_on, scenario) for name, scenario in ON_ENGINES.items()},
    "tiers": measure_tiers,
    "sleep": measure_sleep,
}


# ---- the report ----------------------------------------------------------------------------------


def make_report(
    scenario: str, found: Found, options: BenchOptions, machine: dict[str, Any]
) -> Report:
    names = list(dict.fromkeys(name for one in found.samples.values() for name in one))
    rows = [["", *names]]
    for engine, figures in found.samples.items():
        are_counts = (all(value == int(value) for value in figures[name]) for name in names)
        forms = [".0f" if is_count else ".4f" for is_count in are_counts]
        rows.append([engine, *map(median_and_spread, (figures[n] for n in names), forms)])
    left_out = [f"{engine}: not here ({why})" for engine, why in found.absent.items()]
    compared = f"answers of ours that differ from vLLM's own hit: {found.num_different}"
    if found.spoiled:
        seen = f"{sum(found.spoiled)} of {len(found.spoiled)}"
        compared += f"\nblocks spoiled on purpose that changed the answer: {seen}"
    assert __doc__ is not None
    return Report(
        method=f"{scenario}: median (lowest to highest), times in seconds\n\n{__doc__.strip()}",
        sections=[table(rows), "\n".join(left_out), compared],
        figures={"scenario": scenario, **found._asdict()},
        options=asdict(options),
        machine=machine,
    )
