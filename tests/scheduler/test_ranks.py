"""What the ranks report of their host memory, put together, and the line when it is ready."""

import logging

import pytest

from safe_offload.observe.counters import Counters
from safe_offload.protocol import HostFacts, MemoryFacts, MemoryKind
from safe_offload.scheduler.cache.directory import Directory
from safe_offload.scheduler.cache.slots import SlotPool
from safe_offload.scheduler.eviction.policy import Lru
from safe_offload.scheduler.ranks import Ranks, merge

LOCKED = MemoryFacts(MemoryKind.PAGE_LOCKED, "99 %", (1,))
LOCKING = MemoryFacts(MemoryKind.LOCKING, "unknown")
PATHS = ("kernel", "batch", "each")


def make_ranks(num_ranks: int) -> Ranks:
    counters = Counters()
    return Ranks(num_ranks, SlotPool(8, Directory(8, 1), Lru(8), counters), counters)


def test_a_load_takes_what_it_takes_on_the_slowest_rank_if_all_have_timed_one():
    ranks, seconds = make_ranks(3), []
    for rank, load_block_s in ((0, 1e-5), (1, 3e-5), (2, 0.0), (2, 2e-5)):
        ranks.add_facts(HostFacts(rank, LOCKED, PATHS, load_block_s=load_block_s))
        seconds.append(ranks.load_block_s)
    assert seconds == [0.0, 0.0, 0.0, 3e-5]


def test_what_is_the_same_on_all_ranks_is_said_once():
    merged = merge([HostFacts(0, LOCKED, PATHS), HostFacts(1, LOCKED, PATHS)])
    assert merged == {
        "memory": "page-locked",
        "huge_pages": "99 %",
        "numa_node": "1",
        "copies_by": "kernel, batch, each",
        "ranks_per_copy": "1",
    }


def test_what_differs_between_ranks_is_mixed_and_their_nodes_are_listed():
    other = MemoryFacts(MemoryKind.PAGEABLE, "unknown", (10, 0))
    merged = merge([HostFacts(0, LOCKED, PATHS), HostFacts(1, other, ("each",))])
    assert merged == {
        "memory": "mixed",
        "huge_pages": "mixed",
        "numa_node": "0,1,10",
        "copies_by": "mixed",
        "ranks_per_copy": "1",
    }


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_share_by_twos_or_each_has_its_own(count, caplog):
    ranks = make_ranks(4)
    for rank, num_sharing in enumerate((2, 2, count, count)):  # another machine, or stage
        ranks.add_facts(HostFacts(rank, LOCKED, PATHS, num_sharing))
    assert not ranks.has_dead
    assert "ERROR" not in caplog.text
    assert ranks.host_labels["ranks_per_copy"] == ("2" if count == 2 else "mixed")


@pytest.mark.parametrize("counts", [(2, 2, 1, 2), (2, 2, 2, 1), (4, 4, 2, 4), (4, 4, 2, 2)])
def test_ranks_that_do_not_agree_who_shares_are_given_up(counts, caplog):
    ranks = make_ranks(4)
    for rank, num_sharing in enumerate(counts):
        ranks.add_facts(HostFacts(rank, LOCKED, PATHS, num_sharing))
    assert ranks.has_dead
    assert "sharing its host memory; rank " in caplog.text
    assert caplog.text.count("ERROR") == 1


def test_a_line_says_once_that_the_memory_of_all_ranks_is_ready(caplog):
    caplog.set_level(logging.INFO)
    ranks = make_ranks(2)
    ranks.add_facts(HostFacts(0, LOCKED, PATHS))
    ranks.add_facts(HostFacts(1, LOCKING, PATHS))
    assert "Host memory is ready" not in caplog.text
    ranks.add_facts(HostFacts(1, LOCKED, PATHS))
    ranks.add_facts(HostFacts(1, LOCKED, ("each",)))
    assert caplog.text.count("Host memory is ready") == 1
    assert "It is page-locked, huge pages 99 %, NUMA node 1. Copies by kernel," in caplog.text
