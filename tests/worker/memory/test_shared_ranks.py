"""Ranks that hold the same KV cache, over one host memory: who stores what, and what is loaded."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from safe_offload.errors import SharingError
from safe_offload.layout import PAGE_BYTES
from safe_offload.observe.counters import Counters
from safe_offload.protocol import BadSlots, FailureReason, StepPlan, Transfer
from safe_offload.scheduler.cache.directory import Directory
from safe_offload.scheduler.cache.slots import SlotPool
from safe_offload.scheduler.eviction.policy import Lru
from safe_offload.scheduler.ranks import Ranks
from safe_offload.worker import rank_memory
from safe_offload.worker.memory.host_memory import HostMemory
from safe_offload.worker.memory.shared_memory import Share
from tests.worker.test_bridge import BLOCKS, Worker

NUM_RANKS = 3
FIRST = 6
"""Rank of the first: in some pipeline stage."""


@pytest.fixture
def make_ranks():
    """Workers that register their KV cache at the same time, as threads."""
    workers: list[Worker] = []

    def make(num_slots: int | None = 12, **options: Any) -> list[Worker]:
        ranks = range(FIRST, FIRST + NUM_RANKS)
        workers.extend(
            Worker(num_slots, rank=rank, ranks_per_copy=NUM_RANKS, **options) for rank in ranks
        )
        with ThreadPoolExecutor(NUM_RANKS) as executor:
            for future in [executor.submit(worker.register) for worker in workers]:
                future.result()
        return workers

    yield make
    for worker in workers:
        worker.bridge.shutdown()


def compute(ranks: list[Worker]) -> None:
    """All ranks hold the same in their blocks."""
    for worker in ranks:
        for block in range(BLOCKS):
            worker.write_block(block, 10 * block)


def step(ranks: list[Worker], plan: StepPlan) -> list[dict[int, FailureReason | None]]:
    for worker in ranks:
        worker.step(plan)
    return [worker.settle() for worker in ranks]


def host_of(worker: Worker) -> Any:
    return worker.host


STORE = StepPlan(stores_after_forward=(Transfer(1, (2, 5, 3, 7), (11, 0, 7, 4)),))
LOAD = StepPlan(loads=(Transfer(2, (9, 8, 1, 6), (7, 11, 0, 4)),))


def test_a_store_of_one_block_is_reported_by_all_and_copied_by_one(make_ranks):
    ranks = make_ranks()
    compute(ranks)
    one = StepPlan(stores_after_forward=(Transfer(5, (4,), (9,)),), fences=())
    assert step(ranks, one) == [{5: None}] * NUM_RANKS
    # A fence on it holds up no rank that does not copy it.
    for worker in ranks:
        worker.step(StepPlan(fences=(5,)))
    step(ranks, StepPlan(loads=(Transfer(6, (1,), (9,)),)))
    assert [worker.read_block(1)[0] for worker in ranks] == [40] * NUM_RANKS


def test_a_rank_notices_that_what_another_stored_has_changed(make_ranks):
    ranks = make_ranks(extra={"verify": "load"})
    compute(ranks)
    step(ranks, STORE)
    slot = 7
    offset, _ = ranks[0].layout.ranges_of(slot)[0]
    host_of(ranks[0]).tensor[offset] ^= 1
    found = step(ranks, LOAD)
    assert [outcomes[2] for outcomes in found] == [FailureReason.CHECKSUM_MISMATCH] * NUM_RANKS
    for worker in ranks:
        bad = [told for report in worker.reports for told in report.bad_slots]
        assert bad == [BadSlots(worker.rank, (slot,))]


def test_where_memory_cannot_be_shared_each_rank_has_its_own(make_ranks, monkeypatch, caplog):
    refuse = Mock(side_effect=SharingError("Operation not permitted"))
    monkeypatch.setattr(rank_memory, "share_memory", refuse)
    with caplog.at_level("INFO"):
        ranks = make_ranks()
    said = [r for r in caplog.records if "cannot share one copy" in r.message]
    assert [record.levelname for record in said].count("WARNING") == 1, "of the first rank"
    assert all("Operation not permitted" in record.message for record in said)
    assert "one copy for" not in caplog.text
    compute(ranks)
    assert step(ranks, STORE) == [{1: None}] * NUM_RANKS
    assert step(ranks, LOAD) == [{1: None, 2: None}] * NUM_RANKS
    for worker in ranks:
        assert [worker.read_block(block)[0] for block in (9, 8, 1, 6)] == [30, 20, 50, 70]
    host_of(ranks[0]).tensor[5] = 77
    host_of(ranks[1]).tensor[5] = 78
    assert int(host_of(ranks[0]).tensor[5]) == 77


@pytest.mark.parametrize("num_alone", [0, 1, NUM_RANKS])
def test_the_scheduler_side_is_told_who_shares_and_stops_if_only_some_do(
    make_ranks, monkeypatch, num_alone
):
    """As if some had got a memory, and others had been told that there is none."""
    original = rank_memory.share_memory

    def share(share: Share, *args: object) -> object:
        if num_alone == 0:
            return original(share, *args)
        if share.index < num_alone:
            raise SharingError("no")
        return HostMemory.allocate(2 * PAGE_BYTES)

    monkeypatch.setattr(rank_memory, "share_memory", share)
    workers = make_ranks(extra={"self_test": "off"})
    counters = Counters()
    ranks = Ranks(NUM_RANKS, SlotPool(12, Directory(12, 1), Lru(12), counters), counters)
    for worker in workers:
        worker.settle()
        (facts,) = worker.reports[0].host_facts
        is_alone = worker.rank - FIRST < num_alone
        assert facts.num_sharing == (1 if is_alone else NUM_RANKS)
        ranks.add_facts(facts)
    assert ranks.has_dead == (num_alone == 1)
