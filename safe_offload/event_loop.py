"""The event loop: uvloop's if installed, otherwise asyncio's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

MakeEventLoop = Callable[[], asyncio.AbstractEventLoop]

try:
    import uvloop

    new_event_loop: MakeEventLoop = uvloop.new_event_loop
except ImportError:
    new_event_loop = asyncio.new_event_loop
