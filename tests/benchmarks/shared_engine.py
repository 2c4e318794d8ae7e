"""Eight requests at once with one prefix on the host, in a real engine: `shared --engine`.

What they take together is compared with one host hit that is followed by seven GPU hits, which is
as little as it can be. Both are timed in turns, in one engine.
"""

import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.engine_process import generate
from tests.benchmarks.engines import (
    TIMEOUT_S,
    forget_prefix_cache,
    make_tiny_engine,
    ours,
    random_prompt,
)

NUM_REQUESTS = 8
PREFIX_TOKENS = 8000
TAIL_TOKENS = 16
ANSWER_TOKENS = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are sent one group after the other, each group at once."""

    groups: tuple[tuple[tuple[int, ...], ...], ...]  # prompts
    forgets: bool  # the GPU's prefix cache is reset before


@dataclass(frozen=True, slots=True)
class EngineSeconds:
    """Medians over the rounds."""

    together_s: float  # all at once, the prefix on the host
    in_turn_s: float  # one at first, then the others at once

    @property
    def ratio(self) -> float:
        """How many times longer they take together."""
        return self.together_s / self.in_turn_s

    def __str__(self) -> str:
        """Return a line of the report."""
        return (
            f"real engine, {NUM_REQUESTS} requests at once, {PREFIX_TOKENS} shared tokens on the "
            f"host: {self.together_s:.3f} s; one host hit, then {NUM_REQUESTS - 1} GPU hits: "
            f"{self.in_turn_s:.3f} s; ratio {self.ratio:.2f}"
        )

    def to_json(self) -> dict[str, float]:
        return asdict(self) | {"ratio": self.ratio}


def measure_engine(rounds: int) -> EngineSeconds:
    """Time both ways in turns, after one round that warms up."""
    config = ours(cpu_bytes_to_use="1GiB", min_load_tokens=0)
    sizes = {"prompt_tokens": PREFIX_TOKENS + TAIL_TOKENS, "answer_tokens": ANSWER_TOKENS}
    together: list[float] = []
    in_turn: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="safe-offload-shared-") as folder,
        make_tiny_engine("engine", config, Path(folder), **sizes) as engine,
    ):
        engine.wait_until_started(TIMEOUT_S)
        for index in range(rounds + 1):
            first, *others = _prompts(index)
            engine.call(serve, Batch(((first,),), forgets=False), TIMEOUT_S)
            ways = [(together, ((first, *others),)), (in_turn, ((first,), tuple(others)))]
            for seconds, groups in ways[:: -1 if index % 2 else 1]:
                took_s = engine.call(serve, Batch(groups, forgets=True), TIMEOUT_S)
                if index:
                    seconds.append(took_s)
    return EngineSeconds(statistics.median(together), statistics.median(in_turn))


def _prompts(index: int) -> list[tuple[int, ...]]:
    generator = random.Random(f"shared/{index}")
    prefix = random_prompt(generator, PREFIX_TOKENS)
    return [(*prefix, *random_prompt(generator, TAIL_TOKENS)) for _ in range(NUM_REQUESTS)]


def serve(engine: Any, batch: Batch) -> float:
    if batch.forgets:
        forget_prefix_cache(engine)
    start_s = time.perf_counter()
    for prompts in batch.groups:
        generate(engine, prompts, [ANSWER_TOKENS] * len(prompts))
    return time.perf_counter() - start_s
