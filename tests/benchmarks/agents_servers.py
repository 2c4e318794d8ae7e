"""vLLM's servers for recorded agents: without the connector, with it, and with a pool for all."""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from safe_offload.commands.bench.engine import OURS, BenchOptions, engine_options
from safe_offload.commands.bench.engine_breakdown import BASELINE
from safe_offload.commands.bench.engine_process import EngineOptions, EngineProcess
from safe_offload.commands.bench.tiny_models import DEFAULT_SLIDING_WINDOW, count_prompt_blocks
from safe_offload.errors import SafeOffloadError

LIMIT = "pool for all"
BLOCK_SIZE = 32
BLOCK_BYTES = 32 << 10
"""Of a block of one KV cache group of the tiny models: two layers, two heads of 32 float32."""
MODEL_NAME = "tiny"
STEP_TOKENS = 2048
HOST = "127.0.0.1"
_START_TIMEOUT_S = 600.0
_HEALTH_POLL_S = 0.2

Kind = Literal["llama", "gemma3"]


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
            kind,
            self.context_tokens_max,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=STEP_TOKENS,
        )
        return max(self.num_blocks(kind, self.pool_users), least + 1)

    def limit_blocks(self, kind: Kind) -> int:
        """Return those of the larger pool, which keeps what windows have passed too."""
        return (1 if kind == "llama" else 3) * self.num_blocks(kind, self.limit_users)


def context_blocks(kind: Kind, num_tokens: float) -> float:
    """Return the blocks that a hit of a context takes.

    Gemma-3 has two groups of windows beside the one of full attention.
    """
    num_full = num_tokens / BLOCK_SIZE
    if kind == "llama":
        return num_full
    return num_full + 2 * min(num_full, DEFAULT_SLIDING_WINDOW / BLOCK_SIZE + 1)


def server_options(
    kind: Kind, sizes: Sizes, folder: Path, extra: Mapping[str, Any]
) -> dict[str, EngineOptions]:
    """Return how to start each server: the same but for connector or KV pool."""
    host_bytes = BLOCK_BYTES * sizes.num_blocks(kind, sizes.host_users)
    settings = {"cpu_bytes_to_use": host_bytes, **extra}
    config = {"kv_connector": OURS, "kv_connector_extra_config": settings}
    num_limit = sizes.limit_blocks(kind)
    options = engine_options(
        BenchOptions(
            model=kind,
            prompt_tokens=sizes.context_tokens_max,
            num_gpu_blocks=sizes.pool_blocks(kind),
            max_num_batched_tokens=STEP_TOKENS,
            kv_transfer_config=config,
            engine_args={
                "served_model_name": MODEL_NAME,
                "host": HOST,
                "uvicorn_log_level": "warning",
                "max_num_seqs": sizes.users,
            },
        ),
        folder,
    )
    baseline = options[BASELINE]
    large = baseline.arguments | {"num_gpu_blocks_override": num_limit}
    space = {"VLLM_CPU_KVCACHE_SPACE": str(math.ceil(num_limit * BLOCK_BYTES / (1 << 30)))}
    return options | {LIMIT: EngineOptions(large, baseline.environment | space)}


@contextlib.contextmanager
def started(options: Mapping[str, EngineOptions], log_folder: Path) -> Iterator[dict[str, str]]:
    """Start servers, yield their addresses by name, end them."""
    servers, urls = [], {}
    with ExitStack() as on:
        for name, how in options.items():
            port = _find_free_port()
            how.arguments["port"] = port
            log_path = log_folder / f"{name.replace(' ', '-')}.log"
            servers.append(on.enter_context(EngineProcess(name, how, log_path, serve_http)))
            urls[name] = f"http://{HOST}:{port}"
        for server in servers:
            server.receive(_START_TIMEOUT_S)
        yield urls


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return the options of `vllm serve` for arguments of `vllm.LLM`."""
    options = []
    for name, value in arguments.items():
        if value is not None and value is not False:
            options.append(f"--{name.replace('_', '-')}")
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            options += [] if value is True else [text]
    return options


def serve_http(connection: Connection, options: EngineOptions) -> None:
    """Run in a child: start vLLM's server, say so when it answers, end it when told to."""
    start_s = time.monotonic()
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    process = subprocess.Popen([*server, *command_line(options.arguments)])
    url = f"http://{HOST}:{options.arguments['port']}/health"
    while not _answers(url):
        if process.poll() is not None:
            raise SafeOffloadError(f"vLLM's server ended with status {process.returncode}")
        if connection.poll(_HEALTH_POLL_S):
            break  # told to stop, or the benchmark is gone
    else:
        connection.send((False, time.monotonic() - start_s))
    with contextlib.suppress(EOFError):
        connection.recv()
    process.terminate()
    process.wait(30.0)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


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
