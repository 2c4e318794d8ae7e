"""Block sets: a block that was given away is seen, whatever took it, and parts stay in step."""

from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from safe_offload.scheduler.blocks import BlockSet, BlockTable
from safe_offload.scheduler.cache.directory import Key


def hashed(block: KVCacheBlock, name: bytes) -> bytes:
    """Cache a block as vLLM does: the hash is an object of its own each time."""
    hash_object = make_block_hash_with_group_id(name, 0)  # type: ignore[arg-type]
    block.reset_hash()
    block.set_block_hash(hash_object, num_tokens=4)
    return hash_object


def blocks_of(count: int) -> BlockSet:
    found = BlockSet(0)
    for n in range(count):
        block = KVCacheBlock(n + 1)
        hash_object = hashed(block, bytes([n]) * 32)
        found.add([block], [hash_object], [bytes([n]) * 32])
    return found


def test_nothing_is_given_away_while_the_hashes_are_the_same_objects():
    found = blocks_of(3)
    assert not found.given_away()
    assert found.intact() is found


def test_a_block_that_was_reset_is_lost():
    found = blocks_of(3)
    found.blocks[1].reset_hash()
    assert found.given_away()
    assert [block.block_id for block in found.intact().blocks] == [1, 3]


def test_a_block_that_was_cached_again_under_an_equal_hash_is_lost():
    found = blocks_of(2)
    assert hashed(found.blocks[0], bytes([0]) * 32) == found.hash_objects[0]
    assert found.given_away()
    assert found.intact().hashes == [bytes([1]) * 32]


def test_blocks_in_a_table_that_stands_are_nobody_elses():
    found = blocks_of(2)
    table: list[Any] = list(found.blocks)
    tables = {"a": table}
    found.kept_in = [BlockTable(tables, "a", table)]
    assert not found.given_away()
    tables["a"] = list(table)  # another life of the request
    assert not found.given_away(), "the hashes still say so"
    found.blocks[0].reset_hash()
    assert found.given_away()
    del tables["a"]
    assert found.given_away()


def test_one_table_that_is_gone_makes_all_blocks_be_looked_at():
    found = blocks_of(2)
    table: list[Any] = []
    found.kept_in = [BlockTable({"a": table}, "a", table), BlockTable({}, "b", [])]
    found.blocks[1].reset_hash()
    assert found.given_away()


def test_a_part_has_what_belongs_to_its_blocks():
    found = blocks_of(4)
    first, last = found.hashes[0], found.hashes[3]
    found.more_keys = {first: [Key(0, b"more")], last: [Key(0, b"other")]}
    part = found.part([0, 2])
    assert [block.block_id for block in part.blocks] == [1, 3]
    assert part.hash_objects == [found.hash_objects[0], found.hash_objects[2]]
    assert part.hashes == [found.hashes[0], found.hashes[2]]
    assert part.more_keys == {first: [Key(0, b"more")]}


def test_keeping_all_is_the_same_object():
    found = blocks_of(2)
    assert found.keep([True, True]) is found
    assert found.keep([False, True]).hashes == found.hashes[1:]
    assert found.keep([False, False]).blocks == []
