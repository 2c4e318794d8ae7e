"""Recorded coding agents in engines without a server: no connector, ours and vLLM's own, in turns.

Each user sends the next prompt when the answer before has come and some time
has passed, as recorded and scaled, at most --think-s. The KV pool holds a third of what all users
have under way. Of each request times and tokens go to requests-NAME.jsonl in --logs when it ends. A
round that takes longer than --seconds is cut off; then fewer requests count.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from safe_offload.commands.bench import engine as bench_engine
from safe_offload.commands.bench.engine import PROMPT_TOKEN_IDS, BenchOptions
from safe_offload.commands.bench.engine_process import count_prompt_tokens
from safe_offload.commands.bench.report import Report, publish
from tests.benchmarks import agents_traces, connectors
from tests.benchmarks.agents_traces import Conversation, make_prompt
from tests.benchmarks.engines import TIMEOUT_S, with_model
from tests.benchmarks.report import describe_machine, median_and_spread, table
from tests.benchmarks.scheduler_measure import percentile
from tests.gpu import shapes

BEGIN_S = 0.2
"""One user after another begins: all of them soon are under way together."""
POOL_SHARE = 1 / 3
PERCENTILES = (50, 90, 99)
TOKENS = {
    "tokens computed": "local_compute",
    "from the GPU": "local_cache_hit",
    "from the host": "external_kv_transfer",
}
"""Of prompts, by vLLM's own counters, which all connectors have."""
Turn = tuple[float, tuple[int, ...], int]
"""Think time in seconds, prompt, tokens of the answer."""


@dataclass(frozen=True)
class Round:
    """The requests to one engine in one round.

    Attributes:
        seconds: after which the round is cut off.
        log: the file that has a line for each request that has ended.
    """

    users: Sequence[Sequence[Turn]]
    seconds: float
    log: Path


