"""A planner that does what requests ask for beside their tokens: pins and hints.

It is made only where the configuration allows one of the two. So they cost nothing elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from safe_offload.observe.counters import Count, Counters
from safe_offload.scheduler.adaptive import AdaptivePlanner
from safe_offload.scheduler.cache.directory import Key
from safe_offload.scheduler.cache.pins import Pins
from safe_offload.scheduler.limits import PIN_KEY, TELL_KEY
from safe_offload.scheduler.node.planner import NodePlanner
from safe_offload.scheduler.planner import EstimatingPlanner, Planner, PlannerOptions
from safe_offload.scheduler.tenants import TenantPlanner

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from safe_offload.protocol import StepPlan
    from safe_offload.scheduler.blocks import GpuBlocks
    from safe_offload.scheduler.loads.hits import HostHits
    from safe_offload.scheduler.requests import RequestState
    from safe_offload.scheduler.tiers.tiered_hits import Present, TieredHits

DEMOTED_MAX = 4096
"""Ended requests that wait to be demoted; with one more, the first is evicted as others are."""
DEMOTED_BLOCKS = 8192
"""Of requests to be demoted that are looked at in one step: a few milliseconds."""

_FOREIGN_KEYS = ("do_remote_prefill", "do_remote_decode")
"""Of requests that another connector answers for."""


def _asks(request: Request, key: str) -> bool:
    """Whether a client wrote this key, and no other connector answers it."""
    params = request.kv_transfer_params
    is_ours = isinstance(params, dict) and not any(params.get(each) for each in _FOREIGN_KEYS)
    return is_ours and params.get(key) is not None


class GuidedPlanner(Planner):
    """See `Planner`. Its own state: the pins, ended requests that are still to be demoted, each
    with the key of a block that it waits for, where the tokens of those come from whose clients
    want to know, and what the clients of those that have ended since the last plan are told.

    Bound: the requests that vLLM has, and `DEMOTED_MAX`.
    """

    def __init__(
        self,
        hits: HostHits,
        gpu: GpuBlocks,
        options: PlannerOptions,
        counters: Counters,
        tiered_hits: TieredHits,
    ) -> None:
        super().__init__(hits, gpu, options, counters, tiered_hits)
        self._tiered_hits = tiered_hits
        self._nowhere: Present = tuple({} for _ in hits.geometry.group_block_sizes)
        self.pins = Pins(self.hits.slots, self.leases, self.options.pin_share)
        self._demoted: deque[tuple[Request, Key | None]] = deque(maxlen=DEMOTED_MAX)
        self._sources: dict[Request, dict[str, int]] = {}
        self._answers: dict[Request, dict[str, int]] = {}

    def on_new_request(self, request: Request) -> RequestState:
        is_new = self.book.find(request) is None
        state = super().on_new_request(request)
        if is_new and not (request.skip_reading_prefix_cache or state.limits.leaves_nothing):
            self.pins.use(state, request.block_hashes)
        return state

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, now_s: float
    ) -> int | None:
        if _asks(request, TELL_KEY):
            self._sources[request] = {"gpu_tokens": num_computed_tokens}
        return super().get_num_new_matched_tokens(request, num_computed_tokens, now_s)

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        told = self._sources.get(request)
        if told is None or (not num_external_tokens and "host_tokens" in told):
            return  # it runs, now that its load has ended
        by_tier = self.hit_tokens_by_tier(request, num_external_tokens)
        from_tiers = sum(count for tier, count in by_tier.items() if tier)
        told |= {"host_tokens": num_external_tokens - from_tiers, "tier_tokens": from_tiers}
        told["computed_tokens"] = request.num_tokens - told["gpu_tokens"] - num_external_tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput, now_s: float) -> StepPlan:
        self.pins.set_time(now_s)
        self._answers.clear()
        if self._demoted:
            self._demote_some()
        return super().build_connector_meta(scheduler_output, now_s)

    def request_finished(self, request: Request) -> Any:
        """See `Planner`; return what was pinned, if it was to be."""
        state = self.book.find(request) or self.on_new_request(request)
        if state.finished:
            super().request_finished(request)
            return self._answers.get(request)  # as it was (I4)
        limits = state.limits
        if limits.pin_s and not self._is_disabled and state not in self.outdated.tables:
            self.policy.store_now(state)
        super().request_finished(request)
        self.pins.end(state)
        if limits.is_demoted and not self._is_disabled:
            self._demoted.append((request, None))
        sources = self._sources.pop(request, {})
        if "host_tokens" in sources:
            self._answer(request, TELL_KEY, sources)
        if limits.pin_s is not None:
            num_pinned = num_unpinned = 0
            if limits.pin_s:
                num_wanted, num_pinned = self._pin(request, limits.pin_s)
                num_unpinned = max(0, num_wanted - num_pinned)
                self._counters[Count.UNPINNED_TOKENS] += num_unpinned
            else:
                self.pins.remove(request.block_hashes)
            told = {"pinned_tokens": num_pinned, "unpinned_tokens": num_unpinned}
            self._answer(request, PIN_KEY, told)
        return self._answers.get(request)

    def _pin(self, request: Request, pin_s: float) -> tuple[int, int]:
        """Pin a request that has ended; return how many tokens it may be, and are."""
        geometry, hashes = self.hits.geometry, request.block_hashes
        prompt_end = request.num_prompt_tokens - 1  # the last token is always computed
        num_wanted = prompt_end - prompt_end % geometry.alignment_tokens
        if self._is_disabled or not num_wanted:
            return num_wanted, 0

        def find(end: int) -> Any:
            return self._tiered_hits.find(hashes, 0, end, self._nowhere)

        size = geometry.hash_block_size
        num_pinned, slots = self.pins.cut(find, prompt_end, size)
        if not num_pinned:
            return num_wanted, 0
        key = hashes[num_pinned // size - 1]
        if not self.pins.add(key, slots, pin_s):
            return num_wanted, 0
        num_all, more = self.pins.cut(find, request.num_tokens, size)
        if num_all > num_pinned:
            self.pins.add(key, more, pin_s)
        return num_wanted, max(num_pinned, num_all)

    def _answer(self, request: Request, key: str, told: dict[str, int]) -> None:
        """Note what vLLM is to hand on to a client that wrote a key."""
        # Under MultiConnector the next connector of ours finds it gone: two answers are an error.
        if _asks(request, key):
            request.kv_transfer_params.pop(key)
            self._answers.setdefault(request, {}).update(told)

    def _demote_some(self) -> None:
        """Let what the host has of some ended requests go first, unless it is still being stored.

        A request whose store takes long is not looked through again before a block of it is there.
        """
        tables, being_stored = self.hits.directory.tables, self.hits.directory.being_stored
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
        directory, slots = self.hits.directory, []
        for group_idx in self.hits.geometry.group_ids:
            hashes = self.hits.geometry.hashes_of(request, group_idx)
            found = map(directory.tables[group_idx].get, hashes)
            slots += [slot for slot in found if slot is not None]
        unfilled = next(filter(directory.being_stored.__contains__, reversed(slots)), None)
        if unfilled is not None and (block_hash := directory.hashes[unfilled]) is not None:
            return Key(directory.group_of(unfilled), block_hash)
        self.hits.slots.evict_first(slots[::-1])
        return None

    def reset_cache(self, cause: str | None = None) -> None:
        """See `Planner`; it ends all pins."""
        super().reset_cache(cause)
        self.pins.reset()
        self._demoted.clear()

    def disable(self, report: object = None) -> None:
        super().disable(report)
        self.pins.reset()
        self._sources.clear()

    def gauges(self) -> dict[str, float]:
        """See `Planner`; what is pinned does not count as leased."""
        gauges = super().gauges()
        num_pinned = self.pins.num_slots
        leased = gauges["leased_slots"] - num_pinned
        return {
            **gauges,
            "leased_slots": leased,
            "pinned_slots": num_pinned,
            "pins": len(self.pins),
        }

    def check_invariants(self) -> None:
        """See `SchedulerSide`; also the pins."""
        super().check_invariants()
        self.pins.check_invariants()


def planner_class(
    *,
    has_tenants: bool,
    estimates: bool,
    is_guided: bool,
    is_shared: bool = False,
    is_adaptive: bool = False,
) -> Callable[..., Planner]:
    """Return the planner that a configuration calls for."""
    wanted = {
        NodePlanner: is_shared,
        TenantPlanner: has_tenants,
        EstimatingPlanner: estimates,
        AdaptivePlanner: is_adaptive,
        GuidedPlanner: is_guided,
    }
    parts = tuple(kind for kind, is_wanted in wanted.items() if is_wanted)
    return type("Planner", parts, {}) if len(parts) > 1 else (*parts, Planner)[0]
