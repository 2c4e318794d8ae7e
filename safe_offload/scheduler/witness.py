"""GPU blocks that are worth storing, and how to see that they were given to somebody else.

What tells is a block's hash *object*: vLLM resets it when it reallocates the block and builds a new
object when it caches the block again, so `hash_of(block) is not witness` says that the block was
given away, whoever took it: a request, a load, a copy-on-write, another connector.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_, is_not
from typing import TYPE_CHECKING

from safe_offload.compat import block_hash_of

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from safe_offload.compat import GpuBlocks, Home


@dataclass(slots=True)
class Sources:
    """GPU blocks that a store reads, as they were when they were found.

    Attributes:
        blocks: vLLM's block objects.
        keys: the hash object of each: its witness, and what its bytes are published under.
        more_keys: by its key, what else a block is known under; most are known under one.
        home: the block table that they are in, if none of them can leave it before the whole table
            is gone; None if they must be looked at one by one.
    """

    blocks: list[KVCacheBlock] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    more_keys: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    home: Home | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def given_away(self) -> bool:
        """Whether somebody else may own one of the blocks by now."""
        if self.home is not None and self.home.stands():
            return False
        return any(map(is_not, map(block_hash_of, self.blocks), self.keys))

    def intact(self) -> Sources:
        """Those that nobody else can own yet."""
        if not self.given_away():
            return self
        return self.keep(list(map(is_, map(block_hash_of, self.blocks), self.keys)))

    def keep(self, wanted: list[bool]) -> Sources:
        """Those for which `wanted` is true."""
        if all(wanted):
            return self
        blocks = [block for block, is_wanted in zip(self.blocks, wanted, strict=True) if is_wanted]
        keys = [key for key, is_wanted in zip(self.keys, wanted, strict=True) if is_wanted]
        return self._part(blocks, keys)

    def split(self, count: int) -> tuple[Sources, Sources]:
        """The first `count` of them, and the rest."""
        if count >= len(self.keys):
            return self, Sources()
        first = self._part(self.blocks[:count], self.keys[:count])
        return first, self._part(self.blocks[count:], self.keys[count:])

    def _part(self, blocks: list[KVCacheBlock], keys: list[bytes]) -> Sources:
        more_keys = {key: self.more_keys[key] for key in keys if key in self.more_keys}
        return Sources(blocks, keys, more_keys, self.home)


def sources_of(blocks: list[KVCacheBlock], gpu: GpuBlocks) -> Sources:
    """Those of some blocks that vLLM has hashed; the null block never is."""
    pairs = [(block, key) for block in blocks if (key := block_hash_of(block)) is not None]
    blocks = [block for block, _ in pairs]
    return Sources(blocks, [key for _, key in pairs], gpu.more_keys(blocks))
