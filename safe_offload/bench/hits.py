"""Time to first token of one request whose prefix is on the host: is it ever slower than no hit?

Three real engines live side by side and have their turns, one request at a time: one without a
connector, which computes; one that loads every hit; and one that loads what is expected to be
faster. Each sees a prompt for the first time and stores it. Then its own prefix cache is reset, so
that the prefix is on the host, and it is asked again: that is what counts. A third time says what a
hit in its own cache takes. Before each turn there is a pause, because vLLM's processes poll for a
second after they have worked (0.32.0, SpinCondition of shm_broadcast.py), on the others' cores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safe_offload.bench.engine import BASELINE, CONNECTOR, BenchOptions, engine_options
from safe_offload.bench.engine_process import Answer, EngineProcess, Question, answer, generate
from safe_offload.bench.machine import describe_machine
from safe_offload.bench.output import write_report
from safe_offload.errors import ConfigError, SafeOffloadError

LOADED, RULE = "every hit loaded", "the rule"
MIN_LOAD_TOKENS: dict[str, int | str] = {LOADED: 0, RULE: "auto"}
HIT_TOKENS = (32, 64, 128, 256, 1024, 16_000)
BLOCK_TOKENS = 32
"""Hits are whole blocks."""
TAIL_TOKENS = 16
"""Of each prompt, behind the prefix; it is computed in any case."""
ANSWER_TOKENS = 4
ROUNDS = 12
WARM_UP_ROUNDS = 3
PROMPTS_PER_TURN = 3
"""Of each length."""
LONG_TOKENS, LONG_EVERY = 4096, 3
"""Longer hits are asked for once in so many rounds: there is less doubt, and they take long."""
PAUSE_S = 1.3
SETTLE_S, SETTLE_TOKEN_S = 0.03, 20e-6
"""After a prompt was seen for the first time, for its stores, and for each of its tokens."""
_TOKEN_IDS = range(32, 127)
_TIMEOUT_S = 600.0

Say = Callable[[str], None]


@dataclass(slots=True)
class Found:
    """One way to serve hits of one length; times by round, of the same rounds for all ways.

    Attributes:
        ttft_s: with nothing in the GPU's prefix cache.
        on_gpu_s: the same prompt again, at once.
        num_loaded: rounds in which the host's tokens were used.
    """

    ttft_s: list[float] = field(default_factory=list)
    on_gpu_s: list[float] = field(default_factory=list)
    num_loaded: int = 0


@dataclass(slots=True)
class HitsReport:
    """What was found, by length and way."""

    found: dict[int, dict[str, Found]]
    machine: dict[str, Any]

    def median_s(self, num_tokens: int, way: str) -> float:
        """Return the time to first token of a prompt whose prefix only the host has."""
        return statistics.median(self.found[num_tokens][way].ttft_s)

    def on_gpu_s(self, num_tokens: int, way: str = LOADED) -> float:
        """Return the time to first token of a prompt whose prefix the GPU has."""
        return statistics.median(self.found[num_tokens][way].on_gpu_s)

    def ratio(self, num_tokens: int) -> float:
        """Return the time with the rule, in terms of the better of the other two."""
        better_s = min(self.median_s(num_tokens, way) for way in (BASELINE, LOADED))
        return self.median_s(num_tokens, RULE) / better_s

    def to_json(self) -> dict[str, Any]:
        """Return samples, figures and method."""
        rows = [
            {
                "hit_tokens": num_tokens,
                "ratio": self.ratio(num_tokens),
                "ways": {way: asdict(found) for way, found in by_way.items()},
            }
            for num_tokens, by_way in self.found.items()
        ]
        return {"method": __doc__, "machine": self.machine, "rows": rows}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `safe-offload bench hits`."""
    add = parser.add_argument
    add(
        "--hit-tokens",
        type=int,
        nargs="+",
        default=[*HIT_TOKENS],
        metavar="N",
        help=f"multiples of {BLOCK_TOKENS} (default: {' '.join(map(str, HIT_TOKENS))})",
    )
    add("--rounds", type=int, default=ROUNDS, help="(%(default)s)")
    add("--warm-up", type=int, default=WARM_UP_ROUNDS, help="rounds before those (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write samples, figures and method here")


def run_command(arguments: argparse.Namespace) -> int:
    """Run `safe-offload bench hits`."""
    lengths = arguments.hit_tokens
    if any(number < 1 or number % BLOCK_TOKENS for number in lengths):
        raise ConfigError(f"--hit-tokens: expected multiples of {BLOCK_TOKENS}, found {lengths}")
    if arguments.rounds < 1 or arguments.warm_up < 1:
        raise ConfigError("--rounds and --warm-up: expected at least 1")
    report = measure(lengths, arguments.rounds, arguments.warm_up, print)
    write_report(report, render_table(report), arguments)
    return 0


def measure(lengths: Sequence[int], rounds: int, num_warm_up: int, say: Say) -> HitsReport:
    """Ask all three engines for hits of every length, round by round.

    The engine that goes first changes from round to round, so that a drift of the machine's speed
    hits all alike.

    Args:
        lengths: of hits, in tokens.
        rounds: that count.
        num_warm_up: rounds before those, in which the rule measures.
        say: takes one line of progress.

    Raises:
        SafeOffloadError: an engine died, or what is to be a hit was none.
    """
    machine = describe_machine()
    found = {number: {way: Found() for way in (BASELINE, LOADED, RULE)} for number in lengths}
    with tempfile.TemporaryDirectory(prefix="safe-offload-hits-") as name, ExitStack() as running:
        engines = _start(Path(name), max(lengths), running, say)
        order = [*engines]
        for index in range(-num_warm_up, rounds):
            questions = _questions(lengths, index)
            for way in order:
                answered = engines[way].call(take_turn, questions, _TIMEOUT_S)
                for (number, _), (cold, warm) in zip(questions, answered, strict=True):
                    check_answers(way, number, cold, warm)
                    if index >= 0:
                        kept = found[number][way]
                        kept.ttft_s.append(cold.ttft_s)
                        kept.on_gpu_s.append(warm.ttft_s)
                        kept.num_loaded += cold.num_host_tokens > 0
            order.append(order.pop(0))
    return HitsReport(found, machine)


