"""GPU blocks that are worth storing, and how to see that they were given to somebody else.

What tells is a block's hash *object*: vLLM resets it when it reallocates the block and builds a new
object when it caches the block again, so `block's hash is not witness` says that the block was
given away, whoever took it: a request, a load, a copy-on-write, another connector.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_, is_not
from typing import TYPE_CHECKING

from safe_offload.scheduler.gpu_blocks import hashes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from safe_offload.scheduler.directory import Key
    from safe_offload.scheduler.gpu_blocks import Home
    from safe_offload.scheduler.requests import RequestState


@dataclass(slots=True)
class Sources:
    """GPU blocks of one KV cache group that a store reads, as they were when they were found.

    Attributes:
        group_idx: the group.
        blocks: vLLM's block objects.
        witnesses: the hash object of each.
        hashes: of each, without its group: what its bytes are found under.
        owners: the requests whose prefixes they extend, with how many of the blocks, in the order
            of these; the rest is nobody's.
        more_keys: by its hash, what else a block is known under; most have one hash.
        homes: the block tables that they are in, if none of the blocks can leave them before the
            whole table is gone; None if the blocks must be looked at one by one.
    """

    group_idx: int
    blocks: list[KVCacheBlock] = field(default_factory=list)
    witnesses: list[bytes] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    owners: list[tuple[RequestState, int]] = field(default_factory=list)
    more_keys: dict[bytes, list[Key]] = field(default_factory=dict)
    homes: list[Home] | None = None

    def given_away(self) -> bool:
        """Whether somebody else may own one of the blocks by now."""
        if self.homes is not None and all(home.stands() for home in self.homes):
            return False
        return any(map(is_not, hashes_of(self.blocks), self.witnesses))

    def intact(self) -> Sources:
        """Those that nobody else can own yet."""
        if not self.given_away():
            return self
        return self.keep(list(map(is_, hashes_of(self.blocks), self.witnesses)))

    def keep(self, wanted: list[bool]) -> Sources:
        """Those for which `wanted` is true."""
        if all(wanted):
            return self
        return self.part([index for index, is_wanted in enumerate(wanted) if is_wanted])

    def part(self, indices: Sequence[int]) -> Sources:
        """Those at these places, with no owner."""
        hashes = [self.hashes[index] for index in indices]
        more_keys = self.more_keys and {h: self.more_keys[h] for h in hashes if h in self.more_keys}
        return Sources(
            self.group_idx,
            [self.blocks[index] for index in indices],
            [self.witnesses[index] for index in indices],
            hashes,
            more_keys=more_keys,
            homes=self.homes,
        )

    def add(self, blocks: list[KVCacheBlock], witnesses: list[bytes], hashes: list[bytes]) -> None:
        """Take in more, one witness and hash for each block."""
        self.blocks += blocks
        self.witnesses += witnesses
        self.hashes += hashes

    def append(self, block: KVCacheBlock, witness: bytes, block_hash: bytes) -> None:
        """Take in one more."""
        self.blocks.append(block)
        self.witnesses.append(witness)
        self.hashes.append(block_hash)
