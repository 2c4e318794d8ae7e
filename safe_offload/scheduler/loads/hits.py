"""vLLM's hit rules, applied to the host's blocks.

The rules of hybrid models (full attention, sliding window, chunked local, Mamba states, MLA, the
block that EAGLE drops) belong to vLLM: its own cache coordinator runs over the host's slots. Only
the rules of full attention and of windows are implemented here, too, without a call per block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, filterfalse
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

from safe_offload.compat import cache_hits, specs
from safe_offload.compat.cache_hits import GroupGeometry
from safe_offload.scheduler.loads.boundaries import Boundaries

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from safe_offload.scheduler.cache.slots import SlotPool


NO_SLOT = -1
"""In a hit, for a block that its group does not need (a window has slid past it)."""


def needed(items: list[Any], markers: list[Any], null: object) -> list[Any]:
    """Return the items whose marker is not `null`; in most cases, all nulls are at the head."""
    num_nulls = markers.count(null)
    if num_nulls and null in markers[num_nulls:]:
        return [item for item, marker in zip(items, markers, strict=True) if marker != null]
    return items[num_nulls:]


@dataclass(frozen=True, slots=True)
class Hit:
    """A run of tokens that the host has, after those that the GPU has.

    Bound: an entry for each block of its request, of each KV cache group.
    """

    # By KV cache group, one slot per block of the run; `NO_SLOT` where the group does not need one.
    slots_by_group: tuple[list[int], ...]
    num_tokens: int
    num_computed_tokens: int  # tokens before the run, which the GPU has
    end_max: int  # the upper limit of the run's end, as a token of the request
    as_of: tuple[int, int]  # `Directory.version` and `Directory.num_forgets` at the search
    parted_at: int = 0  # see `HostHits.search`

    def slots(self) -> list[int]:
        """Return all real slots of the hit, each group in prefix order."""
        slots: list[int] = []
        for group in self.slots_by_group:
            slots += needed(group, group, NO_SLOT)
        return slots


class Ends(NamedTuple):
    """Windows and states of a request."""

    spare: Sequence[int]  # held, but no hit is known to need them and no load has read them
    needed: Sequence[int]  # by hits, and the request does not hold them


class Finder(Protocol):
    """A place of blocks: `Directory`, or that and tiers (`tiered_hits.py`)."""

    def find(self, group_idx: int, block_hash: bytes) -> Any:
        """Return the slot of a block, or what stands for it; None if it is nowhere."""

    def find_run(self, group_idx: int, hashes: Sequence[bytes]) -> list[Any]:
        """Return the results of `find` up to the first missing block."""


class FoundAsBlocks:
    """The part of vLLM's `BlockPool` that its hit rules use, over the blocks of a finder."""

    null_block = NO_SLOT

    def __init__(self, finder: Finder, hash_block_size: int) -> None:
        self.hash_block_size = hash_block_size
        self._find = finder.find
        self._find_run = finder.find_run

    def get_cached_block(self, block_hash: bytes, group_ids: Iterable[int]) -> list[Any] | None:
        """Return the slot of a block in each group; None if a group lacks the block."""
        found = []
        for group_idx in group_ids:
            block = self._find(group_idx, block_hash)
            if block is None:
                return None
            found.append(block)
        return found

    def find_runs(
        self, block_hashes: Sequence[bytes], group_ids: Iterable[int]
    ) -> tuple[list[Any], ...]:
        """Return by group the slots of the leading blocks that all groups have."""
        runs = tuple(self._find_run(group_idx, block_hashes) for group_idx in group_ids)
        num_blocks = min(map(len, runs))
        for run in runs:
            del run[num_blocks:]
        return runs