def _start(folder: Path, longest: int, running: ExitStack, say: Say) -> dict[str, EngineProcess]:
    """Start the three engines, which differ in nothing but the connector."""
    engines: dict[str, EngineProcess] = {}
    for way in (BASELINE, LOADED, RULE):
        say(f"starting the engine: {way} ...")
        options = engine_options(_options(longest, MIN_LOAD_TOKENS.get(way, 0)), folder)
        chosen = options[BASELINE if way == BASELINE else CONNECTOR]
        log_path = folder / f"{way.replace(' ', '-')}.log"
        engines[way] = running.enter_context(EngineProcess(way, chosen, log_path))
        engines[way].wait_until_started(_TIMEOUT_S)
    return engines


def _options(longest: int, min_load_tokens: int | str) -> BenchOptions:
    extra = {"cpu_bytes_to_use": "1GiB", "min_load_tokens": min_load_tokens}
    return BenchOptions(
        model="llama",
        num_prompt_tokens=longest + TAIL_TOKENS,
        num_answer_tokens=ANSWER_TOKENS,
        rounds=1,
        pool_ratio=1.6,
        num_gpu_blocks=None,
        block_size=BLOCK_TOKENS,
        max_num_batched_tokens=2048,
        cpu_bytes=None,
        kv_transfer_config={"kv_connector": CONNECTOR, "kv_connector_extra_config": extra},
        engine_arguments={},
        answer_timeout_s=_TIMEOUT_S,
        seed=0,
    )


def _questions(lengths: Sequence[int], index: int) -> list[tuple[int, Question]]:
    """Hits and prompts of one round, lengths mixed."""
    generator = random.Random(f"hits/{index}")
    numbers = [number for number in lengths if number <= LONG_TOKENS] * PROMPTS_PER_TURN
    if index % LONG_EVERY == 0:
        numbers += [number for number in lengths if number > LONG_TOKENS]
    return [
        (
            number,
            Question(tuple(generator.choices(_TOKEN_IDS, k=number + TAIL_TOKENS)), ANSWER_TOKENS),
        )
        for number in numbers
    ]


def take_turn(engine: Any, questions: list[tuple[int, Question]]) -> list[tuple[Answer, Answer]]:
    """Run in the engine's process: see each prompt, then answer it from the host, then the GPU.

    Returns:
        The answers when the GPU has forgotten a prompt, and when it has it.
    """
    time.sleep(PAUSE_S)
    answers = []
    for _, question in questions:
        prompt = question.prompt_token_ids
        generate(engine, [prompt], [question.num_answer_tokens])
        time.sleep(SETTLE_S + len(prompt) * SETTLE_TOKEN_S)
        if not engine.reset_prefix_cache():
            raise SafeOffloadError("expected vLLM to forget its prefix cache, it did not")
        answers.append((answer(engine, question), answer(engine, question)))
    return answers


def check_answers(way: str, num_tokens: int, cold: Answer, warm: Answer) -> None:
    """See that the tokens of both answers came from where they should.

    Raises:
        SafeOffloadError: they did not.
    """
    expected = {BASELINE: (0,), LOADED: (num_tokens,), RULE: (0, num_tokens)}[way]
    if cold.num_host_tokens not in expected or cold.num_gpu_tokens:
        raise SafeOffloadError(
            f"{way}, {num_tokens} tokens: expected {expected} from the host and none from the GPU, "
            f"found {cold.num_host_tokens} and {cold.num_gpu_tokens}"
        )
    if warm.num_gpu_tokens != num_tokens:
        raise SafeOffloadError(
            f"{way}, {num_tokens} tokens: the GPU had {warm.num_gpu_tokens} of them"
        )


def render_table(report: HitsReport) -> str:
    """Return the report as text."""
    lines = [
        "Time to first token of one request alone, in ms: medians of rounds in turns.",
        f"Tiny Llama on vLLM's CPU engine; {TAIL_TOKENS} tokens behind the hit are computed in any "
        "case.",
        f"{'tokens':>7}{'computed':>10}{'loaded':>10}{'the rule':>10}{'GPU hit':>10}"
        f"{'rule / better':>15}{'loads by the rule':>19}",
    ]
    for number, by_way in report.found.items():
        times_s = [report.median_s(number, way) for way in (BASELINE, LOADED, RULE)]
        cells = "".join(f"{time_s * 1000:10.2f}" for time_s in (*times_s, report.on_gpu_s(number)))
        share = f"{by_way[RULE].num_loaded} of {len(by_way[RULE].ttft_s)}"
        lines.append(f"{number:>7}{cells}{report.ratio(number):15.2f}{share:>19}")
    worst = max(
        max(times_s) / min(times_s)
        for number, by_way in report.found.items()
        for times_s in [[report.on_gpu_s(number, way) for way in by_way]]
    )
    lines.append(
        f"GPU hits, which all engines serve alike, differ between them by up to {worst:.2f}."
    )
    return "\n".join(lines)
