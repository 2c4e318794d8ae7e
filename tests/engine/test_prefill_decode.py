"""Prefill and decode on two real engines: NIXL between them, ours beside it on both.

NIXL's UCX takes host memory, over TCP here: a stopped prefill engine so holds a transfer that has
begun.
"""

import asyncio
import contextlib
import importlib
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from examples.prefill_decode_proxy import make_app, prefill
from tests.engine.clients import Expected, ask_baseline, first_difference, is_a_tie
from tests.engine.engines import connector, make_prompts
from tests.engine.http_server import HANG_S, HttpServer, find_free_port, make_body

try:
    importlib.import_module("nixl._api")
except ImportError as error:
    pytest.skip(f"the wheel of NIXL does not load: {error}", allow_module_level=True)

LONG_TOKENS, SHORT_TOKENS = 900, 300
NUM_HIT = LONG_TOKENS // 32 * 32
ANSWER_TOKENS = {"long": 8, "short": 320}
LEASE_S = 6
"""How long a prefill engine keeps what no decode engine has come for."""
PROMPTS = {
    **make_prompts(LONG_TOKENS, ["A", "B", "C", "D", "E"]),
    **make_prompts(SHORT_TOKENS, ["p", "q", "r", "s"]),
}
LONG, SHORT = "ABCDE", "pqrs"
SOURCES = {"device": "GPU", "host": "host", "p2p": "NIXL"}
"""Of what vLLM did not compute when a request began."""
OTHERS = {
    "vllm:safe_offload_hit_tokens_total": "hit",  # by a request that was preempted, too
    "vllm:num_preemptions_total": "preemptions",
    "vllm:nixl_num_failed_transfers_total": "failed",
    "vllm:nixl_num_kv_expired_reqs_total": "expired",
}
PATH = "/v1/completions"
FAILURES, GIVEN_UP = "safe_offload_transfer_failures_total{", 'reason="source_lost"'
"""A store whose block NIXL writes is given up."""


@dataclass
class Pair:
    """A prefill and a decode server, and what they have done since it was read last."""

    is_ours_first: bool
    servers: tuple[HttpServer, HttpServer]
    last: list[dict[str, float]] = field(default_factory=list)

    @property
    def prefill(self) -> HttpServer:
        return self.servers[0]

    @property
    def decode(self) -> HttpServer:
        return self.servers[1]

    def read(self) -> list[dict[str, float]]:
        """Where the tokens of prompts came from, on either side, since the last call."""
        now = [read_sources(server) if server.is_running else {} for server in self.servers]
        before = self.last or [{}, {}]
        grown = [
            {name: count - old.get(name, 0) for name, count in new.items()}
            for new, old in zip(now, before, strict=True)
        ]
        self.last = now
        return grown


def read_sources(server: HttpServer) -> dict[str, float]:
    found = dict.fromkeys(("computed", *SOURCES.values(), *OTHERS.values()), 0.0)
    for family in text_string_to_metric_families(server.metrics_text()):
        for sample in family.samples:
            source = sample.labels.get("source")
            if sample.name == "vllm:prompt_tokens_cached_by_source_total" and source in SOURCES:
                found[SOURCES[source]] = sample.value
            elif sample.name == "vllm:prompt_tokens_by_source_total" and source == "local_compute":
                found["computed"] = sample.value
            elif sample.name in OTHERS:
                found[OTHERS[sample.name]] = sample.value
    return found


def configuration(role: str, *, is_ours_first: bool) -> dict[str, Any]:
    ours = connector(400)
    policy = ours.pop("kv_load_failure_policy")
    nixl = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        # Four threads that poll would leave nothing of two cores.
        "kv_connector_extra_config": {"num_threads": 0, "kv_lease_duration": LEASE_S},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "connectors": [ours, nixl] if is_ours_first else [nixl, ours]
        },
    }


