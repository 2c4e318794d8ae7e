"""What requests ask for beside their tokens: to be pinned, and where they were hit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from safe_offload.observe.counters import Count
from safe_offload.scheduler.cache.pins import Pins
from safe_offload.scheduler.limits import PIN_KEY, TELL_KEY
from safe_offload.scheduler.part import Part

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from safe_offload.scheduler.planner import Planner
    from safe_offload.scheduler.requests import RequestState
    from safe_offload.scheduler.tiers.tiered_hits import Present, TieredHits

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
    """Its state: the pins, whether anything is still stored, where the tokens of those requests
    come from whose clients want to know, and what the clients of those that have ended since the
    last plan are told.

    Bound: the requests that vLLM has.
    """

    def __init__(self, planner: Planner, tiered_hits: TieredHits, pin_share: float) -> None:
        self._planner = planner
        self._hits = planner.hits
        self._tiered_hits = tiered_hits
        self._nowhere: Present = tuple({} for _ in self._hits.geometry.group_block_sizes)
        self.pins = Pins(self._hits.slots, planner.leases, pin_share)
        self._is_stopped = False
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
        """See `Part`; pin it, if that is wished."""
        request, limits = state.request, state.limits
        self.pins.end(state)
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

    def planning(self, output: SchedulerOutput, now_s: float) -> None:
        self.pins.set_time(now_s)
        self._answers.clear()

    # ---- what goes wrong -----------------------------------------------------------------------

    def reset(self, cause: str | None) -> None:
        """See `Part`; all pins end."""
        self.pins.reset()

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
