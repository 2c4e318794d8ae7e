"""Which GPU blocks to store.

A block is worth storing when vLLM has hashed it for its own prefix cache (so it is full, and its
tokens are known) and when its bytes are there by the time that the store reads them.

That vLLM has hashed a block proves nothing about its bytes: it hashes the blocks of a step while it
schedules the step. But every block that a request *scheduled in this step* has hashed is computed
once the forward of this step has run, and a store after the forward is ordered behind it. So a
block of a prompt is stored in the very step that computes it; a step later a sliding window may
have passed it. Blocks of an answer are looked for together, every so many steps (`agenda.py`), and
in the table that a preempted request had (`Snapshot`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from operator import is_not
from typing import TYPE_CHECKING, Any

from safe_offload.scheduler.directory import Directory, Key
from safe_offload.scheduler.gpu_blocks import (
    Home,
    Place,
    block_hash_of,
    get_block_hash,
    get_group_id,
    hashes_of,
)
from safe_offload.scheduler.hits import needed
from safe_offload.scheduler.witness import Sources

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from safe_offload.scheduler.gpu_blocks import GpuBlocks
    from safe_offload.scheduler.hits import HostHits
    from safe_offload.scheduler.requests import RequestState


class EagerScan:
    """Finds what a request has computed since the last scan.

    Args:
        index: to skip what the host has or is about to have.
        gpu: the block tables.
    """

    def __init__(self, index: HostHits, gpu: GpuBlocks) -> None:
        self._directory = index.directory
        self._hash_block_size = index.hash_block_size
        self._block_sizes = index.group_block_sizes
        self._gpu = gpu
        self._group_ids = [g for g in index.group_ids if gpu.is_positional(g)]
        self._larger_ids = [
            g for g in self._group_ids if self._block_sizes[g] > self._hash_block_size
        ]

    def scan(
        self, states: Sequence[RequestState]
    ) -> tuple[list[Sources], dict[RequestState, list[int]]]:
        """Move the requests' cursors to the end of what is hashed.

        Returns:
            What to store, of each group request by request, in prefix order; and of which requests
            the host has blocks already, in which slots.
        """
        found: list[Sources] = []
        present: dict[RequestState, list[int]] = {}
        for group_idx in self._group_ids:
            tables, nums_hashed = self._gpu.tables_of(group_idx)
            homes: list[Home] | None = [] if self._gpu.has_homes(group_idx) else None
            sources = Sources(group_idx, homes=homes)
            for state in states:
                request = state.request
                request_id = request.request_id
                num_hashed = nums_hashed.get(request_id, 0)
                limit = state.limits.store_tokens
                if limit is not None:
                    num_hashed = min(num_hashed, limit // self._block_sizes[group_idx])
                cursor = state.cursors[group_idx]
                if cursor >= num_hashed:
                    continue
                state.cursors[group_idx] = num_hashed
                table = tables[request_id]
                num_before = len(sources.blocks)
                kept = self._look(request, table[cursor:num_hashed], cursor, sources)
                if kept:
                    present[state] = present[state] + kept if state in present else kept
                num_added = len(sources.blocks) - num_before
                if num_added:
                    sources.owners.append((state, num_added))
                    if homes is not None:
                        homes.append(Home(tables, request_id, table))
            if sources.blocks:
                found.append(sources)
        return found, present

    def tails(self, state: RequestState) -> list[Sources]:
        """The blocks in which the prompt ends, if vLLM finds them by their first tokens.

        vLLM hashes such a block where hits end inside a block, before it is full. It may become
        full while its request runs, so it is worth storing when that has ended.
        (vLLM 0.32.0, FullAttentionManager._cache_partial_tail_block)
        """
        request_id, limit = state.request.request_id, state.limits.store_tokens
        tails = []
        for group_idx in self._larger_ids:
            tables, nums_hashed = self._gpu.tables_of(group_idx)
            place = nums_hashed.get(request_id, 0)
            is_allowed = limit is None or (place + 1) * self._block_sizes[group_idx] <= limit
            table = tables.get(request_id, ())
            if is_allowed and state.cursors[group_idx] <= place < len(table):
                tails.append(Sources(group_idx))
                self._look(state.request, table[place : place + 1], place, tails[-1])
        return tails

    def pass_over(self, state: RequestState) -> None:
        """Move the cursors to the end of what is hashed, whatever it holds."""
        for group_idx in self._group_ids:
            _, nums_hashed = self._gpu.tables_of(group_idx)
            num_hashed = nums_hashed.get(state.request.request_id, 0)
            if group_idx in self._larger_ids:
                num_hashed += 1  # the prompt may end in it
            state.cursors[group_idx] = max(state.cursors[group_idx], num_hashed)

    def _look(
        self, request: Request, blocks: list[KVCacheBlock], first: int, sources: Sources
    ) -> list[int]:
        """Look at blocks of a table, from the `first` on; add those to `sources` that are missing.

        Returns:
            The host slots that hold the others.
        """
        group_idx = sources.group_idx
        witnesses: list[Any] = hashes_of(blocks)
        is_whole = all(witnesses)
        if not is_whole:  # a window slid past some, or no hit can ever need them
            if not any(witnesses):
                return []
            blocks = needed(blocks, witnesses, None)
            witnesses = needed(witnesses, witnesses, None)
        if is_whole and self._block_sizes[group_idx] == self._hash_block_size:
            hashes = request.block_hashes[first : first + len(blocks)]
        else:
            hashes = [get_block_hash(witness) for witness in witnesses]
        kept: list[Any] = list(map(self._directory.tables[group_idx].get, hashes))
        num_missing = kept.count(None)
        if num_missing < len(kept):
            if not num_missing:
                return self._directory.filled(kept)
            missing = [slot is None for slot in kept]
            blocks = list(compress(blocks, missing))
            witnesses = list(compress(witnesses, missing))
            hashes = list(compress(hashes, missing))
            kept = [slot for slot in kept if slot is not None]
        else:
            kept = []
        sources.add(blocks, witnesses, hashes)
        if self._gpu.has_more_hashes:
            sources.more_keys.update(find_more_keys(self._gpu, blocks, hashes))
        return self._directory.filled(kept) if kept else kept


@dataclass(slots=True)
class Snapshot:
    """A block table of a running request, to find there what is not stored if it is preempted.

    Attributes:
        group_idx: KV cache group.
        table: its block table; vLLM drops it when it preempts the request, and leaves it as it is.
        num_blocks: so many blocks at the head of it were computed when it was looked at last; None
            for a request that decodes, of which its tokens tell.
        num_prompt_tokens: of the request then; it differs when a client has sent more meanwhile.
        first: the blocks ahead of this one are stored, or need not be.
    """

    group_idx: int
    table: list[KVCacheBlock]
    num_blocks: int | None
    num_prompt_tokens: int
    first: int = 0

    def grows_with(self, request: Request) -> bool:
        """Whether it needs no other look: the request's tokens tell what is computed by then."""
        return self.num_blocks is None and self.num_prompt_tokens == request.num_prompt_tokens

    def num_computed(self, request: Request, block_size: int) -> int:
        """Leading blocks that are computed, or will be by a step ahead of the one being planned.

        The last token of an answer came out of a step that has computed all those before it.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        if request.num_prompt_tokens != self.num_prompt_tokens:
            return 0
        num_tokens: int = request.num_tokens - 1
        return num_tokens // block_size

    def unsaved(
        self, hashes: Sequence[bytes], num_blocks: int, given_out: Collection[int], gpu: GpuBlocks
    ) -> tuple[Sources, Sources]:
        """What it holds that is not stored, when its request has been preempted.

        Args:
            hashes: of the request, one for each of its blocks.
            num_blocks: so many blocks at the head are computed.
            given_out: ids of the blocks that were allocated in this step.
            gpu: tells which group is of sliding windows.

        Returns:
            Those that can only be stored ahead of the forward, because somebody was given them in
            this step or because vLLM has no hash to watch them by, as of many blocks of sliding
            windows; and those that wait in the queue of free blocks.
        """
        lost, waiting = Sources(self.group_idx), Sources(self.group_idx)
        is_window = gpu.is_window(self.group_idx)
        first = 0 if is_window else self.first  # what was not hashed was passed over
        table = self.table[first:num_blocks]
        for block, block_hash in zip(table, hashes[first:], strict=False):
            if block.is_null:
                continue
            witness = block_hash_of(block)
            if (
                witness is not None
                and get_block_hash(witness) == block_hash
                # Another group may hold the same tokens in it by now.
                and get_group_id(witness) == self.group_idx
            ):
                waiting.append(block, witness, block_hash)
            elif is_window or block.block_id in given_out:
                lost.append(block, _NO_WITNESS, block_hash)
        return lost, waiting


_NO_WITNESS = b"given away"
"""Is the hash object of no block."""


class LazyWalk:
    """Finds what is about to be evicted: the head of vLLM's queue of free blocks.

    The queue is not walked in every step. What was looked at once needs no second look while it
    stays in the queue: so a step goes on behind the last block that was seen, up to a distance from
    the head that no step can eat up, and begins again at the head when half of that is gone.

    Args:
        index: to skip what the host has or is about to have.
        gpu: the free queue.
        num_blocks: how far ahead of the allocator to look; twice what a step may allocate.
    """

    def __init__(self, index: HostHits, gpu: GpuBlocks, num_blocks: int) -> None:
        self._directory = index.directory
        self._group_ids = index.group_ids
        self._gpu = gpu
        self._num_blocks = num_blocks
        self._watched: list[tuple[list[KVCacheBlock], list[bytes | None]]] = []
        """What may be lost before the next plan, with the hash objects of then."""
        self._num_seen = 0
        self._half: Place | None = None
        self._last: Place | None = None
        self._ahead: Place | None = None
        """The last block that `look_ahead` has seen since the last plan."""
        self._avoided: dict[int, bytes] = {}  # by block id: a hash whose tokens nobody computed

    def avoid(self, hashes: set[bytes]) -> None:
        """Never store free blocks of these hashes, the last ones of blocks that nobody computed.

        By priority vLLM may preempt what it has scheduled, and hashed blocks for, in this step.
        """
        length = len(next(iter(hashes), b""))
        for block in self._gpu.free_blocks(self._gpu.num_free_blocks if hashes else 0):
            witness = block_hash_of(block)
            if witness is not None and get_block_hash(witness)[-length:] in hashes:
                self._avoided[block.block_id] = witness

    def _sources(
        self, blocks: Sequence[KVCacheBlock], witnesses: Sequence[bytes | None]
    ) -> list[Sources]:
        """See `sources_of`."""
        if self._avoided:
            avoided = map(self._avoided.get, [block.block_id for block in blocks])
            pairs = zip(witnesses, avoided, strict=True)
            witnesses = [None if w is known else w for w, known in pairs]
        return sources_of(blocks, witnesses, self._gpu, self._directory)

    def watch(self, state: RequestState) -> None:
        """Remember blocks of a request that finishes, if the next step may allocate them unseen.

        vLLM frees the tail of a table first, behind what is free already, and hands out no more in
        a step than half of what the walk looks at.
        """
        num_at_risk = self._num_blocks // 2 - self._gpu.num_free_blocks
        if num_at_risk <= 0:
            return
        request_id = state.request.request_id
        for group_idx in self._group_ids:
            tables, nums_hashed = self._gpu.tables_of(group_idx)
            end = nums_hashed.get(request_id, 0) + 1  # the prompt may end in a block that is hashed
            first = max(0, end - 1 - num_at_risk)
            blocks = tables.get(request_id, ())[first:end]
            if blocks:
                self._watched.append((blocks, hashes_of(blocks)))

    def look_ahead(self, num_blocks: int) -> None:
        """Remember what a request may take that has a hit, beside what the step's tokens take.

        A hit in the GPU's own cache takes its blocks out of the queue, and a load takes new ones.
        """
        if self._ahead is not None and self._ahead.stands():
            behind = self._ahead.block
        else:
            num_blocks += self._num_blocks // 2
            behind = self._last.block if self._last is not None and self._last.stands() else None
        blocks = self._gpu.free_blocks(num_blocks, behind)
        if blocks:
            self._ahead = Place.of(blocks[-1])
            self._watched.append((blocks, hashes_of(blocks)))

    def lost(self) -> list[Sources]:
        """What was watched, and was given away in this step; the rest waits in the queue."""
        watched, self._watched, self._ahead = self._watched, [], None
        found = []
        for blocks, witnesses in watched:
            is_lost = list(map(is_not, hashes_of(blocks), witnesses))
            if any(is_lost):
                lost = list(compress(blocks, is_lost)), list(compress(witnesses, is_lost))
                found += self._sources(*lost)
        return found

    def walk(self) -> list[Sources]:
        """Free blocks that the allocator takes soon, that the host does not have, not seen yet."""
        half, last = self._half, self._last
        if half is None or last is None or not (half.stands() and last.stands()):
            blocks = self._gpu.free_blocks(self._num_blocks)
            self._num_seen = 0
            middle = min(len(blocks), self._num_blocks // 2) - 1
            self._half = Place.of(blocks[middle]) if blocks else None
        elif self._num_seen < self._num_blocks:
            blocks = self._gpu.free_blocks(self._num_blocks - self._num_seen, last.block)
        else:
            return []
        if not blocks:
            return []
        self._num_seen += len(blocks)
        self._last = Place.of(blocks[-1])
        return self._sources(blocks, hashes_of(blocks))

    def begin_again(self) -> None:
        """Look at everything anew, in the next step."""
        self._half = self._last = None

    def reset(self) -> None:
        """Forget what is watched, and look at everything anew."""
        self._watched, self._ahead = [], None
        self.begin_again()


def sources_of(
    blocks: Sequence[KVCacheBlock],
    witnesses: Sequence[bytes | None],
    gpu: GpuBlocks,
    directory: Directory,
) -> list[Sources]:
    """Of some blocks, those that vLLM has hashed and the host neither has nor is about to have.

    Of blocks that hold the same, as two requests may have computed it, the first.

    Args:
        blocks: whatever group they are of.
        witnesses: the hash object of each; None if vLLM has not hashed it.
        gpu: tells what else they are known under.
        directory: what the host has.
    """
    by_group = [Sources(group_idx) for group_idx in range(len(directory.tables))]
    seen: set[bytes] = set()
    for block, witness in zip(blocks, witnesses, strict=True):
        if witness is None or witness in seen:
            continue
        block_hash = get_block_hash(witness)
        group_idx = get_group_id(witness) if len(by_group) > 1 else 0
        if block_hash not in directory.tables[group_idx]:
            seen.add(witness)
            by_group[group_idx].append(block, witness, block_hash)
    found = [sources for sources in by_group if sources.blocks]
    if gpu.has_more_hashes:
        for sources in found:
            owned = sources.intact()  # what was given away has the hashes of its next owner
            sources.more_keys = find_more_keys(gpu, owned.blocks, owned.hashes)
    return found


def find_more_keys(
    gpu: GpuBlocks, blocks: Sequence[KVCacheBlock], hashes: Sequence[bytes]
) -> dict[bytes, list[Key]]:
    """What blocks are known under beside their own hash, by that hash."""
    more = ((h, gpu.more_hashes(b.block_id)) for h, b in zip(hashes, blocks, strict=True))
    return {h: [Key(get_group_id(k), get_block_hash(k)) for k in keys] for h, keys in more if keys}
