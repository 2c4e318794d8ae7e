"""Recorded agents on virtual time: the same on every machine, however busy.

vLLM's scheduler and the scheduler side of our connector are real (`slow_tier_engine`): a step takes
5 ms and 0.1 ms for each of its tokens, copies run at 20 GB/s. So it shows what decisions cost, and,
beside an ideal connector, what a pool costs that is too small for those who ask.
"""

from __future__ import annotations

import heapq
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from safe_offload.observe.counters import Count
from tests.benchmarks import agents_servers
from tests.benchmarks.agents_report import STATISTICS, TIMES, Run
from tests.benchmarks.agents_servers import STEP_TOKENS, Kind, Sizes
from tests.benchmarks.agents_traces import BLOCK_TOKENS, Conversation, Request
from tests.benchmarks.ideal import IDEAL
from tests.benchmarks.slow_tier_engine import SLOT_BYTES, TimedEngine
from tests.engine.http_server import BLOCK_SIZE
from tests.simulator.vllm_setup import NONE, OURS, EngineShape

TOKENS_PER_S = 10_000
GROUPS: dict[Kind, tuple[str, ...]] = {
    "llama": (f"full@{BLOCK_SIZE}",),
    "gemma3": (f"full@{BLOCK_SIZE}", *[f"window:512@{BLOCK_SIZE}"] * 2),
    "mamba": (f"full@{BLOCK_SIZE}", f"mamba@{BLOCK_SIZE}"),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """What a user asks some time after the answer before."""

    prompt: Sequence[int]
    num_answer_tokens: int
    think_s: float = 0.0


def server_sets(kind: Kind, sizes: Sizes) -> dict[str, tuple[str, int]]:
    """Return connector and KV pool of each server, by name.

    Beside those that there are: an ideal connector with the smaller pool.
    """
    sets = agents_servers.server_sets(kind, sizes, {})
    servers = {name: (OURS if one.config else NONE, one.num_blocks) for name, one in sets.items()}
    return servers | {IDEAL: (IDEAL, sizes.pool_blocks(kind))}


def make_engine(
    kind: Kind,
    connector: str,
    num_blocks: int,
    num_slots: int,
    num_tokens_max: int,
    users: int,
    retention_interval: int | None = None,
) -> TimedEngine:
    shape = EngineShape(
        groups=GROUPS[kind],
        num_blocks=num_blocks,
        num_slots=num_slots,
        max_batched_tokens=STEP_TOKENS,
        max_seqs=users,
        max_model_len=num_tokens_max + BLOCK_SIZE,
        retention_interval=retention_interval,
        extra={"min_load_tokens": "auto"},
        connector=connector,
        page_bytes=SLOT_BYTES,
    )
    return TimedEngine(shape, TOKENS_PER_S, None)


def asks_of(user: int, conversation: Conversation) -> list[Ask]:
    return [
        Ask(make_prompt(user, turn, one), one.num_answer_tokens, one.think_s if turn else 0.0)
        for turn, one in enumerate(conversation.requests)
    ]


def replay(engine: TimedEngine, users: Sequence[Sequence[Ask]], every_s: float) -> Run:
    """Let users ask, each one thing after the other; one user after another begins."""
    clock, start_s = engine.clock, engine.clock.now_s
    counts_before = Counter(engine.counts)
    due = [(start_s + user * every_s, user, 0) for user in range(len(users))]
    live: dict[str, tuple[float, int, int]] = {}
    waits_s: list[list[float]] = []
    num_prompt = num_computed = 0
    while due or live:
        while due and due[0][0] <= clock.now_s:
            begin_s, user, turn = heapq.heappop(due)
            ask = users[user][turn]
            name = f"{start_s}-{user}-{turn}"
            engine.send(name, ask.prompt, ask.num_answer_tokens)
            live[name] = begin_s, user, turn
            num_prompt += len(ask.prompt)
        if not live:
            engine.idle_until(due[0][0])
            continue
        num_computed += engine.step()
        for name in [name for name in live if name not in engine.scheduler.requests]:
            begin_s, user, turn = live.pop(name)
            asks, now_s = users[user], clock.now_s
            first_s, num_more = engine.first_token_s[name], asks[turn].num_answer_tokens - 1
            num_computed -= num_more
            waits_s.append(
                [first_s - begin_s, (now_s - first_s) / max(1, num_more), now_s - begin_s]
            )
            if turn + 1 < len(asks):
                heapq.heappush(due, (now_s + asks[turn + 1].think_s, user, turn + 1))
    counts = engine.counts - counts_before
    return _make_run(counts, clock.now_s - start_s, waits_s, num_prompt, num_computed)


def make_prompt(user: int, turn: int, request: Request) -> list[int]:
    """Return tokens that two prompts of a conversation share where they share blocks."""
    tokens: list[int] = []
    for block_id in request.block_ids:
        tokens += [zlib.crc32(f"{user}/{block_id}".encode())] * BLOCK_TOKENS
    rest = zlib.crc32(f"{user}, {turn}".encode())
    return tokens + [rest] * (request.num_tokens - len(tokens))


def _make_run(
    counts: Counter[str],
    took_s: float,
    waits_s: list[list[float]],
    num_prompt: int,
    num_computed: int,
) -> Run:
    times = {
        name: {
            what: float(column.mean() if what == "mean" else np.percentile(column, percent))
            for what, percent in zip(STATISTICS, (0, 50, 90, 99), strict=True)
        }
        for name, column in zip(TIMES, 1e3 * np.array(waits_s).T, strict=True)
    }
    counters: Counter[str] = Counter()
    for name, count in counts.items():
        counters[f"safe_offload_{name.partition('{')[0]}"] += count  # without labels
    num_host = counts[Count.LOADED_TOKENS]
    num_gpu = max(0, num_prompt - num_host - num_computed)
    counters.update(external_kv_transfer=num_host, local_compute=num_computed)
    counters.update(local_cache_hit=num_gpu)
    return Run(len(waits_s), len(waits_s) / took_s, times, dict(counters))
