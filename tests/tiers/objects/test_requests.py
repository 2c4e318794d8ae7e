"""Requests of an S3 bucket as they go over the network: on both event loops, with and without TLS.

A server in threads answers half, the call is cancelled, and the test writes to the slot; then the
server goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Buffers, Result
from safe_offload.tiers.naming import DESCRIPTION_FILE, HEADER_BYTES
from safe_offload.tiers.objects.tier import ObjectTier
from tests.tiers.contract import FACTS, bytes_of, fetch_one, filled, name_of, put, slot_of
from tests.tiers.given_up import (
    LOOPS,
    PATTERN,
    SLOT_BYTES,
    SOURCE,
    Ending,
    cancel,
    close,
    object_bytes,
    until,
)
from tests.tiers.objects.scripted_bucket import ScriptedBucket, answer
from tests.tiers.valkey.scripted_server import PATIENCE_S, Peer, Script, ScriptedServer
from tests.valkey_server import Certificates

NO_CONTENT = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials, no files of the user's, no proxy."""
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.lower(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: Any) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["plain", "tls"])
def tls(
    request: Any, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> Certificates | None:
    if request.param == "plain":
        return None
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    return certificates


@pytest.fixture(params=LOOPS.values(), ids=LOOPS)
def runner(request: Any) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


@contextlib.contextmanager
def tier_of(
    script: Script, tls: Certificates | None = None, host: str = "localhost"
) -> Iterator[tuple[ObjectTier, ScriptedServer]]:
    with ScriptedServer(script, tls=tls) as server:
        endpoint = f"http{'s' if tls else ''}://{host}:{server.port}"
        yield ObjectTier(TierConfig.at("s3://bucket/kv", endpoint=endpoint), FACTS), server


def head_from(peer: Peer) -> bytes:
    """Return the head of a request; nothing of its body is read."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = peer.connection.recv(1)
        if not byte:
            raise ConnectionError
        head += byte
    return head


def take_description(peer: Peer) -> None:
    """Take what is written down of a namespace before its first object."""
    head = head_from(peer)
    assert DESCRIPTION_FILE.encode() in head
    left = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    while left:
        left -= len(peer.connection.recv(left))
    peer.send(NO_CONTENT)


def object_answer(slot: Buffers = SOURCE) -> bytes:
    data = object_bytes(slot)
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data


# ---- slots --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [cancel, close])
def test_nothing_writes_to_the_slot_of_a_fetch_that_was_given_up(
    runner: asyncio.Runner, tls: Certificates | None, end: Ending
) -> None:
    has_begun, goes_on, is_over = threading.Event(), threading.Event(), threading.Event()
    data = object_answer()

    def script(peer: Peer) -> None:
        assert head_from(peer).startswith(b"GET ")
        try:
            peer.send(data[: HEADER_BYTES + (1 << 20)])
            has_begun.set()
            goes_on.wait(PATIENCE_S)
            for _ in range(4):
                peer.send(data[HEADER_BYTES + (1 << 20) :])
        finally:
            is_over.set()

    async def fetch(tier: ObjectTier) -> Buffers:
        slot = slot_of((SLOT_BYTES,))
        call = asyncio.ensure_future(tier.fetch([name_of(1)], [slot]))
        await until(has_begun.is_set)
        await end(call, tier)
        assert await call == [Result.CANCELLED]
        put(slot, PATTERN)
        goes_on.set()
        await until(is_over.is_set)
        await tier.close()
        return slot

    with tier_of(script, tls) as (tier, _):
        slot = runner.run(fetch(tier))
    assert bytes_of(slot) == PATTERN


@pytest.mark.parametrize("end", [cancel, close])
def test_nothing_reads_the_slot_of_a_spill_that_was_given_up(
    runner: asyncio.Runner, tls: Certificates | None, end: Ending
) -> None:
    has_begun, goes_on = threading.Event(), threading.Event()
    read: list[bytes] = []

    def script(peer: Peer) -> None:
        take_description(peer)
        assert head_from(peer).startswith(b"PUT ")
        has_begun.set()
        goes_on.wait(PATIENCE_S)
        read.append(peer.read_to_the_end())

    async def spill(tier: ObjectTier) -> None:
        slot = slot_of((SLOT_BYTES,), fill=bytes(SLOT_BYTES))
        call = asyncio.ensure_future(tier.spill([name_of(1)], [slot]))
        await until(has_begun.is_set)
        await end(call, tier)
        assert await call == [Result.CANCELLED]
        put(slot, PATTERN)
        goes_on.set()
        await until(lambda: bool(read))
        await tier.close()

    with tier_of(script, tls) as (tier, _):
        runner.run(spill(tier))
    assert PATTERN[:16] not in read[0]
    assert len(read[0]) < SLOT_BYTES, "it was given up before all was sent"


@pytest.mark.parametrize("cut", [10, HEADER_BYTES, HEADER_BYTES + 100_000])
def test_a_connection_that_is_lost_in_the_middle_leaves_the_slot_alone(
    runner: asyncio.Runner, tls: Certificates | None, cut: int
) -> None:
    def script(peer: Peer) -> None:
        assert head_from(peer).startswith(b"GET ")
        peer.send(object_answer()[:cut])

    async def fetch(tier: ObjectTier) -> Buffers:
        slot = slot_of((SLOT_BYTES,))
        assert await fetch_one(tier, name_of(1), slot) is Result.FAILED
        put(slot, PATTERN)
        assert await fetch_one(tier, name_of(1), slot_of((SLOT_BYTES,))) is Result.FAILED
        await tier.close()
        return slot

    with tier_of(script, tls) as (tier, _):
        slot = runner.run(fetch(tier))
    assert bytes_of(slot) == PATTERN


# ---- connections --------------------------------------------------------------------------------


def test_connections_are_used_again(runner: asyncio.Runner, tls: Certificates | None) -> None:
    def script(peer: Peer) -> None:
        try:
            while head_from(peer).startswith(b"HEAD "):
                peer.send(NO_CONTENT)
        finally:
            num_ended.append(1)

    async def ask(tier: ObjectTier, server: ScriptedServer) -> None:
        async def is_there(number: int) -> bool:
            return (await tier.probe([name_of(number)]))[0]

        assert [await is_there(number) for number in range(20)] == [True] * 20
        assert server.num_connections == 1
        await tier.close()
        await until(lambda: num_ended == [1])

    num_ended: list[int] = []
    with tier_of(script, tls) as (tier, server):
        runner.run(ask(tier, server))


def test_no_connection_is_made_once_the_tier_is_closed(runner: asyncio.Runner) -> None:
    def script(peer: Peer) -> None:
        peer.send(NO_CONTENT)

    async def ask(tier: ObjectTier) -> None:
        await tier.close()
        await tier.close()
        assert await tier.fetch([name_of(1)], [slot_of((512,))]) == [Result.CANCELLED]
        with pytest.raises(OSError, match="closed"):
            await tier.probe([name_of(1)])

    with tier_of(script) as (tier, server):
        runner.run(ask(tier))
    assert server.num_connections == 0


# ---- TLS ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["an unknown authority", "another name"])
def test_a_server_that_is_not_who_it_should_be_is_sent_nothing(
    runner: asyncio.Runner,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
) -> None:
    def script(peer: Peer) -> None:
        heard.append(head_from(peer))

    heard: list[bytes] = []
    host = "localhost"
    if trouble == "another name":
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
        host = "127.0.0.1"
    with tier_of(script, certificates, host) as (tier, _):
        fetching = fetch_one(tier, name_of(1), slot_of((512,)))
        assert runner.run(fetching) is Result.FAILED
        runner.run(tier.close())
    assert not heard
    assert "failed to read: the request failed (GenericError). Fix" in caplog.text
    assert all(record.levelno < logging.ERROR for record in caplog.records)


# ---- credentials --------------------------------------------------------------------------------


async def test_credentials_that_cannot_be_had_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are asked for when they are needed: here, of a machine that has no role.

    That there is none (404) does not mean that there is no object.
    """
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    async with ScriptedBucket(lambda request: answer("404 Not Found")) as nobody:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", nobody.endpoint)
        tier = ObjectTier(TierConfig.at("s3://bucket/kv", endpoint="http://127.0.0.1:1"), FACTS)
        names, slots = [name_of(1), name_of(2)], [filled((512,)), filled((512,))]
        assert await tier.fetch(names, slots) == [Result.FAILED] * 2
        assert await tier.spill(names, slots) == [Result.FAILED] * 2
        with pytest.raises(OSError, match="the request failed"):
            await tier.probe(names)
        await tier.close()
    for what in ("read", "write", "ask"):
        assert f"Tier s3://bucket/kv failed to {what}: the request failed" in caplog.text
    assert "if it has no credentials, at the variables AWS_…, the role of the" in caplog.text
