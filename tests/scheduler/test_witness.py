"""Sources: a block that was given away is seen, whoever took it, and parts stay in step."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from safe_offload.scheduler.directory import Key
from safe_offload.scheduler.gpu_blocks import Home
from safe_offload.scheduler.witness import Sources


def hashed(block: KVCacheBlock, name: bytes) -> bytes:
    """Cache a block as vLLM does: the hash is an object of its own each time."""
    witness = make_block_hash_with_group_id(name, 0)  # type: ignore[arg-type]
    block.reset_hash()
    block.set_block_hash(witness, num_tokens=4)
    return witness


def sources_of(count: int) -> Sources:
    sources = Sources(0)
    for n in range(count):
        block = KVCacheBlock(n + 1)
        witness = hashed(block, bytes([n]) * 32)
        sources.add([block], [witness], [bytes([n]) * 32])
    return sources


def test_nothing_is_given_away_while_the_hashes_are_the_same_objects() -> None:
    sources = sources_of(3)
    assert not sources.given_away()
    assert sources.intact() is sources


def test_a_block_that_was_reset_is_lost() -> None:
    sources = sources_of(3)
    sources.blocks[1].reset_hash()
    assert sources.given_away()
    assert [block.block_id for block in sources.intact().blocks] == [1, 3]


def test_a_block_that_was_cached_again_under_an_equal_hash_is_lost() -> None:
    sources = sources_of(2)
    assert hashed(sources.blocks[0], bytes([0]) * 32) == sources.witnesses[0]
    assert sources.given_away()
    assert sources.intact().hashes == [bytes([1]) * 32]


def test_blocks_in_a_table_that_stands_are_nobody_elses() -> None:
    sources = sources_of(2)
    table: list[Any] = list(sources.blocks)
    tables = {"a": table}
    sources.homes = [Home(tables, "a", table)]
    assert not sources.given_away()
    tables["a"] = list(table)  # another life of the request
    assert not sources.given_away(), "the hashes still say so"
    sources.blocks[0].reset_hash()
    assert sources.given_away()
    del tables["a"]
    assert sources.given_away()


def test_one_table_that_is_gone_makes_all_blocks_be_looked_at() -> None:
    sources = sources_of(2)
    table: list[Any] = []
    sources.homes = [Home({"a": table}, "a", table), Home({}, "b", [])]
    sources.blocks[1].reset_hash()
    assert sources.given_away()


def test_a_part_has_what_belongs_to_its_blocks_and_no_owner() -> None:
    sources = sources_of(4)
    first, last = sources.hashes[0], sources.hashes[3]
    sources.more_keys = {first: [Key(0, b"more")], last: [Key(0, b"other")]}
    sources.owners = [(None, 4)]  # type: ignore[list-item]
    part = sources.part([0, 2])
    assert [block.block_id for block in part.blocks] == [1, 3]
    assert part.witnesses == [sources.witnesses[0], sources.witnesses[2]]
    assert part.hashes == [sources.hashes[0], sources.hashes[2]]
    assert part.more_keys == {first: [Key(0, b"more")]}
    assert part.owners == []


def test_keeping_all_is_the_same_object() -> None:
    sources = sources_of(2)
    assert sources.keep([True, True]) is sources
    assert sources.keep([False, True]).hashes == sources.hashes[1:]
    assert sources.keep([False, False]).blocks == []
