"""What vLLM's EngineCore does around its scheduler, over simulated ranks.

`step` follows `EngineCore.step` and `step_with_batch_queue` (vLLM 0.32.0, v1/engine/core.py): with
asynchronous scheduling or pipeline stages several steps are in flight, each rank works them off in
order and at its own pace, and aborts that come in meanwhile are handled right before the output.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from safe_offload.compat.engine_config import ranks_per_copy
from safe_offload.compat.engine_core.live_weights import ModelLoads
from safe_offload.config.options import OffloadConfig
from safe_offload.tiers.guarded_tier import GuardedTier
from safe_offload.worker.copies.base import Backend
from safe_offload.worker.memory.shared_memory import Share
from safe_offload.worker.opening import Opened
from safe_offload.worker.tier_runner import TierRunner
from safe_offload.worker.transfers import Transfers
from safe_offload.worker.verify import Verifier
from tests.simulator.chance import Chance
from tests.simulator.device import Device, DeviceOptions, Memory, SimBackend
from tests.simulator.findings import Findings
from tests.simulator.groups import PAGE_BYTES
from tests.simulator.model_runner import Batch, ModelRunner
from tests.simulator.node import Host, Node
from tests.simulator.remote import BROUGHT, SENT_ON, RemoteRank, wrap
from tests.simulator.stepper import Stepper
from tests.simulator.tiers import ObjectStore, RankTiers, SlotView, namespace_of
from tests.simulator.virtual_loop import Clock, VirtualLoop
from tests.simulator.vllm_setup import (
    EngineShape,
    as_model_runner,
    make_config,
    make_kv_cache_config,
    runner_output,
)
from tests.simulator.words import VOCABULARY, Sequel
from tests.simulator.worker import Forward, SlowThreads, SteppedLoop, StepResult, Worker

PATIENCE_S = 10_000.0
"""Virtual time that copies have to end when the engine is closed."""

MutateOutputs = Callable[[int, list[Any]], None]
"""Called with the number of a step and what the ranks' connectors return for it, by rank."""


