"""Shared loads: requests wait for another request's load instead of loading the same blocks again.

Requests with one prefix often arrive together. If each loaded its own copy before the first load
has landed, all copies would hold GPU blocks (docs/guarantees.md: P3). So they wait: vLLM's
scheduler asks again in its next step, continues with the requests after them, and adds the loaded
blocks to its own prefix cache before it asks. (vLLM 0.32.0, Scheduler.schedule considers requests
that hold blocks for a load first; _update_waiting_for_remote_kv caches the blocks of each group.)

What bounds the wait (docs/guarantees.md: H5):

- A request waits for a load while it is in flight and its request lives. vLLM frees the blocks of
  an aborted request without caching them, and a failed load has nothing to cache.
- A request waits at most `wait_max_s` over its whole life, for all loads together.
- It never waits again for a load that it has stopped waiting for, nor for an older one.
- If a load has landed without extending its GPU hit, because vLLM does not retain the blocks that
  the request needs, the request waits for no other load before it has run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING

from safe_offload.compat.cache_hits import kept_boundary
from safe_offload.observe.counters import Count, Counters

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from safe_offload.scheduler.loads.hits import HostHits
    from safe_offload.scheduler.pending import Load

WAIT_MAX_S = 10.0
"""Maximum wait of a request for loads of others, over its whole life; at most a transfer's."""
MARK_EVERY = 16
"""A load is indexed by the hash of its first block, and of each block whose index in the prompt is
a multiple of this, so that few lookups find it from any of its blocks."""
LOOKS_MAX = 16
"""Maximum number of loads of one block that are considered: if vLLM does not retain loaded blocks,
there may be as many as requests."""


class Wait:
    """The waits of a request for loads of others; only this file changes it."""

    load: Load | None = None  # the one that it waits for now
    is_called_off = False  # the host cache was reset meanwhile
    asked_s = 0.0  # when vLLM last asked, while it waits
    waited_s = 0.0  # over its whole life, up to `asked_s`
    newest_id = -1  # of the loads that it has waited for
    num_computed_tokens = 0  # tokens on the GPU when its present wait began
    stuck_at = -1  # tokens on the GPU when a load landed without adding any; -1 for none
    is_put_off = False  # it waits because loads of others hold too many blocks for its own

    def begin(self, load: Load, num_computed_tokens: int, now_s: float) -> None:
        """Its request waits for a load from now on."""
        self.load, self.newest_id = load, load.transfer_id
        self.is_called_off = False
        self.asked_s, self.num_computed_tokens = now_s, num_computed_tokens

    def asked_again(self, now_s: float) -> None:
        """VLLM asks again for a postponed request."""
        self.waited_s += now_s - self.asked_s

    def end_putting_off(self) -> None:
        """Its request is no longer postponed, or is postponed anew."""
        self.is_put_off = False

    def end(self) -> None:
        """Its request stops waiting."""
        self.load = None

    def call_off(self) -> None:
        """The load that its request waits for has become useless."""
        self.is_called_off = True

    def unstick(self) -> None:
        """Its request has run: it may wait for another load."""
        self.stuck_at = -1


