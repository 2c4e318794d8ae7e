"""Two servers that share one host cache: time of a hit of the neighbour's over one of its own.

    python -m tests.benchmarks node

The first server computes prompts of 16,000 tokens. Both are asked them again, in turns, when their
GPU pools have lost them. One is killed then and started again, beside the pool and beside an empty
one, in turns: seconds from its start to its first answer, and of these for the answer alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

from examples.tiny_models import write_tiny_model
from safe_offload.node.pools import find_pools, remove_pool
from tests.engine.engines import connector, make_prompts
from tests.engine.http_server import HttpServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--rounds", type=int, default=5)


def _ask(server: HttpServer, prompt: list[int]) -> tuple[float, list[int]]:
    begin_s = time.monotonic()
    tokens = server.ask(prompt, 1)
    return time.monotonic() - begin_s, tokens


def _remove_others(kept: set[Path]) -> None:
    for pool in find_pools():
        while pool.path not in kept and remove_pool(pool.path):
            time.sleep(0.1)  # a process of a server has not ended yet


def run_command(arguments: argparse.Namespace) -> int:
    prompts = list(make_prompts(arguments.tokens, map(str, range(arguments.rounds + 1))).values())
    num_blocks = arguments.tokens // 32
    before = {pool.path for pool in find_pools()}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = write_tiny_model("llama", folder / "llama")
        config = connector(num_blocks * (len(prompts) + 4), share="node", check_invariants=False)
        stack.callback(_remove_others, before)

        def start(which: str) -> HttpServer:
            (folder / which).mkdir()
            server = HttpServer(
                model,
                folder / which,
                num_blocks=int(1.3 * num_blocks),
                config=config,
                max_model_len=arguments.tokens + 64,
            )
            return stack.enter_context(server)

        one, other = start("one"), start("other")
        for server in (one, other):
            server.wait_until_healthy()
        computed = [_ask(one, prompt) for prompt in prompts]
        one.settle()
        _ask(other, prompts[-1])  # the first load of a server takes longer
        own: list[float] = []
        foreign: list[float] = []
        for prompt, (_, tokens) in zip(prompts[:-1], computed, strict=False):
            for server, times in ((one, own), (other, foreign)):
                seconds, answer = _ask(server, prompt)
                assert answer == tokens
                times.append(seconds)
        assert other.count("stored_blocks") == 0
        starts: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        other.kill()
        for is_kept in (True, False) * arguments.rounds:
            one.kill()
            if not is_kept:
                _remove_others(before)
            begin_s = time.monotonic()
            one.start()
            one.wait_until_healthy()
            answer_s, answer = _ask(one, prompts[0])
            assert answer == computed[0][1]
            assert (one.count("loaded_tokens") > 0) == is_kept
            starts[is_kept].append((time.monotonic() - begin_s, answer_s))
            one.settle()
        one.kill()
        left = [pool for pool in find_pools() if pool.path not in before]
    ratios = [theirs / mine for theirs, mine in zip(foreign, own, strict=True)]
    compute_s = statistics.median(seconds for seconds, _ in computed)
    print(f"computed {compute_s:.3f} s, own hit {statistics.median(own):.3f} s")
    print(
        f"the neighbour's {statistics.median(foreign):.3f} s, {statistics.median(ratios):.2f} of it"
    )
    for is_kept, name in ((True, "the pool"), (False, "an empty pool")):
        total_s, answer_s = (
            statistics.median(times) for times in zip(*starts[is_kept], strict=True)
        )
        print(
            f"beside {name}: first answer {total_s:.1f} s after the start, {answer_s:.3f} s asked"
        )
    for pool in left:
        print(f"left when all have gone: {pool.size_bytes:,} bytes, {pool.num_filled} blocks")
    return 0
