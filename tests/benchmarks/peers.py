"""Connectors on vLLM's real scheduler: vLLM's own, none at all, and ours beside them.

Their scheduler sides are pure Python and run as they are. Their workers want a GPU, so a stand-in
settles each transfer a fixed number of steps after the plan that names it. Only the order of events
is that of an engine: memory has no contents here. The tests see so which of the reported faults
the others show, and `python -m tests.benchmarks scheduler` what each costs the scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol
from unittest import mock

from safe_offload.errors import SafeOffloadError
from safe_offload.protocol import Capacity, Outcome, StepPlan, StepReport
from tests.simulator import vllm_setup
from tests.simulator.chance import Chance
from tests.simulator.findings import Findings
from tests.simulator.model_runner import ModelRunner
from tests.simulator.vllm_setup import (
    EngineShape,
    as_model_runner,
    make_kv_cache_config,
    make_scheduler,
    runner_output,
)
from tests.simulator.words import Sequel

__all__ = [
    "NONE",
    "OFFLOADING",
    "OURS",
    "SIMPLE",
    "NoWorker",
    "OffloadingWorker",
    "PeerEngine",
    "SafeWorker",
    "SimpleWorker",
    "StandInWorker",
    "as_peer_runner",
    "make_peer_scheduler",
    "make_worker",
    "peer_shape",
    "runner_output",
]

OURS = "SafeCPUOffloadConnector"
SIMPLE = "SimpleCPUOffloadConnector"
OFFLOADING = "OffloadingConnector"
NONE = "none"
"""Not a connector: the engine runs without one."""

_ALIGNMENT_BYTES = {SIMPLE: 1, OFFLOADING: 4096}
"""What the bytes of a host slot are rounded up to."""


def peer_shape(connector: str, **what: Any) -> EngineShape:
    """The shape of an engine with any connector, or with none, and as many host slots."""
    shape = EngineShape(connector=connector, **what)
    if connector not in _ALIGNMENT_BYTES:
        return shape
    spec = make_kv_cache_config(shape).kv_cache_groups[0].kv_cache_spec
    alignment = _ALIGNMENT_BYTES[connector]
    num_bytes = shape.num_slots * -(-spec.page_size_bytes // alignment) * alignment
    return dataclasses.replace(shape, extra={"cpu_bytes_to_use": num_bytes, **shape.extra})


def make_peer_scheduler(shape: EngineShape) -> tuple[Any, Any]:
    """See `make_scheduler`; for any connector and for none."""
    if shape.connector != NONE:
        return make_scheduler(shape)
    make_config = vllm_setup.make_config
    known = _known(shape)

    def without_connector(_: EngineShape) -> Any:
        config = make_config(known)
        config.kv_transfer_config = None
        return config

    with mock.patch.object(vllm_setup, "make_config", without_connector):
        return make_scheduler(known)


def as_peer_runner(shape: EngineShape) -> Any:
    """See `as_model_runner`; for any connector and for none."""
    return as_model_runner(_known(shape))


def _known(shape: EngineShape) -> EngineShape:
    """The same with a connector that vLLM can make a configuration for."""
    return dataclasses.replace(shape, connector=OURS) if shape.connector == NONE else shape


class StandInWorker(Protocol):
    """Settles the transfers of one connector's plans.

    Attributes:
        num_stored: blocks of all stores that the plans named.
        num_loaded: of all loads.
    """

    num_stored: int
    num_loaded: int

    @property
    def is_loading(self) -> bool:
        """Whether a load has not ended."""

    def step(self, plan: Any) -> tuple[set[str], Any]:
        """Take a step's plan; returns the requests whose load ended, and the worker's report."""


class _SlowCopier:
    """What the stand-ins have in common.

    Args:
        copy_steps: a copy is reported so many steps after the one whose plan names it.
    """

    def __init__(self, copy_steps: int) -> None:
        self.num_stored = self.num_loaded = 0
        self._copy_steps = copy_steps
        self._num_steps = 0


class SimpleWorker(_SlowCopier):
    """For `SimpleCPUOffloadConnector` (vLLM 0.32.0, v1/simple_kv_offload/worker.py)."""

    def __init__(self, copy_steps: int) -> None:
        super().__init__(copy_steps)
        self._loads: dict[int, int] = {}
        self._stores: dict[int, int] = {}

    @property
    def is_loading(self) -> bool:
        """See `StandInWorker`."""
        return bool(self._loads)

    def step(self, plan: Any) -> tuple[set[str], Any]:
        """See `StandInWorker`."""
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        if plan.need_flush:  # it waits for all copies when a request was preempted
            for running in (self._loads, self._stores):
                running.update(dict.fromkeys(running, self._num_steps))
        self.num_stored += len(plan.store_gpu_blocks)
        self.num_loaded += len(plan.load_gpu_blocks)
        due = self._num_steps + self._copy_steps
        if plan.load_event >= 0:
            self._loads[plan.load_event] = due
        if plan.store_event >= 0:
            self._stores[plan.store_event] = due
        received = {
            request_id
            for event in _take_due(self._loads, self._num_steps)
            for request_id in plan.load_event_to_reqs.get(event, ())
        }
        stored = dict.fromkeys(_take_due(self._stores, self._num_steps), 1)
        self._num_steps += 1
        return received, SimpleCPUOffloadWorkerMetadata(stored) if stored else None


class OffloadingWorker(_SlowCopier):
    """For `OffloadingConnector` (vLLM 0.32.0, kv_connector/v1/offloading/worker.py)."""

    def __init__(self, copy_steps: int) -> None:
        super().__init__(copy_steps)
        self._jobs: dict[int, int] = {}
        self._loading: dict[int, str] = {}

    @property
    def is_loading(self) -> bool:
        """See `StandInWorker`."""
        return bool(self._loading)

    def step(self, plan: Any) -> tuple[set[str], Any]:
        """See `StandInWorker`."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )

        self.num_stored += sum(len(job.src_spec.block_ids) for job in plan.store_jobs.values())
        self.num_loaded += sum(len(job.dst_spec.block_ids) for job in plan.load_jobs.values())
        due = self._num_steps + self._copy_steps
        self._jobs.update(dict.fromkeys([*plan.load_jobs, *plan.store_jobs], due))
        self._loading.update((job_id, job.req_id) for job_id, job in plan.load_jobs.items())
        for job_id in plan.jobs_to_flush or ():  # it waits for these
            if job_id in self._jobs:
                self._jobs[job_id] = self._num_steps
        done = _take_due(self._jobs, self._num_steps)
        received = {self._loading.pop(job_id) for job_id in done if job_id in self._loading}
        self._num_steps += 1
        return received, OffloadingWorkerMetadata(dict.fromkeys(done, 1)) if done else None


