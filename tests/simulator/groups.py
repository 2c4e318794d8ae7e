"""KV cache groups: what attention of each kind reads and writes, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulator.words import Sequel

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

BLOCK_TOKENS = 4
"""Tokens of a block where a group does not say otherwise."""
PAGE_BYTES = 2048
"""Of every page, as vLLM is told: it wants pages of one size. No memory of this size exists."""
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group."""

    # "full", "mla", "window", "chunk" or "mamba"; "replay", a window that is not cached and
    # computed again after a hit; "ring", one block that has the last tokens of a request.
    kind: str
    # Tokens of the window or the chunk; of those that a ring collects before they are one.
    size: int = 0
    block_tokens: int = BLOCK_TOKENS  # tokens of a block

    @classmethod
    def parse(cls, text: str) -> Group:
        """Read "full", "window:10", "chunk:16@8": kind, size, and block size behind the @."""
        shape, _, block_tokens = text.partition("@")
        kind, _, size = shape.partition(":")
        return cls(kind, int(size or 0), int(block_tokens or BLOCK_TOKENS))

    def spec(self, *, half_precision: bool = False, page_bytes: int = PAGE_BYTES) -> Any:
        """vLLM's description of the group.

        Args:
            half_precision: vLLM zeroes new blocks where groups differ in it.
            page_bytes: of a block.
        """
        import torch
        from vllm.v1.kv_cache_interface import (
            ChunkedLocalAttentionSpec,
            FullAttentionSpec,
            MambaSpec,
            MLAAttentionSpec,
            SlidingWindowSpec,
        )

        page_words = page_bytes // _WORD_BYTES
        if self.kind == "mamba":
            return MambaSpec(
                block_size=self.block_tokens,
                shapes=((page_words,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            )
        head_size = page_words // self.block_tokens // (1 if self.kind == "mla" else 2)
        shape: dict[str, Any] = {
            "block_size": self.block_tokens,
            "num_kv_heads": 1,
            "head_size": head_size * 2 if half_precision else head_size,
            "dtype": torch.float16 if half_precision else torch.float32,
        }
        if self.kind == "window":
            return SlidingWindowSpec(**shape, sliding_window=self.size)
        if self.kind == "chunk":
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.size)
        return MLAAttentionSpec(**shape) if self.kind == "mla" else FullAttentionSpec(**shape)

    def first_attended(self, start: int) -> int:
        """First position that a query at `start` reads."""
        if self.kind in ("window", "replay"):
            return max(0, start - self.size + 1)
        if self.kind in ("chunk", "ring"):
            return start // self.size * self.size
        return 0


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive words of one block."""

    block_id: int
    first: int  # index of the first word in the block
    start: int  # position of that word in the prefix
    end: int  # one behind the last position
    is_state: bool = False  # all words of the block are the state behind position `end - 1`

    def words(self, sequel: Sequel, place_bits: int, block_words: int) -> list[int]:
        if self.is_state:
            return sequel.words(place_bits, self.end - 1, self.end) * block_words
        return sequel.words(place_bits, self.start, self.end)


NO_REPLAY = range(0)


def spans_read(
    group: Group, table: Sequence[KVCacheBlock], start: int, replay: range = NO_REPLAY
) -> list[Span]:
    """What the forward of a request reads that has computed `start` tokens.

    Args:
        replay: positions that are computed again for the windows, and are there for the others.
    """
    if group.kind == "mamba":
        if start == 0:
            return []
        block = table[(start - 1) // group.block_tokens]
        return [Span(block.block_id, 0, start - 1, start, is_state=True)]
    first = group.first_attended(start)
    if group.kind == "replay":
        return _spans(group, table, max(first, replay.start), start)
    if group.kind == "ring":
        return _spans(group, table, first, start)
    return _spans(group, table, first, max(start, replay.stop) if start in replay else start)


def spans_written(
    group: Group,
    table: Sequence[KVCacheBlock],
    start: int,
    end: int,
    replay: range = NO_REPLAY,
) -> list[Span]:
    """What the forward writes that computes the tokens from `start` to `end - 1`.

    Args:
        replay: see `spans_read`.
    """
    if group.kind not in ("replay", "ring"):
        start = max(start, replay.stop) if start in replay else start
        if start >= end:
            return []
    if group.kind == "mamba":
        block = table[(end - 1) // group.block_tokens]
        return [Span(block.block_id, 0, start, end, is_state=True)]
    return [s for s in _spans(group, table, start, end) if s.block_id != 0]


def _spans(group: Group, table: Sequence[KVCacheBlock], start: int, end: int) -> list[Span]:
    spans = []
    size = group.block_tokens
    if group.kind == "ring":
        positions = range(max(start, end - size), end)
        return [Span(table[0].block_id, p % size, p, p + 1) for p in positions]
    for index in range(start // size, -(-end // size)):
        low, high = max(start, index * size), min(end, (index + 1) * size)
        spans.append(Span(table[index].block_id, low - index * size, low, high))
    return spans
