"""The worker's hooks over tiny tensors: what they move, what they report, what they refuse."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from safe_offload.config.options import OffloadConfig
from safe_offload.errors import ConfigError, StalledError
from safe_offload.node.locks import TESTS, Locks
from safe_offload.node.pools import TABLE
from safe_offload.observe.counters import Count, Counters
from safe_offload.protocol import (
    EMPTY_PLAN,
    BadSlots,
    FailureReason,
    HostFacts,
    MemoryFacts,
    MemoryKind,
    Outcome,
    StepPlan,
    StepReport,
    Transfer,
    ids_of,
)
from safe_offload.tiers.namespace.namespace_facts import NamespaceFacts
from safe_offload.worker import opening as opening_module
from safe_offload.worker import pool as pool_module
from safe_offload.worker import rank_memory
from safe_offload.worker.bridge import WorkerBridge
from safe_offload.worker.copies import cpu
from safe_offload.worker.copies.base import CopyPath, Direction
from safe_offload.worker.loop_thread import LoopThread, new_event_loop
from safe_offload.worker.memory.host_memory import HostMemory
from safe_offload.worker.opening import Opening, open_backend
from safe_offload.worker.self_test import SelfTest
from tests.node.engines import pools_in
from tests.worker.fake_backend import PATIENCE_S, FakeBackend, transfer
from tests.worker.memory.pools import is_closed
from tests.worker.waiting import wait_until
from tests.worker.watched_loop import HandClock, WatchedLoop

PAGE = 48
BLOCKS = 10
LAYERS = ("a", "b", "c")
SLOT_BYTES = PAGE * len(LAYERS)
RANK = 3


class Worker:
    """A bridge, and the memory that vLLM would have given it."""

    def __init__(
        self,
        num_slots: int | None = 12,
        *,
        layout: str = "layers outermost",
        extra: dict[str, object] | None = None,
        rank: int = RANK,
        ranks_per_copy: int = 1,
        num_blocks: int = BLOCKS,
        is_beside_scheduler: bool = False,
        **opening: Any,
    ) -> None:
        self.rank = rank
        self.loop = WatchedLoop(opening.pop("make_event_loop", new_event_loop))
        self.backend: Any = None
        self.host: HostMemory | None = None
        size = SLOT_BYTES * BLOCKS
        layer_stride, block_stride = (
            (PAGE * BLOCKS, PAGE) if layout == "layers outermost" else (PAGE, SLOT_BYTES)
        )
        tensors = [
            KVCacheTensor(size, list(LAYERS), layer_stride, block_stride),
            # A second cache group overlays the first.
            KVCacheTensor(size, ["x", "y"], layer_stride, block_stride),
        ]
        self.storage = torch.zeros(size, dtype=torch.uint8)
        self.caches = {
            name: torch.as_strided(
                self.storage, (BLOCKS, PAGE), (block_stride, 1), index * layer_stride
            )
            for tensor in tensors
            for index, name in enumerate(tensor.layers)
        }
        settings = {**({"num_cpu_blocks": num_slots} if num_slots else {}), **(extra or {})}
        self.config = dataclasses.replace(
            OffloadConfig.from_extra_config(settings, world_size=ranks_per_copy),
            ranks_per_copy=ranks_per_copy,
        )
        self.opening = Opening(
            config=self.config,
            kv_cache_config=KVCacheConfig(num_blocks, tensors, []),
            rank=rank,
            num_ranks_on_host=opening.pop("num_ranks_on_host", ranks_per_copy),
            open_backend=self._open_backend,
            make_loop=lambda: self.loop,
            namespace_facts_of=opening.pop(
                "namespace_facts_of", lambda geometry, copy_rank: NamespaceFacts({})
            ),
            **opening,
        )
        self.bridge = WorkerBridge(self.opening, is_beside_scheduler=is_beside_scheduler)
        self.reports: list[StepReport] = []

    def _open_backend(self, storage, device, layout, host, config) -> tuple[Any, Any]:
        """The product's, unless the test has put in one of its own."""
        self.layout, self.host = layout, host
        if self.backend is not None:
            return self.backend, None
        self.backend, rows = open_backend(storage, device, layout, host, config)
        return self.backend, rows

    def register(self) -> Worker:
        self.bridge.register_kv_caches(self.caches)
        return self

    # ---- memory --------------------------------------------------------------------------------

    def write_block(self, block: int, word: int) -> None:
        """Fill a block: each layer with a word of its own."""
        for index, layer in enumerate(LAYERS):
            self.caches[layer][block].fill_(word + index)

    def read_block(self, block: int) -> list[int]:
        """The word of each layer; a block that is not uniform is an error."""
        words = []
        for layer in LAYERS:
            found = set(self.caches[layer][block].tolist())
            assert len(found) == 1, (layer, found)
            words.append(found.pop())
        assert words == list(range(words[0], words[0] + len(LAYERS))) or set(words) == {0}
        return words

    # ---- hooks ---------------------------------------------------------------------------------

    def step(
        self, plan: StepPlan, forward: Callable[[], object] = lambda: None, order: str = "V1"
    ) -> tuple[str, ...]:
        """All hooks of a step in one of the orders in which vLLM calls them.

        Returns what `get_transfer_results` answered.
        """
        bridge = self.bridge
        bridge.handle_preemptions(plan)
        bridge.bind_connector_metadata(plan)
        if order == "synchronous loads of another connector":
            bridge.start_load_kv()
        forward()
        if order != "synchronous loads of another connector":
            bridge.start_load_kv()
        if order == "speculative decoding":
            failures = self._collect()
            bridge.wait_for_save()
        else:
            bridge.wait_for_save()
            failures = self._collect()
        bridge.clear_connector_metadata()
        return failures

    def _collect(self) -> tuple[str, ...]:
        failures = self.bridge.get_transfer_results()
        report = self.bridge.build_connector_worker_meta()
        if report is not None:
            self.reports.append(report)
        return failures

    def settle(self) -> dict[int, FailureReason | None]:
        """Wait for all copies, step once more, and return every outcome so far."""
        opened = self.bridge.opened
        if opened is not None:
            wait_until(lambda: not opened.transfers.statistics().unsettled_ids)
        assert self.step(EMPTY_PLAN) == ()
        return self.outcomes()

    def outcomes(self) -> dict[int, FailureReason | None]:
        found = [outcome for report in self.reports for outcome in report.outcomes]
        assert all(outcome.rank == self.rank for outcome in found)
        by_id = {outcome.transfer_id: outcome.failure for outcome in found}
        assert len(by_id) == len(found), "a transfer was reported twice"
        return by_id


