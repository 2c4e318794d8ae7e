"""The proxy of examples/, over HTTP, between a client and stand-ins for its two servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientSession, web

from examples.prefill_decode_proxy import make_app

PATH = "/v1/completions"
BROUGHT = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "P",
    "remote_block_ids": [[1, 2]],
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}
"""What NIXL of a prefill server answers."""
OURS = {
    "store": "nothing",
    "max_offload_tokens": 64,
    "max_load_tokens": 0,
    "pin_s": 600,
    "kv_hints": {"protocol_version": "0.1", "actions": []},
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def stand_in(seen: list[dict[str, Any]], answer: web.Response | None = None) -> web.Application:
    """A server that keeps what it is sent."""

    async def complete(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"kv_transfer_params": BROUGHT}) if answer is None else answer

    app = web.Application()
    app.add_routes([web.post(PATH, complete)])
    return app


class Told:
    """What came of one request: its answer, and what either server was sent."""

    def __init__(self) -> None:
        self.prefill: list[dict[str, Any]] = []
        self.decode: list[dict[str, Any]] = []
        self.status, self.text = 0, ""


def send(prefill: web.Response | None = None, *, decode: str = "", **what: Any) -> Told:
    async def call() -> Told:
        told = Told()
        async with (
            serving(stand_in(told.prefill, prefill)) as first,
            serving(stand_in(told.decode)) as second,
            serving(make_app([first], [decode or second])) as proxy,
            ClientSession() as session,
            session.post(proxy + PATH, **what) as answer,
        ):
            told.status, told.text = answer.status, await answer.text()
        return told

    return asyncio.run(call())


def params(bodies: list[dict[str, Any]]) -> Any:
    (body,) = bodies
    return body["kv_transfer_params"]


def test_both_servers_are_told_what_the_client_asks_for():
    told = send(json={"prompt": "secret", "max_tokens": 9, "kv_transfer_params": OURS})
    assert told.status == 200
    assert OURS.items() <= params(told.prefill).items()
    assert params(told.prefill)["do_remote_decode"] is True
    assert params(told.prefill)["do_remote_prefill"] is False
    assert told.prefill[0]["max_tokens"] == 1
    assert params(told.decode) == OURS | BROUGHT
    assert told.decode[0]["max_tokens"] == 9


@pytest.mark.parametrize(
    "answer",
    [
        {"status": 500},
        {"text": "[1]", "content_type": "application/json"},
        {"text": '{"kv_transfer_params": [1]}', "content_type": "application/json"},
    ],
)
def test_without_an_answer_of_a_prefill_server_the_decode_server_is_told_the_same(answer):
    told = send(web.Response(**answer), json={"prompt": "secret", "kv_transfer_params": OURS})
    assert (told.status, params(told.decode)) == (200, OURS)


def test_clients_do_not_say_from_where_nixl_reads():
    for prefill, brought in ((None, BROUGHT), (web.Response(status=500), {})):
        sent = {"store": "nothing"} | BROUGHT | {"remote_host": "10.9.9.9"}
        told = send(prefill, json={"prompt": "secret", "kv_transfer_params": sent})
        assert params(told.prefill)["remote_host"] is None
        assert params(told.decode) == {"store": "nothing"} | brought


@pytest.mark.parametrize("body", [b"[1]", b"\xff", b"[" * 100_000, b'{"kv_transfer_params": [1]}'])
def test_a_body_that_is_no_json_object_is_refused(body, caplog):
    with caplog.at_level(logging.WARNING):
        told = send(data=body)
    assert told.status == 400
    assert "JSON object" in told.text
    assert not told.prefill
    assert not told.decode
    assert caplog.text == ""


def test_a_decode_server_that_is_down_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        told = send(decode="http://127.0.0.1:1", json={"prompt": "p"})
    assert told.status == 502
    assert "http://127.0.0.1:1" in told.text
    assert caplog.text == ""


def test_no_connection_is_used_that_a_server_has_just_closed():
    """As vLLM's does after 5 s without a request; a POST on it is lost."""

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def call() -> list[int]:
        async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with serving(make_app([url], [url])) as proxy, ClientSession() as session:
                return [(await session.post(proxy + PATH, json={})).status for _ in range(3)]

    assert asyncio.run(call()) == [200] * 3
