"""The directory: what is found under which hash, from when on, and until when."""

from collections import Counter
from hashlib import sha256
from operator import itemgetter

import pytest

from safe_offload.scheduler.cache.directory import SPLIT_FROM, Directory

# ---- blocks that are known under several keys --------------------------------------------------


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