@pytest.fixture(
    scope="module",
    params=["NIXL first", pytest.param("ours first", marks=pytest.mark.nightly)],
)
def pair(request, model, tmp_path_factory, expected):
    is_ours_first = request.param == "ours first"
    folder = tmp_path_factory.mktemp("pair")
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                HttpServer(
                    model("llama"),
                    folder / role,
                    num_blocks=50,
                    config=configuration(role, is_ours_first=is_ours_first),
                    environment={
                        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(find_free_port()),
                        "VLLM_SERVER_DEV_MODE": "1",
                        "UCX_TLS": "tcp,self",
                        "UCX_NET_DEVICES": "lo",
                    },
                )
            )
            for role in ("kv_producer", "kv_consumer")
        ]
        for server in servers:
            server.wait_until_healthy()
        made = Pair(is_ours_first, (servers[0], servers[1]))
        shake_hands(made)
        yield made


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory) -> dict[str, Expected]:
    """What one engine without connectors answers."""
    folder = tmp_path_factory.mktemp("alone")
    answers: dict[str, Expected] = {}
    with HttpServer(model("llama"), folder, num_blocks=300) as server:
        server.wait_until_healthy()
        for names, num_tokens in ((LONG, ANSWER_TOKENS["long"]), (SHORT, ANSWER_TOKENS["short"])):
            found = asyncio.run(ask_baseline(server, [PROMPTS[n] for n in names], num_tokens))
            answers |= dict(zip(names, found, strict=True))
    return answers


def body_of(name: str) -> dict[str, Any]:
    return make_body(PROMPTS[name], ANSWER_TOKENS["long" if name in LONG else "short"])


def check(expected: dict[str, Expected], name: str, tokens: Sequence[int]) -> None:
    position = first_difference(expected[name], tokens)
    assert position is None or is_a_tie(expected[name], tokens, position), (name, position)
    assert len(tokens) == len(expected[name].tokens)


