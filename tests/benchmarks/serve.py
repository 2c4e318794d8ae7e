"""Requests a second and time to first token of a vLLM server, with the connector and without any.

Many users at once, each of which sends the next prompt when it has its answer. First their contexts
grow from turn to turn, and the KV pool holds a third of them; a server whose pool holds all of them
shows the limit. Then they send prompts that never come back, which shows what storing costs. The
servers are vLLM's own, with a tiny Llama on the CPU; or running ones (--url), with any model.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.engine import BenchOptions, engine_options
from safe_offload.commands.bench.engine_process import EngineOptions, EngineProcess, Turns
from safe_offload.commands.bench.engine_report import BASELINE
from safe_offload.commands.bench.report import add_output_arguments, describe_machine, publish
from safe_offload.errors import SafeOffloadError
from tests.benchmarks.engine import tiny
from tests.benchmarks.serve_report import ServeFound, make_report
from tests.benchmarks.serve_workload import (
    GROWING,
    ONE_OFF,
    QUICK,
    Served,
    Sizes,
    make_prompts,
    serve_users,
)
from tests.engine.http_server import hold_port

LIMIT = "no connector, KV pool for all"
POOL_SHARE = 3  # the KV pool holds a third of what the users' contexts need
BLOCK_SIZE = 32
_HOST = "127.0.0.1"
_START_TIMEOUT_S = 600.0
_HEALTH_POLL_S = 0.2

Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = {
        "users": "that ask at once",
        "turns": "of each user",
        "context_tokens": "of a first turn, and of a prompt that never comes back",
        "turn_tokens": "that each turn adds to the one before",
        "answer_tokens": "of each answer",
        "rounds": "that count, after one that warms up",
    }
    for name, of_what in what.items():
        text = f"{of_what} ({getattr(Sizes, name)}; quick {getattr(QUICK, name)})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    parser.add_argument("--quick", action="store_true", help="small sizes, for a first look")
    parser.add_argument(
        "--url",
        nargs="+",
        default=[],
        help="one running server, or two that take turns, the one without the connector first",
    )
    parser.add_argument("--cpu-bytes", default="1GiB", help="host memory (%(default)s)")
    parser.add_argument(
        "--kv-transfer-config",
        type=json.loads,
        metavar="JSON",
        help="measure this connector instead, --cpu-bytes ignored",
    )
    parser.add_argument("--answer-timeout", type=float, default=600.0, metavar="S", help="seconds")
    parser.add_argument("--seed", type=int, help="of the prompts (0; drawn for --url)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs here")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks serve`; return 1 if two servers disagree on a token."""
    sizes = read_sizes(arguments)
    found = measure(sizes, arguments, print)
    publish(make_report(found), arguments)
    return 1 if any(map(found.num_different, found.passes)) else 0


def read_sizes(arguments: argparse.Namespace) -> Sizes:
    given = {one.name: getattr(arguments, one.name) for one in fields(Sizes)}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(QUICK if arguments.quick else Sizes(), **given)


def measure(sizes: Sizes, arguments: argparse.Namespace, say: Say) -> ServeFound:
    machine = describe_machine()
    seed = arguments.seed
    if seed is None:
        # A running server may still have the prompts of an earlier run.
        seed = random.randrange(1 << 32) if arguments.url else 0
    with ExitStack() as on:
        if arguments.url:
            urls: Mapping[str, str] = {url: url for url in arguments.url}
            method = "Running servers."
        else:
            urls = on.enter_context(_own_servers(sizes, arguments, say))
            method = _describe_own(sizes)
        passes = _run_rounds(sizes, urls, str(seed), arguments.answer_timeout, say)
    method += (
        f" {sizes.rounds} rounds after a warm-up, new prompts in each; the servers take turns,\n"
        "their order changes each round. Throughput: median (lowest to highest) over the rounds;\n"
        "ratios are taken within a round. TTFT: over all requests, from sending to the first token."
        "\nComputed: share of the prompts' tokens that were computed, not found in a cache."
    )
    options = asdict(sizes) | {"seed": seed, "url": arguments.url}
    return ServeFound(passes, LIMIT if LIMIT in urls else None, sizes, method, options, machine)


