"""What others do to the host pool of an engine while it matches and plans."""

import contextlib
from collections.abc import Iterator
from typing import Any

from safe_offload.scheduler.cache.leases import Lease, LeaseKind
from tests.simulator.engine_core import EngineCore

SCRIBBLE = -7
"""A word that belongs to no prefix."""


def evict_host(engine: EngineCore) -> None:
    """Another owner takes every host slot that may be taken, writes to it, and gives it back."""
    slots = engine.connector.side.hits.slots
    taken = slots.grant(slots.num_slots)
    for slot in taken:
        for worker in engine.workers:
            words = worker.device.memory.host[slot]
            words[:] = [SCRIBBLE] * len(words)
    slots.release(taken)


class OtherEngine:
    """Another engine that takes slots of the same host pool.

    `engine`: whose pool it shares; `left`: slots that it leaves.
    """

    def __init__(self, engine: EngineCore, left: int = 0) -> None:
        self._planner = engine.connector.side
        self._left = left
        self._taken: list[Lease] = []

    def take(self) -> None:
        count = self._planner.hits.slots.num_free - self._left
        lease = self._planner.leases.grant(LeaseKind.STORE, max(count, 0))
        if lease is not None:
            self._taken.append(lease)

    def give_back(self) -> None:
        while self._taken:
            self._taken.pop().release()


@contextlib.contextmanager
def contested(engine: EngineCore, other: OtherEngine) -> Iterator[None]:
    """Meanwhile another engine takes slots between the wish for some and the grant."""
    slots = engine.connector.side.hits.slots
    grant = slots.grant

    def grant_rest(count: int, *salt: Any) -> Any:
        slots.grant = grant  # by which the other engine takes its own
        other.take()
        slots.grant = grant_rest
        return grant(count, *salt)

    slots.grant = grant_rest
    try:
        yield
    finally:
        slots.grant = grant


def watch_grants(engine: EngineCore) -> list[tuple[int, int]]:
    """How many slots were asked for and how many were granted, each time."""
    grants: list[tuple[int, int]] = []
    slots = engine.connector.side.hits.slots
    grant = slots.grant

    def granted(count: int, *salt: Any) -> Any:
        taken = grant(count, *salt)
        grants.append((count, len(taken)))
        return taken

    slots.grant = granted
    return grants
