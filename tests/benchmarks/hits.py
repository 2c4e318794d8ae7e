"""Time to first token of one request whose prefix is on the host: is it ever slower than no hit?

Two real engines have their turns, one request at a time: one loads every hit, the other what is
expected to be faster ("min_load_tokens": "auto"). Each sees a prompt for the first time and stores
it. Then its own prefix cache is reset, so that the prefix is on the host, and it is asked again:
once as it is set up, once by a request that forbids loading and so is computed, in either order. A
last time says what a hit in its own cache takes. No two processes of one engine are equally fast,
so each engine's time is held against what the same engine takes to compute the same prompts.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from safe_offload.commands.bench.engine_process import (
    Answer,
    EngineProcess,
    Question,
    answer,
    generate,
)
from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
    table,
)
from safe_offload.errors import SafeOffloadError
from tests.benchmarks.engines import (
    TIMEOUT_S,
    forget_prefix_cache,
    make_tiny_engine,
    ours,
    random_prompt,
)

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
"""Longer hits are asked for once in this many rounds: there is less doubt, and they take long."""
SETTLE_S, SETTLE_TOKEN_S = 0.03, 20e-6
"""After a prompt was seen for the first time, for its stores, and for each of its tokens."""


class Answers(NamedTuple):
    """To one prompt, in the ways of `Found`."""

    hit: Answer
    computed: Answer
    on_gpu: Answer


@dataclass(slots=True)
class Found:
    """One engine's hits of one length; times by prompt."""

    # To the first token, with the prefix on the host, as the engine is set up.
    hit_s: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)  # the same prompt, with loading forbidden
    # The same prompt with the prefix in the GPU's cache.
    on_gpu_s: list[float] = field(default_factory=list)
    num_loaded: int = 0  # prompts of which the host's tokens were used

    @property
    def ratio(self) -> float:
        """Return the time of a hit, in terms of computing it."""
        return statistics.median(self.hit_s) / statistics.median(self.computed_s)

    def keep(self, answers: Answers) -> None:
        """Note the answers to one prompt."""
        self.hit_s.append(answers.hit.ttft_s)
        self.computed_s.append(answers.computed.ttft_s)
        self.on_gpu_s.append(answers.on_gpu.ttft_s)
        self.num_loaded += answers.hit.num_host_tokens > 0


FoundByLength = dict[int, dict[str, Found]]
"""By length and engine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks hits`."""
    lengths = arguments.hit_tokens
    machine = describe_machine()
    found = measure(lengths, arguments.rounds, arguments.warm_up)
    publish(make_report(found, machine), arguments)
    return 0


def measure(lengths: Sequence[int], rounds: int, num_warm_up: int) -> FoundByLength:
    """Ask both engines for hits of every length, round by round.

    The engine that goes first changes from round to round, so that a drift of the machine's speed
    hits both alike.
    """
    found = {number: {way: Found() for way in MIN_LOAD_TOKENS} for number in lengths}
    with tempfile.TemporaryDirectory(prefix="safe-offload-hits-") as folder, ExitStack() as running:
        engines: dict[str, EngineProcess] = {}
        for way, min_load_tokens in MIN_LOAD_TOKENS.items():
            print(f"starting the engine: {way} ...")
            config = ours(cpu_bytes_to_use="1GiB", min_load_tokens=min_load_tokens)
            sizes = {"prompt_tokens": max(lengths) + TAIL_TOKENS, "answer_tokens": ANSWER_TOKENS}
            engine = make_tiny_engine(way, config, Path(folder), **sizes)
            engines[way] = running.enter_context(engine)
            engines[way].wait_until_started(TIMEOUT_S)
        order = [*engines]
        for index in range(-num_warm_up, rounds):
            questions = _questions(lengths, index)
            for way in order:
                answered = engines[way].call(take_turn, questions, TIMEOUT_S)
                for (number, _), answers in zip(questions, answered, strict=True):
                    check_answers(way, number, answers)
                    if index >= 0:
                        found[number][way].keep(answers)
            order.reverse()
    return found


