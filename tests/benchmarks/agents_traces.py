"""Recorded conversations of coding agents, scaled to a small machine.

A conversation is what WEKA's kv-cache-tester records (`weka_trace`): prompts as ids of their blocks
of 64 tokens, without any text; times; lengths.
Scaled by 32, each 32 blocks become one, named by the last of them: two prompts share it if they
share all 32. Lengths and times are divided by 32 too, so that a machine that computes 32 times as
slowly has the same load.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safe_offload.errors import ConfigError

BLOCK_TOKENS = 64
THINK_MAX_S = 300.0
"""AgentX, which replays the same conversations, lets no user think longer."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of a conversation, and how long its answer is."""

    think_s: float  # after the answer before
    num_tokens: int
    num_answer_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one user sends, each prompt after the answer to the one before."""

    requests: tuple[Request, ...]

    @property
    def num_tokens_max(self) -> int:
        """The longest of its contexts, with the answer."""
        return max(one.num_tokens + one.num_answer_tokens for one in self.requests)


def read(path: Path) -> list[Conversation]:
    """Return the conversations of a file or folder.

    Args:
        path: a folder of `weka_trace`, one file for each conversation; or one gzipped list of
            {tool_tokens, system_tokens, requests}, whose requests are [start, think time, answer's
            time, prompt tokens, answer tokens, [[first id, count], ...]].
    """
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        found = [_from_weka(json.loads(one.read_bytes())) for one in files]
    elif path.name.endswith(".json.gz"):
        with gzip.open(path) as file:
            found = [_from_runs(one) for one in json.load(file)]
    else:
        raise ConfigError(f"--traces {path}: expected a folder of *.json, or a file *.json.gz")
    found = [one for one in found if one.requests]
    if not found:
        raise ConfigError(f"--traces {path}: expected conversations, found none")
    return found


def _from_weka(trace: dict[str, Any]) -> Conversation:
    if trace["block_size"] != BLOCK_TOKENS:
        what = f"expected blocks of {BLOCK_TOKENS} tokens, found {trace['block_size']}"
        raise ConfigError(f"--traces: {trace['id']}: {what}")
    requests = (
        Request(
            one.get("think_time") or 0.0,
            one["in"],
            one["out"],
            tuple(one["hash_ids"]),
        )
        for one in trace["requests"]
        if one["type"] in ("n", "s")  # no sub-agents
    )
    return Conversation(tuple(requests))


def _from_runs(recorded: dict[str, Any]) -> Conversation:
    requests = (
        Request(think_s, num_in, num_out, tuple(_expand(runs)))
        for _, think_s, _, num_in, num_out, runs in recorded["requests"]
    )
    return Conversation(tuple(requests))


def _expand(runs: Iterable[tuple[int, int]]) -> Iterable[int]:
    return (block_id for first, count in runs for block_id in range(first, first + count))


def choose(
    conversations: Sequence[Conversation],
    number: int,
    num_tokens_max: int,
    skip: int,
    turns: int,
    seed: str,
) -> list[Conversation]:
    """Return parts of as many conversations, drawn by a seed, of contexts that fit."""
    parts = [Conversation(one.requests[skip : skip + turns]) for one in conversations]
    fitting = [one for one in parts if one.requests and one.num_tokens_max <= num_tokens_max]
    if len(fitting) < number:
        what = f"{number} conversations of at most {num_tokens_max:,} tokens"
        raise ConfigError(f"--traces: expected {what}, found {len(fitting)} (fewer --users?)")
    return random.Random(seed).sample(fitting, number)


def scale(conversation: Conversation, factor: int) -> Conversation:
    """Return a conversation as a machine gets it that computes a factor more slowly."""
    return Conversation(tuple(_scale(one, factor) for one in conversation.requests))


def _scale(request: Request, factor: int) -> Request:
    num_tokens = max(1, request.num_tokens // factor)
    return Request(
        min(request.think_s, THINK_MAX_S) / factor,
        num_tokens,
        max(1, request.num_answer_tokens // factor),
        request.block_ids[factor - 1 :: factor][: num_tokens // BLOCK_TOKENS],
    )


def cut_thinking(conversation: Conversation, think_s_max: float) -> Conversation:
    """Return a conversation whose user never thinks longer."""
    requests = (
        replace(one, think_s=min(one.think_s, think_s_max)) for one in conversation.requests
    )
    return replace(conversation, requests=tuple(requests))


def mean_context(conversations: Sequence[Conversation]) -> float:
    """Return the mean tokens of a prompt, which is what a user has under way."""
    sizes = [one.num_tokens for each in conversations for one in each.requests]
    return sum(sizes) / len(sizes)


def make_prompt(user: str, turn: int, request: Request) -> list[int]:
    """Return tokens that two prompts of a conversation share where they share blocks."""
    tokens: list[int] = []
    for block_id in request.block_ids:
        tokens += [zlib.crc32(f"{user}/{block_id}".encode())] * BLOCK_TOKENS
    rest = zlib.crc32(f"{user}, {turn}".encode())
    return tokens + [rest] * (request.num_tokens - len(tokens))