@contextlib.asynccontextmanager
async def proxy(pair: Pair) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the proxy before both servers."""
    app = make_app([pair.prefill.url], [pair.decode.url])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    timeout = aiohttp.ClientTimeout(total=HANG_S)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession(
            url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        ) as session:
            yield session
    finally:
        await runner.cleanup()


def ask(pair: Pair, names: str, *, at_once: bool = False) -> list[list[int]]:
    """The answers to prompts, through the proxy."""

    async def ask_one(session: aiohttp.ClientSession, name: str) -> list[int]:
        async with session.post(PATH, json=body_of(name)) as answer:
            assert answer.ok, await answer.text()
            tokens: list[int] = (await answer.json())["choices"][0]["token_ids"]
            return tokens

    async def ask_all() -> list[list[int]]:
        async with proxy(pair) as session:
            if at_once:
                return list(await asyncio.gather(*(ask_one(session, name) for name in names)))
            return [await ask_one(session, name) for name in names]

    return asyncio.run(ask_all())


def send_on(pair: Pair, name: str) -> dict[str, Any]:
    """Let the prefill engine compute a prompt and keep it for a decode engine."""

    async def call() -> dict[str, Any] | None:
        async with aiohttp.ClientSession() as session:
            return await prefill(session, pair.prefill.url + PATH, body_of(name))

    params = asyncio.run(call())
    assert params is not None
    return params


def decode(pair: Pair, name: str, params: dict[str, Any]) -> list[int]:
    tokens: list[int] = pair.decode.post(PATH, body_of(name) | {"kv_transfer_params": params})[
        "choices"
    ][0]["token_ids"]
    return tokens


def shake_hands(pair: Pair) -> None:
    """Let NIXL connect: it waits 5 s for the other side, which a busy machine can pass."""
    for _ in range(20):
        decode(pair, "E", send_on(pair, "E"))
        if pair.read()[1]["NIXL"]:
            break
    check_idle(pair)
    for server in pair.servers:
        server.post("/reset_prefix_cache?reset_external=true")


def holds_blocks(server: HttpServer) -> bool:
    return server.metrics()["vllm:kv_cache_usage_perc"] > 0


def check_idle(pair: Pair) -> None:
    """No block, slot, lease or transfer is held, and nothing went wrong, on either side."""
    for server in pair.servers:
        if not server.is_running:
            continue
        server.wait_until_drained()
        server.settle()
        server.wait_for(lambda s=server: not holds_blocks(s), "the end of what NIXL keeps")
        assert server.is_healthy()
        for name in ("leased_slots", "contained_errors", "dropped_ids"):
            assert server.count(name) == 0, name
        lines = [line for line in server.metrics_text().splitlines() if FAILURES in line]
        failed = [line for line in lines if not line.endswith(" 0.0") and GIVEN_UP not in line]
        assert failed == []


def test_prompts_that_come_back_hit_the_host_and_are_sent_on(pair, expected):
    names = "ABC"
    for name, tokens in zip(names, ask(pair, names), strict=True):
        check(expected, name, tokens)
    on_prefill, on_decode = pair.read()
    assert on_prefill["computed"] == 3 * LONG_TOKENS
    assert (on_decode["computed"], on_decode["NIXL"]) == (0, 3 * LONG_TOKENS)
    for name, tokens in zip(names, ask(pair, names), strict=True):
        check(expected, name, tokens)
    on_prefill, on_decode = pair.read()
    assert on_prefill["computed"] == 3 * (LONG_TOKENS - NUM_HIT)
    assert on_prefill["host"] >= 2 * NUM_HIT, "the GPU had them"
    if pair.is_ours_first:
        assert on_decode["host"] >= 2 * NUM_HIT
    else:
        assert (on_decode["computed"], on_decode["host"]) == (0, 0)
    check_idle(pair)


def test_what_a_preempted_request_had_comes_back_on_the_decode_side(pair, expected):
    for name, tokens in zip(SHORT, ask(pair, SHORT, at_once=True), strict=True):
        check(expected, name, tokens)
    _, on_decode = pair.read()
    assert on_decode["preemptions"] > 0
    assert on_decode["hit"] > 0
    check_idle(pair)


@pytest.mark.nightly
def test_clients_may_go_at_any_moment(pair, expected):
    rng = random.Random(1)

    async def go_away() -> None:
        async with proxy(pair) as session:
            for name in LONG * 4:  # while it is computed, sent on, or answered
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.uniform(0.005, 0.25)):
                        body = body_of(name) | {"stream": True, "max_tokens": 60}
                        async with session.post(PATH, json=body) as answer:
                            await answer.read()

    asyncio.run(go_away())
    # Nothing comes for it. A machine that stands still may pass its lease, so it is sent again.
    assert any(send_on(pair, "D") and holds_blocks(pair.prefill) for _ in range(5))
    params = send_on(pair, "E")
    pair.prefill.pause()  # in the middle of the transfer
    try:

        async def go_away_then() -> None:
            async with aiohttp.ClientSession() as session:
                body = body_of("E") | {"kv_transfer_params": params}
                asking = asyncio.create_task(session.post(pair.decode.url + PATH, json=body))
                while not await asyncio.to_thread(holds_blocks, pair.decode):
                    assert not asking.done(), "it was not in the middle"
                asking.cancel()

        asyncio.run(go_away_then())
    finally:
        pair.prefill.resume()
    check_idle(pair)
    for name, tokens in zip(LONG, ask(pair, LONG), strict=True):
        check(expected, name, tokens)
    pair.read()
    check_idle(pair)


def test_resets_forget_what_the_host_has_and_spoil_no_answer(pair, expected):
    params = send_on(pair, "A")
    for server in pair.servers:
        server.post("/reset_prefix_cache?reset_external=true")
    check(expected, "A", decode(pair, "A", params))
    check_idle(pair)
    for server in pair.servers:
        server.post("/reset_prefix_cache?reset_external=true")
    pair.read()
    (tokens,) = ask(pair, "A")
    check(expected, "A", tokens)
    on_prefill, on_decode = pair.read()
    assert on_prefill["computed"] == LONG_TOKENS
    assert on_decode["host"] == 0
    check_idle(pair)


def test_a_prefill_engine_that_is_killed_in_a_transfer_costs_no_answer(pair, expected):
    pair.decode.post("/reset_prefix_cache?reset_external=true")
    params = send_on(pair, "B")
    pair.prefill.pause()
    with ThreadPoolExecutor(1) as executor:
        answer = executor.submit(decode, pair, "B", params)
        pair.decode.wait_for(
            lambda: holds_blocks(pair.decode) or answer.done(), "the transfer to begin"
        )
        assert not answer.done(), answer.result()
        pair.prefill.kill()
        check(expected, "B", answer.result(HANG_S))
    _, on_decode = pair.read()
    assert on_decode["failed"] >= 1
    assert on_decode["computed"] == LONG_TOKENS
    for name, tokens in zip("BC", ask(pair, "BC"), strict=True):  # the decode engine goes on alone
        check(expected, name, tokens)
    _, on_decode = pair.read()
    assert on_decode["host"] + on_decode["GPU"] >= NUM_HIT
    check_idle(pair)
