"""vLLM's servers for recorded agents: without the connector, with it, and with a pool for all."""

from __future__ import annotations

import contextlib
import math
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from examples.tiny_models import DEFAULT_SLIDING_WINDOW, count_prompt_blocks
from safe_offload.commands.bench.engine import OURS
from safe_offload.commands.bench.engine_report import BASELINE
from safe_offload.errors import SafeOffloadError
from tests.engine.http_server import BLOCK_SIZE, HttpServer

LIMIT = "pool for all"
BLOCK_BYTES = 32 << 10
"""Of a block of one KV cache group of the tiny models: two layers, two heads of 32 float32."""
STEP_TOKENS = 2048
MAMBA_STATES = 3
"""Blocks that a request and its prefix take."""

Kind = Literal["llama", "gemma3", "mamba"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the servers, in tokens and users.

    Attributes:
        context_tokens: that a user has under way, in the mean.
        context_tokens_max: of the longest prompt and its answer.
        pool_users, host_users: whose contexts KV pool and host memory hold.
        limit_users: whose contexts the pool for all holds, with what they have had before.
        users: that ask at once, at the most.
    """

    context_tokens: float
    context_tokens_max: int
    pool_users: float
    host_users: float
    limit_users: float
    users: int

    def num_blocks(self, kind: Kind, num_users: float) -> int:
        """Return the blocks of some users' contexts."""
        return math.ceil(num_users * context_blocks(kind, self.context_tokens))

    def pool_blocks(self, kind: Kind) -> int:
        """Return the blocks of the smaller pool: it holds the longest context at least."""
        least = count_prompt_blocks(
            "llama" if kind == "mamba" else kind,
            self.context_tokens_max,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=STEP_TOKENS,
        )
        return max(self.num_blocks(kind, self.pool_users), least + 1)

    def limit_blocks(self, kind: Kind) -> int:
        """Return those of the larger pool, which keeps what windows have passed too."""
        return (3 if kind == "gemma3" else 1) * self.num_blocks(kind, self.limit_users)


def context_blocks(kind: Kind, num_tokens: float) -> float:
    """Return the blocks that a hit of a context takes.

    Gemma-3 has two groups of windows beside the one of full attention.
    """
    num_full = num_tokens / BLOCK_SIZE
    if kind != "gemma3":
        return num_full + (MAMBA_STATES if kind == "mamba" else 0)
    return num_full + 2 * min(num_full, DEFAULT_SLIDING_WINDOW / BLOCK_SIZE + 1)


@dataclass(frozen=True, slots=True)
class Set:
    """Of a server: what it has that the others have not."""

    num_blocks: int
    config: dict[str, Any] | None = None


def server_sets(kind: Kind, sizes: Sizes, extra: Mapping[str, Any]) -> dict[str, Set]:
    """Return the servers by name: the same but for connector or KV pool."""
    host_bytes = BLOCK_BYTES * sizes.num_blocks(kind, sizes.host_users)
    settings = {"cpu_bytes_to_use": host_bytes, **extra}
    config = {"kv_connector": OURS, "kv_role": "kv_both", "kv_connector_extra_config": settings}
    num_blocks = sizes.pool_blocks(kind)
    return {
        BASELINE: Set(num_blocks),
        OURS: Set(num_blocks, config),
        LIMIT: Set(sizes.limit_blocks(kind)),
    }


@contextlib.contextmanager
def started(
    sets: Mapping[str, Set], model: Path, sizes: Sizes, folder: Path
) -> Iterator[dict[str, str]]:
    """Start servers, yield their addresses by name, end them."""
    space = math.ceil(max(one.num_blocks for one in sets.values()) * BLOCK_BYTES / (1 << 30))
    with ExitStack() as on:
        servers = {
            name: on.enter_context(
                HttpServer(
                    model,
                    folder / name.replace(" ", "-"),
                    num_blocks=one.num_blocks,
                    config=one.config,
                    max_model_len=sizes.context_tokens_max,
                    max_num_seqs=sizes.users,
                    arguments=[
                        *("--max-num-batched-tokens", str(STEP_TOKENS)),
                        "--no-skip-tokenizer-init",
                    ],
                    environment={"VLLM_CPU_KVCACHE_SPACE": str(space)},
                )
            )
            for name, one in sets.items()
        }
        for server in servers.values():
            server.wait_until_healthy()
        yield {name: server.url for name, server in servers.items()}


_COUNTER = re.compile(
    r"vllm:(?P<name>safe_offload_\w+|prompt_tokens_by_source|num_preemptions)_total"
    r'\{(?:[^}]*source="(?P<source>\w+)")?[^}]*\} (?P<value>\S+)'
)


def read_counters(url: str) -> dict[str, float]:
    """Return counters of a server: of preemptions, prompt tokens by source, and all of ours."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30.0) as response:
            return parse_counters(response.read().decode())
    except OSError as error:
        raise SafeOffloadError(f"{url}/metrics: expected vLLM's metrics, found {error}") from error


def parse_counters(text: str) -> dict[str, float]:
    """Return the sums over engines and labels; prompt tokens by `source` alone."""
    counters: defaultdict[str, float] = defaultdict(float)
    for found in _COUNTER.finditer(text):
        is_of_prompts = found["name"] == "prompt_tokens_by_source"
        counters[found["source" if is_of_prompts else "name"]] += float(found["value"])
    return dict(counters)
