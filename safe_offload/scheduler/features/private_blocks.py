"""Private blocks, which stay out of tiers: their hashes do not cover all their inputs.

vLLM's block hash covers media by their ids, which a client may have chosen, adapters by name and
path, and prompt embeddings without their data type. In a tier, one client would define the meaning
of a name for all engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safe_offload.compat.media_ids import tells_content
from safe_offload.scheduler.feature import Answer, Feature
from safe_offload.scheduler.requests import RequestQueue

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from safe_offload.protocol import StepReport
    from safe_offload.scheduler.blocks import GpuBlocks
    from safe_offload.scheduler.loads.hits import HostHits
    from safe_offload.scheduler.requests import RequestBook, RequestState

SWEEP_MIN = 1 << 16
"""Number of hashes before the first sweep."""


class PrivateBlocks(Feature):
    """Keeps `Directory.private`: the private hashes that the GPU or the host may have.

    Bound: the requests that vLLM has, and the hashes that a sweep leaves, twice, or `SWEEP_MIN`.

    Args:
        tells_media_ids: ids of media that look like a hash of content are one (`media_ids`).
        vouches_for_adapters: `model_version` identifies adapters, too.
    """

    def __init__(
        self,
        book: RequestBook,
        hits: HostHits,
        gpu: GpuBlocks,
        *,
        tells_media_ids: bool,
        vouches_for_adapters: bool = False,
    ) -> None:
        self._book = book
        self._hits = hits
        self._gpu = gpu
        self._tells_media_ids = tells_media_ids
        self._vouches_for_adapters = vouches_for_adapters
        self._hashes = hits.directory.private
        # Requests with private hashes (`RequestState.private`) that may have gained others:
        # sessions, and requests that have run. Read only outside.
        self.growing = RequestQueue()
        self._sweep_at = SWEEP_MIN

    def __repr__(self) -> str:
        return f"PrivateBlocks({len(self._hashes)} hashes)"

    def on_new_request(self, state: RequestState) -> None:
        request = state.request
        first = self._first(request)
        if first is not None or request.resumable:
            state.private = first or 0
            self._learn(state)
            if request.resumable:
                self.growing.add(state)

    def on_scheduled(self, state: RequestState, num_tokens: int) -> None:
        if state.private is not None:
            self.growing.add(state)

    def _first(self, request: Request) -> int | None:
        """Return the index of the first private hash of a request; None without."""
        if request.prompt_embeds is not None:
            return 0
        if request.lora_request is not None and not self._vouches_for_adapters:
            return 0
        for feature in request.mm_features:
            if not (self._tells_media_ids and tells_content(feature.identifier)):
                return int(feature.mm_position.offset) // self._hits.geometry.hash_block_size
        return None

    def on_match(self, state: RequestState, num_computed_tokens: int, now_s: float) -> Answer:
        """Learn hashes before tiers look up any block of the request."""
        if state.private is not None:
            self._learn(state)
        return Answer.SEARCH

    def on_report(self, report: StepReport) -> None:
        """Learn hashes before stored blocks may be found and spilled."""
        for state in self.growing:
            self._learn(state)

    def on_request_finished(self, state: RequestState) -> None:
        """Learn the last hashes; others may still find its blocks."""
        if state.private is not None:
            self._learn(state)
            state.private = None
            if len(self._hashes) > self._sweep_at:
                self._sweep()

    def _learn(self, state: RequestState) -> None:
        request, first = state.request, state.private
        hashes = request.block_hashes
        if request.resumable:  # with media that it had not, and hashes that are others by now
            first = self._first(request)
        if first is not None and first < len(hashes):
            self._hashes.update(hashes[first:])
            state.private = len(hashes)

    def _sweep(self) -> None:
        """Drop the hashes that neither the GPU, nor the host, nor a request has."""
        kept = self._gpu.cached_hashes().union(*self._hits.directory.tables)
        of_live = (s.request.block_hashes for s in self._book if s.private is not None)
        kept.update(*of_live)
        self._hashes.intersection_update(kept)
        self._sweep_at = max(SWEEP_MIN, 2 * len(self._hashes))
