"""Connectors on vLLM's real scheduler: vLLM's own, none at all, and ours beside them.

Their scheduler sides are pure Python and run as they are. Their workers want a GPU, so a stand-in
settles each transfer a fixed number of steps after the plan that names it. Only the order of events
is that of an engine: memory has no contents here. The tests see so which of the reported faults
the others show, and `python -m tests.benchmarks scheduler` what each costs the scheduler.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from safe_offload.errors import SafeOffloadError
from safe_offload.protocol import Capacity, Outcome, StepPlan, StepReport
from tests.simulator.chance import Chance
from tests.simulator.findings import Findings
from tests.simulator.model_runner import ModelRunner
from tests.simulator.stepper import Stepper
from tests.simulator.vllm_setup import NONE, OURS, EngineShape, make_kv_cache_config, runner_output
from tests.simulator.words import Sequel

SIMPLE = "SimpleCPUOffloadConnector"
OFFLOADING = "OffloadingConnector"

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


class StandInWorker(Protocol):
    """Settles the transfers of one connector's plans."""

    num_stored: int  # blocks of all stores that the plans named
    num_loaded: int  # of all loads

    @property
    def is_loading(self) -> bool:
        """Whether a load has not ended."""

    def step(self, plan: Any) -> tuple[set[str], Any]:
        """Take a step's plan; returns the requests whose load ended, and the worker's report."""


class _SlowCopier:
    """What the stand-ins have in common.

    `copy_steps`: a copy is reported this many steps after the one whose plan names it.
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
        return bool(self._loads)

    def step(self, plan: Any) -> tuple[set[str], Any]:
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
        return bool(self._loading)

    def step(self, plan: Any) -> tuple[set[str], Any]:
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

    `copy_steps`: a copy is reported this many steps after the one whose plan names it; `num_slots`:
    host slots, told in the first report.
    """

    def __init__(self, copy_steps: int, num_slots: int) -> None:
        super().__init__(copy_steps)
        self._loads: dict[int, int] = {}
        self._stores: dict[int, int] = {}
        self._news: tuple[Capacity, ...] = (Capacity(0, num_slots),)

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def step(self, plan: Any) -> tuple[set[str], Any]:
        """See `StandInWorker`; the scheduler side names the requests itself, from the report."""
        assert isinstance(plan, StepPlan)
        if plan.failures:
            raise SafeOffloadError(f"expected no load to fail here, found {plan.failures}")
        due = self._num_steps + self._copy_steps
        for transfer in (*plan.loads, *plan.loads_in_step):
            self._loads[transfer.transfer_id] = due
            self.num_loaded += len(transfer.block_ids)
        for transfer in (*plan.stores_before_forward, *plan.stores_after_forward):
            self._stores[transfer.transfer_id] = due
            self.num_stored += len(transfer.block_ids)
        self._stores.update((spill.transfer_id, due) for spill in plan.spills)
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
        return set(), None


def _take_due(running: dict[int, int], step: int) -> list[int]:
    due = [key for key, end in running.items() if end <= step]
    for key in due:
        del running[key]
    return due


def make_worker(shape: EngineShape, copy_steps: int) -> StandInWorker:
    """The stand-in for the workers of the shape's connector.

    `shape`: see `peer_shape`; `copy_steps`: a copy is reported this many steps after the one whose
    plan names it.
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


Tokens = Callable[[str, int], int]
"""The token of a request, by its id, at a position."""


class PeerEngine(Stepper):
    """An engine with any connector: one rank, one step in flight.

    `shape`: see `peer_shape`; `copy_steps`: how long the stand-in's copies take; `tokens`: what is
    sampled; what the prefix leads to, if not given (`words.Sequel`). `num_steps`: so far;
    `num_prompt_tokens`: of all requests so far; `num_computed`: tokens that were scheduled so far;
    `num_preemptions`: so far.
    """

    def __init__(
        self, shape: EngineShape, copy_steps: int = 0, tokens: Tokens | None = None
    ) -> None:
        super().__init__(shape)
        self.runner = ModelRunner(shape, self.scheduler, Chance(0), Findings())
        self.worker = make_worker(shape, copy_steps)  # the stand-in
        # Called with what the worker's connector returns for a step.
        self.mutate_output: list[Callable[[Any], None]] = []
        self.last_plan: Any = None  # what the connector told the workers in the last step
        self.num_steps = self.num_prompt_tokens = 0
        self.num_computed = self.num_preemptions = 0
        self._tokens = tokens

    @property
    def is_loading(self) -> bool:
        return self.worker.is_loading

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4) -> Any:
        self.num_prompt_tokens += len(prompt)
        if self._tokens is None:
            self.runner.sequels[request_id] = Sequel(prompt)
        return self.send(request_id, prompt, max_tokens)

    def step(self) -> list[str]:
        from vllm.v1.outputs import KVConnectorOutput

        scheduled = self.schedule()
        self.num_steps += 1
        self.num_computed += scheduled.total_num_scheduled_tokens
        self.num_preemptions += len(scheduled.preempted_req_ids or ())
        sampled = self._sample(scheduled)
        self.last_plan = scheduled.kv_connector_metadata
        received, report = self.worker.step(self.last_plan)
        connector_output = KVConnectorOutput(
            finished_recving=received, finished_sending=set(), kv_connector_worker_meta=report
        )
        for mutate in self.mutate_output:
            mutate(connector_output)
        output = runner_output(list(scheduled.num_scheduled_tokens), sampled, connector_output)
        return self.update(scheduled, output)

    def _sample(self, scheduled: Any) -> list[list[int]]:
        if self._tokens is None:
            return [list(tokens) for tokens in self.runner.prepare(scheduled).sampled]
        requests = [self.scheduler.requests[name] for name in scheduled.num_scheduled_tokens]
        return [
            [] if one.is_prefill_chunk else [self._tokens(one.request_id, one.num_tokens)]
            for one in requests
        ]
