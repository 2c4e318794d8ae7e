"""Transfers of all kinds, from their planning until every rank has reported them."""

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
    """A transfer that some rank has not reported; its state changes by its methods only.

    Bound: an entry for each rank.

    Attributes:
        ranks_left: ranks that have not reported it.
        failure: the first reason that a rank reported, or that its bytes cannot be trusted.
    """

    transfer_id: int
    ranks_left: set[int]
    failure: FailureReason | None = None

    def reported(self, rank: int, failure: FailureReason | None) -> bool:
        """Note what a rank has reported; return whether it was the last one."""
        self.ranks_left.discard(rank)
        if self.failure is None:
            self.failure = failure
        return not self.ranks_left

    def fail(self) -> None:
        """Its bytes are not to be used, whatever the ranks report."""
        if self.failure is None:
            self.failure = FailureReason.SOURCE_LOST


T = TypeVar("T", bound=Pending)


class Ledger(Generic[T]):
    """Transfers of one kind: those for the next plan, and those in flight.

    Its state: `new`, to which its owner adds, and, by transfer id, `in_flight`.

    Bound: that of its owner, who opens a load for each request that waits, stores up to a number of
    blocks, fetches up to a number of slots, and a few spills.

    Args:
        transfer_ids: never gives the same twice.
    """

    def __init__(self, transfer_ids: Iterable[int], num_ranks: int) -> None:
        self._transfer_ids = iter(transfer_ids)
        self._num_ranks = num_ranks
        self.new: list[T] = []
        self.in_flight: dict[int, T] = {}

    def __repr__(self) -> str:
        return f"{len(self.new)} new, {len(self.in_flight)} in flight"

    def open(self) -> tuple[int, set[int]]:
        """Return the id of a new transfer, and the ranks that will report it."""
        return next(self._transfer_ids), set(range(self._num_ranks))

    def sent(self) -> list[T]:
        """The workers have been told of the new ones; return these."""
        sent = self.new
        if sent:
            self.new = []
            for transfer in sent:
                self.in_flight[transfer.transfer_id] = transfer
        return sent

    def get(self, transfer_id: int) -> T | None:
        """Return the transfer of that id, if it is in flight."""
        return self.in_flight.get(transfer_id)

    def remove(self, transfer: T) -> None:
        """Every rank has reported it."""
        del self.in_flight[transfer.transfer_id]

    def give_up(self) -> list[T]:
        """After an internal error: forget those that no worker copies, and return them."""
        gone = [*self.new, *(t for t in self.in_flight.values() if not t.ranks_left)]
        self.new = []
        self.in_flight = {i: t for i, t in self.in_flight.items() if t.ranks_left}
        return gone

    def __len__(self) -> int:
        return len(self.in_flight)


@dataclass(slots=True, eq=False, kw_only=True)
class Load(Pending):
    """A load; requests that want the same may wait for it.

    Attributes:
        owner: the request that waits for it.
        hashes: of the owner's blocks, from its first token on.
        first_hash, end_hash: which of these blocks it brings.
        has_ended: every rank has reported it, or it was given up.
        sent_s: when the plan was made that names it.
    """

    transfer: Transfer
    lease: Lease
    owner: RequestState
    num_tokens: int
    hashes: Sequence[bytes]
    first_hash: int
    end_hash: int
    has_ended: bool = False
    sent_s: float | None = None

    def sent(self, now_s: float | None) -> None:
        """A plan names it."""
        self.sent_s = now_s

    def end(self) -> None:
        """Every rank has reported it, or it is given up."""
        self.has_ended = True

    @property
    def is_under_way(self) -> bool:
        """Whether the owner still waits for it."""
        return not (self.has_ended or self.owner.finished)

    @property
    def has_landed(self) -> bool:
        """Whether the owner has got what it brings."""
        return self.has_ended and self.failure is None and not self.owner.finished


@dataclass(slots=True, eq=False)
class Part:
    """What a store keeps of one KV cache group.

    Bound: an owner for each of its blocks.

    Attributes:
        lease: the slots that it writes, one for each of them.
        owners: the requests whose prefixes they extend, with how many of the blocks, in the order
            of these; the rest belongs to none.
    """

    blocks: BlockSet
    lease: Lease
    owners: list[tuple[RequestState, int]]

    def reads(self, block_ids: Collection[int]) -> bool:
        """Whether it keeps one of these blocks."""
        return any(block.block_id in block_ids for block in self.blocks.blocks)