class SafeWorker(_SlowCopier):
    """For ours: what `WorkerBridge` and `Transfers` answer when every copy goes well.

    Args:
        copy_steps: a copy is reported so many steps after the one whose plan names it.
        num_slots: host slots, told in the first report.
    """

    def __init__(self, copy_steps: int, num_slots: int) -> None:
        super().__init__(copy_steps)
        self._loads: dict[int, int] = {}
        self._stores: dict[int, int] = {}
        self._news: tuple[Capacity, ...] = (Capacity(0, num_slots),)

    @property
    def is_loading(self) -> bool:
        """See `StandInWorker`."""
        return bool(self._loads)

    def step(self, plan: Any) -> tuple[set[str], Any]:
        """See `StandInWorker`; the scheduler side names the requests itself, from the report."""
        assert isinstance(plan, StepPlan)
        if plan.failures:
            raise SafeOffloadError(f"expected no load to fail here, found {plan.failures}")
        due = self._num_steps + self._copy_steps
        for transfer in plan.loads:
            self._loads[transfer.transfer_id] = due
            self.num_loaded += len(transfer.block_ids)
        for transfer in (*plan.stores_before_forward, *plan.stores_after_forward):
            self._stores[transfer.transfer_id] = due
            self.num_stored += len(transfer.block_ids)
        for transfer_id in plan.fences:  # the step waits for these
            if transfer_id in self._stores:
                self._stores[transfer_id] = self._num_steps
        done = _take_due(self._stores, self._num_steps) + _take_due(self._loads, self._num_steps)
        self._num_steps += 1
        news, self._news = self._news, ()
        if not done and not news:
            return set(), None
        return set(), StepReport(tuple(Outcome(0, transfer_id) for transfer_id in done), news)