class FullAttentionInRuns(FullAttentionManager):
    """vLLM's rule of full attention for `FoundAsBlocks`, without a call for each block.

    Source: vLLM 0.32.0, FullAttentionManager.find_longest_cache_hit, which is called wherever more
    than the number of leading blocks matters.
    """

    @classmethod
    def find_longest_cache_hit(  # noqa: PLR0913 (they are vLLM's)
        cls,
        block_hashes: Sequence[bytes],
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> Any:
        """Return the slots of each group, and the number of tokens that all of them cover."""
        size = kv_cache_spec.block_size
        is_aligned = size == block_pool.hash_block_size and alignment_tokens % size == 0
        if not is_aligned or dcp_world_size > 1 or pcp_world_size > 1:
            what = block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec
            how = drop_eagle_block, alignment_tokens, dcp_world_size, pcp_world_size
            return super().find_longest_cache_hit(*what, *how)
        runs = block_pool.find_runs(block_hashes[: max_length // size], kv_cache_group_ids)
        num_tokens = max(0, len(runs[0]) - drop_eagle_block) * size
        num_tokens -= num_tokens % alignment_tokens
        for run in runs:
            del run[num_tokens // size :]
        return runs, num_tokens


class WindowInRuns(SlidingWindowManager):
    """vLLM's rule of sliding windows for `FoundAsBlocks`: nearly always the last one is there.

    Source: vLLM 0.32.0, SlidingWindowManager.find_longest_cache_hit, which is called for the
    others.
    """

    @classmethod
    def find_longest_cache_hit(  # noqa: PLR0913 (they are vLLM's)
        cls,
        block_hashes: Sequence[bytes],
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> Any:
        """Return the slots of each group, and the number of tokens that all of them cover."""
        size, end = kv_cache_spec.block_size, max_length // kv_cache_spec.block_size
        if size == block_pool.hash_block_size == alignment_tokens and not drop_eagle_block:
            first = max(0, end - max(1, -(-(kv_cache_spec.sliding_window - 1) // size)))
            runs = block_pool.find_runs(block_hashes[first:end], kv_cache_group_ids)
            if len(runs[0]) == end - first:
                return tuple([NO_SLOT] * first + run for run in runs), end * size
        what = block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec
        how = drop_eagle_block, alignment_tokens, dcp_world_size, pcp_world_size
        return super().find_longest_cache_hit(*what, *how)


RULES: dict[type, type] = {
    FullAttentionManager: FullAttentionInRuns,
    SlidingWindowManager: WindowInRuns,
}


def coordinator_over(pool: Any, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Any:
    """Return vLLM's cache coordinator with its rules over a pool of ours."""
    sizes = specs.resolve_block_sizes(kv_cache_config, vllm_config)
    # It makes a pool of its own, which has no use: one block is the least.
    config = replace(kv_cache_config, num_blocks=1)
    coordinator = cache_hits.make_coordinator(vllm_config, config, *sizes)
    cache_hits.replace_rules(coordinator, RULES)
    coordinator.block_pool = pool
    for manager in coordinator.single_type_managers:
        manager.block_pool = pool
        manager._null_block = NO_SLOT
    return coordinator


class HostHits:
    """Finds hits on the host; only `slots` and its directory are mutable.

    Bound: an entry for each KV cache group.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, slots: SlotPool
    ) -> None:
        self.slots = slots
        self.directory = slots.directory
        self._block_size, hash_block_size = specs.resolve_block_sizes(kv_cache_config, vllm_config)
        pool = FoundAsBlocks(self.directory, hash_block_size)
        self._coordinator = coordinator_over(pool, vllm_config, kv_cache_config)
        self.geometry = GroupGeometry(vllm_config, kv_cache_config, self._coordinator)
        num_step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        # Where vLLM keeps windows and states of requests.
        self.boundaries = Boundaries(self.geometry, self._coordinator, num_step_tokens)
        self._hash_block_size = hash_block_size
        self._alignment_tokens = self.geometry.alignment_tokens
        self._is_plain = self.geometry.is_plain
        takes_last_block = self._is_plain and not cache_hits.uses_drafter(vllm_config)
        self._overhang = int(takes_last_block)  # tokens of the last block behind the hit
        self._reads_ends = cache_hits.reads_ends(self._coordinator)
        self._skips: list[tuple[int, Callable[[int], int] | None]] = []
        """By group, the tokens that so many tokens skip; None: none. Empty: see vLLM."""
        if not (self.geometry.ends_inside_blocks or self._coordinator.eagle_group_ids):
            skips = [m.get_num_skipped_tokens for m in self._coordinator.single_type_managers]
            for group_idx in self.geometry.group_ids:
                reads_end = self._reads_ends[group_idx]
                self._skips.append((group_idx, skips[group_idx] if reads_end else None))
        self._num_end_blocks = sum(cache_hits.boundary_blocks(self._coordinator))
        self.full_group = cache_hits.full_attention_group(self._coordinator, hash_block_size)
        # A hit is as many leading blocks as there are, or one less with EAGLE drafts.
        self.ends_anywhere = cache_hits.ends_anywhere(self._coordinator, hash_block_size)

    def find_hit(
        self, block_hashes: Sequence[bytes], num_computed_tokens: int, end_max: int
    ) -> Hit | None:
        """Find the longest run of tokens from `num_computed_tokens` on that the host holds.

        Args:
            block_hashes: the request's, one per `hash_block_size` tokens.
            num_computed_tokens: tokens that the GPU has.
            end_max: the upper limit of the run's end, as a token of the request.

        Returns:
            None if there is none, or if it cannot start at `num_computed_tokens`.
        """
        return self.search(block_hashes, num_computed_tokens, end_max)[0]

    def search(
        self, block_hashes: Sequence[bytes], num_computed_tokens: int, end_max: int
    ) -> tuple[Hit | None, int]:
        """Return the result of `find_hit`, and where prompts diverged beyond it, as a token, or 0.

        The host has full attention up to there. Where that is all there is, a hit that ends one
        token before the end of a block takes that block, too: so a prompt of whole blocks computes
        its last token only. vLLM hashes that block in the step that computes the token, so no other
        request reads it before, and nothing is written to a hashed block. Drafters have KV cache of
        their own, which depends on the next token. And the last block alone is computed: that takes
        no longer than its load.
        """
        if num_computed_tokens % self._alignment_tokens:
            return None, 0
        parted_at = 0
        size = self._hash_block_size
        first = num_computed_tokens // size
        slots_by_group: tuple[list[int], ...]
        if self._is_plain:
            end = end_max // size
            if end > first:
                end = (end_max + self._overhang) // size
            slots = self.directory.find_run(0, block_hashes[first:end])
            if not slots:
                return None, 0
            num_tokens = min(len(slots) * size, end_max - num_computed_tokens)
            slots_by_group = (slots,)
        else:
            remaining, num_tokens_max = block_hashes[first:], end_max - num_computed_tokens
            if not remaining or num_tokens_max <= 0:
                return None, 0
            found = self._coordinator.find_longest_cache_hit(remaining, num_tokens_max)
            slots_by_group, num_tokens = found[:2]
            if num_more := cache_hits.uncached_tokens(found):
                parted_at = num_computed_tokens + num_tokens + num_more
            if not 0 < num_tokens <= num_tokens_max:
                return None, parted_at
        as_of = self.directory.version, self.directory.num_forgets
        found_hit = Hit(slots_by_group, num_tokens, num_computed_tokens, end_max, as_of, parted_at)
        return found_hit, parted_at

    def may_begin(self, block_hashes: Sequence[bytes], num_computed_tokens: int) -> bool:
        """Return whether `find_hit` may find a hit, judged by its first block."""
        if num_computed_tokens % self._alignment_tokens:
            return False
        if self.full_group is None:
            return True
        first_hash = block_hashes[num_computed_tokens // self._hash_block_size]
        return self.directory.find(self.full_group, first_hash) is not None

    def at_ends(self, request: Request, ends: Iterable[int], slots: Sequence[int]) -> Ends:
        """Sort a request's windows and states among `slots` by whether a hit needs them.

        Hits end at the ends of prompt and output, and at `ends`, as tokens.
        """
        is_found = map(self._reads_ends.__getitem__, map(self.directory.group_of, slots))
        found = list(dict.fromkeys(compress(slots, is_found)))
        if len(found) <= self._num_end_blocks and not self.geometry.has_states:
            return Ends((), ())
        needed: set[int] = set()
        for end in {request.num_prompt_tokens - 1, request.num_tokens, *ends}:
            needed.update(self._read_up_to(request, end))
        others = needed.difference(found, (NO_SLOT,))
        spare = filterfalse(needed.__contains__, self.slots.unread(found))
        return Ends(list(spare), sorted(others))

    def _read_up_to(self, request: Request, end: int) -> Iterable[int]:
        """Return the windows and states that the longest hit up to a token reads.

        It nearly always ends with the last block, or the last computed one, and then needs no
        search.
        """
        last = end - end % self._block_size
        if self._skips:
            for place in (last, last - self._block_size):
                if place > 0 and (read := self._read_at(request, place)) is not None:
                    return read
        hit = self.find_hit(request.block_hashes, 0, end)
        if hit is None:
            return ()
        found = list(chain(*compress(hit.slots_by_group, self._reads_ends)))
        if self._coordinator.eagle_group_ids:  # a search finds one more block, and drops it
            for group_idx in filter(self._reads_ends.__getitem__, self.geometry.group_ids):
                place = hit.num_tokens // self.geometry.group_block_sizes[group_idx]
                dropped = self.geometry.hashes_of(request, group_idx)[place : place + 1]
                found += self.directory.find_run(group_idx, dropped)
        return found

    def _read_at(self, request: Request, end: int) -> list[int] | None:
        """Return the windows and states that a hit with this end reads; None without one."""
        read: list[Any] = []
        for group_idx, num_skipped in self._skips:
            size = self.geometry.group_block_sizes[group_idx]
            count = end // size
            first = num_skipped(end) // size if num_skipped else count - 1
            hashes = self.geometry.hashes_of(request, group_idx)[first:count]
            found = list(map(self.directory.tables[group_idx].get, hashes))
            if None in found or len(found) < count - first:
                return None
            if num_skipped:
                read += found
        return read if self.directory.being_stored.isdisjoint(read) else None

    def is_still_longest(
        self, hit: Hit, block_hashes: Sequence[bytes], num_computed_tokens: int, end_max: int
    ) -> bool:
        """Return whether a search would find a leased hit again; vLLM asks in every step."""
        if hit.num_computed_tokens != num_computed_tokens:
            return False
        if hit.end_max != end_max:
            return False  # it has grown: one that was preempted may get a token while it waits
        version, num_forgets = hit.as_of
        directory = self.directory
        if num_forgets != directory.num_forgets:
            return False  # a slot of a hit can be forgotten although it is leased
        end = hit.num_computed_tokens + hit.num_tokens
        if version == directory.version or end == end_max:
            return True
        group_idx, block_size = self.full_group, self._hash_block_size
        if group_idx is None or end % block_size:
            return False
        if end + block_size > end_max + self._overhang or end // block_size >= len(block_hashes):
            return True
        return directory.find(group_idx, block_hashes[end // block_size]) is None

    def grown(
        self, hit: Hit, block_hashes: Sequence[bytes], num_computed_tokens: int, end_max: int
    ) -> tuple[Hit, list[int]] | None:
        """Extend a leased hit at its head, because the GPU has lost blocks before it.

        This happens to a preempted request at the head of the queue. Returns the result of
        `find_hit` and its new slots, which are its first; None if that requires a search.
        """
        num_more = hit.num_computed_tokens - num_computed_tokens
        if num_more <= 0 or num_computed_tokens % self._alignment_tokens:
            return None
        if not self.is_still_longest(hit, block_hashes, hit.num_computed_tokens, end_max):
            return None
        new: list[int] = []
        slots_by_group: list[list[int]] = []
        for group_idx, slots in enumerate(hit.slots_by_group):
            if group_idx == self.full_group:
                first = num_computed_tokens // self._hash_block_size
                end = hit.num_computed_tokens // self._hash_block_size
                new = self.directory.find_run(group_idx, block_hashes[first:end])
                if len(new) < end - first:
                    return None
                slots_by_group.append([*new, *slots])
            elif slots and slots[0] == NO_SLOT:
                num_blocks = num_more // self.geometry.group_block_sizes[group_idx]
                slots_by_group.append([NO_SLOT] * num_blocks + slots)
            else:
                return None
        as_of = self.directory.version, self.directory.num_forgets
        return replace(
            hit,
            slots_by_group=tuple(slots_by_group),
            num_tokens=hit.num_tokens + num_more,
            num_computed_tokens=num_computed_tokens,
            as_of=as_of,
        ), new
