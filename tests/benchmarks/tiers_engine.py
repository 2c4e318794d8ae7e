"""Time to first token of one prompt computed, from the GPU, the host and a tier, side by side.

Two engines with one tier have their turns, and one with host memory alone. The
first computes prompts, which are stored; it is asked again while a prompt is still on its GPU, and
when its GPU has forgotten it and its host has not. The second is asked what it has never seen, and
finds it in the tier. The one without a tier computes the same prompts: what does writing cost? Then
all engines end, and a new one with the same tier is asked everything: a cold start.

What the tier itself gives, `safe-offload bench tier` measures.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from safe_offload.commands.bench.engine import (
    DEFAULT_CPU_BYTES,
    OURS,
    PROMPT_TOKEN_IDS,
    BenchOptions,
    engine_options,
)
from safe_offload.commands.bench.engine_process import Answer, EngineProcess, Question, answer
from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    median_and_spread,
    publish,
    table,
)
from safe_offload.commands.bench.tier_place import Signals
from safe_offload.commands.cache import places
from safe_offload.config.tier_url import FILE, SERVERS, URL_KEY
from safe_offload.errors import SafeOffloadError
from tests.benchmarks.engine import tiny

START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 300.0
SPILLED_TIMEOUT_S = 120.0
QUIET_S = 1.5
"""Nothing was stored or spilled for that long: all that was stored has been spilled."""
POLL_S = 0.3
NUM_PROMPTS = 3
HASH_ALGORITHM = "sha256_cbor"
PREFIX = "safe-offload-bench-"

COMPUTED, ALONE, ON_GPU, ON_HOST, BESIDE, COLD = SOURCES = (
    "computed",
    "computed, host memory alone",
    "from the GPU",
    "from the host",
    "from the tier, computed by another engine",
    "from the tier, after a restart",
)
_KIND = {
    COMPUTED: "computed",
    ALONE: "computed",
    ON_GPU: "gpu",
    ON_HOST: "host",
    BESIDE: "host",
    COLD: "host",
}


@dataclass(frozen=True, slots=True)
class EngineFound:
    """Times to first token in seconds, by where the prompt came from, and what was wrong."""

    ttft_s: dict[str, list[float]]
    num_different_answers: int
    num_answers: int
    prompt_tokens: int

    def ratio(self, source: str) -> float:
        """Return the speedup over computing."""
        return statistics.median(self.ttft_s[COMPUTED]) / statistics.median(self.ttft_s[source])

    @property
    def writing_costs(self) -> list[float]:
        """Return how much later each prompt is computed with a tier than without: 0.01 is 1 %."""
        pairs = zip(self.ttft_s[COMPUTED], self.ttft_s[ALONE], strict=True)
        return [with_tier_s / alone_s - 1 for with_tier_s, alone_s in pairs]


@dataclass(frozen=True, slots=True)
class EngineBenchOptions:
    """What to ask of which engine."""

    tier: Mapping[str, Any]  # as `tiers` of the configuration has it; nothing is in it yet
    model: str
    prompt_tokens: int
    rounds: int
    extra: dict[str, Any]
    engine_args: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("place", metavar="DIR_OR_URL", help="of the tier; what is made there is deleted")
    add("--engine", metavar="MODEL", default="llama", help="llama, gemma3, deepseek, or any model")
    add("--prompt-tokens", type=int, default=16_000, help="of the prompts (%(default)s)")
    add("--rounds", type=int, default=5, help="after a warm-up (%(default)s)")
    how: dict[str, Any] = {"type": json.loads, "default": {}, "metavar": "JSON"}
    add("--engine-args", help="more arguments of vllm.LLM", **how)
    add("--extra-config", help="more keys of kv_connector_extra_config", **how)
    for option, setting in places.OPTIONS.items():
        add(option, help=f'as the tier\'s "{setting}"')
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks tiers_engine`."""
    machine = describe_machine()
    with Signals(), _place_of_ours(arguments) as written:  # what SIGTERM ends is deleted, too
        options = EngineBenchOptions(
            tier=written,
            model=arguments.engine,
            prompt_tokens=arguments.prompt_tokens,
            rounds=arguments.rounds,
            extra=arguments.extra_config,
            engine_args=arguments.engine_args,
        )
        found = measure_engines(options, print)
    method = " ".join((__doc__ or "").split("\n\n")[1].split())
    asked = {"model": options.model, "rounds": options.rounds}
    figures = {"engines": asdict(found)}
    publish(Report(method, [render(found)], figures, asked, machine), arguments)
    return 1 if found.num_different_answers else 0


