"""Spills: asynchronous writes of host blocks to the tiers.

A block that waits to be spilled has no lease. When it is next, it is looked up again; if the host
has evicted it, it is dropped and counted. So the queue is no longer than the pool, and blocks
nothing. Few spills of bounded size are in flight, and lease their slots until all ranks have read
them.

If tiers take evicted blocks only, the next victims are checked while free slots are few; if blocks
with hits only, the whole prefix of each load, since its end is useless without its head. Blocks
fetched from a tier are spilled at once to the nearer tiers that keep copies.

A failed write is retried in the tier that failed (`Retries`). A refused one is not: it would evict
other engines' objects, or be refused again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, repeat
from typing import TYPE_CHECKING, Final

from safe_offload.observe.counters import FAILED_SPILLS, Count
from safe_offload.protocol import ALL_TIERS, Keys, TierTransfer, ids_of
from safe_offload.scheduler.cache.leases import Lease, LeaseKind
from safe_offload.scheduler.pending import Ledger, Spill, Store, Write

if TYPE_CHECKING:
    from safe_offload.scheduler.pending import Fetch
    from safe_offload.scheduler.tiers.context import TierContext

IN_FLIGHT_MAX = 2
"""Maximum number of spills: while one is written, the next is known."""
BATCH_BYTES_MAX = 64 << 20
"""Of one spill, over all ranks."""
BATCH_SHARE = 16
"""A spill leases at most one slot in this many; the same number of next victims is checked."""
AWAKE_S = 10.0
"""After this time without a write or a new block, an idle engine stops stepping for retries; they
continue with the next request."""
AHEAD_MAX = 4096
"""Slots checked per step: a millisecond."""
PAUSES_S: Final = (0.0, 1.0, 4.0, 16.0, 64.0)
"""Pauses before each retry. They outlast an open circuit breaker and a restart of a server."""
WAITING_MAX: Final = 1 << 16
"""Maximum number of waiting blocks; further failed ones are not retried."""


class Retries:
    """Failed writes that wait for their next try, without a lease.

    A hit has no gaps: one block lost at the head of a prompt costs all blocks after it. So retries
    go before new blocks, the oldest first, except while tiers take nothing.

    Bound: `WAITING_MAX`.
    """

    def __init__(self) -> None:
        self._waiting: tuple[dict[int, tuple[float, Write]], ...] = tuple({} for _ in PAUSES_S)

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def add(self, write: Write, tiers: int, now_s: float) -> bool:
        """Schedule a retry, in place of one of the same slot; False if there are too many."""
        number = write.num_failures
        if number >= len(PAUSES_S) or len(self) >= WAITING_MAX:
            return False
        write = write._replace(targets=tiers, num_failures=number + 1)
        self._waiting[number].pop(write.slot, None)
        self._waiting[number][write.slot] = now_s + PAUSES_S[number], write
        return True

    @property
    def due_s(self) -> float:
        """Return the end of the first pause."""
        firsts = (next(iter(waiting.values()))[0] for waiting in self._waiting if waiting)
        return min(firsts, default=float("inf"))

    def take(self, count: int, now_s: float) -> list[Write]:
        """Remove and return up to `count` writes whose pauses have ended."""
        due: list[Write] = []
        for waiting in reversed(self._waiting):
            for slot, (due_s, write) in list(islice(waiting.items(), count - len(due))):
                if due_s > now_s:
                    break
                del waiting[slot]
                due.append(write)
        return due

    def discard(self, slots: Iterable[int]) -> int:
        """Drop the writes of these slots; return their number."""
        found = [(waiting, waiting.keys() & slots) for waiting in self._waiting if waiting]
        for waiting, gone in found:
            for slot in gone:
                del waiting[slot]
        return sum(len(gone) for _, gone in found)

    def clear(self) -> None:
        """Drop all writes."""
        for waiting in self._waiting:
            waiting.clear()


class Spills:
    """Blocks that wait to be spilled, and spills in flight.

    The epoch is the number of times that the queue was cleared. The origin of a block is the number
    of the tier that has it; 0 if none is known to.

    Bound: an entry for each slot.
    """

    def __init__(self, context: TierContext) -> None:
        configs, slots = context.configs, context.hits.slots
        self._slots = slots
        self._directory = context.hits.directory
        self._leases = context.leases
        self._num_ahead = min(max(1, slots.num_slots // BATCH_SHARE), AHEAD_MAX)
        num_in_bytes = BATCH_BYTES_MAX // max(1, context.slot_bytes)
        self._batch_max = max(1, min(num_in_bytes, self._num_ahead))
        self._counters = context.counters
        store = configs[0].store
        self._evicted_only, self._hit_only = store == "evicted", store == "hit"
        # Each plan checks the next victims, or the blocks with hits.
        self.looks = self._evicted_only or self._hit_only
        self._loads, self._geometry = context.loads, context.hits.geometry
        # The nearest tier that keeps what comes from those farther away; the last one if none does.
        self._nearest_kept = next((n for n, c in enumerate(configs, 1) if c.keep), len(configs))
        self._queue: dict[int, tuple[int, bytes, int]] = {}
        self.retries = Retries()  # read only outside
        self._epoch, self._now_s, self._moved_s = 0, 0.0, 0.0
        self._writes_succeed = True
        self.ledger: Ledger[Spill] = Ledger(context.transfer_ids, context.num_ranks)
        self._spilled: dict[int, tuple[bytes, int]] = {}
        self._seen_version = -1

    def __repr__(self) -> str:
        return f"Spills({len(self._queue)} wait, {len(self.retries)} again, {self.ledger!r})"

    def __len__(self) -> int:
        return len(self.ledger)

    def stored(self, store: Store) -> None:
        """A complete store is about to be published."""
        if store.failure is not None or store.epoch != self._directory.epoch or self.looks:
            return
        for part in store.parts:
            slots = part.lease.slots
            # What they held before.
            num_evicted = len(self._queue.keys() & slots) + self.retries.discard(slots)
            if num_evicted:
                self._counters[Count.DROPPED_SPILLS_EVICTED] += num_evicted
            keys = zip(repeat(part.blocks.group_idx), part.blocks.hashes, repeat(0))
            self._queue.update(zip(slots, keys, strict=False))

    def fetched(self, fetch: Fetch, slots: Iterable[int]) -> None:
        """A fetch has published blocks in these slots."""
        is_kept = fetch.batch.tier > self._nearest_kept
        if not (is_kept or self.looks):
            return
        directory, message = self._directory, fetch.message
        origins = dict(zip(message.slot_ids, message.origins, strict=True))
        for slot in slots:
            block_hash = directory.hashes[slot]
            if block_hash is None:
                continue
            origin = origins[slot] if origins[slot] > self._nearest_kept else 0
            if self.looks:
                self._spilled[slot] = block_hash, origin
            elif origin:
                # What it held before.
                is_evicted = self._queue.pop(slot, None) is not None
                num_evicted = is_evicted + self.retries.discard([slot])
                self._counters[Count.DROPPED_SPILLS_EVICTED] += num_evicted
                self._queue[slot] = directory.group_of(slot), block_hash, origin

    def _look_ahead(self) -> None:
        slots, directory = self._slots, self._directory
        if slots.num_empty >= self._num_ahead or directory.version == self._seen_version:
            return
        self._seen_version = directory.version
        self._offer(slots.next_evicted(self._num_ahead))

    def _look_at_hits(self) -> None:
        """Queue the prefixes of the new loads that tiers do not have."""
        for load in self._loads.new:
            request, end = load.owner.request, load.end_hash * self._geometry.hash_block_size
            for group_idx in self._geometry.group_ids:
                num_blocks = end // self._geometry.group_block_sizes[group_idx]
                hashes = self._geometry.hashes_of(request, group_idx)[:num_blocks]
                found = map(self._directory.tables[group_idx].get, hashes)
                self._offer(self._directory.filled([slot for slot in found if slot is not None]))

    def _offer(self, slots: Iterable[int]) -> None:
        """Queue the slots whose blocks tiers do not have."""
        directory, hashes, spilled = self._directory, self._directory.hashes, self._spilled
        for slot in slots:
            block_hash = hashes[slot]
            if block_hash is None:
                continue
            known_hash, origin = spilled.get(slot, (b"", 0))
            if known_hash != block_hash:
                self._queue[slot] = directory.group_of(slot), block_hash, 0
            elif origin:
                self._queue[slot] = directory.group_of(slot), block_hash, origin

    def plan(self, generation: str, now_s: float) -> tuple[TierTransfer, ...]:
        """Return new spills; while one is in flight, another starts at full size only."""
        self._now_s = now_s
        if self._hit_only and self._loads.new:
            self._look_at_hits()
        num_under_way = len(self.ledger)
        if num_under_way >= IN_FLIGHT_MAX:
            return ()
        if self._evicted_only:
            self._look_ahead()
        if num_under_way and len(self._queue) < self._batch_max:
            return ()
        if not self._queue and self.retries.due_s > now_s:
            return ()
        spill = self._make(generation)
        if spill is None:
            return ()
        self.ledger.new.append(spill)
        return (spill.message,)

    def _make(self, generation: str) -> Spill | None:
        """Make a spill of the first waiting blocks that the host still has, and lease them.

        While tiers take nothing, new blocks go first: each is tried once, soon.
        """
        queue, find = self._queue, self._directory.find
        num_first = 0 if self._writes_succeed else len(queue)
        waiting = self.retries.take(max(0, self._batch_max - num_first), self._now_s)
        for slot in list(islice(queue, self._batch_max - len(waiting))):
            waiting.append(Write(slot, *queue.pop(slot)))
        found: list[Write] = []
        for entry in waiting:
            slot, group_idx, block_hash = entry[:3]
            if block_hash in self._directory.private:
                continue
            if find(group_idx, block_hash) == slot:
                found.append(entry)
            else:
                self._counters[Count.DROPPED_SPILLS_EVICTED] += 1
        num_forgets, num_found = self._directory.num_forgets, len(found)
        lease = self._leases.hold(LeaseKind.SPILL, [entry[0] for entry in found])
        if self._directory.num_forgets != num_forgets:  # another engine has overwritten some
            found = [entry for entry in found if find(entry[1], entry[2]) == entry[0]]
            lease.keep(LeaseKind.SPILL, [entry[0] for entry in found])
            self._counters[Count.DROPPED_SPILLS_EVICTED] += num_found - len(found)
        if not found:
            lease.release()
            return None
        slots, group_ids, hashes, origins, targets, failures = zip(*found, strict=True)
        if 0 in failures:
            self._moved_s = self._now_s
        if any(failures):
            self._counters[Count.RETRIED_SPILL_BLOCKS] += len(found) - failures.count(0)
        if self.looks:  # what tiers will not take is not offered again while the host has it
            self._spilled.update(zip(slots, zip(hashes, repeat(0)), strict=True))
        transfer_id, ranks = self.ledger.open()
        known = bytes(origins) if any(origins) else b""
        wanted = bytes(targets) if any(failures) else b""
        keys = Keys(bytes(group_ids), hashes)
        quotas = self._slots.quotas
        return Spill(
            transfer_id=transfer_id,
            ranks_left=ranks,
            message=TierTransfer(
                transfer_id,
                keys,
                ids_of(slots),
                generation,
                known,
                targets=wanted,
                marks=ids_of(quotas.marks_of(slots)) if quotas is not None else (),
            ),
            lease=lease,
            missing=set(),
            writes=found,
            epoch=self._epoch,
        )

    def sent(self) -> None:
        """The plan with the new spills has been sent."""
        self.ledger.sent()

    def settle(self, spill: Spill) -> None:
        """Complete a spill that every rank has reported, and release its slots."""
        self.ledger.remove(spill)
        counters, again = self._counters, spill.again
        if spill.failure is not None:
            counters[FAILED_SPILLS[spill.failure]] += 1
            again = dict.fromkeys(range(len(spill.writes)), ALL_TIERS)
        waiting, dropped = set[int](), Count.DROPPED_SPILLS_REFUSED
        if spill.epoch != self._epoch:
            dropped = Count.DROPPED_SPILLS_EVICTED
        elif again:
            waiting = self._try_again(spill.writes, again)
        num_written = len(spill.writes) - len(again)
        self._writes_succeed = num_written > 0
        if num_written:
            self._moved_s = self._now_s
        num_kept = sum(
            write.origin > 0 for place, write in enumerate(spill.writes) if place not in again
        )
        counters[Count.KEPT_BLOCKS] += num_kept
        counters[Count.SPILLED_BLOCKS] += num_written - num_kept
        counters[dropped] += len(again) - len(waiting)
        if self._evicted_only:
            spill.lease.release(first=[s for s in spill.lease.slots if s not in waiting])
        else:
            spill.lease.release()

    def _try_again(self, writes: Sequence[Write], again: Mapping[int, int]) -> set[int]:
        waiting: set[int] = set()
        for place, write in enumerate(writes):
            tiers = again.get(place, 0)
            if not tiers:
                continue
            if self.retries.add(write, tiers, self._now_s):
                waiting.add(write.slot)
            elif self._hit_only:
                self._spilled.pop(write.slot, None)  # no tier has it: the next hit offers it again
        return waiting

    def forget(self) -> None:
        """Drop the waiting blocks; spills in flight continue."""
        self._queue.clear()
        self.retries.clear()
        self._epoch += 1
        self._spilled.clear()

    def give_up(self) -> None:
        """After an internal error, drop the spills of no worker."""
        self.forget()
        self.ledger.give_up()

    @property
    def leases(self) -> list[Lease]:
        """Of the spills in flight."""
        return [spill.lease for spill in self.ledger.in_flight.values()]

    @property
    def is_waiting(self) -> bool:
        """Return whether blocks wait for a spill that a plan can start."""
        return bool(self._queue) and not self.ledger.in_flight

    @property
    def retries_soon(self) -> bool:
        """Return whether an idle engine keeps stepping for retries."""
        is_moving = self._now_s - self._moved_s <= AWAKE_S
        return is_moving and bool(len(self.retries)) and not self.ledger.in_flight

    @property
    def due_s(self) -> float:
        """Return when to plan again, if nothing happens before."""
        return min(self.retries.due_s, self._moved_s + AWAKE_S if self.retries_soon else math.inf)
