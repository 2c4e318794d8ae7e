"""The directory: what is found under which hash, from when on, and until when."""

from collections import Counter
from hashlib import sha256
from operator import itemgetter

import pytest

from safe_offload.errors import InvariantError
from safe_offload.scheduler.cache.directory import SPLIT_FROM, Directory, Key


def hashes_of(names: str) -> list[bytes]:
    """One hash for each letter."""
    return [name.encode() for name in names]


def filled(directory: Directory, names: str, first: int = 0, group_idx: int = 0) -> list[int]:
    """Slots from the `first` on that hold these."""
    slots = list(range(first, first + len(names)))
    directory.begin_store(slots, group_idx, hashes_of(names), {})
    directory.publish(slots)
    return slots


def test_what_is_published_is_found_and_changes_the_version():
    directory = Directory(3, 1)
    slots = [0, 1, 2]
    directory.begin_store(slots, 0, hashes_of("abc"), {})
    version = directory.version
    assert directory.find(0, b"a") is None
    assert directory.find_run(0, hashes_of("abc")) == []
    assert (directory.num_held, len(directory.being_stored)) == (3, 3)
    directory.publish(slots[:2])
    assert directory.version > version
    assert directory.find_run(0, hashes_of("abc")) == slots[:2]
    assert directory.filled(slots) == slots[:2]
    assert directory.find(0, b"a") == slots[0]
    assert (directory.num_held, len(directory.being_stored)) == (3, 1)


def test_a_run_ends_at_the_first_that_is_missing():
    directory = Directory(4, 1)
    filled(directory, "abd")
    assert directory.find_run(0, hashes_of("abcd")) == [0, 1]
    assert directory.find_run(0, hashes_of("cd")) == []
    assert directory.find_run(0, []) == []


def test_what_is_overwritten_is_not_found_and_was_not_forgotten_under_a_lease():
    directory = Directory(2, 1)
    filled(directory, "ab")
    version, num_forgets = directory.version, directory.num_forgets
    directory.remove([1])
    assert directory.find_run(0, hashes_of("ab")) == [0]
    assert directory.version > version
    assert directory.num_forgets == num_forgets


def test_forgetting_all_begins_another_epoch():
    directory = Directory(4, 2)
    filled(directory, "a")
    directory.begin_store([1], 1, hashes_of("a"), {})
    assert directory.forget_all() == [1, 0]
    assert directory.epoch == 1
    assert directory.kept() == {}
    assert not any(directory.tables)
    assert (directory.num_held, len(directory.being_stored)) == (0, 0)


# ---- blocks that are known under several keys --------------------------------------------------


def test_a_block_is_found_under_each_of_its_keys_and_forgotten_under_all():
    directory = Directory(4, 2)
    more = [Key(0, b"a2"), Key(1, b"a3")]
    directory.begin_store([0], 0, hashes_of("a"), {b"a": more})
    assert directory.find(0, b"a2") is None
    directory.publish([0])
    assert [directory.find(0, b"a"), directory.find(0, b"a2"), directory.find(1, b"a3")] == [0] * 3
    directory.check_invariants(set())
    directory.remove([0])
    assert not any(directory.tables)


def test_a_key_that_another_slot_has_stays_with_it():
    directory = Directory(4, 1)
    filled(directory, "b")
    more = {b"a": [Key(0, b"b"), Key(0, b"c"), Key(0, b"d")]}
    directory.begin_store([1, 2], 0, hashes_of("ac"), more)
    directory.publish([1, 2])
    assert [directory.find(0, h) for h in hashes_of("bcd")] == [0, 2, 1]
    directory.forget([1])
    assert [directory.find(0, h) for h in hashes_of("bcd")] == [0, 2, None]
    directory.check_invariants(set())


@pytest.mark.parametrize("is_large", [False, True])
def test_the_tables_of_a_large_host_are_many_dictionaries_of_one_size(is_large):
    """One of millions of entries takes a step's time to grow, and again whenever it was churned."""
    directory = Directory(SPLIT_FROM - (not is_large), 1)
    hashes = [sha256(b"%d" % index).digest() for index in range(SPLIT_FROM // 8)]
    directory.begin_store(range(len(hashes)), 0, hashes, {})
    sizes = Counter(map(itemgetter(0), directory.tables[0]))
    assert max(sizes.values()) < 1.5 * len(hashes) / 256
    assert isinstance(directory.tables[0], dict) is not is_large
    directory.publish(range(len(hashes)))
    assert directory.find_run(0, hashes) == list(range(len(hashes)))
    directory.remove(range(0, len(hashes), 2))
    assert len(directory.tables[0]) == directory.num_held == len(hashes) // 2
    directory.check_invariants(set())


# ---- its own check -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "invariant_id"),
    [
        (lambda directory: directory.begin_store([2], 0, [b"c"], {}), "I5"),
        (lambda directory: directory.tables[0].update(c=0), "I6"),
        (lambda directory: directory.tables[0].update(a=1, b=0), "I6"),
    ],
)
def test_a_spoilt_directory_is_seen(spoil, invariant_id):
    directory = Directory(4, 1)
    directory.begin_store([0], 0, [b"a"], {})
    filled(directory, "b", first=1)
    directory.check_invariants({0})
    spoil(directory)
    with pytest.raises(InvariantError, match=invariant_id):
        directory.check_invariants({0})
