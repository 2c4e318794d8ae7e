"""After `fetch` and `spill` have returned nothing touches their slots, however they ended.

A server answers half of an object, the call is cancelled, and the test writes to the slot; then the
server goes on. It runs on both event loops, with and without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Buffers, Result
from safe_offload.tiers.naming import HEADER_BYTES
from safe_offload.tiers.valkey.tier import ValkeyTier
from tests.tiers.contract import bytes_of, name_of, put, slot_of
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
from tests.tiers.valkey.scripted_server import PATIENCE_S, Peer, Script, ScriptedServer
from tests.valkey_server import Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: Any) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["plain", "tls"])
def tls(request: Any, certificates: Certificates) -> Certificates | None:
    return certificates if request.param == "tls" else None


@pytest.fixture(params=LOOPS.values(), ids=LOOPS)
def runner(request: Any) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


@contextlib.contextmanager
def tier_of(script: Script, tls: Certificates | None) -> Iterator[ValkeyTier]:
    with ScriptedServer(script, tls=tls) as server:
        scheme = "redis" if tls is None else "rediss"
        values = {} if tls is None else {"ca_file": str(tls.ca)}
        yield ValkeyTier(TierConfig.at(f"{scheme}://localhost:{server.port}", **values))


@pytest.mark.parametrize("end", [cancel, close])
def test_nothing_writes_to_the_slot_of_a_fetch_that_was_given_up(
    runner: asyncio.Runner, tls: Certificates | None, end: Ending
) -> None:
    goes_on, is_over = threading.Event(), threading.Event()
    data = object_bytes()

    def script(peer: Peer) -> None:
        assert peer.command()[0] == b"GET"
        try:
            peer.send(b"$%d\r\n" % len(data) + data[: HEADER_BYTES + (1 << 20)])
            goes_on.wait(PATIENCE_S)
            for _ in range(4):
                peer.send(data[HEADER_BYTES + (1 << 20) :])
        finally:
            is_over.set()

    async def fetch(tier: ValkeyTier) -> Buffers:
        slot = slot_of((SLOT_BYTES,))
        call = asyncio.ensure_future(tier.fetch([name_of(1)], [slot]))
        await until(lambda: slot[0][1 << 19] == SOURCE[0][1 << 19])
        await end(call, tier)
        assert await call == [Result.CANCELLED]
        put(slot, PATTERN)
        goes_on.set()
        await until(is_over.is_set)
        await tier.close()
        return slot

    with tier_of(script, tls) as tier:
        slot = runner.run(fetch(tier))
    assert bytes_of(slot) == PATTERN


@pytest.mark.parametrize("end", [cancel, close])
def test_nothing_reads_the_slot_of_a_spill_that_was_given_up(
    runner: asyncio.Runner, tls: Certificates | None, end: Ending
) -> None:
    has_begun, goes_on = threading.Event(), threading.Event()
    read: list[bytes] = []

    def script(peer: Peer) -> None:
        assert peer.command()[0] == b"EXISTS"
        peer.send(b":0\r\n")
        assert peer.begin_command()[0] == b"SET"
        has_begun.set()
        goes_on.wait(PATIENCE_S)
        read.append(peer.read_to_the_end())

    async def spill(tier: ValkeyTier) -> None:
        slot = slot_of((SLOT_BYTES,), fill=bytes(SLOT_BYTES))
        call = asyncio.ensure_future(tier.spill([name_of(1)], [slot]))
        await until(has_begun.is_set)
        await end(call, tier)
        assert await call == [Result.CANCELLED]
        put(slot, PATTERN)
        goes_on.set()
        await until(lambda: bool(read))
        await tier.close()

    with tier_of(script, tls) as tier:
        runner.run(spill(tier))
    assert PATTERN[:16] not in read[0]


@pytest.mark.parametrize("cut", [10, HEADER_BYTES, HEADER_BYTES + 100_000])
def test_a_connection_that_is_lost_in_the_middle_leaves_the_slot_alone(
    runner: asyncio.Runner, tls: Certificates | None, cut: int
) -> None:
    data = object_bytes()

    def script(peer: Peer) -> None:
        assert peer.command()[0] == b"GET"
        peer.send((b"$%d\r\n" % len(data) + data)[:cut])

    async def fetch(tier: ValkeyTier) -> Buffers:
        slot = slot_of((SLOT_BYTES,))
        assert await tier.fetch([name_of(1)], [slot]) == [Result.FAILED]
        put(slot, PATTERN)
        assert await tier.fetch([name_of(1)], [slot_of((SLOT_BYTES,))]) == [Result.FAILED]
        await tier.close()
        return slot

    with tier_of(script, tls) as tier:
        slot = runner.run(fetch(tier))
    assert bytes_of(slot) == PATTERN
