"""A GPU block that is worth storing, and how to see that it was given to somebody else.

What tells is the block's hash *object*: vLLM resets it when it reallocates the block and builds a
new object when it caches the block again, so `block.block_hash is not witness` says that the block
was given away, whoever took it: a request, a load, a copy-on-write, another connector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from safe_offload.compat import GpuBlocks


@dataclass(slots=True)
class Source:
    """One GPU block that a store reads.

    Attributes:
        block: vLLM's block object.
        keys: the hashes under which the bytes are published, the block's own hash first.
        num_tokens: tokens of the prefix that ends with this block; None if vLLM does not say.
        witness: the block's hash object when the store was planned; None if the block had none or
            had been given away already: then nothing can tell when it is overwritten, and the store
            is fenced in the step that plans it.
    """

    block: KVCacheBlock
    keys: tuple[bytes, ...]
    num_tokens: int | None
    witness: bytes | None

    @property
    def given_away(self) -> bool:
        """Whether somebody else may own the block by now."""
        return self.witness is None or self.block.block_hash is not self.witness


def source_of(block: KVCacheBlock, gpu: GpuBlocks) -> Source | None:
    """A block as the source of a store; None if vLLM has not hashed it, or it is the null block."""
    witness = block.block_hash
    if witness is None or block.is_null:
        return None
    keys = (witness, *gpu.extra_hashes(block.block_id))
    return Source(block, keys, block.block_hash_num_tokens, witness)