@dataclass(slots=True, eq=False, kw_only=True)
class Store(Pending):
    """A store; it is never published once it has failed.

    Bound: a part for each KV cache group of the requests that vLLM has.

    Attributes:
        parts: what it keeps, of all requests of its step.
        epoch: of the directory when it was planned; a store from before a reset is not published.
    """

    parts: list[Part]
    epoch: int

    @property
    def num_blocks(self) -> int:
        """How many blocks it keeps."""
        return sum(len(part.lease.slots) for part in self.parts)

    def given_away(self) -> bool:
        """Whether any of the blocks that it reads was given away."""
        return any(part.blocks.given_away() for part in self.parts)

    def reads(self, block_ids: Collection[int]) -> bool:
        """Whether it reads one of these blocks."""
        return any(part.reads(block_ids) for part in self.parts)

    def keep_back(self) -> None:
        """It is not published, whatever the ranks report, and is no failure."""
        self.epoch = -1

    def disown(self) -> None:
        """No prefix is extended by what it keeps."""
        for part in self.parts:
            part.owners.clear()


@dataclass(slots=True, eq=False, kw_only=True)
class TierPending(Pending):
    """A fetch or a spill.

    Bound: an entry for each of its slots.

    Attributes:
        missing: places in its keys that some rank could not fetch, or not spill.
    """

    message: TierTransfer
    lease: Lease
    missing: set[int]

    def settled(self, outcome: Outcome) -> bool:
        """Note what a rank has reported; return whether it was the last one."""
        self.missing.update(outcome.missing)
        return self.reported(outcome.rank, outcome.failure)


@dataclass(slots=True, eq=False)
class FetchBatch:
    """All that is fetched for one request at one time, so that it can be timed.

    Attributes:
        tier: the farthest that something comes from, counted from 1.
        num_left: fetches of it that have not ended.
        is_whole: nothing of it was missing.
        sent_s: when the plan was made that names it.
    """

    tier: int
    num_slots: int
    num_left: int
    is_whole: bool = True
    sent_s: float | None = None

    def sent(self, now_s: float) -> None:
        """A plan names it."""
        self.sent_s = now_s

    def ended(self, *, is_whole: bool) -> bool:
        """A fetch of it has ended; return whether that was the last one."""
        self.is_whole &= is_whole
        self.num_left -= 1
        return not self.num_left


class Write(NamedTuple):
    """A block in a slot that is to be written to tiers.

    Attributes:
        origin: the tier that has it, see `TierTransfer`.
        targets: likewise.
        num_failures: how often that has failed.
    """

    slot: int
    group_idx: int
    block_hash: bytes
    origin: int
    targets: int = ALL_TIERS
    num_failures: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Spill(TierPending):
    """What is written to tiers.

    Bound: an entry for each of its slots.

    Attributes:
        writes: what each of its keys is.
        epoch: see `Spills`; what failed of one of before is not tried again.
        again: by place in its keys, the tiers to write it to again; 0 if some rank has been refused
            for good.
    """

    writes: Sequence[Write]
    epoch: int
    again: dict[int, int] = field(default_factory=dict)

    def settled(self, outcome: Outcome) -> bool:
        for place, tiers in zip(outcome.missing, outcome.again or repeat(ALL_TIERS), strict=False):
            before = self.again.get(place, tiers)
            self.again[place] = before | tiers if before and tiers else 0
        return TierPending.settled(self, outcome)


@dataclass(slots=True, eq=False, kw_only=True)
class Fetch(TierPending):
    """A part of a batch.

    Bound: the requests that vLLM has.

    Attributes:
        epoch: of the directory when it was planned; what comes after a reset is not published.
        users: requests that wait for it, or for which it has come. Its lease is theirs.
        first_token: up to there a request can go without it, if all before it has come.
    """

    epoch: int
    batch: FetchBatch
    users: RequestQueue = field(default_factory=RequestQueue)
    first_token: int

    @property
    def is_whole(self) -> bool:
        """Whether every rank has got all of it."""
        return not self.ranks_left and self.failure is None and not self.missing
