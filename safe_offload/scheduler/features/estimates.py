"""Estimated hit rates of other host sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from safe_offload.compat.cache_hits import kept_boundary
from safe_offload.scheduler.cache.end_curve import EndCurve
from safe_offload.scheduler.cache.hit_curve import Curve, HitCurve
from safe_offload.scheduler.feature import Feature

if TYPE_CHECKING:
    from safe_offload.scheduler.loads.hits import HostHits
    from safe_offload.scheduler.requests import RequestState


class Estimates(Feature):
    """Estimates hit rates at other sizes from running requests (`RequestState.is_estimated`).

    Bound: that of the curve.
    """

    def __init__(self, hits: HostHits) -> None:
        self._hits = hits
        self.curve: Curve | None = None

    def on_scheduled(self, state: RequestState, num_tokens: int) -> None:
        """Count a request when it starts to run, if all of it may be stored."""
        request = state.request
        is_partial = state.limits.store_tokens is not None and not state.is_refused
        if num_tokens or is_partial or state.is_estimated:
            return
        state.is_estimated = True
        self.curve = self.curve or self._make_curve()
        if state.may_hit:
            size = self._hits.geometry.hash_block_size
            ends = [end // size for end in (kept_boundary(request), *state.hit_ends)]
            self.curve.see(request.block_hashes, (request.num_tokens - 1) // size, ends)

    def _make_curve(self) -> Curve:
        geometry, boundaries = self._hits.geometry, self._hits.boundaries
        num_slots, per_hash = self._hits.slots.num_slots, boundaries.blocks_per_hash
        if not boundaries.needs:
            return HitCurve(max(1, round(num_slots / per_hash)))
        align = geometry.alignment_tokens // geometry.hash_block_size
        return EndCurve(num_slots, per_hash, boundaries.needs, align)

    def on_request_finished(self, state: RequestState) -> None:
        if state.is_estimated and self.curve:
            num_kept = state.num_kept_tokens // self._hits.geometry.hash_block_size
            self.curve.keep(state.request.block_hashes[:num_kept])

    def gauges(self) -> Mapping[str, float]:
        return self.curve.rates() if self.curve else {}