class Replayed(NamedTuple):
    first_s: list[float]  # of each request that has ended
    whole_s: list[float]
    took_s: float
    tokens: Mapping[str, int]  # of prompts, by `TOKENS`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_engine.add_arguments(parser)
    parser.set_defaults(model="llama")
    shapes.add_arguments(parser)
    add = parser.add_argument
    add("--block-size", type=int, help="tokens in a KV block (vLLM's choice)")
    add("--traces", type=Path, required=True, help="folder of weka_trace, or *.json.gz")
    several = "at once (%(default)s); of several numbers, each on the same engines"
    add("--users", nargs="+", type=int, default=[16], help=several)
    add("--turns", type=int, default=12, help="requests of a user (%(default)s)")
    add("--skip", type=int, default=0, help="requests of a user before those (%(default)s)")
    add("--scale", type=int, default=4, help="divides lengths and times (%(default)s)")
    add("--think-s", type=float, default=math.inf, help="at most, after scaling (no limit)")
    add("--seconds", type=float, default=TIMEOUT_S / 2, help="of a round (%(default)s)")
    add("--only", nargs="+", choices=connectors.ENGINES, default=list(connectors.ENGINES))
    also = "scenarios of `connectors` on the same engines, before; there is no warm-up then"
    add("--also", nargs="+", choices=list(connectors.ON_ENGINES), default=[], help=also)
    add("--also-tokens", type=int, default=16_000, help="of a prompt of those (%(default)s)")
    add("--also-rounds", type=int, default=2, help="of those (%(default)s)")


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks agents_engine`."""
    machine, options = describe_machine(), bench_engine.read_options(arguments)
    longest = options.prompt_tokens - options.answer_tokens
    recorded = agents_traces.read(arguments.traces)

    def draw(index: int, num_users: int) -> list[Conversation]:
        how = (num_users, longest * arguments.scale, arguments.skip, arguments.turns)
        chosen = agents_traces.choose(recorded, *how, f"{options.seed}/{index}")
        scaled = (agents_traces.scale(one, arguments.scale) for one in chosen)
        return [agents_traces.cut_thinking(one, arguments.think_s) for one in scaled]

    num_users_max = max(arguments.users)
    under_way = agents_traces.mean_context(draw(1, num_users_max)) * num_users_max
    options = with_pool(options, POOL_SHARE * under_way)
    is_good = True
    with (
        with_model(options, arguments) as (options, folder),
        connectors.running(arguments.only, options, folder) as (engines, absent),
    ):
        sizes = {"prompt_tokens": arguments.also_tokens, "rounds": arguments.also_rounds}
        also = replace(options, **sizes)
        for name in arguments.also:
            part = connectors.ON_ENGINES[name](engines, also)._replace(absent=absent)
            is_good = is_good and part.is_good
            report = connectors.make_report(name, part, also, machine)
            connectors.publish_part(report, arguments, name)
        first = 1 if arguments.also else 0
        for num_users in arguments.users:
            found: dict[str, list[Replayed]] = {}
            for index, engine in connectors.in_turns(engines, options.rounds, first):
                drawn = draw(index, num_users)
                names = (f"{num_users}/{index}/{user}" for user in range(num_users))
                turns = [*map(to_turns, names, drawn)]
                plan = Round(turns, arguments.seconds, folder / f"requests-{engine}.jsonl")
                replayed = engines[engine].call(replay, plan, TIMEOUT_S)
                if index:
                    found.setdefault(engine, []).append(replayed)
                    report = make_report(found, absent, options, arguments, num_users, machine)
                    if len(arguments.users) == 1:
                        publish(report, arguments)
                    else:
                        connectors.publish_part(report, arguments, str(num_users))
            first = 1
            is_good = is_good and bool(found)
    return int(not is_good)


def with_pool(options: BenchOptions, num_tokens: float) -> BenchOptions:
    """Return the options with a KV pool of so many tokens, and room for the longest prompt."""
    ratio = max(1.1, num_tokens / options.prompt_tokens)
    if options.block_size is None:
        return replace(options, pool_ratio=ratio)
    return replace(
        options, num_gpu_blocks=math.ceil(ratio * options.prompt_tokens / options.block_size)
    )


def make_report(
    found: Mapping[str, Sequence[Replayed]],
    absent: Mapping[str, str],
    options: BenchOptions,
    arguments: argparse.Namespace,
    num_users: int,
    machine: dict[str, Any],
) -> Report:
    samples: connectors.Samples = {}
    throughput: dict[str, list[float]] = {}
    for engine, rounds in found.items():
        for one in rounds:
            times = {"mean": statistics.fmean(one.first_s)}
            times |= {f"p{each}": percentile(one.first_s, each) for each in PERCENTILES}
            named = {f"first token, {name}": value for name, value in times.items()}
            named |= {"whole answer": statistics.fmean(one.whole_s), "all": one.took_s}
            named |= {"requests": len(one.first_s), **one.tokens}
            connectors.record(samples, engine, **named)
            throughput.setdefault(engine, []).append(len(one.first_s) / one.took_s)
    names = list(next(iter(samples.values()), {}))
    rows = [["", "requests/s", *names]]
    for engine, figures in samples.items():
        forms = [".0f" if name in (*TOKENS, "requests") else ".3f" for name in names]
        cells = map(median_and_spread, figures.values(), forms)
        rows.append([engine, median_and_spread(throughput[engine], ".2f"), *cells])
    left_out = [f"{engine}: not here ({why})" for engine, why in absent.items()]
    what = f"{num_users} users, {arguments.turns} requests each, lengths divided by"
    cut = f"think times of at most {arguments.think_s:g} s"
    sections = [f"{what} {arguments.scale}, {cut}; times in seconds", table(rows)]
    sizes = {name: getattr(arguments, name) for name in ("turns", "skip", "scale")}
    given = asdict(options) | {"users": num_users, **sizes}
    figures_of_all = {"samples": samples, "requests_per_s": throughput}
    return Report(__doc__ or "", [*sections, *left_out], figures_of_all, given, machine)


def to_turns(user: str, conversation: Conversation) -> list[Turn]:
    """Return what a user sends; users of different names share no prompt."""
    known = len(PROMPT_TOKEN_IDS)
    return [
        (
            one.think_s,
            tuple(PROMPT_TOKEN_IDS[token % known] for token in make_prompt(user, turn, one)),
            one.num_answer_tokens,
        )
        for turn, one in enumerate(conversation.requests)
    ]


def replay(engine: Any, plan: Round) -> Replayed:
    """Ask for all turns of all users, each when it is due."""
    from vllm import SamplingParams

    users, llm = plan.users, engine.llm_engine
    before = count_prompt_tokens(engine)
    due = [(user * BEGIN_S, user, 0) for user in range(len(users))]
    live: dict[str, tuple[float, int, int]] = {}
    first_s: dict[str, float] = {}
    found = Replayed([], [], 0.0, {})
    begin_s = time.perf_counter()
    with plan.log.open("a", encoding="utf-8") as log:
        while (due or live) and (now_s := time.perf_counter() - begin_s) < plan.seconds:
            while due and due[0][0] <= now_s:
                sent_s, user, turn = heapq.heappop(due)
                _, prompt, num_tokens = users[user][turn]
                how: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
                llm.add_request(
                    name := f"{user}-{turn}-{begin_s}",
                    {"prompt_token_ids": list(prompt)},
                    SamplingParams(max_tokens=num_tokens, **how),
                )
                live[name] = sent_s, user, turn
            if not live:
                time.sleep(max(0.0, min(due[0][0], plan.seconds) - now_s))
                continue
            for output in llm.step():
                now_s = time.perf_counter() - begin_s
                first_s.setdefault(output.request_id, now_s)
                if output.finished:
                    sent_s, user, turn = live.pop(output.request_id)
                    found.first_s.append(first_s[output.request_id] - sent_s)
                    found.whole_s.append(now_s - sent_s)
                    row = {
                        "user": user,
                        "turn": turn,
                        "sent_s": round(sent_s, 4),
                        "prompt_tokens": len(users[user][turn][1]),
                        "first_s": round(found.first_s[-1], 4),
                        "whole_s": round(found.whole_s[-1], 4),
                    }
                    print(json.dumps(row), file=log, flush=True)
                    if turn + 1 < len(users[user]):
                        heapq.heappush(due, (now_s + users[user][turn + 1][0], user, turn + 1))
    took_s = time.perf_counter() - begin_s
    if live:
        llm.abort_request(list(live))
    after = count_prompt_tokens(engine)
    tokens = {name: after[one] - before[one] for name, one in TOKENS.items()}
    return found._replace(took_s=took_s, tokens=tokens)
