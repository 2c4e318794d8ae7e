"""What requests ask for beside their tokens: to be pinned or demoted, and where they were hit."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from safe_offload.observe.counters import Count
from safe_offload.scheduler.cache.directory import Key
from safe_offload.scheduler.cache.pins import Pins
from safe_offload.scheduler.limits import PIN_KEY, TELL_KEY
from safe_offload.scheduler.part import Part

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from safe_offload.scheduler.planner import Planner
    from safe_offload.scheduler.requests import RequestState
    from safe_offload.scheduler.tiers.tiered_hits import Present, TieredHits

DEMOTED_MAX = 4096
"""Ended requests that wait to be demoted; with one more, the first is evicted as others are."""
DEMOTED_BLOCKS = 8192
"""Of requests to be demoted that are looked at in one step: a few milliseconds."""

TRIES_MAX = 8
"""To pin what other engines of a pool overwrite meanwhile."""

_FOREIGN_KEYS = ("do_remote_prefill", "do_remote_decode")
"""Of requests that another connector answers for."""


def _asks(request: Request, key: str) -> bool:
    """Whether a client wrote this key, and no other connector answers it."""
    params = request.kv_transfer_params
    is_ours = isinstance(params, dict) and not any(params.get(each) for each in _FOREIGN_KEYS)
    return is_ours and params.get(key) is not None


class Wishes(Part):
    """Its state: the pins, whether anything is still stored, ended requests that are still to be
    demoted, each with the key of a block that it waits for, where the tokens of those come from
    whose clients want to know, and what the clients of those that have ended since the last plan
    are told.

    Bound: the requests that vLLM has, and `DEMOTED_MAX`.
    """

    def __init__(self, planner: Planner, tiered_hits: TieredHits, pin_share: float) -> None:
        self._planner = planner
        self._hits = planner.hits
        self._tiered_hits = tiered_hits
        self._nowhere: Present = tuple({} for _ in self._hits.geometry.group_block_sizes)
        self.pins = Pins(self._hits.slots, planner.leases, pin_share)
        self._is_stopped = False
        self._demoted: deque[tuple[Request, Key | None]] = deque(maxlen=DEMOTED_MAX)
        self._sources: dict[Request, dict[str, int]] = {}
        self._answers: dict[Request, dict[str, int]] = {}

    # ---- a request -----------------------------------------------------------------------------

    def seen(self, state: RequestState, *, may_read: bool) -> None:
        if not state.request.skip_reading_prefix_cache:
            self.pins.use(state, state.request.block_hashes)

    def asked(self, state: RequestState, num_computed_tokens: int) -> None:
        if _asks(state.request, TELL_KEY):
            self._sources[state.request] = {"gpu_tokens": num_computed_tokens}

    def scheduled(self, state: RequestState, num_tokens: int) -> None:
        request = state.request
        told = self._sources.get(request)
        if told is None or (not num_tokens and "host_tokens" in told):
            return  # it runs, now that its load has ended
        by_tier = self._planner.hit_tokens_by_tier(request, num_tokens)
        from_tiers = sum(count for tier, count in by_tier.items() if tier)
        told |= {"host_tokens": num_tokens - from_tiers, "tier_tokens": from_tiers}
        told["computed_tokens"] = request.num_tokens - told["gpu_tokens"] - num_tokens

    def finishing(self, state: RequestState) -> None:
        """See `Part`; what is to be pinned is stored at once."""
        if state.limits.pin_s and not (self._is_stopped or state in self._planner.outdated):
            self._planner.policy.store_now(state)

    def ended(self, state: RequestState) -> None:
        """See `Part`; pin or demote it, if that is wished."""
        request, limits = state.request, state.limits
        self.pins.end(state)
        if limits.is_demoted and not self._is_stopped:
            self._demoted.append((request, None))
        sources = self._sources.pop(request, {})
        if "host_tokens" in sources:
            self._tell(request, TELL_KEY, sources)
        if limits.pin_s is not None:
            num_pinned = num_unpinned = 0
            if limits.pin_s:
                num_wanted, num_pinned = self._pin(request, limits.pin_s)
                num_unpinned = max(0, num_wanted - num_pinned)
                self._planner.counters[Count.UNPINNED_TOKENS] += num_unpinned
            else:
                self.pins.remove(request.block_hashes)
            told = {"pinned_tokens": num_pinned, "unpinned_tokens": num_unpinned}
            self._tell(request, PIN_KEY, told)

    def told(self, state: RequestState) -> Mapping[str, Any] | None:
        """See `Part`; what was pinned, and where the request was hit."""
        return self._answers.get(state.request)

    def _pin(self, request: Request, pin_s: float) -> tuple[int, int]:
        """Pin a request that has ended; return how many tokens it may be, and are."""
        geometry, hashes = self._hits.geometry, request.block_hashes
        prompt_end = request.num_prompt_tokens - 1  # the last token is always computed
        num_wanted = prompt_end - prompt_end % geometry.alignment_tokens
        if self._is_stopped or not num_wanted:
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

    def _tell(self, request: Request, key: str, told: dict[str, int]) -> None:
        """Note what vLLM is to hand on to a client that wrote a key."""
        # Under MultiConnector the next connector of ours finds it gone: two answers are an error.
        if _asks(request, key):
            request.kv_transfer_params.pop(key)
            self._answers.setdefault(request, {}).update(told)

    def _demote_some(self) -> None:
        """Let what the host has of some ended requests go first, unless it is still being stored.

        A request whose store takes long is not looked through again before a block of it is there.
        """
        tables, being_stored = self._hits.directory.tables, self._hits.directory.being_stored
        num_left = DEMOTED_BLOCKS
        for _ in range(len(self._demoted)):
            if num_left <= 0:
                return
            request, key = self._demoted.popleft()
            if key is None or tables[key.group_idx].get(key.block_hash) not in being_stored:
                num_left -= len(request.block_hashes) * len(tables)
                key = self._demote(request)
            if key is not None:
                self._demoted.append((request, key))

    def _demote(self, request: Request) -> Key | None:
        """Demote a request; return its last block that is still being stored, to wait for that."""
        directory, slots = self._hits.directory, []
        for group_idx in self._hits.geometry.group_ids:
            hashes = self._hits.geometry.hashes_of(request, group_idx)
            found = map(directory.tables[group_idx].get, hashes)
            slots += [slot for slot in found if slot is not None]
        unfilled = next(filter(directory.being_stored.__contains__, reversed(slots)), None)
        if unfilled is not None and (block_hash := directory.hashes[unfilled]) is not None:
            return Key(directory.group_of(unfilled), block_hash)
        self._hits.slots.evict_first(slots[::-1])
        return None

    def planning(self, output: SchedulerOutput, now_s: float) -> None:
        self.pins.set_time(now_s)
        self._answers.clear()
        if self._demoted:
            self._demote_some()

    # ---- what goes wrong -----------------------------------------------------------------------

    def reset(self, cause: str | None) -> None:
        """See `Part`; all pins end."""
        self.pins.reset()
        self._demoted.clear()

    def stopped(self) -> None:
        self._is_stopped = True

    def given_up(self) -> None:
        self._is_stopped = True
        self.pins.reset()
        self._sources.clear()

    def gauges(self) -> Mapping[str, float]:
        """See `Part`; what is pinned does not count as leased."""
        num_pinned = self.pins.num_slots
        return {
            "leased_slots": self._hits.slots.num_leased - num_pinned,
            "pinned_slots": num_pinned,
            "pins": len(self.pins),
        }

    def check_invariants(self) -> None:
        self.pins.check_invariants()
