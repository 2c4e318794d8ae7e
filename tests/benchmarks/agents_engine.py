"""Recorded coding agents in engines without a server: no connector, ours and vLLM's own, in turns.

For a machine that nothing can be reached from: no client has to be installed, and the traces travel
beside the checkout. Each user sends the next prompt when the answer before has come and some time
has passed, as recorded and scaled. The KV pool holds a third of what all users have under way.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safe_offload.commands.bench import engine as bench_engine
from safe_offload.commands.bench.engine import PROMPT_TOKEN_IDS
from safe_offload.commands.bench.report import (
    Report,
    describe_machine,
    median_and_spread,
    publish,
    table,
)
from tests.benchmarks import agents_traces, connectors
from tests.benchmarks.agents_traces import Conversation
from tests.benchmarks.agents_virtual import make_prompt
from tests.benchmarks.engines import TIMEOUT_S, with_model
from tests.gpu import shapes

EVERY_S = 7.0
POOL_SHARE = 1 / 3
FIGURES = ("first_token", "whole_answer", "requests_per_s", "tokens_from_the_host")
Turn = tuple[float, tuple[int, ...], int]
"""Think time in seconds, prompt, tokens of the answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_engine.add_arguments(parser)
    parser.set_defaults(model="llama", answer_tokens=16)
    shapes.add_arguments(parser)
    add = parser.add_argument
    add("--traces", type=Path, required=True, help="as of `agents`, or a file *.json.gz")
    add("--users", type=int, default=16, help="at once (%(default)s)")
    add("--turns", type=int, default=12, help="requests of a user (%(default)s)")
    add("--scale", type=int, default=4, help="divides lengths and times (%(default)s)")
    add("--only", nargs="+", choices=connectors.ENGINES, default=list(connectors.ENGINES))


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks agents_engine`."""
    machine, options = describe_machine(), bench_engine.read_options(arguments)
    longest = options.prompt_tokens - options.answer_tokens
    recorded = agents_traces.read(arguments.traces)

    def draw(index: int) -> list[Conversation]:
        how = (arguments.users, longest * arguments.scale, arguments.turns)
        chosen = agents_traces.choose(recorded, *how, f"{options.seed}/{index}")
        return [agents_traces.scale(one, arguments.scale) for one in chosen]

    under_way = agents_traces.mean_context(draw(1)) * arguments.users
    options = replace(options, pool_ratio=max(1.1, POOL_SHARE * under_way / options.prompt_tokens))
    samples: connectors.Samples = {}
    with (
        with_model(options, arguments) as (options, folder),
        connectors.running(arguments.only, options, folder) as (engines, absent),
    ):
        for index, engine in connectors.in_turns(engines, options.rounds):
            asked = [to_turns(user, one) for user, one in enumerate(draw(index))]
            how = (asked, EVERY_S / arguments.scale)
            found = engines[engine].call(replay, how, TIMEOUT_S)
            if index:
                connectors.note(samples, engine, **dict(zip(FIGURES, found, strict=True)))
    rows = [["", *(name.replace("_", " ") for name in FIGURES)]]
    for engine, figures in samples.items():
        rows.append([engine, *(median_and_spread(one, ".3f") for one in figures.values())])
    left_out = [f"{engine}: not here ({why})" for engine, why in absent.items()]
    what = f"{arguments.users} users, {arguments.turns} requests each, lengths and times divided by"
    sections = [f"{what} {arguments.scale}; means of a round, times in seconds", table(rows)]
    given = asdict(options) | {"users": arguments.users, "scale": arguments.scale}
    report = Report(__doc__ or "", [*sections, *left_out], {"samples": samples}, given, machine)
    publish(report, arguments)
    return int(not samples)


def to_turns(user: int, conversation: Conversation) -> list[Turn]:
    known = len(PROMPT_TOKEN_IDS)
    return [
        (
            one.think_s,
            tuple(PROMPT_TOKEN_IDS[token % known] for token in make_prompt(user, turn, one)),
            one.num_answer_tokens,
        )
        for turn, one in enumerate(conversation.requests)
    ]


def replay(engine: Any, asked: tuple[Sequence[Sequence[Turn]], float]) -> tuple[float, ...]:
    """Return means of times to first token and of whole answers, requests a second, tokens."""
    from vllm import SamplingParams

    users, every_s = asked
    llm, loaded = engine.llm_engine, connectors.read_metric(engine, connectors.LOADED)
    due = [(user * every_s, user, 0) for user in range(len(users))]
    live: dict[str, tuple[float, int, int]] = {}
    first_s: dict[str, float] = {}
    times_s: list[tuple[float, float]] = []
    begin_s = time.perf_counter()
    while due or live:
        while due and due[0][0] <= time.perf_counter() - begin_s:
            asked_s, user, turn = heapq.heappop(due)
            _, prompt, num_tokens = users[user][turn]
            how: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
            llm.add_request(
                f"{user}-{turn}-{begin_s}",
                {"prompt_token_ids": list(prompt)},
                SamplingParams(max_tokens=num_tokens, **how),
            )
            live[f"{user}-{turn}-{begin_s}"] = asked_s, user, turn
        if not live:
            time.sleep(max(0.0, due[0][0] - (time.perf_counter() - begin_s)))
            continue
        for output in llm.step():
            now_s = time.perf_counter() - begin_s
            first_s.setdefault(output.request_id, now_s)
            if output.finished:
                asked_s, user, turn = live.pop(output.request_id)
                times_s.append((first_s[output.request_id] - asked_s, now_s - asked_s))
                if turn + 1 < len(users[user]):
                    heapq.heappush(due, (now_s + users[user][turn + 1][0], user, turn + 1))
    took_s = time.perf_counter() - begin_s
    means = (statistics.fmean(column) for column in zip(*times_s, strict=True))
    loaded = connectors.read_metric(engine, connectors.LOADED) - loaded
    return (*means, len(times_s) / took_s, loaded)
