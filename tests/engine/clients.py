"""Clients of a vLLM server: they ask, stream, go away, and know what the answer should be."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from tests.engine.http_server import HANG_S, HttpServer, make_body

MARGIN_MIN = 1e-3
"""Nearer than this (in log-probability) the two likeliest tokens are a tie, which rounding decides.

A prompt that is computed in other chunks, in another batch, or from a cache rounds differently, by
about 1e-5 in float32.
"""


@dataclass(frozen=True, slots=True)
class Expected:
    """The baseline's answer to a prompt."""

    tokens: tuple[int, ...]
    # By how much each token is likelier than the runner-up, in log-probability.
    margins: tuple[float, ...]
    runners_up: tuple[int, ...]  # the second likeliest token at each position


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the storm."""

    number: int
    prompt_idx: int  # which prompt
    num_tokens: int  # length of the answer that is asked for
    # The client goes away when it has received this many tokens; 0 is before the first one.
    cut_off_tokens: int | None = None
    cut_off_s: float | None = None  # the client goes away this long after it has begun to send

    @property
    def is_cut_off(self) -> bool:
        """Whether the client means to go away before the end."""
        return self.cut_off_tokens is not None or self.cut_off_s is not None


@dataclass(slots=True)
class Reply:
    """What the client of one request saw."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    is_complete: bool = False
    error: str | None = None


def open_session(server: HttpServer) -> aiohttp.ClientSession:
    """A session whose every request has a connection of its own, which going away closes."""
    return aiohttp.ClientSession(
        server.url,
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=HANG_S),
    )


async def ask_baseline(
    server: HttpServer, prompts: Sequence[list[int]], num_tokens: int, num_in_flight: int = 8
) -> list[Expected]:
    """The answer of this many tokens to every prompt, with the likelihood of its tokens."""
    turn = asyncio.Semaphore(num_in_flight)

    async def ask_one(session: aiohttp.ClientSession, prompt: list[int]) -> Expected:
        body = make_body(prompt, num_tokens)
        body |= {"logprobs": 2, "return_tokens_as_token_ids": True}
        async with turn, session.post("/v1/completions", json=body) as response:
            response.raise_for_status()
            (choice,) = (await response.json())["choices"]
        margins, runners_up = [], []
        for likeliest in choice["logprobs"]["top_logprobs"]:
            (_, first), (second_token, second) = likeliest.items()
            margins.append(first - second)
            runners_up.append(int(second_token.removeprefix("token_id:")))
        return Expected(tuple(choice["token_ids"]), tuple(margins), tuple(runners_up))

    async with open_session(server) as session:
        return list(await asyncio.gather(*(ask_one(session, prompt) for prompt in prompts)))


async def ask_all(
    server: HttpServer, prompts: Sequence[list[int]], asks: Sequence[Ask], num_in_flight: int
) -> list[Reply]:
    """Send requests in order, `num_in_flight` at a time, and go away from those that say so.

    When one gets no answer, no other is sent: an engine that hangs does so for all of them.
    """
    turn = asyncio.Semaphore(num_in_flight)
    gave_up = False

    async def ask_one(session: aiohttp.ClientSession, ask: Ask) -> Reply:
        nonlocal gave_up
        reply = Reply(ask)
        async with turn:
            if gave_up:
                reply.error = "not sent"
                return reply
            try:
                async with asyncio.timeout(ask.cut_off_s):
                    await receive(session, prompts[ask.prompt_idx], reply)
            except TimeoutError:
                if ask.cut_off_s is None:
                    reply.error = f"no answer within {HANG_S:.0f} s"
                    gave_up = True
            except (aiohttp.ClientError, OSError) as error:
                reply.error = repr(error)
        return reply

    async with open_session(server) as session:
        return list(await asyncio.gather(*(ask_one(session, ask) for ask in asks)))


async def receive(session: aiohttp.ClientSession, prompt: list[int], reply: Reply) -> None:
    """Stream one answer into the reply until its end or until the client goes away."""
    ask = reply.ask
    body = make_body(prompt, ask.num_tokens) | {"stream": True}
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            reply.error = f"HTTP {response.status}: {await response.text()}"
            return
        if ask.cut_off_tokens == 0:
            response.close()
            return
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                reply.is_complete = True
                return
            event = json.loads(data)
            if "error" in event:
                reply.error = str(event["error"])
                return
            (choice,) = event["choices"]
            reply.tokens += choice["token_ids"]
            if ask.cut_off_tokens is not None and len(reply.tokens) >= ask.cut_off_tokens:
                response.close()
                return
    reply.error = "the stream ended without [DONE]"


def first_difference(expected: Expected, tokens: Sequence[int]) -> int | None:
    """Position of the first token that is not the baseline's, if any."""
    pairs = zip(tokens, expected.tokens, strict=False)
    return next((i for i, (found, wanted) in enumerate(pairs) if found != wanted), None)


def is_a_tie(expected: Expected, tokens: Sequence[int], position: int) -> bool:
    """Whether rounding alone explains that the token at a position is not the baseline's."""
    return (
        expected.margins[position] < MARGIN_MIN
        and tokens[position] == expected.runners_up[position]
    )
