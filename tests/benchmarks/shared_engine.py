"""Eight requests at once with one prefix on the host, in a real engine: `bench shared --engine`.

What they take together is compared with one host hit that is followed by seven GPU hits, which is
as little as it can be. Both are timed in turns, in one engine.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safe_offload.bench.engine import (
    CONNECTOR,
    PROMPT_TOKEN_IDS,
    engine_options,
    tiny_options,
)
from safe_offload.bench.engine_process import EngineProcess, forget_prefix_cache, generate

NUM_REQUESTS = 8
PREFIX_TOKENS = 8000
TAIL_TOKENS = 16
ANSWER_TOKENS = 1
POOL_RATIO = 1.6
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are sent one group after the other, each group at once.

    Attributes:
        groups: prompts.
        forgets: the GPU's prefix cache is reset before.
    """

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    forgets: bool


@dataclass(frozen=True, slots=True)
class EngineSeconds:
    """Medians over the rounds.

    Attributes:
        together_s: all at once, the prefix on the host.
        in_turn_s: one at first, then the others at once.
    """

    together_s: float
    in_turn_s: float

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
        """Return the figures."""
        return asdict(self) | {"ratio": self.ratio}


def measure_engine(rounds: int) -> EngineSeconds:
    """Time both ways in turns, after one round that warms up."""
    extra = {"cpu_bytes_to_use": "1GiB", "min_load_tokens": 0}
    options = tiny_options(
        {"kv_connector": CONNECTOR, "kv_connector_extra_config": extra},
        num_prompt_tokens=PREFIX_TOKENS + TAIL_TOKENS,
        num_answer_tokens=ANSWER_TOKENS,
        pool_ratio=POOL_RATIO,
    )
    together: list[float] = []
    in_turn: list[float] = []
    with tempfile.TemporaryDirectory(prefix="safe-offload-shared-") as folder:
        chosen = engine_options(options, Path(folder))[CONNECTOR]
        with EngineProcess(CONNECTOR, chosen, Path(folder) / "engine.log") as engine:
            engine.wait_until_started(_TIMEOUT_S)
            for index in range(rounds + 1):
                first, *others = _prompts(index)
                engine.call(serve, Batch(((first,),), forgets=False), _TIMEOUT_S)
                ways = [(together, ((first, *others),)), (in_turn, ((first,), tuple(others)))]
                for seconds, groups in ways[:: -1 if index % 2 else 1]:
                    took_s = engine.call(serve, Batch(groups, forgets=True), _TIMEOUT_S)
                    if index:
                        seconds.append(took_s)
    return EngineSeconds(statistics.median(together), statistics.median(in_turn))


def _prompts(index: int) -> list[tuple[int, ...]]:
    generator = random.Random(f"shared/{index}")
    prefix = generator.choices(PROMPT_TOKEN_IDS, k=PREFIX_TOKENS)
    return [
        (*prefix, *generator.choices(PROMPT_TOKEN_IDS, k=TAIL_TOKENS)) for _ in range(NUM_REQUESTS)
    ]


def serve(engine: Any, batch: Batch) -> float:
    """Run in the engine's process: answer a batch; return the seconds that it took."""
    if batch.forgets:
        forget_prefix_cache(engine)
    start_s = time.perf_counter()
    for prompts in batch.groups:
        generate(engine, prompts, [ANSWER_TOKENS] * len(prompts))
    return time.perf_counter() - start_s