class EngineCore(Stepper):
    """The engine. `stores`: of its tiers, as many as the shape's settings name, nearest first."""

    def __init__(
        self,
        shape: EngineShape,  # what it is made of
        seed: int | str = 0,  # decides when copies move and how far ranks lag behind
        *,
        copy_ticks_max: int = 0,  # how late copies may end
        stores: Sequence[ObjectStore] = (),
        clock: Clock | None = None,  # of all engines that are driven together; its own if not given
        engine: int = 0,  # its number among them
        node: Node | None = None,  # whose host memory they share
    ) -> None:
        vllm_config, kv_cache_config = make_config(shape), make_kv_cache_config(shape)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.config = replace(
            OffloadConfig.from_extra_config(extra, world_size=shape.num_ranks),
            ranks_per_copy=ranks_per_copy(vllm_config, kv_cache_config),
        )
        self.clock = clock if clock is not None else Clock()
        self.engine = engine
        self.node = node if self.config.sharing is not None else None
        self.num_fences_left = 0
        """After as many the engine dies; 0 for never."""
        with (
            patch("safe_offload.connector.monotonic", lambda: self.clock.now_s),
            patch("safe_offload.config.tenants.TenantsFile.start"),  # it is looked at by hand
        ):
            super().__init__(shape)
        self.connector.model_loads = ModelLoads()  # else that of all engines of the process
        self.chance = Chance(seed)
        self.findings = Findings()
        self.injected: Counter[str] = Counter()  # see `Device`
        self.mutate_outputs: list[MutateOutputs] = []
        self.before_update: list[Callable[[Batch], None]] = []
        # Called with the number of a step and blocks that it reads, which were not loaded.
        self.on_unloaded: list[Callable[[int, set[int]], None]] = []
        self.num_steps = 0
        self.process_engine_step: Callable[[], object] = self.step
        self._hosts: dict[int, Host] = self.node.hosts if self.node is not None else {}
        """Host memory and its checksums, by the first of the ranks that have it."""
        self.stores = stores
        self.tiers: list[RankTiers] = []
        with as_model_runner(shape):
            self.workers = [
                self._make_worker(rank, copy_ticks_max) for rank in range(shape.num_ranks)
            ]
        if self.node is not None:
            self._lag(self.connector.side.hits.slots)
        self.runner = ModelRunner(shape, self.scheduler, self.chance, self.findings)
        for worker in self.workers if shape.remote else ():
            worker.remote = RemoteRank(self, worker.rank)
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        self._aggregator = KVOutputAggregator(shape.num_ranks)
        self.queue: deque[Batch] = deque()
        self._to_run: list[deque[Batch]] = [deque() for _ in self.workers]
        self._aborts: list[str] = []

    def _make_worker(self, rank: int, copy_ticks_max: int) -> Worker:
        from safe_offload.compat.base import KVConnectorRole
        from safe_offload.connector import SafeCPUOffloadConnector
        from safe_offload.worker.bridge import WorkerBridge

        shape = self.shape
        connector = SafeCPUOffloadConnector(
            make_config(shape, rank), KVConnectorRole.WORKER, make_kv_cache_config(shape)
        )
        assert isinstance(connector.side, WorkerBridge)
        device, loop, opened = self._open(rank, copy_ticks_max)
        connector.side.attach(opened)
        return Worker(
            rank,
            connector,
            opened.transfers,
            loop,
            device,
            is_v2=shape.is_v2,
            defers_finalize=shape.num_draft_tokens > 0,
            is_last_stage=rank >= shape.num_ranks - shape.tensor_ranks,
            pause=self._pause,
            pool=opened.pool,
        )

    def _open(self, rank: int, copy_ticks_max: int) -> tuple[Device, SteppedLoop, Opened]:
        """Return a device, and what copies for it on a loop that is turned by hand."""
        shape = self.shape
        memory = Memory.empty(shape.num_blocks, shape.slots_of(rank), shape.block_words)
        own = memory.host, np.zeros(len(memory.host), dtype=np.uint64)
        memory.host, checksums = self._hosts.setdefault(shape.holder_of(rank), own)
        device = Device(
            rank,
            memory,
            DeviceOptions(shape.has_streams, copy_ticks_max, shape.ticks_per_slot),
            self.chance,
            self.clock,
            injected=self.injected,
        )
        event_loop = VirtualLoop(self.clock)
        backend = SimBackend(device, event_loop)
        loop = SteppedLoop(device, event_loop)
        verifier = None
        if self.config.verify_every:
            verifier = Verifier(backend, SlowThreads(), self.config.verify_every, checksums)
        share = Share.of_rank(rank, self.config.ranks_per_copy)
        tiers = self._open_tiers(rank, device, loop, share, verifier)
        transfers = Transfers(
            backend,
            loop,
            self.config.max_inflight_bytes,
            timeout_s=self.config.transfer_timeout_s,
            verifier=verifier,
            tiers=tiers,
        )
        pool: Any = None
        if self.node is not None:
            pool = self.node.open(shape.holder_of(rank), shape.num_slots)
        return device, loop, Opened(transfers, backend, share, None, tiers, pool)

    def _open_tiers(
        self, rank: int, device: Device, loop: SteppedLoop, share: Share, verifier: Verifier | None
    ) -> TierRunner | None:
        self.tiers.append(RankTiers(self.stores, device, self.chance, self.engine))
        if not self.stores:
            return None
        holder = self.shape.holder_of(rank)
        chance = self.chance.stream("breaker", rank).random
        guarded_tiers = [
            GuardedTier(
                tier,
                config,
                functools.partial(namespace_of, holder),
                slot_bytes=PAGE_BYTES,
                chance=chance,
            )
            for tier, config in zip(self.tiers[rank].tiers, self.config.tiers, strict=True)
        ]
        return TierRunner(
            rank,
            guarded_tiers,
            cast("Backend", device),  # which says how many slots are usable
            loop,
            slot_of=lambda slot_id: (SlotView(device, slot_id),),
            share=share,
            verifier=verifier,
        )

    def _lag(self, slots: Any) -> None:
        """Let it notice late at times what others have done; between processes it does."""
        use_source = slots.use_source

        def use_with_lag(source: Any) -> None:
            sync = source and source.sync

            def sync_at_times() -> None:
                draw = self.chance.bits("lag of the pool", self.num_steps, slots.directory.version)
                if draw & 3:
                    sync()

            if source is not None:
                source.sync = sync_at_times
            use_source(source)

        slots.use_source = use_with_lag

    # ---- what clients do -----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.queue or self.scheduler.has_requests())

    def is_in_flight(self, request_id: str) -> bool:
        """Whether a step is being computed that a request of this id is part of."""
        return any(request_id in batch.scheduled.num_scheduled_tokens for batch in self.queue)

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **options: Any,
    ) -> Any:
        self.runner.sequels[request_id] = Sequel(prompt, cache_salt or "")
        asked = self.chance.choose((None, BROUGHT, SENT_ON), "remote", request_id, self.num_steps)
        if self.shape.remote and asked:
            options["kv_transfer_params"] = {
                asked: True,
                **(options.get("kv_transfer_params") or {}),
            }
        return self.send(
            request_id,
            prompt,
            max_tokens,
            arrival_time=self.clock.now_s,
            cache_salt=cache_salt,
            priority=priority,
            **options,
        )

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def abort_before_update(self, request_id: str) -> None:
        self._aborts.append(request_id)

    # ---- a step --------------------------------------------------------------------------------

    @property
    def queue_size(self) -> int:
        """Steps in flight (vLLM's `max_concurrent_batches`)."""
        pipeline = self.shape.pipeline_ranks
        if self.shape.is_async and self.shape.is_v2:
            return pipeline + 1
        return 2 if self.shape.is_async and pipeline == 1 else pipeline

    def step(self) -> Batch | None:
        """One turn of the engine's busy loop; returns the step that was scheduled, if any."""
        self.num_steps += 1
        scheduled = None
        if self.scheduler.has_requests():
            scheduled = self._schedule()
            is_worth_waiting = scheduled.works or self.scheduler.has_requests()
            if len(self.queue) < self.queue_size and is_worth_waiting:
                self._let_ranks_run()
                self.findings.raise_first()
                return scheduled
            if self.shape.is_in_process:
                self._let_ranks_run()
        if self.queue:
            self._finish_step(self.queue.popleft())
        self.findings.raise_first()
        return scheduled

    @property
    def batch_queue(self) -> deque[Batch]:
        return self.queue

    def _process_engine_step(self) -> None:
        """Go on, as vLLM's engine is asked to by the connector before a reset."""
        self.process_engine_step()

    def _schedule(self) -> Batch:
        output = self.schedule()
        self.findings.raise_first()
        batch = self.runner.prepare(output)
        self.queue.append(batch)
        for steps in self._to_run:
            steps.append(batch)
        if not batch.works:
            self.clock.advance(1.0)  # an idle engine polls
        return batch

    def _let_ranks_run(self) -> None:
        for worker in self.workers:
            count = self.chance.below(self.queue_size + 1, "lag", self.num_steps, worker.rank)
            self._run_rank(worker, self.queue_size if self.shape.is_in_process else count)
            self._pause(worker.rank)

    def _run_rank(self, worker: Worker, count: int) -> None:
        steps = self._to_run[worker.rank]
        for _ in range(min(count, len(steps))):
            batch = steps.popleft()
            forward = Forward(
                batch.zeroed,
                batch.copies,
                functools.partial(self.runner.move_states, batch),
                functools.partial(self.runner.compute, batch),
                functools.partial(self._see_unloaded, batch),
            )
            batch.results[worker.rank] = worker.run(
                batch.scheduled.kv_connector_metadata, forward, batch.scheduled.finished_req_ids
            )

    def _see_unloaded(self, batch: Batch, rank: int, block_ids: set[int]) -> None:
        # Steps that are launched before vLLM has heard of it may read them, too.
        self.runner.excuse(rank, block_ids, batch.number + self.queue_size - 1)
        for see in self.on_unloaded:
            see(batch.number, block_ids)

    def _pause(self, rank: int) -> None:
        worker = self.workers[rank]
        device = worker.device
        draw = self.chance.bits("pause", rank, worker.num_steps, device.num_ticks)
        if draw & 3:
            worker.loop.turn()
        if draw & 4:
            worker.loop.turn()
        device.advance_compute(draw >> 3 & 3)
        device.tick()
        if worker.remote is not None:
            worker.remote.tick()

    def _finish_step(self, batch: Batch) -> None:
        for worker in self.workers:
            steps = self._to_run[worker.rank]
            while batch in steps:
                self._run_rank(worker, 1)
            worker.device.synchronize(batch.results[worker.rank].num_operations)
            self._pause(worker.rank)
        self.findings.raise_first()
        output = self._aggregate(batch)
        for observe in self.before_update:
            observe(batch)
        for request_id in self._aborts:
            self.abort(request_id)
        self._aborts.clear()
        spoilt = {name: len(self.answers.get(name, ())) for name in batch.spoilt}
        self.update(batch.scheduled, output)
        for name, count in spoilt.items():
            if len(self.answers.get(name, ())) > count:
                self.findings.add("I6", f"{name} gets a token that nothing loaded led to")
        self.findings.raise_first()
        self._take_drafts(batch)

    def _take_drafts(self, batch: Batch) -> None:
        # What was preempted meanwhile has no use for the drafts of this step.
        drafts = {i: d for i, d in batch.drafts.items() if self._is_running(i)}
        if drafts and not self.shape.is_async:
            from vllm.v1.outputs import DraftTokenIds

            self.scheduler.update_draft_token_ids(
                DraftTokenIds(list(drafts), list(drafts.values()))
            )

    def _is_running(self, request_id: str) -> bool:
        request = self.scheduler.requests.get(request_id)
        is_running = request is not None and request.status.name == "RUNNING"
        return is_running and not self.is_in_flight(request_id)

    def _aggregate(self, batch: Batch) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        connector_outputs = [
            _connector_output(batch.results[w.rank], KVConnectorOutput) for w in self.workers
        ]
        for mutate in self.mutate_outputs:
            mutate(batch.number, connector_outputs)
        outputs = [
            runner_output(
                batch.request_ids, [list(tokens) for tokens in batch.sampled], connector_output
            )
            for connector_output in connector_outputs
        ]
        output = self._aggregator.aggregate(outputs)
        connector_output = output.kv_connector_output
        for name in ("finished_recving", "finished_sending", "failed_recving"):
            ids = getattr(connector_output, name)
            if ids:
                setattr(connector_output, name, SortedIds(ids))
        if self.shape.remote:
            wrap(connector_output, self.scheduler.connector.sub_connectors)
        return output

    def die(self, num_ticks: int) -> None:
        """Be killed; the ranks notice it late, and go on with what they copy for so long."""
        source = self.connector.side.hits.slots.source
        if source is not None:
            source.table.close()
        for _ in range(num_ticks):
            for worker in self.workers:
                worker.loop.turn()
                worker.device.tick()
        for worker in self.workers:
            worker.pool.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.device.hold_copies = False
        for tiers in self.tiers:
            tiers.recover()
        for worker in self.workers:
            worker.transfers.close(PATIENCE_S)
        if self.node is not None:
            self.die(0)


class SortedIds(set[str]):
    """A set of ids that is gone through in order, so that a run is the same in every process."""

    def __iter__(self) -> Any:
        return iter(sorted(super().__iter__()))


def _connector_output(result: StepResult, make: Any) -> Any:
    return make(
        finished_sending=result.finished_sending,
        finished_recving=result.finished_recving,
        failed_recving=set(result.failed_recving),
        invalid_block_ids=set(result.invalid_block_ids),
        kv_connector_stats=result.stats,
        kv_connector_worker_meta=result.worker_meta,
    )


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    """A prompt that is its own for each seed."""
    stream = Chance("prompt").stream(seed)
    return [stream.randrange(VOCABULARY) for _ in range(num_tokens)]
