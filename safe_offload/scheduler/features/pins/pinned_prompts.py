"""Pins the prompts of requests with `pin_s` when these end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from safe_offload.observe.counters import Count
from safe_offload.scheduler.feature import Feature
from safe_offload.scheduler.features.pins.pins import Pins
from safe_offload.scheduler.limits import PIN_KEY

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from safe_offload.scheduler.planner import Planner
    from safe_offload.scheduler.requests import RequestState
    from safe_offload.scheduler.tiers.tiered_hits import Present, TieredHits

TRIES_MAX = 8
"""Tries to pin slots that other engines of a pool overwrite meanwhile."""

_FOREIGN_KEYS = ("do_remote_prefill", "do_remote_decode")
"""Keys of responses that belong to another connector."""


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
