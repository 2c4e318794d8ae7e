"""Transfers that the test drives, on a loop that it can look at."""

import threading
from typing import Any

from safe_offload.event_loop import MakeEventLoop, new_event_loop
from safe_offload.protocol import FailureReason
from safe_offload.worker.copies.base import Backend, Direction
from safe_offload.worker.copies.threads import DirectionThreads
from safe_offload.worker.transfers import Transfers
from safe_offload.worker.verify import Verifier
from tests.worker.fake_backend import PATIENCE_S, FakeBackend, transfer
from tests.worker.watched_loop import WatchedLoop

NAME_OF_LAST = 999_999


class DrivenTransfers(Transfers):
    """Transfers as they are, put together here, and what they were put together from.

    `threads`: that compute checksums; made only if some are asked for.
    """

    def __init__(
        self,
        backend: Backend,
        max_inflight_bytes: int,
        *,
        verify_every: int = 0,
        make_event_loop: MakeEventLoop = new_event_loop,
        **options: Any,
    ) -> None:
        self.loop = WatchedLoop(make_event_loop)  # that they run on
        verifier = None
        if verify_every:
            self.threads = DirectionThreads("safe-offload-verify")
            verifier = Verifier(backend, self.threads, verify_every)
        super().__init__(backend, self.loop, max_inflight_bytes, verifier=verifier, **options)


def submit(
    transfers: Transfers, direction: Direction, *transfer_ids: int, num_blocks: int = 1
) -> None:
    """Submit transfers of equal size."""
    for transfer_id in transfer_ids:
        transfers.submit(direction, transfer(transfer_id, num_blocks))


def flush(transfers: DrivenTransfers) -> None:
    transfers.loop.flush()


def join(transfers: DrivenTransfers) -> None:
    transfers.loop.join()


def drained(transfers: DrivenTransfers) -> list[tuple[int, FailureReason | None]]:
    """Return what has settled when the loop has done what it can."""
    flush(transfers)
    return transfers.drain()


def looked_at(threads: DirectionThreads) -> None:
    """Wait until the checksums that were asked for have been computed."""
    for direction in Direction:
        threads.submit(direction, lambda: None).result(PATIENCE_S)


def hurry(transfers: Transfers, transfer_id: int) -> None:
    """Let a store in whose turn has not come: another thread fences it."""
    threading.Thread(target=transfers.fence, args=((transfer_id,),), daemon=True).start()


def serves(transfers: DrivenTransfers, backend: FakeBackend) -> bool:
    """Whether a transfer still succeeds, once all before it have ended."""
    submit(transfers, Direction.LOAD, NAME_OF_LAST)
    backend.complete(NAME_OF_LAST)
    flush(transfers)
    if hasattr(transfers, "threads"):
        looked_at(transfers.threads)
    return (NAME_OF_LAST, None) in drained(transfers)
