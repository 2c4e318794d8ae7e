"""What the users of `safe-offload bench serve` ask, and how they ask it over HTTP.

A user sends a prompt, reads the answer as it streams, and sends the next one. All users do so at
once. The prompts are fixed beforehand, so that every server gets the same.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from safe_offload.commands.bench.engine import PROMPT_TOKEN_IDS
from safe_offload.errors import SafeOffloadError

GROWING, ONE_OFF = "contexts that grow", "prompts that never come back"

Prompt = Sequence[int]


@dataclass(frozen=True)
class Sizes:
    """How much the users ask; see `serve.add_arguments`."""

    users: int = 16
    turns: int = 5
    context_tokens: int = 4000
    turn_tokens: int = 500
    answer_tokens: int = 16
    rounds: int = 3

    @property
    def longest_tokens(self) -> int:
        """Return the tokens of a user's last turn, its answer included."""
        return self.context_tokens + (self.turns - 1) * self.turn_tokens + self.answer_tokens


QUICK = Sizes(users=6, turns=3)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a user saw of one answer."""

    ttft_s: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """One pass of a workload over one server.

    Attributes:
        num_computed_tokens: of the prompts, as the server counts; None if it does not tell.
    """

    duration_s: float
    replies: Sequence[Sequence[Reply]]  # by user and turn
    num_prompt_tokens: int
    num_computed_tokens: int | None

    @property
    def request_throughput(self) -> float:
        return sum(map(len, self.replies)) / self.duration_s

    @property
    def ttfts_s(self) -> list[float]:
        return [reply.ttft_s for replies in self.replies for reply in replies]


def make_prompts(workload: str, sizes: Sizes, seed: str) -> list[list[Prompt]]:
    """Return the prompts by user and turn; another seed gives prompts with nothing in common.

    Contexts that grow begin with `context_tokens`, and each turn has the one before it as its
    prefix and `turn_tokens` more, in place of the answer and the next question.
    """
    turns = range(sizes.turns)

    def make(user: int) -> list[Prompt]:
        generator = random.Random(f"{seed}/{workload}/{user}")
        if workload == ONE_OFF:
            return [generator.choices(PROMPT_TOKEN_IDS, k=sizes.context_tokens) for _ in turns]
        tokens = generator.choices(PROMPT_TOKEN_IDS, k=sizes.longest_tokens)
        return [tokens[: sizes.context_tokens + turn * sizes.turn_tokens] for turn in turns]

    return [make(user) for user in range(sizes.users)]


async def serve_users(
    url: str, users: Sequence[Sequence[Prompt]], answer_tokens: int, timeout_s: float
) -> Served:
    """Let all users ask at once, each its prompts one after the other."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        try:
            model = await _model_name(session)
            how = {"model": model, "max_tokens": answer_tokens, "temperature": 0}
            how |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
            computed = await _count_computed_tokens(session)
            start_s = time.perf_counter()
            replies = await asyncio.gather(*(_ask_in_turn(session, how, user) for user in users))
            duration_s = time.perf_counter() - start_s
            if computed is not None:
                computed = (await _count_computed_tokens(session) or 0) - computed
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            what = f"{url}: a request failed: {error!r} (--logs FOLDER keeps the servers' logs)"
            raise SafeOffloadError(what) from error
    num_tokens = sum(len(prompt) for user in users for prompt in user)
    return Served(duration_s, replies, num_tokens, computed)


async def _ask_in_turn(
    session: aiohttp.ClientSession, how: dict[str, Any], prompts: Sequence[Prompt]
) -> list[Reply]:
    return [await _ask(session, how | {"prompt": prompt}) for prompt in prompts]


async def _ask(session: aiohttp.ClientSession, body: dict[str, Any]) -> Reply:
    """Stream one answer; the time begins before the request is sent."""
    token_ids: list[int] = []
    ttft_s = 0.0
    start_s = time.perf_counter()
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            text = await response.text()
            raise SafeOffloadError(f"{response.url}: HTTP {response.status}: {text}")
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if not data or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise SafeOffloadError(f"{response.url}: {event['error']}")
            new = event["choices"][0].get("token_ids") or []
            if new and not token_ids:
                ttft_s = time.perf_counter() - start_s
            token_ids += new
    if len(token_ids) != body["max_tokens"]:
        expected, found = body["max_tokens"], len(token_ids)
        raise SafeOffloadError(f"{response.url}: expected {expected} tokens, found {found}")
    return Reply(ttft_s, tuple(token_ids))


async def _model_name(session: aiohttp.ClientSession) -> str:
    async with session.get("/v1/models") as response:
        response.raise_for_status()
        name: str = (await response.json())["data"][0]["id"]
        return name


async def _count_computed_tokens(session: aiohttp.ClientSession) -> int | None:
    """Return how many prompt tokens the server has computed so far, if it says so.

    Source: `vllm:prompt_tokens_by_source` in vllm/v1/metrics/loggers.py (0.32.0).
    """
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines() if response.status == 200 else []
    start, source = "vllm:prompt_tokens_by_source_total{", 'source="local_compute"'
    found = [line for line in lines if line.startswith(start) and source in line]
    return round(sum(float(line.rpartition(" ")[2]) for line in found)) if found else None
