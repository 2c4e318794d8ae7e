"""Fetches: from blocks of a tier to published slots.

The fetch of a request is split into pieces in the order of its tokens, so that a late rest does not
hold up the first pieces. A piece is published when every rank has it; blocks missing on a rank are
dropped. The slots stay leased until each request that waits for the piece has matched, stopped
waiting or ended, and until no rank can write to them any more. These leases are limited to a share
of all slots (I11), so that a herd of waiting requests cannot flush the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from safe_offload.errors import InvariantError
from safe_offload.observe.counters import FAILED_FETCHES, Count
from safe_offload.protocol import Keys, TierTransfer, ids_of
from safe_offload.scheduler.cache.leases import Lease, LeaseKind
from safe_offload.scheduler.pending import Fetch, FetchBatch, Ledger

if TYPE_CHECKING:
    from safe_offload.scheduler.requests import RequestState
    from safe_offload.scheduler.tiers.context import TierContext
    from safe_offload.scheduler.tiers.tiered_hits import Stage, TierBlock

SHARE = 4
"""Fetches lease at most one in this many usable slots."""
NUM_PIECES = 16
PIECE_BLOCKS_MIN = 16
"""Minimum blocks of a piece, as a tier reads several at once; fewer of large blocks."""
PIECE_BYTES_MIN = 8 << 20
"""Over all ranks."""


class Fetches:
    """All fetches whose slots are leased. Bound: the share of the slots that fetches may take."""

    def __init__(self, context: TierContext) -> None:
        self._hits = context.hits
        self._leases = context.leases
        num_large = max(1, PIECE_BYTES_MIN // max(1, context.slot_bytes))
        self._piece_blocks_min = min(PIECE_BLOCKS_MIN, num_large)
        self._counters = context.counters
        self.ledger: Ledger[Fetch] = Ledger(context.transfer_ids, context.num_ranks)
        self._by_slot: dict[int, Fetch] = {}

    def __repr__(self) -> str:
        return f"Fetches({self.ledger!r}, {len(self._by_slot)} slots)"

    def __len__(self) -> int:
        return len(self.ledger)

    def num_slots_left(self, user: RequestState) -> int:
        """Return the number of slots that a fetch of a request may use now."""
        slots, salt = self._hits.slots, user.request.cache_salt
        return min(slots.num_usable // SHARE - len(self._by_slot), slots.num_grantable(salt))

    def has_share(self, user: RequestState) -> bool:
        """Return whether fetches have any share: a tiny pool has none."""
        return self._hits.slots.num_in_reach(user.request.cache_salt) >= SHARE

    def begin(self, stages: Sequence[Stage], user: RequestState, generation: str) -> list[Fetch]:
        """Fetch stages of at most `num_slots_left` blocks in pieces; return these.

        Only the first blocks are fetched if a shared pool grants fewer slots.
        """
        num_blocks = sum(len(stage.blocks) for stage in stages)
        num_in_piece = max(-(-num_blocks // NUM_PIECES), self._piece_blocks_min)
        pieces = [
            (stage.first_token, stage.blocks[start : start + num_in_piece])
            for stage in stages
            for start in range(0, len(stage.blocks), num_in_piece)
        ]
        granted = []
        for first_token, blocks in pieces:
            lease = self._leases.grant(LeaseKind.FETCH, len(blocks), user.request.cache_salt)
            if lease is None:  # other engines of a pool read what is free
                break
            granted.append((first_token, blocks[: len(lease.slots)], lease))
        wanted = [block for _, blocks, _ in granted for block in blocks]
        batch = FetchBatch(max((b.tier for b in wanted), default=0), len(wanted), len(granted))
        fetches = []
        for first_token, blocks, lease in granted:
            self._begin_store(blocks, lease, user)
            keys = Keys(bytes(b.group_idx for b in blocks), tuple(b.block_hash for b in blocks))
            tiers, slots = bytes(b.tier for b in blocks), ids_of(lease.slots)
            transfer_id, ranks = self.ledger.open()
            fetch = Fetch(
                transfer_id=transfer_id,
                ranks_left=ranks,
                message=TierTransfer(transfer_id, keys, slots, generation, tiers),
                lease=lease,
                missing=set(),
                epoch=self._hits.directory.epoch,
                batch=batch,
                first_token=blocks[0].first_token if self._hits.geometry.is_plain else first_token,
            )
            fetch.users.add(user)
            self._by_slot.update(dict.fromkeys(lease.slots, fetch))
            fetches.append(fetch)
        self.ledger.new.extend(fetches)
        return fetches

    def _begin_store(self, blocks: Sequence[TierBlock], lease: Lease, user: RequestState) -> None:
        for group_idx in sorted({block.group_idx for block in blocks}):
            pairs = zip(blocks, lease.slots, strict=True)
            of_group = [(slot, b.block_hash) for b, slot in pairs if b.group_idx == group_idx]
            slots, hashes = zip(*of_group, strict=True)
            self._hits.directory.begin_store(slots, group_idx, hashes, {}, [(user, 0)])

    def under_way(self, slots: Iterable[int]) -> list[Fetch]:
        """Return the unfinished fetches into any of these slots, each once."""
        by_slot = self._by_slot
        if not by_slot:
            return []
        found = dict.fromkeys(by_slot[slot] for slot in slots if slot in by_slot)
        return [fetch for fetch in found if fetch.ranks_left]

    def share(self, fetches: Iterable[Fetch], user: RequestState) -> None:
        """Let another request wait for these fetches, too."""
        for fetch in fetches:
            fetch.users.add(user)

    def release(self, fetches: Iterable[Fetch], user: RequestState) -> None:
        """Remove a request from these fetches."""
        for fetch in fetches:
            fetch.users.discard(user)
            if not (fetch.users or fetch.ranks_left):
                self._free(fetch)

    def _free(self, fetch: Fetch) -> None:
        for slot in fetch.lease.slots:
            self._by_slot.pop(slot, None)
        fetch.lease.release()

    def plan(self) -> tuple[TierTransfer, ...]:
        """Return the fetches begun since the last `sent`."""
        return tuple(fetch.message for fetch in self.ledger.new)

    def sent(self, now_s: float) -> None:
        """The plan with the new fetches has been sent."""
        for fetch in self.ledger.sent():
            fetch.batch.sent(now_s)

    def settle(self, fetch: Fetch) -> list[int]:
        """Publish the blocks of a fetch that every rank has reported; return their slots."""
        self.ledger.remove(fetch)
        slots, come = fetch.lease.slots, []
        is_current = fetch.epoch == self._hits.directory.epoch
        if fetch.failure is not None:
            self._counters[FAILED_FETCHES[fetch.failure]] += 1
        elif is_current:
            missing = fetch.missing
            come = [slot for i, slot in enumerate(slots) if i not in missing] if missing else slots
        if is_current:
            self._counters[Count.FETCHED_BLOCKS] += len(come)
            self._counters[Count.MISSED_BLOCKS] += len(slots) - len(come)
            if come:
                self._hits.directory.publish(come)
        if len(come) < len(slots):
            lost = set(slots).difference(come)
            if is_current:
                self._hits.slots.forget([slot for slot in slots if slot in lost])
            for slot in lost:
                self._by_slot.pop(slot, None)
            fetch.lease.keep(LeaseKind.FETCH, come)
        if not fetch.users:
            self._free(fetch)
        return come

    def give_up(self) -> None:
        """After an internal error, publish nothing and drop the fetches of no worker."""
        self.ledger.give_up()
        self._by_slot.clear()
        for fetch in self.ledger.in_flight.values():
            fetch.fail()
            fetch.users.clear()
            self._by_slot.update(dict.fromkeys(fetch.lease.slots, fetch))

    @property
    def leases(self) -> list[Lease]:
        """Of the fetches in flight."""
        return [fetch.lease for fetch in self.ledger.in_flight.values()]

    def check_invariants(self) -> None:
        """Check that fetches hold no more than their share (I11)."""
        if len(self._by_slot) > self._hits.slots.num_usable // SHARE:
            raise InvariantError("I11", "fetches hold more than their share of the host slots")