class NoWorker:
    """For an engine without a connector."""

    is_loading = False
    num_stored = num_loaded = 0

    def step(self, plan: Any) -> tuple[set[str], Any]:
        """See `StandInWorker`."""
        return set(), None


def _take_due(running: dict[int, int], step: int) -> list[int]:
    due = [key for key, end in running.items() if end <= step]
    for key in due:
        del running[key]
    return due


def make_worker(shape: EngineShape, copy_steps: int) -> StandInWorker:
    """The stand-in for the workers of the shape's connector.

    Args:
        shape: see `peer_shape`.
        copy_steps: a copy is reported so many steps after the one whose plan names it.
    """
    if shape.connector == OURS:
        return SafeWorker(copy_steps, shape.num_slots)
    if shape.connector == NONE:
        return NoWorker()
    return _WORKERS[shape.connector](copy_steps)


_WORKERS: dict[str, Callable[[int], StandInWorker]] = {
    SIMPLE: SimpleWorker,
    OFFLOADING: OffloadingWorker,
}


class PeerEngine:
    """An engine with any connector: one rank, one step in flight.

    Args:
        shape: see `peer_shape`.
        copy_steps: how long the stand-in's copies take.
    """

    def __init__(self, shape: EngineShape, copy_steps: int = 0) -> None:
        with as_peer_runner(shape):
            self.scheduler, self._hasher = make_peer_scheduler(shape)
        self.shape = shape
        self.runner = ModelRunner(shape, self.scheduler, Chance(0), Findings())
        self.answers: dict[str, list[int]] = {}
        self.mutate_output: list[Callable[[Any], None]] = []
        self._worker = make_worker(shape, copy_steps)

    @property
    def connector(self) -> Any:
        """The scheduler side of the connector; None if there is none."""
        return self.scheduler.connector

    @property
    def pool(self) -> Any:
        """vLLM's pool of GPU blocks."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def is_loading(self) -> bool:
        """Whether a copy to the GPU is still under way."""
        return self._worker.is_loading

    @property
    def has_work(self) -> bool:
        """Whether the engine would go on stepping."""
        return bool(self.scheduler.has_requests())

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 4) -> Any:
        """Send a request; returns vLLM's object."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(request_id, list(prompt), params, None, block_hasher=self._hasher)
        self.runner.sequels[request_id] = Sequel(prompt)
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """One step of the engine; returns what was scheduled."""
        from vllm.v1.outputs import KVConnectorOutput

        with as_peer_runner(self.shape):
            scheduled = self.scheduler.schedule()
        batch = self.runner.prepare(scheduled)
        received, report = self._worker.step(scheduled.kv_connector_metadata)
        connector_output = KVConnectorOutput(
            finished_recving=received, finished_sending=set(), kv_connector_worker_meta=report
        )
        for mutate in self.mutate_output:
            mutate(connector_output)
        sampled = [list(tokens) for tokens in batch.sampled]
        output = runner_output(batch.request_ids, sampled, connector_output)
        with as_peer_runner(self.shape):
            by_client = self.scheduler.update_from_output(scheduled, output)
        for outputs in by_client.values():
            for item in outputs.outputs:
                self.answers.setdefault(item.request_id, []).extend(item.new_token_ids)
        return scheduled

    def drain(self, max_steps: int = 500) -> None:
        """Step until the engine would go idle."""
        for _ in range(max_steps):
            if not self.has_work:
                return
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps")
