"""Waits for work that may touch host memory until it has ended, despite cancellations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from typing import Any


async def outlast(
    futures: Collection[asyncio.Future[Any]],
    give_up: Callable[[], object],
    until_s: float = math.inf,
) -> bool:
    """Wait until futures have ended, or until `until_s` of the loop; return whether they have.

    A cancellation meanwhile calls `give_up`, and is not raised: slots may be granted again only
    when the futures have ended.
    """
    loop = asyncio.get_running_loop()
    while not all(future.done() for future in futures):
        left_s = None if until_s == math.inf else max(0.0, until_s - loop.time())
        try:
            await asyncio.wait(futures, timeout=left_s)
        except asyncio.CancelledError:
            give_up()
            continue
        if loop.time() >= until_s:  # late; futures just cancelled had a turn to end
            break
    return all(future.done() for future in futures)
