"""Probes: which of these blocks do the tiers have?

Requests with one prefix share a probe: no block is in two probes at a time. An answer is a snapshot
and is dropped with the requests that wanted it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

from safe_offload.observe.counters import Count
from safe_offload.protocol import Keys, Presence, Probe
from safe_offload.scheduler.requests import RequestQueue

if TYPE_CHECKING:
    from safe_offload.scheduler.requests import RequestState
    from safe_offload.scheduler.tiers.context import TierContext

KEYS_MAX = 1 << 16
"""Maximum number of keys in flight, beyond the first probe; other probes wait."""

_ANY = bytes([0]) + bytes([255]) * 255
"""Translates the number of a tier: 0 for none, all bits for any."""


@dataclass(slots=True, eq=False)
class PendingProbe:
    """A probe and its answers; only its methods change it.

    Bound: the requests that vLLM has, and an entry for each rank.
    """

    probe_id: int
    keys: Keys
    users: RequestQueue  # requests that wait for the answer, in the order of arrival
    ranks_left: set[int]  # ranks that have not answered
    tiers: bytes = b""  # by key, the tier that has it on all ranks that have answered; 0 for none
    sent_s: float | None = None  # the time of its plan; None before that

    def sent(self, now_s: float) -> None:
        """A plan names it."""
        self.sent_s = now_s

    def answered(self, presence: Presence) -> bool:
        """Record the answer of a rank; return whether it was the last one."""
        found = presence.tiers if len(presence.tiers) == len(self.keys) else bytes(len(self.keys))
        if self.tiers:
            both = int.from_bytes(self.tiers) & int.from_bytes(found.translate(_ANY))
            found = both.to_bytes(len(found))
        self.tiers = found
        self.ranks_left.discard(presence.rank)
        return self.is_answered

    @property
    def is_answered(self) -> bool:
        """Whether all ranks have answered."""
        return not self.ranks_left

    def present(self) -> Iterable[tuple[int, bytes, int]]:
        """Return group, hash and tier of the present blocks."""
        if not any(self.tiers):
            return ()
        keys = zip(self.keys.group_ids, self.keys.hashes, self.tiers, strict=True)
        return compress(keys, self.tiers)


class Probes:
    """The unanswered probes.

    Bound: the hashes of the requests that vLLM has; `KEYS_MAX` of them are in flight.
    """

    def __init__(self, context: TierContext) -> None:
        self._num_ranks = context.num_ranks
        self._counters = context.counters
        self._next_id = 0
        self.waiting: dict[int, PendingProbe] = {}
        self._planned: list[PendingProbe] = []
        self._in_flight: dict[int, PendingProbe] = {}
        self._num_keys = 0
        groups = context.hits.geometry.group_block_sizes
        self._by_hash: tuple[dict[bytes, PendingProbe], ...] = tuple({} for _ in groups)

    def __repr__(self) -> str:
        return f"Probes({len(self.waiting)} wait, {len(self._in_flight)} in flight)"

    def ask(self, wanted: Sequence[Sequence[bytes]], user: RequestState) -> list[PendingProbe]:
        """Probe for blocks by KV cache group; return all probes that include them."""
        probes: dict[PendingProbe, None] = {}
        group_ids = bytearray()
        hashes: list[bytes] = []
        for group_idx, group in enumerate(wanted):
            known = self._by_hash[group_idx]
            new = [block_hash for block_hash in group if block_hash not in known]
            if len(new) < len(group):
                probes.update(dict.fromkeys(known[h] for h in group if h in known))
            group_ids += bytes([group_idx]) * len(new)
            hashes += new
        if hashes:
            keys = Keys(bytes(group_ids), tuple(hashes))
            probe = PendingProbe(self._next_id, keys, RequestQueue(), set(range(self._num_ranks)))
            self._next_id += 1
            self.waiting[probe.probe_id] = probe
            probes[probe] = None
            for group_idx, block_hash in zip(group_ids, hashes, strict=True):
                self._by_hash[group_idx][block_hash] = probe
        for probe in probes:
            probe.users.add(user)
        return list(probes)

    def release(self, probes: Iterable[PendingProbe], user: RequestState) -> None:
        """A request does not need these answers any more; unsent probes without users go."""
        for probe in probes:
            probe.users.discard(user)
            if not probe.users and probe.probe_id in self.waiting:
                del self.waiting[probe.probe_id]
                self._forget_keys(probe)

    def _forget_keys(self, probe: PendingProbe) -> None:
        for group_idx, block_hash in zip(probe.keys.group_ids, probe.keys.hashes, strict=True):
            if self._by_hash[group_idx].get(block_hash) is probe:
                del self._by_hash[group_idx][block_hash]

    def plan(self, generation: str) -> tuple[Probe, ...]:
        """Return the probes that this step sends, in the order of arrival."""
        self._planned, num_keys = [], self._num_keys
        for probe in self.waiting.values():
            if num_keys and num_keys + len(probe.keys) > KEYS_MAX:
                break
            num_keys += len(probe.keys)
            self._planned.append(probe)
        return tuple(Probe(p.probe_id, p.keys, generation) for p in self._planned)

    def sent(self, now_s: float) -> None:
        """The plan with these probes has been sent."""
        for probe in self._planned:
            del self.waiting[probe.probe_id]
            probe.sent(now_s)
            self._in_flight[probe.probe_id] = probe
            self._num_keys += len(probe.keys)
        self._planned = []

    def record(self, presence: Presence) -> PendingProbe | None:
        """Record an answer; return the probe if all ranks have answered it."""
        probe = self._in_flight.get(presence.probe_id)
        if probe is None:
            self._counters[Count.STALE_REPORTS] += 1
            return None
        if presence.rank not in probe.ranks_left:
            self._counters[Count.DUPLICATE_REPORTS] += 1
            return None
        if not probe.answered(presence):
            return None
        del self._in_flight[presence.probe_id]
        self._num_keys -= len(probe.keys)
        self._forget_keys(probe)
        return probe

    def forget(self) -> None:
        """Drop the users of all probes; answers still settle the probes in flight."""
        self.waiting.clear()
        self._planned = []
        for probes in self._by_hash:
            probes.clear()
        for probe in self._in_flight.values():
            probe.users.clear()