class SharedLoads:
    """Decides which request waits for which load, at most `wait_max_s` over its whole life.

    Bound: two entries for each load in flight, and two for each `MARK_EVERY` of its blocks.
    """

    def __init__(self, hits: HostHits, wait_max_s: float, counters: Counters) -> None:
        self._geometry = hits.geometry
        self._boundaries = hits.boundaries
        self._wait_max_s = wait_max_s
        self._counters = counters
        self._loads: defaultdict[bytes, dict[Load, None]] = defaultdict(dict)
        self._marks: dict[Load, list[bytes]] = {}

    def begin(self, load: Load) -> None:
        """A load has begun: requests may wait for it."""
        first, end = load.first_hash, load.end_hash
        next_mark = first - first % MARK_EVERY + MARK_EVERY
        marks = [*load.hashes[first : first + 1], *load.hashes[next_mark:end:MARK_EVERY]]
        self._marks[load] = marks
        for block_hash in marks:
            self._loads[block_hash][load] = None

    def end(self, load: Load) -> None:
        """A load has ended: every rank has reported it, or it was dropped."""
        for block_hash in self._marks.pop(load, ()):
            loads = self._loads[block_hash]
            loads.pop(load, None)
            if not loads:
                del self._loads[block_hash]

    def go_on(self, wait: Wait, request: Request, num_computed_tokens: int, now_s: float) -> None:
        """End a request's wait for a load that adds nothing to the GPU, or takes too long."""
        load = wait.load
        assert load is not None
        wait.waited_s += now_s - wait.asked_s
        wait.asked_s = now_s
        if not load.is_under_way:
            if load.has_landed and num_computed_tokens <= wait.num_computed_tokens:
                wait.stuck_at = num_computed_tokens
        elif wait.waited_s >= self._wait_max_s:
            self._counters[Count.SHARED_WAITS_CUT] += 1
        elif not wait.is_called_off and self._brings(load, request, num_computed_tokens):
            return
        wait.load = None

    def puts_off(self, wait: Wait, now_s: float) -> bool:
        """Return whether a request waits, not computes, while loads of others hold the blocks.

        The loads are in flight: soon there are more blocks, or too few for computing, too.
        """
        wait.asked_s, wait.is_put_off = now_s, wait.waited_s < self._wait_max_s
        return wait.is_put_off

    def find(self, wait: Wait, request: Request, num_computed_tokens: int) -> Load | None:
        """Return the oldest load that a request may wait for instead of its own."""
        for load in self.candidates(wait, request, num_computed_tokens):
            if self.is_kept(load, request.block_hashes, num_computed_tokens):
                return load
        return None

    def candidates(self, wait: Wait, request: Request, num_computed_tokens: int) -> Iterator[Load]:
        """Yield the loads of a request's first missing block that it may wait for, oldest first."""
        if wait.waited_s >= self._wait_max_s or num_computed_tokens <= wait.stuck_at:
            return
        place = num_computed_tokens // self._geometry.hash_block_size
        marks = request.block_hashes[place - place % MARK_EVERY : place + 1]
        found = list(filter(None, map(self._loads.get, marks)))
        for load in islice(merge(*found, key=_age), LOOKS_MAX) if found else ():
            is_new = load.transfer_id > wait.newest_id and load.is_under_way
            if is_new and _has_block(load, request.block_hashes, place):
                yield load

    def _brings(self, load: Load, request: Request, num_computed_tokens: int) -> bool:
        """Return whether a load adds a request's first missing block to vLLM's prefix cache."""
        place = num_computed_tokens // self._geometry.hash_block_size
        hashes = request.block_hashes
        return _has_block(load, hashes, place) and self.is_kept(load, hashes, num_computed_tokens)

    def is_kept(self, load: Load, hashes: Sequence[bytes], num_computed_tokens: int) -> bool:
        """Return whether vLLM's prefix cache has more than these tokens once the load has landed.

        By default, vLLM retains the windows and Mamba states for a hit at the end of the prompt,
        and those at one earlier boundary, which is moved to the end of the load if necessary. The
        rest of the prompt of the loading request is computed in the step after the load. A load
        that ends inside a block leaves no Mamba state there, unless the prompt ends there.

        A call may move the boundary, so call it only for a load that will be waited for.
        """
        geometry = self._geometry
        interval, size = geometry.retention_interval, geometry.hash_block_size
        units = [geometry.alignment_tokens]
        if geometry.ends_inside_blocks:
            units.append(size)
        end = load.end_hash * size
        if interval is None and not (geometry.ends_inside_blocks and end % units[0]):
            return True
        if interval and end // interval * interval > num_computed_tokens:
            return True
        num_tokens = load.owner.request.num_prompt_tokens - 1
        ends = [num_tokens // unit * unit for unit in units]
        boundary = kept_boundary(load.owner.request) // units[0] * units[0]
        if boundary >= end:  # else it lies inside of the load, which brings nothing for it
            ends.append(boundary)
        if any(e > num_computed_tokens and _is_shared(load, hashes, e // size) for e in ends):
            return True
        is_useful = end > num_computed_tokens and not end % units[0]
        return (
            is_useful
            and _is_shared(load, hashes, load.end_hash)
            and self._boundaries.keep(load.owner, end)
        )


def _has_block(load: Load, hashes: Sequence[bytes], place: int) -> bool:
    """Return whether a load includes a block; an equal hash implies equal ones before it."""
    is_brought = load.first_hash <= place < min(load.end_hash, len(hashes))
    return is_brought and load.hashes[place] == hashes[place]


def _is_shared(load: Load, hashes: Sequence[bytes], count: int) -> bool:
    known = min(len(hashes), len(load.hashes))
    return count <= known and hashes[count - 1] == load.hashes[count - 1]


def num_shared(load: Load, hashes: Sequence[bytes], num_beyond: int = 0) -> int:
    """Return the number of leading hashes that a request shares with the loading request.

    Up to the end of the load, and some beyond. Few are compared, as hashes are chained.
    """
    end = min(load.end_hash + num_beyond, len(hashes), len(load.hashes))
    if _is_shared(load, hashes, end):
        return end
    return bisect_left(range(end), True, key=lambda place: hashes[place] != load.hashes[place])


def _age(load: Load) -> int:
    return load.transfer_id
