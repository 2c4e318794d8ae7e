"""What tests of calls that are given up in the middle of an object need, whatever the tier."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import uvloop

from safe_offload.tiers.base import Buffers, Result, Tier
from safe_offload.tiers.seal import PLAIN
from tests.tiers.contract import bytes_of, filled, name_of
from tests.tiers.valkey.scripted_server import PATIENCE_S

SLOT_BYTES = 8 << 20
"""More than the buffers of sockets hold."""
PATTERN = b"\xee" * SLOT_BYTES
SOURCE = filled((SLOT_BYTES,), 1)
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

Ending = Callable[["asyncio.Task[list[Result]]", Tier], Awaitable[None]]


async def cancel(call: asyncio.Task[list[Result]], tier: Tier) -> None:
    """Give the call up."""
    call.cancel()


async def close(call: asyncio.Task[list[Result]], tier: Tier) -> None:
    """Close the tier under the call."""
    await tier.close()


def object_bytes(slot: Buffers = SOURCE) -> bytes:
    """Return an object as a server keeps it."""
    return PLAIN.header(name_of(1), slot) + bytes_of(slot)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 a thread makes it so
            await asyncio.sleep(0.001)
