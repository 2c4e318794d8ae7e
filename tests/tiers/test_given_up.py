"""After `fetch` and `spill` have returned nothing touches their slots, however they ended.

A server answers half of an object, the call is given up, and the test writes to the slot; then the
server goes on: Valkey and a bucket, on both event loops, with and without TLS.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Result, Tier
from safe_offload.tiers.choice import open_tier
from safe_offload.tiers.naming import HEADER_BYTES
from safe_offload.tiers.seals.seal import PLAIN
from tests.tiers.contract import FACTS, bytes_of, fetch_one, filled, name_of, put, slot_of
from tests.tiers.objects.scripted_bucket import head_from, known_to_the_tier
from tests.tiers.valkey.scripted_server import PATIENCE_S, Peer, Script, ScriptedServer, until
from tests.valkey_server import Certificates

SLOT_BYTES = 16 << 20
"""Far more than the buffers of sockets hold."""
PATTERN = b"\xee" * SLOT_BYTES
SOURCE = filled((SLOT_BYTES,), 1)
STORED = PLAIN.header(name_of(1), SOURCE) + bytes_of(SOURCE)
BEGUN_BYTES = HEADER_BYTES + (1 << 20)


async def cancel(call: asyncio.Task[list[Result]], tier: Tier) -> None:
    call.cancel()


async def close(call: asyncio.Task[list[Result]], tier: Tier) -> None:
    await tier.close()


class Store(Protocol):
    """How a server of one kind is spoken to."""

    head: bytes

    def config(self, port: int, tls: Certificates | None) -> TierConfig: ...
    def take_fetch(self, peer: Peer) -> None: ...
    def take_spill(self, peer: Peer) -> None: ...


class OfValkey:
    head = b"$%d\r\n" % len(STORED)

    def config(self, port: int, tls: Certificates | None) -> TierConfig:
        scheme, values = ("redis", {}) if tls is None else ("rediss", {"ca_file": str(tls.ca)})
        return TierConfig.at(f"{scheme}://localhost:{port}", **values)

    def take_fetch(self, peer: Peer) -> None:
        assert peer.command()[0] == b"GET"

    def take_spill(self, peer: Peer) -> None:
        assert peer.command()[0] == b"EXISTS"
        peer.send(b":0\r\n")
        assert peer.begin_command()[0] == b"SET"


class OfBucket:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(STORED)

    def config(self, port: int, tls: Certificates | None) -> TierConfig:
        endpoint = f"http{'s' if tls else ''}://localhost:{port}"
        return TierConfig.at("s3://bucket/kv", endpoint=endpoint)

    def take_fetch(self, peer: Peer) -> None:
        assert head_from(peer).startswith(b"GET ")

    def take_spill(self, peer: Peer) -> None:
        assert head_from(peer).startswith(b"PUT ")


@pytest.fixture(params=[OfValkey, OfBucket])
def store(request, tls, monkeypatch):
    known_to_the_tier(monkeypatch)
    if tls is not None:
        monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
    found: Store = request.param()
    return found


@contextlib.contextmanager
def tier_of(store: Store, script: Script, tls: Certificates | None) -> Iterator[Tier]:
    with ScriptedServer(script, tls=tls) as server:
        yield open_tier(store.config(server.port, tls), SLOT_BYTES, dict(FACTS))[0]


@pytest.mark.parametrize("end", [cancel, close])
def test_nothing_writes_to_the_slot_of_a_fetch_that_was_given_up(runner, store, tls, end):
    has_begun, goes_on, is_over = threading.Event(), threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        store.take_fetch(peer)
        try:
            peer.send(store.head + STORED[:BEGUN_BYTES])
            has_begun.set()
            goes_on.wait(PATIENCE_S)
            for _ in range(4):
                peer.send(STORED[BEGUN_BYTES:])
        finally:
            is_over.set()

    async def fetch(tier: Tier) -> None:
        slot = slot_of((SLOT_BYTES,))
        call = asyncio.ensure_future(tier.fetch([name_of(1)], [slot]))
        await until(has_begun.is_set)
        if isinstance(store, OfValkey):  # which is received into the slot
            await until(lambda: slot[0][1 << 19] == SOURCE[0][1 << 19])
        await end(call, tier)
        assert await call == [Result.CANCELLED]
        put(slot, PATTERN)
        goes_on.set()
        await until(is_over.is_set)
        await tier.close()
        assert bytes_of(slot) == PATTERN

    with tier_of(store, script, tls) as tier:
        runner.run(fetch(tier))


@pytest.mark.parametrize("end", [cancel, close])
def test_nothing_reads_the_slot_of_a_spill_that_was_given_up(runner, store, tls, end):
    has_begun, goes_on = threading.Event(), threading.Event()
    read: list[bytes] = []

    def script(peer: Peer) -> None:
        store.take_spill(peer)
        has_begun.set()
        goes_on.wait(PATIENCE_S)
        read.append(peer.read_to_the_end())

    async def spill(tier: Tier) -> None:
        slot = slot_of((SLOT_BYTES,), fill=bytes(SLOT_BYTES))
        call = asyncio.ensure_future(tier.spill([name_of(1)], [slot]))
        await until(has_begun.is_set)
        await end(call, tier)
        assert await call == [Result.CANCELLED]
        put(slot, PATTERN)
        goes_on.set()
        await until(lambda: bool(read))
        await tier.close()

    with tier_of(store, script, tls) as tier:
        runner.run(spill(tier))
    assert PATTERN[:16] not in read[0]
    # What obstore has made a copy of, it may send to the end.
    has_copy = isinstance(store, OfBucket)
    assert has_copy or len(read[0]) < SLOT_BYTES, "it was given up before all was sent"


@pytest.mark.parametrize("cut", [10, HEADER_BYTES + 100_000])
def test_a_connection_that_is_lost_in_the_middle_leaves_the_slot_alone(runner, store, tls, cut):
    def script(peer: Peer) -> None:
        store.take_fetch(peer)
        peer.send((store.head + STORED)[:cut])

    async def fetch(tier: Tier) -> None:
        slot = slot_of((SLOT_BYTES,))
        assert await fetch_one(tier, name_of(1), slot) is Result.FAILED
        put(slot, PATTERN)
        assert await fetch_one(tier, name_of(1), slot_of((SLOT_BYTES,))) is Result.FAILED
        await tier.close()
        assert bytes_of(slot) == PATTERN

    with tier_of(store, script, tls) as tier:
        runner.run(fetch(tier))
