"""Requests that wait for a load of another request instead of loading the same blocks once more.

Requests with one prefix often come together: several answers to one prompt, agents, users with
one system prompt. If each loaded a copy of its own before the first load has landed, all copies
would hold GPU blocks (docs/guarantees.md: P3). So they wait: vLLM's scheduler asks again in its
next step, goes on with the requests after them meanwhile, and puts what the load brings into its
own prefix cache before it asks. (vLLM 0.32.0, Scheduler.schedule: it looks first at the requests
that hold blocks for a load; _update_waiting_for_remote_kv caches the blocks of each group.)

What bounds the wait (docs/guarantees.md: H5):

- A request waits for a load while it is in flight and its request lives. vLLM frees the blocks of
  an aborted request without caching them, and a failed load has nothing to cache.
- A request waits at most `wait_max_s` over its whole life, whatever it waits for.
- A load that a request has stopped waiting for, and every older one, it does not wait for again.
- A load that has landed must have brought it further. If it did not, because vLLM does not keep
  what the request needs of it, the request waits for no other before it has run.
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
"""A request waits no longer for loads of others, over its whole life; nor than a transfer may."""
MARK_EVERY = 16
"""A load is found by the hash of its first block, and of each block whose place in the prompt is a
multiple of this: so few looks find it from any of its blocks."""
LOOKS_MAX = 16
"""Loads of one block that are looked at: where vLLM does not keep what they bring, there may be as
many as requests."""


class Wait:
    """How a request has waited for loads of others; only this file changes it.

    Attributes:
        load: the one that it waits for now.
        is_called_off: the host forgot what it waits for.
        asked_s: when vLLM asked last, while it waits.
        waited_s: over its whole life, up to `asked_s`.
        newest_id: of the loads that it has waited for.
        num_computed_tokens: on the GPU when its present wait began.
        stuck_at: those that were there when a load landed that made them no more; -1 for none.
        is_put_off: it waits because loads of others hold too many blocks for its own.
    """

    load: Load | None = None
    is_called_off = False
    asked_s = waited_s = 0.0
    num_computed_tokens = 0
    stuck_at = -1
    is_put_off = False

    def __init__(self, newest_id: int = -1) -> None:
        self.newest_id = newest_id

    def begin(self, load: Load, num_computed_tokens: int, now_s: float) -> None:
        """Its request waits for a load from now on."""
        self.load, self.newest_id = load, load.transfer_id
        self.is_called_off = False
        self.asked_s, self.num_computed_tokens = now_s, num_computed_tokens

    def asked_again(self, now_s: float) -> None:
        """VLLM asks again about its request, which was put off."""
        self.waited_s += now_s - self.asked_s

    def end_putting_off(self) -> None:
        """Its request is no longer put off, or is so anew."""
        self.is_put_off = False

    def end(self) -> None:
        """Its request waits no more."""
        self.load = None

    def call_off(self) -> None:
        """What its request waits for is of no use any more."""
        self.is_called_off = True

    def unstick(self) -> None:
        """Its request has run: another load may bring it further."""
        self.stuck_at = -1


class SharedLoads:
    """Decides which request waits for which load.

    Its state: the loads that have begun and not ended, the oldest first, by the hashes of some of
    the blocks that each brings, and these hashes of each.

    Bound: two entries for each load in flight, and two for each `MARK_EVERY` blocks that it brings.

    Args:
        wait_max_s: of one request, over its whole life.
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
        """Every rank has reported a load, or it is given up."""
        for block_hash in self._marks.pop(load, ()):
            loads = self._loads[block_hash]
            loads.pop(load, None)
            if not loads:
                del self._loads[block_hash]

    def go_on(self, wait: Wait, request: Request, num_computed_tokens: int, now_s: float) -> None:
        """End a request's wait for a load if that brings nothing more, or has taken too long.

        Args:
            num_computed_tokens: tokens that the GPU's prefix cache has.
        """
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
        """Whether a request waits, rather than computes, while loads of others hold the blocks.

        They are in flight: soon there are more blocks, or too few to compute in either.
        """
        wait.asked_s, wait.is_put_off = now_s, wait.waited_s < self._wait_max_s
        return wait.is_put_off

    def find(self, wait: Wait, request: Request, num_computed_tokens: int) -> Load | None:
        """Return the load that a request may wait for, rather than make its own: the oldest."""
        for load in self.candidates(wait, request, num_computed_tokens):
            if self.is_kept(load, request.block_hashes, num_computed_tokens):
                return load
        return None

    def candidates(self, wait: Wait, request: Request, num_computed_tokens: int) -> Iterator[Load]:
        """Yield loads of a request's first missing block that it may wait for, the oldest first."""
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
        """Whether a load brings a request's first missing block, to where vLLM finds it."""
        place = num_computed_tokens // self._geometry.hash_block_size
        hashes = request.block_hashes
        return _has_block(load, hashes, place) and self.is_kept(load, hashes, num_computed_tokens)

    def is_kept(self, load: Load, hashes: Sequence[bytes], num_computed_tokens: int) -> bool:
        """Whether vLLM's prefix cache has more than these tokens once the load has landed.

        By default vLLM keeps of sliding windows and Mamba states what a hit at the end of the
        prompt needs, and at one boundary more, which from now on is the end of the load if nothing
        else helps. What the load's own request has of its prompt beyond the load is computed in the
        step that finds the load landed. A load that ends inside a block leaves no Mamba state
        there, if the prompt of its request does not end with it.

        Asked only for what is waited for if it is: vLLM may be told to keep it.
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
    """Whether a load brings this block of a request.

    Hashes are chained, so one that is equal says that all before it are.
    """
    is_brought = load.first_hash <= place < min(load.end_hash, len(hashes))
    return is_brought and load.hashes[place] == hashes[place]


def _is_shared(load: Load, hashes: Sequence[bytes], count: int) -> bool:
    """Whether a request has the first `count` hashes of the one that loads."""
    known = min(len(hashes), len(load.hashes))
    return count <= known and hashes[count - 1] == load.hashes[count - 1]


def num_shared(load: Load, hashes: Sequence[bytes], num_beyond: int = 0) -> int:
    """Return how many first hashes of a request are those of the one that loads.

    Up to where the load ends, and some beyond. Few are compared: those before an equal one are
    equal.
    """
    end = min(load.end_hash + num_beyond, len(hashes), len(load.hashes))
    if _is_shared(load, hashes, end):
        return end
    return bisect_left(range(end), True, key=lambda place: hashes[place] != load.hashes[place])


def _age(load: Load) -> int:
    return load.transfer_id