def _run_rounds(
    sizes: Sizes, urls: Mapping[str, str], seed: str, timeout_s: float, say: Say
) -> dict[str, dict[str, list[Served]]]:
    """Run the warm-up, which is round 0 and not kept, and the rounds.

    Only one server is loaded at a time, and the next begins when the one before has stopped
    spinning.
    """
    passes: dict[str, dict[str, list[Served]]] = {
        workload: {name: [] for name in urls if workload == GROWING or name != LIMIT}
        for workload in (GROWING, ONE_OFF)
    }
    turns = Turns()
    for round_index in range(sizes.rounds + 1):
        for workload, servers in passes.items():
            users = make_prompts(workload, sizes, f"{seed}/{round_index}")
            for name in list(servers)[:: 1 if round_index % 2 else -1]:
                turns.begin(name)
                served = asyncio.run(serve_users(urls[name], users, sizes.answer_tokens, timeout_s))
                turns.end(name)
                label = f"round {round_index}" if round_index else "warm-up"
                say(f"{label}, {workload}, {name}: {served.request_throughput:.2f} req/s")
                if round_index:
                    servers[name].append(served)
    return passes


# ---- servers of our own ------------------------------------------------------------------------


def count_blocks(sizes: Sizes) -> tuple[int, int]:
    """Return the blocks that all contexts need at their ends, and those of the smaller pool.

    The smaller one holds at least the longest context.
    """
    of_user = math.ceil(sizes.longest_tokens / BLOCK_SIZE) + 1
    for_all = sizes.users * of_user
    return for_all, max(for_all // POOL_SHARE, of_user)


def _describe_own(sizes: Sizes) -> str:
    for_all, for_some = count_blocks(sizes)
    return (
        f"vLLM servers on the CPU with a tiny Llama; KV pool of {for_some:,} blocks of {BLOCK_SIZE}"
        f" tokens, the contexts need {for_all:,}.\n"
    )


@contextlib.contextmanager
def _own_servers(
    sizes: Sizes, arguments: argparse.Namespace, say: Say
) -> Iterator[Mapping[str, str]]:
    """Start the servers, yield their addresses by name, end them."""
    with tempfile.TemporaryDirectory(prefix="safe-offload-serve-") as temporary, ExitStack() as on:
        folder = Path(temporary)
        log_folder = arguments.logs or folder
        log_folder.mkdir(parents=True, exist_ok=True)
        servers, urls = [], {}
        for name, options in server_options(sizes, arguments, folder).items():
            say(f"starting the server with {name} ...")
            held, port = hold_port()
            on.enter_context(held)
            options.arguments["port"] = port
            log_path = log_folder / f"{name.replace(' ', '-')}.log"
            servers.append(on.enter_context(EngineProcess(name, options, log_path, serve_http)))
            urls[name] = f"http://{_HOST}:{port}"
        for server in servers:
            say(f"  {server.name}: ready after {server.receive(_START_TIMEOUT_S):.0f} s")
        yield urls


def server_options(
    sizes: Sizes, arguments: argparse.Namespace, folder: Path
) -> dict[str, EngineOptions]:
    """Return how to start each server: the same but for connector or KV pool."""
    for_all, for_some = count_blocks(sizes)
    bench_options = BenchOptions(
        "llama",
        prompt_tokens=sizes.longest_tokens,
        answer_tokens=sizes.answer_tokens,
        num_gpu_blocks=for_some,
        block_size=BLOCK_SIZE,
        cpu_bytes=arguments.cpu_bytes,
        kv_transfer_config=arguments.kv_transfer_config,
        engine_args={"host": _HOST, "uvicorn_log_level": "warning", "max_num_seqs": sizes.users},
    )
    options = engine_options(tiny(bench_options, folder))
    baseline = options[BASELINE]
    large = baseline.arguments | {"num_gpu_blocks_override": for_all}
    return options | {LIMIT: EngineOptions(large, baseline.environment)}


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
    url = f"http://{_HOST}:{options.arguments['port']}/health"
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
