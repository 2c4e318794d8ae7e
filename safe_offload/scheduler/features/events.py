"""KV events: passes requests to `KvEvents`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safe_offload.scheduler.feature import Feature

if TYPE_CHECKING:
    from safe_offload.scheduler.cache.events import KvEvents
    from safe_offload.scheduler.requests import RequestState


class Events(Feature):
    """Passes requests to `KvEvents`, to which the directory reports changes."""

    def __init__(self, events: KvEvents) -> None:
        self._events = events

    def on_new_request(self, state: RequestState) -> None:
        self._events.seen(state)

    def on_request_finished(self, state: RequestState) -> None:
        self._events.ended(state)

    def has_work(self) -> bool:
        return self._events.is_pending