def _questions(lengths: Sequence[int], index: int) -> list[tuple[int, Question]]:
    """Hits and prompts of one round, lengths mixed."""
    generator = random.Random(f"hits/{index}")
    numbers = [number for number in lengths if number <= LONG_TOKENS] * PROMPTS_PER_TURN
    if index % LONG_EVERY == 0:
        numbers += [number for number in lengths if number > LONG_TOKENS]
    return [
        (number, Question(random_prompt(generator, number + TAIL_TOKENS), ANSWER_TOKENS))
        for number in numbers
    ]


def take_turn(engine: Any, questions: list[tuple[int, Question]]) -> list[Answers]:
    answers = []
    for place, (_, question) in enumerate(questions):
        prompt = question.prompt_token_ids
        generate(engine, [prompt], [question.num_answer_tokens])
        time.sleep(SETTLE_S + len(prompt) * SETTLE_TOKEN_S)
        # A limit in both: a request that has one takes vLLM longer than one that has none.
        asked = [replace(question, num_load_tokens_max=limit) for limit in (len(prompt), 0)]
        turns = asked[:: -1 if place % 2 else 1]
        hit, computed = [_ask_cold(engine, turn) for turn in turns][:: -1 if place % 2 else 1]
        answers.append(Answers(hit, computed, answer(engine, question)))
    return answers


def _ask_cold(engine: Any, question: Question) -> Answer:
    forget_prefix_cache(engine)
    return answer(engine, question)


def check_answers(way: str, num_tokens: int, answers: Answers) -> None:
    """See that the tokens of all answers came from where they should."""
    found = [(one.num_host_tokens, one.num_gpu_tokens) for one in answers]
    hits = [(num_tokens, 0)] if way == LOADED else [(num_tokens, 0), (0, 0)]
    if found not in [[hit, (0, 0), (0, num_tokens)] for hit in hits]:
        raise SafeOffloadError(
            f"{way}, {num_tokens} tokens: expected a hit on the host, none, and one on the GPU; "
            f"found these tokens on host and GPU: {found}"
        )


def rule_ratio(by_way: dict[str, Found]) -> float:
    """Return the time with the rule, in terms of the better of loading and computing."""
    return by_way[RULE].ratio / min(1.0, by_way[LOADED].ratio)


def make_report(found: FoundByLength, machine: dict[str, Any]) -> Report:
    way_head = ["computed", "hit", "ratio", "GPU hit"]
    rows = [["tokens", *way_head, *way_head, "loads", "rule / better"]]
    for number, by_way in found.items():
        cells = [cell for way in (LOADED, RULE) for cell in _cells(by_way[way])]
        loads = f"{by_way[RULE].num_loaded} of {len(by_way[RULE].hit_s)}"
        rows.append([str(number), *cells, loads, f"{rule_ratio(by_way):.2f}"])
    return Report(
        method=(
            "Time to first token of one request alone: medians in ms, and ratios of medians.\n"
            f"Tiny Llama on vLLM's CPU engine; {TAIL_TOKENS} tokens behind the hit are computed in "
            "any case.\n"
            "Engine that loads every hit, engine with the rule; 'better' is the better of loading "
            "and computing."
        ),
        sections=[table(rows, num_left=0)],
        figures={
            "rows": [
                {
                    "hit_tokens": number,
                    "ratio": rule_ratio(by_way),
                    "engines": {way: asdict(one) for way, one in by_way.items()},
                }
                for number, by_way in found.items()
            ]
        },
        options={},
        machine=machine,
    )


def _cells(found: Found) -> list[str]:
    computed_s, hit_s, on_gpu_s = map(
        statistics.median, (found.computed_s, found.hit_s, found.on_gpu_s)
    )
    times = (f"{1000 * computed_s:.2f}", f"{1000 * hit_s:.2f}")
    return [*times, f"{found.ratio:.2f}", f"{1000 * on_gpu_s:.2f}"]