ORDERS = ("V1", "speculative decoding", "synchronous loads of another connector")


@pytest.fixture
def make_worker():
    workers: list[Worker] = []

    def make(**kwargs: object) -> Worker:
        workers.append(Worker(**kwargs))
        return workers[-1]

    yield make
    for worker in workers:
        worker.bridge.shutdown()


@pytest.fixture
def worker(make_worker):
    return make_worker().register()


def faked(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """Register a worker with a backend whose copies the test ends, so that nothing tests itself."""
    monkeypatch.setattr(SelfTest, "run", lambda *_, **__: True)
    worker.backend = FakeBackend()
    worker.register()
    return worker.backend


# ---- the self-test -------------------------------------------------------------------------------


def test_a_rank_whose_copies_are_wrong_says_once_that_it_is_lost_and_gives_its_memory_back(
    make_worker, monkeypatch, caplog
):
    monkeypatch.setattr(cpu, "move_each", lambda ranges: None)
    monkeypatch.setattr(cpu, "find_move", lambda: cpu.move_each)
    freed = []
    monkeypatch.setattr(HostMemory, "close", lambda host: freed.append(host.size_bytes))
    worker = make_worker().register()
    assert freed
    assert "No copy path passed the self-test" in caplog.text
    store = Transfer(1, ids_of([1]), ids_of([1]))
    worker.step(StepPlan(stores_after_forward=(store,)))
    worker.step(EMPTY_PLAN)
    assert [report.lost_ranks for report in worker.reports] == [(RANK,)]
    assert worker.outcomes() == {1: FailureReason.NOT_RUNNING}
    assert not any(report.capacities for report in worker.reports)


def test_ways_to_copy_that_were_left_are_counted_once(make_worker, monkeypatch):
    worker = make_worker()
    backend = faked(worker, monkeypatch)
    backend.num_demotions = 2
    assert counted(worker) == {Count.COPY_PATH_DEMOTIONS: 2}
    assert counted(worker) == {}


def counted(worker: Worker) -> dict[str, int]:
    """What the worker has counted since the last call."""
    counters = Counters()
    worker.bridge.take_changes(counters)
    return counters.take()


# ---- a step ------------------------------------------------------------------------------------


def test_beside_the_scheduler_a_report_tells_what_has_settled_when_it_is_read(make_worker):
    worker = make_worker(is_beside_scheduler=True).register()
    worker.step(StepPlan(stores_after_forward=(Transfer(1, ids_of([4]), ids_of([4])),)))
    wait_until(lambda: not worker.bridge.opened.transfers.statistics().unsettled_ids)
    worker.reports.clear()
    worker.step(StepPlan(loads=(Transfer(2, ids_of([6]), ids_of([4])),)))
    worker.step(EMPTY_PLAN)
    wait_until(lambda: not worker.bridge.opened.transfers.statistics().unsettled_ids)
    first, *_ = worker.reports
    assert first.outcomes == ()
    assert first.completed().outcomes == (Outcome(RANK, 1), Outcome(RANK, 2))
    assert [report.completed() for report in worker.reports] == [None] * len(worker.reports)
    worker.step(EMPTY_PLAN)
    assert not any(report.later for report in worker.reports[2:]), "nothing is under way"


def test_beside_the_scheduler_stores_and_loads_in_the_step_are_reported_with_its_output(
    make_worker,
):
    worker = make_worker(is_beside_scheduler=True).register()
    first = Transfer(1, ids_of([4]), ids_of([4]))
    worker.step(StepPlan(loads=(Transfer(0, ids_of([6]), ids_of([4])),)))
    worker.step(StepPlan(stores_before_forward=(first,)))
    worker.step(StepPlan(stores_after_forward=(Transfer(2, ids_of([5]), ids_of([5])),)))
    worker.step(StepPlan(loads_in_step=(Transfer(3, ids_of([7]), ids_of([4])),)))
    wait_until(lambda: not worker.bridge.opened.transfers.statistics().unsettled_ids)
    reports = [report.completed() for report in worker.reports]
    told = [{o.transfer_id for o in report.outcomes} if report else set() for report in reports]
    assert told[-4:] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_issued_where_in_a_step(make_worker, monkeypatch, order):
    worker = make_worker()
    backend = faked(worker, monkeypatch)
    plan = StepPlan(
        loads=(transfer(20),),
        stores_before_forward=(transfer(10), transfer(11)),
        stores_after_forward=(transfer(30),),
    )
    before_forward: list[list[int]] = []

    def forward() -> None:
        worker.loop.flush()
        before_forward.append(backend.names)

    worker.step(plan, forward, order)
    worker.loop.flush()
    loads_first = order == "synchronous loads of another connector"
    assert before_forward == [[10, 11, 20] if loads_first else [10, 11]]
    assert backend.names == [10, 11, 20, 30]
    directions = [completion.copy.direction for completion in backend.issued]
    assert directions == [Direction.STORE, Direction.STORE, Direction.LOAD, Direction.STORE]
    backend.complete_all()


def step_of_an_earlier_stage(
    worker: Worker, plan: StepPlan, forward: Callable[[], object] = lambda: None
) -> None:
    """V1 with drafts, on all pipeline stages but the last: it ends with what it collects.

    `finalize_kv_connector` is called where tokens are sampled (vLLM 0.32.0,
    v1/worker/gpu_model_runner.py:4226 and :4509).
    """
    worker.bridge.handle_preemptions(plan)
    worker.bridge.bind_connector_metadata(plan)
    forward()
    worker.bridge.start_load_kv()
    worker._collect()


def test_stores_that_no_hook_started_take_what_their_forward_wrote(worker):
    store = StepPlan(stores_after_forward=(Transfer(1, (4,), (4,)),))
    step_of_an_earlier_stage(worker, store, lambda: worker.write_block(4, 44))
    # The block has been given away by the next plan, and the one after it has nothing to say.
    fence = StepPlan(fences=(1,))
    step_of_an_earlier_stage(worker, fence, lambda: worker.write_block(4, 77))
    assert worker.settle() == {1: None}
    worker.step(StepPlan(loads=(Transfer(2, (6,), (4,)),)))
    worker.settle()
    assert worker.read_block(6)[0] == 44


def test_a_wrong_id_fails_its_transfer_and_no_other(worker):
    plan = StepPlan(
        loads=(Transfer(1, (BLOCKS,), (0,)), Transfer(2, (1,), (1,))),
        stores_after_forward=(Transfer(3, (0,), (12,)), Transfer(4, (0,), (11,))),
    )
    worker.step(plan)
    bad = FailureReason.BAD_PLAN
    assert worker.settle() == {1: bad, 2: None, 3: bad, 4: None}


# ---- loads in the step -------------------------------------------------------------------------


def test_a_load_in_the_step_is_there_when_its_forward_begins(worker):
    worker.write_block(4, 44)
    worker.step(StepPlan(stores_after_forward=(Transfer(1, (4,), (4,)),)))
    worker.settle()
    read: list[list[int]] = []
    plan = StepPlan(loads_in_step=(Transfer(2, (6,), (4,)),))
    worker.step(plan, lambda: read.append(worker.read_block(6)))
    assert read[0][0] == 44
    assert worker.bridge.take_unloaded() == set()
    assert worker.settle() == {1: None, 2: None}


@pytest.mark.parametrize("trouble", ["closed", "asleep", "no mark", "bad id", "no copy", "raises"])
def test_blocks_that_were_not_loaded_are_named_with_their_step(worker, monkeypatch, trouble):
    fail = Mock(side_effect=RuntimeError("injected"))
    transfers, backend = worker.bridge.opened.transfers, worker.backend
    if trouble == "closed":
        worker.bridge.shutdown()
    elif trouble == "asleep":
        worker.bridge.unregister_kv_caches()
    elif trouble == "no mark":
        monkeypatch.setattr(transfers, "mark", fail)
    elif trouble == "no copy":
        monkeypatch.setattr(backend, "join", lambda completion: False)
    elif trouble == "raises":
        monkeypatch.setattr(transfers, "load_now", fail)
    slot = 12 if trouble == "bad id" else 4
    plan = StepPlan(loads_in_step=(Transfer(2, (6, 7), (slot, 5)),), unloaded=(9,))
    worker.step(plan)
    assert worker.bridge.take_unloaded() == {6, 7, 9}
    assert worker.bridge.take_unloaded() == set()
    assert worker.settle()[2] is not None


# ---- what is reported --------------------------------------------------------------------------


def test_how_a_rank_keeps_and_copies_is_in_the_first_report_and_when_it_changes(
    make_worker, monkeypatch
):
    worker = make_worker()
    backend = faked(worker, monkeypatch)
    worker.step(EMPTY_PLAN)
    assert worker.reports[0].host_facts == (HostFacts(RANK, backend.memory, ("each",)),)
    assert worker.bridge.build_connector_worker_meta() is None
    backend.memory = MemoryFacts(MemoryKind.PAGE_LOCKED, "99 %", (1,))
    locked = HostFacts(RANK, backend.memory, ("each",))
    assert worker.bridge.build_connector_worker_meta() == StepReport(host_facts=(locked,))
    backend.paths = (CopyPath.BATCH, CopyPath.EACH)
    assert worker.bridge.build_connector_worker_meta().host_facts[0].copy_paths == ("batch", "each")
    backend.load_block_s = 0.5
    assert worker.bridge.build_connector_worker_meta().host_facts[0].load_block_s == 0.5
    assert worker.bridge.build_connector_worker_meta() is None


def test_transfers_whose_hooks_never_come_are_cancelled_at_the_end_of_the_step(
    make_worker, monkeypatch
):
    worker = make_worker()
    backend = faked(worker, monkeypatch)
    plan = StepPlan(
        loads=(transfer(1),),
        stores_before_forward=(transfer(2),),
        stores_after_forward=(transfer(3), transfer(4)),
    )
    worker.bridge.handle_preemptions(plan)
    worker.bridge.bind_connector_metadata(plan)
    worker.bridge.clear_connector_metadata()
    worker.loop.flush()
    backend.complete_all()
    cancelled = FailureReason.CANCELLED
    assert worker.settle() == {1: cancelled, 2: None, 3: cancelled, 4: cancelled}


def test_transfers_of_a_step_that_told_nothing_are_cancelled_by_the_next(worker):
    worker.bridge.bind_connector_metadata(
        StepPlan(loads=(transfer(1),), stores_after_forward=(transfer(2),))
    )
    worker.step(StepPlan(stores_after_forward=(transfer(3),)))
    cancelled = FailureReason.CANCELLED
    assert worker.settle() == {1: None, 2: cancelled, 3: None}, "the load had begun"


def test_a_transfer_that_cannot_be_queued_is_reported_once(make_worker, monkeypatch):
    worker = make_worker()
    backend = faked(worker, monkeypatch)
    backend.on_mark = Mock(side_effect=RuntimeError("no event left"))
    worker.step(StepPlan(loads=(transfer(1),), stores_after_forward=(transfer(2),)))
    assert worker.outcomes() == {1: FailureReason.COPY_FAILED, 2: FailureReason.COPY_FAILED}


def test_slots_that_changed_are_in_the_report_that_has_the_failure(make_worker, monkeypatch):
    worker = make_worker(extra={"verify": "load"})
    backend = faked(worker, monkeypatch)
    worker.step(StepPlan(stores_after_forward=(transfer(1, 3),)))
    backend.complete(1)
    looked_at(worker)
    worker.step(EMPTY_PLAN)
    backend.slots = {2: 1}
    worker.step(StepPlan(loads=(Transfer(5, (7, 8, 9), (1, 2, 3)),)))
    backend.complete(7)
    looked_at(worker)
    worker.step(EMPTY_PLAN)
    assert worker.reports[-1] == StepReport(
        (Outcome(RANK, 5, FailureReason.CHECKSUM_MISMATCH),), (), (BadSlots(RANK, (2,)),)
    )
    assert worker.bridge.build_connector_worker_meta() is None


def looked_at(worker: Worker) -> None:
    """Wait until checksums have been noted or compared."""
    wait_until(lambda: not worker.bridge.opened.transfers.statistics().unsettled_ids)


def test_overdue_copies_are_counted_once(make_worker, monkeypatch):
    clock = HandClock()
    worker = make_worker(make_event_loop=clock.new_event_loop)
    assert counted(worker) == {}
    backend = faked(worker, monkeypatch)
    worker.step(StepPlan(loads=(transfer(1),)))
    backend.wait_for(1)
    clock.advance(worker.loop, 31.0)
    assert counted(worker) == {Count.OVERDUE_TRANSFERS: 1}
    assert counted(worker) == {}
    backend.complete_all()


def test_counts_that_begin_anew_take_nothing_back(worker, monkeypatch):
    for num_overdue, num_demotions, count, number in (
        (2, 0, Count.OVERDUE_TRANSFERS, 2),
        (0, 1, Count.COPY_PATH_DEMOTIONS, 1),
    ):
        nothing = {"take_copied": list, "drain": list, "take_bad_slots": list}
        transfers = SimpleNamespace(num_overdue=num_overdue, **nothing)
        backend = SimpleNamespace(num_demotions=num_demotions)
        opened = SimpleNamespace(transfers=transfers, backend=backend, tiers=None)
        monkeypatch.setattr(worker.bridge, "opened", opened)
        counters = Counters()
        worker.bridge.take_changes(counters)
        assert counters.take() == {count: number}
    monkeypatch.undo()


# ---- starting ----------------------------------------------------------------------------------


def test_a_worker_without_layers_has_no_capacity_and_refuses_transfers(make_worker):
    worker = make_worker()
    worker.bridge.register_kv_caches({})
    worker.step(StepPlan(loads=(transfer(1),), stores_before_forward=(transfer(2),), fences=(2,)))
    assert worker.outcomes() == dict.fromkeys((1, 2), FailureReason.NOT_RUNNING)
    assert all(not report.capacities for report in worker.reports)


def test_a_pool_too_small_for_one_block_is_refused(make_worker):
    worker = make_worker()
    config = OffloadConfig.from_extra_config({"cpu_bytes_to_use": 4096}, world_size=1)
    kv_cache_config = KVCacheConfig(2, [KVCacheTensor(16384, ["a"], 16384, 8192)], [])
    opening = dataclasses.replace(worker.opening, config=config, kv_cache_config=kv_cache_config)
    storage = torch.zeros(16384, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use.*at least one block, 8.00 KiB"):
        WorkerBridge(opening).register_kv_caches({"a": storage})


def test_a_pool_larger_than_the_machine_is_refused(make_worker, monkeypatch):
    monkeypatch.setattr(rank_memory, "available_host_bytes", lambda: 100 * SLOT_BYTES)
    with pytest.raises(ConfigError, match="num_cpu_blocks"):
        make_worker(num_slots=101).register()


def test_a_storage_smaller_than_its_blocks_is_refused(make_worker):
    worker = make_worker(num_blocks=BLOCKS + 1)
    with pytest.raises(ConfigError, match="unsupported KV cache layout"):
        worker.register()


def test_a_device_without_a_backend_is_refused_and_its_host_memory_given_back(
    make_worker, monkeypatch
):
    worker = make_worker()
    taken = []
    allocate = HostMemory.allocate
    monkeypatch.setattr(
        HostMemory,
        "allocate",
        lambda size_bytes: taken.append(allocate(size_bytes)) or taken[-1],
    )
    storage = torch.zeros(worker.storage.numel(), dtype=torch.uint8, device="meta")
    with pytest.raises(ConfigError, match="'meta'"):
        worker.bridge.register_kv_caches({"a": storage})
    assert all(is_closed(memory) for memory in taken)
    worker.step(StepPlan(loads=(transfer(1),)))
    assert worker.outcomes() == {1: FailureReason.NOT_RUNNING}


# ---- the end -----------------------------------------------------------------------------------


def test_shutting_down_twice_is_the_same_as_once_and_leaves_no_thread(make_worker):
    make_worker().bridge.shutdown()  # it was never registered
    before = set(threading.enumerate())
    worker = make_worker().register()
    worker.step(StepPlan(stores_after_forward=(transfer(1),)))
    worker.settle()
    worker.bridge.shutdown()
    worker.bridge.shutdown()
    assert set(threading.enumerate()) <= before


def test_what_settles_during_shutdown_is_reported(make_worker, monkeypatch):
    worker = make_worker(extra={"max_inflight_bytes": 4096})
    backend = faked(worker, monkeypatch)
    worker.step(StepPlan(loads=(transfer(1, num_blocks=41), transfer(2, 40))))
    backend.wait_for(1)
    transfers = worker.bridge.opened.transfers
    close = transfers.close

    def close_while_a_copy_ends() -> bool:
        assert not close(timeout_s=0.0)
        worker.loop.flush()
        backend.complete(1)
        return close(PATIENCE_S)

    monkeypatch.setattr(transfers, "close", close_while_a_copy_ends)
    worker.bridge.shutdown()
    worker.step(EMPTY_PLAN)
    assert worker.outcomes() == {1: None, 2: FailureReason.CANCELLED}


def test_the_storage_is_kept_for_a_copy_that_does_not_end(make_worker, monkeypatch):
    worker = make_worker()
    backend = faked(worker, monkeypatch)
    worker.step(StepPlan(loads=(transfer(1),)))
    backend.wait_for(1)
    storage = weakref.ref(worker.bridge.opened.storage)
    close = worker.bridge.opened.transfers.close
    monkeypatch.setattr(worker.bridge.opened.transfers, "close", lambda: close(timeout_s=0.0))
    worker.storage = worker.caches = None
    worker.bridge.shutdown()
    gc.collect()
    assert storage() is not None
    backend.complete(1)
    assert close(PATIENCE_S)


@pytest.mark.parametrize("is_child", [True, False])
def test_in_a_process_of_vllm_s_own_every_thread_starts_on_other_cores(is_child, monkeypatch):
    free, started = [], []

    @contextlib.contextmanager
    def on_other_cores() -> Iterator[None]:
        free.append(True)
        yield
        free.pop()

    start = threading.Thread.start

    def watched_start(thread: threading.Thread) -> None:
        started.append((thread.name, bool(free)))
        start(thread)

    monkeypatch.setattr(opening_module, "on_other_cores", on_other_cores)
    monkeypatch.setattr(threading.Thread, "start", watched_start)
    worker = Worker(is_child=is_child).register()
    names = {"safe-offload-store_0", "safe-offload-load_0", "safe-offload-loop"}
    assert {entry for entry in started if entry[0] in names} == {(name, is_child) for name in names}
    worker.bridge.shutdown()


@pytest.fixture
def shared(tmp_path):
    """What a rank with `"share": "node"` opens, below a folder of the test's."""

    def open_rank(**extra):
        worker = Worker(extra={"share": "node", **extra}, rank=0)
        opening = dataclasses.replace(
            worker.opening,
            open_backend=opening_module.open_backend,
            make_loop=LoopThread,
            hash_bytes=32,
        )
        return opening.open(worker.caches)

    with pools_in(tmp_path):
        yield open_rank


def test_an_engine_whose_neighbour_stopped_in_its_self_test_has_memory_of_its_own(
    shared, monkeypatch, logged
):
    monkeypatch.setattr(pool_module, "TEST_TIMEOUT_S", 0.1)
    first = shared()
    assert first.pool is not None
    locks = Locks(f"{first.pool.facts.place[0]}/{TABLE}")
    locks.take(TESTS)
    second = shared()
    assert second.pool is None
    assert "made no progress for 0.1 s" in logged[0].getMessage()
    assert "Fix: continue or kill that process" in logged[0].getMessage()
    locks.close()
    third = shared()
    assert third.pool is not None
    for opened in (first, second, third):
        assert opened.transfers.close()


def test_an_engine_whose_neighbour_stopped_while_it_made_the_pool_has_memory_of_its_own(
    shared, monkeypatch, logged
):
    stalled = Mock(side_effect=StalledError("another process made no progress"))
    monkeypatch.setattr(pool_module, "open_rank", stalled)
    opened = shared()
    assert opened.pool is None
    assert "not shared with other engines" in logged[0].getMessage()
    assert opened.transfers.close()


@pytest.mark.parametrize("part", ["open_backend", "SelfTest", "a wrong copy"])
def test_a_start_that_fails_leaves_no_place_in_the_pool_nor_a_loop(shared, monkeypatch, part):
    first = shared()
    num_threads = threading.active_count()
    with monkeypatch.context() as patch:
        if part == "a wrong copy":
            patch.setattr(SelfTest, "run", lambda *_, **__: False)
            assert shared() is None
        else:
            patch.setattr(opening_module, part, Mock(side_effect=ConfigError("no")))
            with pytest.raises(ConfigError, match="no"):
                shared()
    assert threading.active_count() == num_threads
    locks = Locks(f"{first.pool.facts.place[0]}/{TABLE}")
    assert first.transfers.close()
    first.pool.close()
    assert not locks.is_used()
    locks.close()


def test_engines_that_note_checksums_share_no_slots_with_those_that_note_none(shared):
    opened = {verify: shared(verify=verify) for verify in ("off", "load", "sample:4")}
    places = {verify: each.pool.facts.place for verify, each in opened.items()}
    assert places["off"] != places["load"] == places["sample:4"]
    for each in opened.values():
        assert each.transfers.close()
