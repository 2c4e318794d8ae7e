"""A hit without a GPU: vLLM's scheduler and all of ours, over the GPU of threads.

Steps follow vLLM's `EngineCore.step_with_batch_queue` and `_process_engine_step` (0.32.0): two are
in flight, the worker is in the scheduler's process, and a step that computes nothing is followed by
a sleep of 1 ms. There is no forward, and the time of the copies themselves says nothing.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput

from safe_offload.compat.base import KVConnectorRole
from safe_offload.config.options import OffloadConfig
from safe_offload.connector import SafeCPUOffloadConnector
from safe_offload.tiers.namespace.namespace_facts import NamespaceFacts
from safe_offload.worker.copies.base import CopyPath
from safe_offload.worker.copies.gpu import GpuBackend
from safe_offload.worker.opening import Opening
from tests.benchmarks.breakdown import Seen
from tests.benchmarks.engine_watch import Recorder, watch_hooks
from tests.simulator.stepper import Stepper
from tests.simulator.vllm_setup import EngineShape, make_config, make_kv_cache_config, runner_output
from tests.worker.copies.fake_device import FakeGpu

BLOCK_TOKENS = 16
SLEEP_S = 0.001
"""Source: `_process_engine_step`."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What a prompt's KV cache is made of, and how it is copied."""

    num_ranges: int  # of a block
    path: CopyPath
    num_blocks: int = 1024  # of a prompt
    block_bytes: int = 1 << 20

    @property
    def shape(self) -> EngineShape:
        """Return an engine whose GPU and host hold one prompt."""
        num_tokens = self.num_blocks * BLOCK_TOKENS
        return EngineShape(
            groups=(f"full@{BLOCK_TOKENS}",),
            num_blocks=self.num_blocks + 8,
            num_slots=self.num_blocks + 8,
            is_async=True,
            is_in_process=True,
            has_streams=True,
            max_batched_tokens=num_tokens + BLOCK_TOKENS,
            max_model_len=num_tokens + BLOCK_TOKENS,
            extra={"self_test": "off"},
        )


CASES = (Case(32, CopyPath.KERNEL), Case(32, CopyPath.BATCH), Case(1, CopyPath.BATCH))
"""Layer by layer, as a model of 16 layers, and blocks in one piece."""


class StandIn(Stepper):
    """The engine. `case`: what it loads; `gpu`: where to."""

    def __init__(self, case: Case, gpu: FakeGpu) -> None:
        super().__init__(case.shape)
        self._case, self._gpu = case, gpu
        self._queue: deque[tuple[Any, Any]] = deque()
        self.recorder = Recorder()
        self.recorder.watch_copies()
        self.moments: list[tuple[str, float]] = []
        watch_hooks(self.connector, self.moments)
        self.worker = SafeCPUOffloadConnector(
            make_config(case.shape), KVConnectorRole.WORKER, make_kv_cache_config(case.shape)
        )
        opened = self._opening().open(self._make_caches())
        assert opened is not None
        self.worker.side.attach(opened)  # type: ignore[attr-defined]
        self.opened = opened

    def ask(self, prompt: list[int]) -> Seen:
        """Serve one request of one token, alone."""
        self.recorder.take()
        self.moments.clear()
        begin_s = time.monotonic()
        self.send("asked", prompt, 1)
        queued_s = time.monotonic()
        while not self.answers.get("asked"):
            self.step()
        token_s = time.monotonic()
        self.drain()
        probe = self.recorder.take()
        return Seen(begin_s, queued_s, token_s, token_s, tuple(self.moments), probe)

    def scatter(self) -> None:
        """Let the next request get blocks in no order, as after a long time."""
        blocks = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        random.Random(0).shuffle(blocks)
        self.pool.free_blocks(blocks)

    def step(self) -> None:
        """See the module."""
        works = False
        if self.scheduler.has_requests():
            scheduled = self.schedule()
            works = scheduled.total_num_scheduled_tokens > 0
            self._queue.append((scheduled, self._run(scheduled)))
            if len(self._queue) < 2 and (works or self.scheduler.has_requests()):
                self._sleep(works)
                return
        if self._queue:
            self.update(*self._queue.popleft())
        self._sleep(works)

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self.scheduler.has_requests())

    def _sleep(self, works: bool) -> None:
        if not works and self.scheduler.has_requests():
            time.sleep(SLEEP_S)

    def _run(self, scheduled: Any) -> Any:
        """Let the worker do a step, in the order of vLLM's V2 runner; return its output."""
        begin_s, worker = time.monotonic(), self.worker
        worker.handle_preemptions(scheduled.kv_connector_metadata)
        worker.bind_connector_metadata(scheduled.kv_connector_metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(scheduled.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving or set(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        num_tokens = scheduled.total_num_scheduled_tokens
        self.recorder.steps.append([begin_s, time.monotonic(), num_tokens])
        ids = list(scheduled.num_scheduled_tokens)
        return runner_output(ids, [[1]] * len(ids), output)

    def _opening(self) -> Opening:
        case = self._case

        def open_backend(storage: Any, _: Any, layout: Any, host: Any, _config: Any) -> Any:
            address = storage.data_ptr()
            return GpuBackend(self._gpu.open(), address, layout, host, case.path), None

        return Opening(
            config=OffloadConfig.from_extra_config(
                {"num_cpu_blocks": case.shape.num_slots, "self_test": "off"}, world_size=1
            ),
            kv_cache_config=KVCacheConfig(case.shape.num_blocks, self._tensors(), []),
            rank=0,
            num_ranks_on_host=1,
            open_backend=open_backend,
            namespace_facts_of=lambda geometry, rank: NamespaceFacts({}),
        )

    def _tensors(self) -> list[KVCacheTensor]:
        """All ranges of one kind together, layer by layer, or each block in one piece."""
        case, num_blocks = self._case, self.shape.num_blocks
        layers = [f"layer.{index}" for index in range(case.num_ranges)]
        part = case.block_bytes // case.num_ranges
        return [KVCacheTensor(num_blocks * case.block_bytes, layers, num_blocks * part, part)]

    def _make_caches(self) -> dict[str, torch.Tensor]:
        storage = torch.zeros(self.shape.num_blocks * self._case.block_bytes, dtype=torch.uint8)
        return {name: storage for tensor in self._tensors() for name in tensor.layers}


@contextmanager
def stand_in(case: Case) -> Iterator[StandIn]:
    """Yield an engine that has one block free; end it and its GPU."""
    gpu = FakeGpu()
    engine = StandIn(case, gpu)
    try:
        yield engine
    finally:
        engine.worker.shutdown()
        gpu.close()


def measure(case: Case, rounds: int) -> tuple[list[Seen], list[Seen]]:
    """Return hits of the host and of the GPU's own cache."""
    tokens = range(2, 250)
    prompt = random.Random(0).choices(tokens, k=case.num_blocks * BLOCK_TOKENS + 1)
    with stand_in(case) as engine:
        engine.ask([1])  # the worker tells how many slots it has
        engine.ask(prompt)
        on_host, on_gpu = [], []
        for _ in range(rounds + 1):
            assert engine.scheduler.reset_prefix_cache()
            engine.scatter()
            on_host.append(engine.ask(prompt))
            on_gpu.append(engine.ask(prompt))
    return on_host[1:], on_gpu[1:]