@contextmanager
def _place_of_ours(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the tier in a place that nothing else uses, as `tiers` has it; delete it then."""
    options = {setting: getattr(arguments, setting) for setting in places.OPTIONS.values()}
    config = places.config_of(arguments.place, options)
    written = {key: value for key, value in options.items() if value is not None}
    if config.location.scheme == FILE:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=config.location.path) as folder:
            yield written | {URL_KEY: f"file://{quote(folder)}"}
        return
    word = f"{PREFIX}{random.SystemRandom().getrandbits(32):08x}"
    if config.location.scheme in SERVERS:  # which then deletes it
        yield written | {URL_KEY: arguments.place, "ttl": "1h", "namespace": word}
        return
    url = f"{arguments.place.rstrip('/')}/{word}"
    try:
        yield written | {URL_KEY: url}
    finally:
        place = places.open_place(url, places.config_of(url, options))
        place.delete(list(place.items()))
        place.forget(list(place.namespaces()))
        place.close()


class _Bench:
    """Engines, questions, and what was found so far."""

    def __init__(self, options: EngineBenchOptions, work: Path) -> None:
        self._options, self._work = options, work
        self.ttft_s: dict[str, list[float]] = {source: [] for source in SOURCES}
        self._tokens: dict[tuple[int, int], set[tuple[int, ...]]] = {}
        self.num_answers = 0

    def start(self, name: str, *, has_tier: bool = True) -> EngineProcess:
        """Return an engine that has started."""
        tiers = [dict(self._options.tier)] if has_tier else []
        extra = {"cpu_bytes_to_use": DEFAULT_CPU_BYTES, "tiers": tiers, **self._options.extra}
        config = {"kv_connector": OURS, "kv_connector_extra_config": extra}
        how = BenchOptions(
            model=self._options.model,
            prompt_tokens=self._options.prompt_tokens,
            kv_transfer_config=config,
            engine_args={"prefix_caching_hash_algo": HASH_ALGORITHM} | self._options.engine_args,
        )
        chosen = engine_options(tiny(how, self._work))[OURS]
        engine = EngineProcess(name, chosen, self._work / f"{name}.log")
        engine.wait_until_started(START_TIMEOUT_S)
        return engine

    def ask(self, engine: EngineProcess, round_index: int, which: int, source: str) -> Answer:
        """Ask for a prompt; its time counts as one from `source`, unless the round is the 0th."""
        generator = random.Random(f"{round_index}/{which}")
        prompt = generator.choices(PROMPT_TOKEN_IDS, k=self._options.prompt_tokens)
        found = engine.call(answer, Question(tuple(prompt), 16), ANSWER_TIMEOUT_S)
        self._tokens.setdefault((round_index, which), set()).add(found.token_ids)
        self.num_answers += 1
        came_from = _source_of(found)
        if came_from != _KIND[source]:
            raise SafeOffloadError(
                f"prompt {which} of round {round_index} was to come {source}; of its tokens "
                f"{found.num_gpu_tokens} came from the GPU, {found.num_host_tokens} from the "
                f"connector, and {found.num_computed_tokens} were computed"
            )
        if round_index:
            self.ttft_s[source].append(found.ttft_s)
        return found

    def found(self) -> EngineFound:
        different = sum(len(tokens) > 1 for tokens in self._tokens.values())
        return EngineFound(self.ttft_s, different, self.num_answers, self._options.prompt_tokens)


def _source_of(found: Answer) -> str:
    most = max(found.num_gpu_tokens, found.num_host_tokens, found.num_computed_tokens)
    return {found.num_gpu_tokens: "gpu", found.num_host_tokens: "host"}.get(most, "computed")


def measure_engines(options: EngineBenchOptions, say: Callable[[str], None]) -> EngineFound:
    """Run the engines; `say` takes progress."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        bench = _Bench(options, Path(name))
        prompts = range(NUM_PROMPTS)
        say("starting three engines ...")
        with (
            bench.start("first") as first,
            bench.start("beside") as beside,
            bench.start("alone", has_tier=False) as alone,
        ):
            ways = [(first, COMPUTED), (alone, ALONE)]
            for round_index in range(options.rounds + 1):
                ways.reverse()
                for engine, source in ways:
                    for which in prompts:
                        bench.ask(engine, round_index, which, source)
                bench.ask(first, round_index, prompts[-1], ON_GPU)
                for which in prompts:
                    bench.ask(first, round_index, which, ON_HOST)
                wait_until_spilled(first)
                for which in prompts:
                    bench.ask(beside, round_index, which, BESIDE)
                say(f"round {round_index}: {_medians(bench.ttft_s)}")
        say("starting one more with the same tier ...")
        with bench.start("restarted") as restarted:
            for round_index in range(options.rounds + 1):
                for which in prompts:
                    bench.ask(restarted, round_index, which, COLD)
        return bench.found()


def _medians(ttft_s: dict[str, list[float]]) -> str:
    known = {source: times for source, times in ttft_s.items() if times}
    return ", ".join(f"{source} {statistics.median(t):.3f} s" for source, t in known.items())


def wait_until_spilled(engine: EngineProcess) -> None:
    """Wait until an engine has stored and spilled nothing for a while."""
    deadline_s = time.monotonic() + SPILLED_TIMEOUT_S
    before, since_s = None, time.monotonic()
    while time.monotonic() < deadline_s:
        # Counts move when vLLM is asked something; this is less than a block, and never stored.
        engine.call(answer, Question(tuple(PROMPT_TOKEN_IDS[:1]), 1), ANSWER_TIMEOUT_S)
        counts = engine.call(_count_writes, None, ANSWER_TIMEOUT_S)
        if counts != before:
            before, since_s = counts, time.monotonic()
        elif time.monotonic() - since_s > QUIET_S and not counts["spills_in_flight"]:
            if num_dropped := counts["dropped_spill_blocks"]:
                raise SafeOffloadError(
                    f"the tier would not take {num_dropped:.0f} blocks. Fix: see how fast it "
                    "writes, and give it a longer --timeout-s"
                )
            return
        time.sleep(POLL_S)
    raise SafeOffloadError(f"the tier is still written to after {SPILLED_TIMEOUT_S:g} s")


def _count_writes(engine: Any, _: None) -> dict[str, float]:
    """Return what an engine has stored, spilled and dropped so far; in its process."""
    names = ("stored_blocks", "spilled_blocks", "spills_in_flight", "dropped_spill_blocks")
    counts = dict.fromkeys(names, 0.0)
    for metric in engine.get_metrics():
        name = metric.name.removeprefix("vllm:safe_offload_")
        if name in counts:
            counts[name] += metric.value
    return counts


def render(found: EngineFound) -> str:
    rows: list[Sequence[str]] = [["time to first token", "ms", "speedup over computing"]]
    for source in SOURCES:
        times_ms = [1e3 * seconds for seconds in found.ttft_s[source]]
        rows.append([source, median_and_spread(times_ms, ".1f"), f"{found.ratio(source):.1f}"])
    same = found.num_answers - found.num_different_answers
    title = f"prompts of {found.prompt_tokens:,} tokens; {found.num_answers} answers"
    equal = "all equal" if same == found.num_answers else f"{found.num_different_answers} DIFFER"
    costs = median_and_spread([100 * cost for cost in found.writing_costs], "+.1f")
    return f"{title}, {equal}\n{table(rows)}\nwriting to the tier: first pass {costs} % later"
