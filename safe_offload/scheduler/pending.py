"""Transfers of all kinds, from their plan until every rank has reported them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from safe_offload.protocol import ALL_TIERS, FailureReason
from safe_offload.scheduler.requests import RequestQueue

if TYPE_CHECKING:
    from safe_offload.protocol import Outcome, TierTransfer, Transfer
    from safe_offload.scheduler.blocks import BlockSet
    from safe_offload.scheduler.cache.leases import Lease
    from safe_offload.scheduler.requests import RequestState


@dataclass(slots=True, eq=False, kw_only=True)
class Pending:
    """A transfer that some rank has not reported; only its methods change it.

    Bound: an entry for each rank.
    """

    transfer_id: int
    ranks_left: set[int]  # ranks that have not reported it
    failure: FailureReason | None = None  # the first reason that a rank reported, or `SOURCE_LOST`

    def reported(self, rank: int, failure: FailureReason | None) -> bool:
        """Record the report of a rank; return whether it was the last one."""
        self.ranks_left.discard(rank)
        if self.failure is None:
            self.failure = failure
        return not self.ranks_left

    def fail(self) -> None:
        """Fail it, whatever the ranks report."""
        if self.failure is None:
            self.failure = FailureReason.SOURCE_LOST


T = TypeVar("T", bound=Pending)


class Ledger(Generic[T]):
    """Transfers of one kind: those for the next plan, and those in flight, by transfer id.

    Its owner adds to `new`.

    Bound: its owner's: one load per waiting request, stores of a limited number of blocks, fetches
    of a limited number of slots, a few spills.
    """

    def __init__(self, transfer_ids: Iterable[int], num_ranks: int) -> None:
        self._transfer_ids = iter(transfer_ids)
        self._num_ranks = num_ranks
        self.new: list[T] = []
        self.in_flight: dict[int, T] = {}

    def __repr__(self) -> str:
        return f"{len(self.new)} new, {len(self.in_flight)} in flight"

    def open(self) -> tuple[int, set[int]]:
        """Return a new transfer id, and the ranks that will report it."""
        return next(self._transfer_ids), set(range(self._num_ranks))

    def sent(self) -> list[T]:
        """The plan with the new transfers has been sent; return these."""
        sent = self.new
        if sent:
            self.new = []
            for transfer in sent:
                self.in_flight[transfer.transfer_id] = transfer
        return sent

    def get(self, transfer_id: int) -> T | None:
        """Return the transfer with this id, if it is in flight."""
        return self.in_flight.get(transfer_id)

    def remove(self, transfer: T) -> None:
        """Every rank has reported it."""
        del self.in_flight[transfer.transfer_id]

    def give_up(self) -> list[T]:
        """After an internal error, remove and return the transfers that no worker copies."""
        gone = [*self.new, *(t for t in self.in_flight.values() if not t.ranks_left)]
        self.new = []
        self.in_flight = {i: t for i, t in self.in_flight.items() if t.ranks_left}
        return gone

    def __len__(self) -> int:
        return len(self.in_flight)


@dataclass(slots=True, eq=False, kw_only=True)
class Load(Pending):
    """A load; other requests may wait for it, too."""

    transfer: Transfer
    lease: Lease
    owner: RequestState  # the request that vLLM blocks for it
    num_tokens: int
    hashes: Sequence[bytes]  # of the owner's blocks, from its first token on
    # `first_hash`, `end_hash`: the range of these blocks that it loads.
    first_hash: int
    end_hash: int
    has_ended: bool = False  # every rank has reported it, or it was dropped
    sent_s: float | None = None  # the time of its plan
    is_in_step: bool = False  # vLLM does not wait for it; see `engine_core.step_loads`

    def sent(self, now_s: float | None) -> None:
        """A plan names it."""
        self.sent_s = now_s

    def end(self) -> None:
        """It has ended: every rank has reported it, or it was dropped."""
        self.has_ended = True

    @property
    def is_under_way(self) -> bool:
        """Return whether the owner still waits for it."""
        return not (self.has_ended or self.owner.finished)

    @property
    def has_landed(self) -> bool:
        """Return whether the owner has its blocks."""
        return self.has_ended and self.failure is None and not self.owner.finished


@dataclass(slots=True, eq=False)
class Part:
    """The blocks of a store in one KV cache group. Bound: an owner for each of its blocks."""

    blocks: BlockSet
    lease: Lease  # the slots that it writes, one per block
    # The requests whose prefixes the blocks extend, each with its number of blocks, in order; the
    # rest have no owner.
    owners: list[tuple[RequestState, int]]

    def reads(self, block_ids: Collection[int]) -> bool:
        """Return whether it stores one of these blocks."""
        return any(block.block_id in block_ids for block in self.blocks.blocks)


@dataclass(slots=True, eq=False, kw_only=True)
class Store(Pending):
    """A store; it is never published once it has failed.

    Bound: a part for each KV cache group of the requests that vLLM has.
    """

    parts: list[Part]
    epoch: int  # of the directory at its plan; a store from before a reset is not published

    @property
    def num_blocks(self) -> int:
        """Return its number of blocks."""
        return sum(len(part.lease.slots) for part in self.parts)

    def given_away(self) -> bool:
        """Return whether any of its blocks was reallocated."""
        return any(part.blocks.given_away() for part in self.parts)

    def reads(self, block_ids: Collection[int]) -> bool:
        """Return whether it reads one of these blocks."""
        return any(part.reads(block_ids) for part in self.parts)

    def keep_back(self) -> None:
        """Do not publish it, whatever the ranks report, without counting a failure."""
        self.epoch = -1

    def disown(self) -> None:
        """Extend no prefix with its blocks."""
        for part in self.parts:
            part.owners.clear()


@dataclass(slots=True, eq=False, kw_only=True)
class TierPending(Pending):
    """A fetch or a spill; `missing` are indices of keys that some rank could not copy.

    Bound: an entry for each of its slots.
    """

    message: TierTransfer
    lease: Lease
    missing: set[int]

    def settled(self, outcome: Outcome) -> bool:
        """Record the report of a rank; return whether it was the last one."""
        self.missing.update(outcome.missing)
        return self.reported(outcome.rank, outcome.failure)


@dataclass(slots=True, eq=False)
class FetchBatch:
    """The fetches begun together for one request, which are timed together."""

    tier: int  # the farthest tier that they read, counted from 1
    num_slots: int
    num_left: int  # unfinished fetches
    is_whole: bool = True  # no block was missing
    sent_s: float | None = None  # the time of their plan

    def sent(self, now_s: float) -> None:
        """A plan names it."""
        self.sent_s = now_s

    def ended(self, *, is_whole: bool) -> bool:
        """One of its fetches has ended; return whether it was the last one."""
        self.is_whole &= is_whole
        self.num_left -= 1
        return not self.num_left


class Write(NamedTuple):
    """A block to be written to tiers from its slot; see `TierTransfer`."""

    slot: int
    group_idx: int
    block_hash: bytes
    origin: int
    targets: int = ALL_TIERS
    num_failures: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Spill(TierPending):
    """A transfer from host slots to tiers. Bound: an entry for each of its slots."""

    writes: Sequence[Write]  # one per key
    epoch: int  # see `Spills`; failed writes of an earlier epoch are not retried
    # By index of its keys, the tiers to retry; 0 if a rank was refused for good.
    again: dict[int, int] = field(default_factory=dict)

    def settled(self, outcome: Outcome) -> bool:
        for place, tiers in zip(outcome.missing, outcome.again or repeat(ALL_TIERS), strict=False):
            before = self.again.get(place, tiers)
            self.again[place] = before | tiers if before and tiers else 0
        return TierPending.settled(self, outcome)


@dataclass(slots=True, eq=False, kw_only=True)
class Fetch(TierPending):
    """A piece of a batch. Bound: the requests that vLLM has."""

    epoch: int  # of the directory at its plan; a fetch from before a reset is not published
    batch: FetchBatch
    # Requests that wait for it, or have not used it yet. Its lease is theirs.
    users: RequestQueue = field(default_factory=RequestQueue)
    first_token: int  # the token that a request can reach without it, after all earlier pieces

    @property
    def is_whole(self) -> bool:
        """Return whether every rank has all blocks."""
        return not self.ranks_left and self.failure is None and not self.missing
