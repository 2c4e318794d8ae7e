"""Pins: prompts that stay on the host for a time after their last use, at a client's request.

A pin leases the blocks of a hit at the end of its prompt and, if the host has them, of a hit at the
end of its output, also while they are being stored. All pins together hold at most a share of the
slots; of a prompt without enough room, the head is pinned. Shared prefixes are leased once: slots
form a tree, as prompts do, so adding or removing a pin only touches its own part.

The time of a pin restarts when the last request that starts with its prefix has ended. The clock is
the time of the last plan: nothing is evicted before the next one, and a busy engine plans in every
step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress, count, groupby
from operator import ne
from typing import TYPE_CHECKING, Any

from safe_offload.errors import InvariantError
from safe_offload.observe.counters import Count
from safe_offload.scheduler.cache.leases import Lease, LeaseBook, LeaseKind
from safe_offload.scheduler.cache.slots import SlotPool
from safe_offload.scheduler.feature import Feature
from safe_offload.scheduler.limits import PIN_KEY
from safe_offload.scheduler.requests import RequestQueue, RequestState

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from safe_offload.scheduler.planner import Planner
    from safe_offload.scheduler.tiers.tiered_hits import Present, TieredHits

PINS_MAX = 4096
TRIES_MAX = 8
"""Tries to pin slots that other engines of a pool overwrite meanwhile."""

_FOREIGN_KEYS = ("do_remote_prefill", "do_remote_decode")
"""Keys of responses that belong to another connector."""


class Stretch:
    """A node of the tree: slots held by the same pins, under one lease; only `Pins` changes it.

    Bound: `PINS_MAX` for all together.

    Attributes:
        before: its parent; None at the start of prompts.
        after: its children, by their first slots.
        num_uses: pins that end with it, and children.
    """

    __slots__ = ("after", "before", "lease", "num_uses")

    def __init__(self, lease: Lease, before: Stretch | None) -> None:
        self.lease, self.before, self.num_uses = lease, before, 0
        self.after: dict[int, Stretch] = {}


class Pin:
    """A pinned prefix; only `Pins` changes it.

    Bound: an end for each slot of it.

    Attributes:
        key: the last hash of the pinned prefix.
        ends: the last stretch by KV cache group, of the prompt and of its outputs.
        pin_s: its duration after the last use.
        until_s: its end; infinite while it is used, from the first plan on.
    """

    def __init__(self, key: bytes, pin_s: float) -> None:
        self.key, self.pin_s = key, pin_s
        self.ends: dict[Stretch, None] = {}
        self.until_s, self.num_users = 0.0, 0

    def last_slots(self) -> list[int]:
        """Return the last slot of each end: all are of one tenant, as salts keep blocks apart."""
        found = []
        for end in self.ends:
            stretch: Stretch | None = end
            while stretch is not None and not stretch.lease.slots:  # they were forgotten
                stretch = stretch.before
            found += [] if stretch is None else stretch.lease.slots[-1:]
        return found


class Pins:
    """All pins, which hold at most a share of the slots.

    Bound: `PINS_MAX` pins, `num_slots_max` slots, and the requests that vLLM has.
    """

    def __init__(self, slots: SlotPool, leases: LeaseBook, share: float) -> None:
        self._slots, self._leases, self._share = slots, leases, share
        self._pins: dict[bytes, Pin] = {}
        self._stretches: dict[Stretch, None] = {}
        self._first: dict[int, Stretch] = {}
        self._counts: Counter[int] = Counter()
        self._users = RequestQueue()
        self._used: set[Pin] = set()
        self._now_s, self._due_s = 0.0, math.inf
        self._num_forgets = 0

    def __repr__(self) -> str:
        return f"Pins({len(self)} pins, {self.num_slots} slots)"

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_slots(self) -> int:
        """The number of pinned slots, each counted once."""
        return len(self._counts)

    @property
    def num_slots_max(self) -> int:
        """The maximum number of pinned slots."""
        return int(self._share * self._slots.num_usable)

    # ---- what requests ask for -----------------------------------------------------------------

    def cut(
        self, find: Callable[[int], Any], end: int, block_size: int
    ) -> tuple[int, Sequence[int]]:
        """Return the tokens and the slots of the longest hit that fits.

        Args:
            find: returns the longest hit up to a token, with `num_tokens` and `slots`, or None.
            end: the first token to try.
            block_size: of a hash, in tokens.
        """
        while (hit := find(end)) is not None:
            new = [slot for slot in dict.fromkeys(hit.slots) if slot not in self._counts]
            num_over = self.num_slots + len(new) - self.num_slots_max
            if self._slots.quotas is not None:
                num_over = max(num_over, self._slots.quotas.num_overpinned(new))
            if num_over <= 0:
                return hit.num_tokens, hit.slots
            # Each block of a hash is a slot in one group, or in several.
            end = hit.num_tokens - block_size * max(
                1, num_over // len(self._slots.directory.tables)
            )
        return 0, ()

    def add(self, key: bytes, slots: Sequence[int], pin_s: float) -> bool:
        """Pin slots; return False, with nothing changed, if there are too many pins.

        Args:
            slots: filled, or being filled.
            pin_s: the duration; of slots pinned already, the longer one counts.
        """
        old = self._pins.get(key)
        if old is None and len(self) >= PINS_MAX:
            return False
        pin = self._pins[key] = old or Pin(key, pin_s)
        pin.pin_s = max(pin.pin_s, pin_s)
        runs = groupby(dict.fromkeys(slots), self._slots.directory.group_of)
        for run in [list(run) for _, run in runs][::-1]:
            end = self._reach(run)
            if end not in pin.ends:
                pin.ends[end] = None
                end.num_uses += 1
        self._begin(pin)
        return True

    def use(self, user: RequestState, hashes: Iterable[bytes]) -> None:
        """Let a new request use the pins that its prompt starts with, until it ends."""
        found = [self._pins[block_hash] for block_hash in hashes if block_hash in self._pins]
        if found:
            user.pins = found
            self._users.add(user)
            self._used.update(found)
            for pin in found:
                pin.num_users += 1

    def end(self, user: RequestState) -> None:
        """A request has ended."""
        pins, user.pins = user.pins, ()
        for pin in pins:
            pin.num_users -= 1
            self._begin(pin)

    def _begin(self, pin: Pin) -> None:
        """Restart the time of a pin, unless a request uses it."""
        if pin.num_users and pin.until_s == math.inf:
            return
        last_s = pin.until_s if pin.until_s < math.inf else 0.0
        pin.until_s = max(last_s, self._now_s + pin.pin_s)
        self._due_s = min(self._due_s, pin.until_s)

    def remove(self, hashes: Iterable[bytes]) -> None:
        """End all pins of prefixes of a prompt."""
        for key in [block_hash for block_hash in hashes if block_hash in self._pins]:
            for end in self._pins.pop(key).ends:
                self._let_go(end)

    # ---- what happens --------------------------------------------------------------------------

    def set_time(self, now_s: float) -> None:
        """Set the time of a plan, and end expired pins."""
        self._now_s = now_s
        if now_s >= self._due_s:
            self.remove([key for key, pin in self._pins.items() if pin.until_s <= now_s])
            self._due_s = min((pin.until_s for pin in self._pins.values()), default=math.inf)
        quotas = self._slots.quotas
        if self._pins and quotas is not None and quotas.num_overpinned():
            for pin in sorted(self._pins.values(), key=lambda pin: pin.until_s):
                if quotas.must_unpin(pin.last_slots()):
                    self.remove([pin.key])
        if self._used:
            for pin in self._used:
                if pin.num_users:
                    pin.until_s = math.inf
            self._used.clear()
        if self._num_forgets != self._slots.directory.num_forgets:
            self._num_forgets = self._slots.directory.num_forgets
            held = self._slots.directory.hashes
            for stretch in self._stretches:
                if None in map(held.__getitem__, stretch.lease.slots):
                    self._lose(stretch)

    def reset(self) -> None:
        """End all pins."""
        for stretch in self._stretches:
            stretch.lease.release()
        self._slots.unpin(self._counts)
        self._pins.clear()
        for user in self._users:
            user.pins = ()
        for state in (self._stretches, self._first, self._counts, self._users, self._used):
            state.clear()

    # ---- the tree ------------------------------------------------------------------------------

    def _reach(self, slots: list[int]) -> Stretch:
        """Return the stretch at the end of a prefix, leasing its last slots if necessary."""
        before, place = None, 0
        while stretch := self._after(before).get(slots[place]):
            own = stretch.lease.slots
            rest = slots[place : place + len(own)]
            if rest != own:
                num_equal = next(compress(count(), map(ne, own, rest)), len(rest))
                stretch = self._split(stretch, num_equal)
            place += len(stretch.lease.slots)
            if place == len(slots):
                return stretch
            before = stretch
        lease = self._leases.hold(LeaseKind.PIN, slots[place:])
        self._counts.update(lease.slots)
        self._slots.pin(lease.slots)
        if before is not None:
            before.num_uses += 1
        return self._insert(lease, before)

    def _after(self, stretch: Stretch | None) -> dict[int, Stretch]:
        return self._first if stretch is None else stretch.after

    def _insert(self, lease: Lease, before: Stretch | None) -> Stretch:
        stretch = Stretch(lease, before)
        self._stretches[stretch] = None
        self._after(before)[lease.slots[0]] = stretch
        return stretch

    def _split(self, stretch: Stretch, num_slots: int) -> Stretch:
        """Split this many slots off the head of a stretch; return the new stretch."""
        whole, head, tail = stretch.lease, *(self._leases.hold(LeaseKind.PIN, ()) for _ in "ab")
        whole.share([(num_slots, head), (len(whole.slots) - num_slots, tail)])
        first = self._insert(head, stretch.before)
        first.num_uses = 1
        first.after[tail.slots[0]] = stretch
        stretch.lease, stretch.before = tail, first
        return first

    def _let_go(self, end: Stretch | None) -> None:
        """Remove an end of a pin: release stretches without other uses, the last slots first."""
        while end is not None:
            end.num_uses -= 1
            if end.num_uses:
                return
            self._detach(end)
            self._uncount(end.lease.slots)
            end.lease.release()
            del self._stretches[end]
            end = end.before

    def _lose(self, stretch: Stretch) -> None:
        """Release slots that the directory has dropped; no other prompt continues here."""
        self._detach(stretch)
        held, slots = self._slots.directory.hashes, stretch.lease.slots
        stretch.lease.keep(LeaseKind.PIN, [slot for slot in slots if held[slot] is not None])
        self._uncount([slot for slot in slots if held[slot] is None])

    def _detach(self, stretch: Stretch) -> None:
        after, slots = self._after(stretch.before), stretch.lease.slots
        if slots and after.get(slots[0]) is stretch:
            del after[slots[0]]

    def _uncount(self, slots: Iterable[int]) -> None:
        self._counts.subtract(slots)
        for slot in slots:
            if not self._counts[slot]:
                del self._counts[slot]
                self._slots.unpin((slot,))

    def check_invariants(self) -> None:
        """Compare the counts with the leases and their users (I8), and with the limits (I5)."""
        leased = Counter(slot for stretch in self._stretches for slot in stretch.lease.slots)
        if leased != self._counts:
            raise InvariantError("I8", "the pinned slots are not exactly those under a pin's lease")
        uses = Counter(end for pin in self._pins.values() for end in pin.ends)
        uses.update(s.before for s in self._stretches if s.before is not None)
        if uses != {stretch: stretch.num_uses for stretch in self._stretches}:
            raise InvariantError("I8", "a stretch is not leased for exactly those that use it")
        if len(leased) > self.num_slots_max or len(self) > PINS_MAX:
            raise InvariantError("I5", "more is pinned than may be")


class PinnedPrompts(Feature):
    """Pins prompts when their requests end, and lets new ones use the pins."""

    def __init__(self, planner: Planner, tiered_hits: TieredHits, pin_share: float) -> None:
        self._planner = planner
        self._hits = planner.hits
        self._tiered_hits = tiered_hits
        self._nowhere: Present = tuple({} for _ in self._hits.geometry.group_block_sizes)
        self.pins = Pins(self._hits.slots, planner.leases, pin_share)

    # ---- a request -----------------------------------------------------------------------------

    def on_new_request(self, state: RequestState) -> None:
        if state.limits.pin_s:
            state.retain()
        if not state.request.skip_reading_prefix_cache:
            self.pins.use(state, state.request.block_hashes)

    def on_request_finished(self, state: RequestState) -> None:
        """Pin or unpin its prompt, if it requests that."""
        request, limits = state.request, state.limits
        self.pins.end(state)
        if limits.pin_s is not None:
            num_pinned = num_unpinned = 0
            if limits.pin_s:
                num_wanted, num_pinned = self._pin(request, limits.pin_s)
                num_unpinned = max(0, num_wanted - num_pinned)
                self._planner.counters[Count.UNPINNED_TOKENS] += num_unpinned
            else:
                self.pins.remove(request.block_hashes)
            self._report(state, num_pinned, num_unpinned)

    def _pin(self, request: Request, pin_s: float) -> tuple[int, int]:
        """Pin an ended request; return the tokens to pin and the pinned ones."""
        geometry, hashes = self._hits.geometry, request.block_hashes
        prompt_end = request.num_prompt_tokens - 1  # the last token is always computed
        num_wanted = prompt_end - prompt_end % geometry.alignment_tokens
        if self._planner.is_disabled or not num_wanted:
            return num_wanted, 0

        def find(end: int) -> Any:
            return self._tiered_hits.find(hashes, 0, end, self._nowhere)

        size, directory = geometry.hash_block_size, self._hits.directory
        for _ in range(TRIES_MAX):
            num_forgets = directory.num_forgets
            num_pinned, slots = self.pins.cut(find, prompt_end, size)
            if not num_pinned:
                break
            key = hashes[num_pinned // size - 1]
            if not self.pins.add(key, slots, pin_s):
                break
            num_all, more = self.pins.cut(find, request.num_tokens, size)
            if num_all > num_pinned:
                self.pins.add(key, more, pin_s)
            if directory.num_forgets == num_forgets:
                return num_wanted, max(num_pinned, num_all)
            self.pins.remove([key])  # another engine had overwritten some of it
        return num_wanted, 0

    @staticmethod
    def _report(state: RequestState, num_pinned: int, num_unpinned: int) -> None:
        """Add the result of a pin to its response, unless another connector responds."""
        params = state.request.kv_transfer_params
        is_ours = isinstance(params, dict) and not any(params.get(key) for key in _FOREIGN_KEYS)
        if is_ours and params.get(PIN_KEY) is not None:
            # Under MultiConnector the next connector of ours finds it gone: two answers are an
            # error.
            params.pop(PIN_KEY)
            state.respond({"pinned_tokens": num_pinned, "unpinned_tokens": num_unpinned})

    def on_step(self, output: SchedulerOutput, now_s: float) -> None:
        self.pins.set_time(now_s)

    # ---- what goes wrong -----------------------------------------------------------------------

    def on_reset(self, cause: str | None) -> None:
        """End all pins."""
        self.pins.reset()

    def on_disabled(self) -> None:
        self.pins.reset()

    def gauges(self) -> Mapping[str, float]:
        return {"pinned_slots": self.pins.num_slots, "pins": len(self.pins)}

    def check_invariants(self) -> None:
        self.pins.check_invariants()
