"""The connectors that are compared, each on vLLM's scheduler, and traces served by them.

There is no model: a token is a function of its request and position, so an answer can be part of
the next prompt and is the same with every connector. There are no workers either (`PeerEngine`).
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, field
from typing import Any

from safe_offload.errors import SafeOffloadError
from tests.benchmarks.scheduler_probe import Probe, wrap_hooks
from tests.benchmarks.scheduler_traces import (
    MAX_BATCHED_TOKENS,
    MAX_MODEL_LEN,
    VOCABULARY,
    Trace,
    User,
)
from tests.simulator.peers import OFFLOADING, SIMPLE, PeerEngine, peer_shape
from tests.simulator.vllm_setup import NONE, OURS

STEPS_MAX = 20_000
"""A trace that has not ended then never will."""
TOKEN_STRIDE = 7919


@dataclass(frozen=True, slots=True)
class Contestant:
    """A connector and how it is set up."""

    connector: str
    extra: dict[str, Any] = field(default_factory=dict)


CONTESTANTS = {
    "none": Contestant(NONE),
    "simple-eager": Contestant(SIMPLE),
    "simple-lazy": Contestant(SIMPLE, {"lazy_offload": True}),
    "offloading": Contestant(OFFLOADING),
    "ours-eager": Contestant(OURS),
    "ours-lazy": Contestant(OURS, {"lazy_offload": True}),
}
"""What is compared, by the name on the command line."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large an engine is; see `EngineShape`."""

    groups: tuple[str, ...]
    num_blocks: int
    num_slots: int
    max_seqs: int = 8
    max_batched_tokens: int = MAX_BATCHED_TOKENS
    retention_interval: int | None = None
    num_draft_tokens: int = 0

    @classmethod
    def of(cls, trace: Trace) -> Sizes:
        return cls(
            trace.groups,
            trace.num_blocks,
            trace.num_slots,
            trace.max_seqs,
            trace.max_batched_tokens,
        )


def make_engine(name: str, sizes: Sizes, copy_steps: int) -> PeerEngine:
    """Return an engine that reports a transfer `copy_steps` after the plan that names it."""
    contestant = CONTESTANTS[name]
    shape = peer_shape(
        contestant.connector,
        groups=sizes.groups,
        num_blocks=sizes.num_blocks,
        num_slots=sizes.num_slots,
        max_seqs=sizes.max_seqs,
        max_batched_tokens=sizes.max_batched_tokens,
        retention_interval=sizes.retention_interval,
        num_draft_tokens=sizes.num_draft_tokens,
        max_model_len=MAX_MODEL_LEN,
        extra=dict(contestant.extra),
    )
    return PeerEngine(shape, copy_steps, _token)


def _token(request_id: str, position: int) -> int:
    return (_seed(request_id) + position * TOKEN_STRIDE) % VOCABULARY


@functools.cache
def _seed(request_id: str) -> int:
    return zlib.crc32(request_id.encode())


def serve(engine: PeerEngine, trace: Trace, probe: Probe) -> None:
    wrap_hooks(engine.connector, probe.wrap)
    arrivals: dict[int, list[tuple[User, int, tuple[int, ...]]]] = {}
    sent: dict[str, tuple[User, int, tuple[int, ...]]] = {}
    for user in trace.users:
        arrivals.setdefault(user.arrival_step, []).append((user, 0, ()))
    step = 0
    while step < STEPS_MAX:
        for user, index, before in arrivals.pop(step, ()):
            turn = user.turns[index]
            prompt = (*before, *turn.token_ids) if turn.continues else turn.token_ids
            request_id = f"{user.name}-{index}"
            sent[request_id] = (user, index, prompt)
            engine.add(request_id, prompt, turn.num_answer_tokens)
        if engine.has_work:
            for request_id in engine.step():
                user, index, prompt = sent.pop(request_id)
                answer = engine.answers[request_id]
                if len(answer) != user.turns[index].num_answer_tokens:
                    raise SafeOffloadError(f"{request_id}: answered in {len(answer)} tokens")
                if index + 1 < len(user.turns):
                    follower = (user, index + 1, (*prompt, *answer))
                    arrivals.setdefault(step + 1 + user.pause_steps, []).append(follower)
            probe.end_step(engine)
            step += 1
        elif arrivals:
            step = min(arrivals)
        elif sent:
            raise SafeOffloadError(f"{trace.name}: went idle before {sorted(sent)} was answered")
        else:
            return
    raise SafeOffloadError(f"{trace.name}: not ended after {STEPS_MAX} steps")
