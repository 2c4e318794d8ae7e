"""One rank: the connector's worker half, the transfer engine run step by step, the model runner.

The model runner calls the connector's hooks in the order of vLLM's two model runners (vLLM 0.32.0,
v1/worker/gpu_model_runner.py with kv_connector_model_runner_mixin.py, and v1/worker/gpu/).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from safe_offload.config import OffloadConfig
from safe_offload.connector import SafeCPUOffloadConnector
from safe_offload.protocol import StepPlan
from safe_offload.worker.engine import TransferEngine
from tests.simulator.device import Device, SimBackend
from tests.simulator.virtual_loop import VirtualLoop

logger = logging.getLogger(f"vllm.{__name__}")

T = TypeVar("T")

VERIFY_S = 0.003
"""Virtual time that checksums take: some ticks, in which everybody else goes on."""
PATIENCE_STEPS = 40
"""Turns of the loop after which somebody who waits for it lets seconds pass, not milliseconds."""


class SteppedEngine(TransferEngine):
    """The transfer engine without a thread: its loop turns when it is told to.

    Args:
        backend: of the device.
        config: as in production.
        loop: not running.
        checksums: of the host slots.
    """

    def __init__(
        self,
        backend: SimBackend,
        config: OffloadConfig,
        loop: VirtualLoop,
        checksums: npt.NDArray[np.uint64],
    ) -> None:
        super().__init__(
            backend,
            config.max_inflight_bytes,
            timeout_s=config.transfer_timeout_s,
            verify_every=config.verify_every,
            checksums=checksums,
        )
        self._device = backend.device
        self._virtual = loop
        self._main_task = loop.create_task(self._main())

    def start(self) -> None:
        """Run the loop until it takes transfers."""
        while not self._started.is_set():
            self.turn()

    def turn(self) -> None:
        """One turn of the loop; if that ended it, what its thread does at its end."""
        if self._ended.is_set():
            return
        try:
            self._virtual.run_once()
        except BaseException as error:  # as in `TransferEngine._run`
            logger.info("the loop of rank %d died: %r", self._device.rank, error)
            self._finish()
            return
        if self._main_task.done():
            self._finish()

    def _finish(self) -> None:
        if self._main_task.done() and not self._main_task.cancelled():
            self._main_task.exception()  # seen, so that asyncio does not complain
        self._end()

    def kill(self) -> None:
        """The loop dies."""
        self._main_task.cancel()

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the loop in good order."""
        if self._closing is not None:
            self._closing.set()
        for _ in range(10_000):
            if self._ended.is_set():
                break
            self.turn()
            self._pass_time(1.0)
        self._virtual.close()
        return self._ended.is_set()

    def _now_s(self) -> float:
        return self._device.clock.now_s

    def _wait(self, event: threading.Event, timeout_s: float) -> bool:
        deadline_s = self._now_s() + timeout_s
        num_turns = 0
        while not event.is_set():
            if self._now_s() > deadline_s:
                return False
            self.turn()
            num_turns += 1
            self._pass_time(0.0 if num_turns < PATIENCE_STEPS else 1.0)
        return True

    def _pass_time(self, seconds: float) -> None:
        self._device.clock.advance(seconds)
        self._device.advance_compute(1)
        self._device.tick()

    async def _in_thread(self, executor: Executor, function: Callable[..., T], *args: object) -> T:
        await asyncio.sleep(VERIFY_S)
        return function(*args)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if not self._ended.is_set():
            self._virtual.call_soon(function, *args)


@dataclass(slots=True)
class Forward:
    """What the model runners of all ranks do to their memory in one step.

    Attributes:
        zeroed: blocks to zero.
        copies: (source, target) of blocks to copy before the forward.
        move_states: copies Mamba states to the blocks of this step, on one device.
        compute: checks what attention reads and writes what the step computes, on one device.
    """

    zeroed: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]
    move_states: Callable[[Device], None]
    compute: Callable[[Device], None]


@dataclass(slots=True)
class StepResult:
    """What a worker returns for one step, and when it may: at the end of its forward."""

    finished_sending: set[str] | None
    finished_recving: set[str] | None
    failed_recving: set[str]
    stats: Any
    worker_meta: Any
    num_operations: int


@dataclass(slots=True)
class Worker:
    """One worker process.

    Attributes:
        is_v2: hooks as in Model Runner V2.
        defers_finalize: stores are started behind the report, as with speculative decoding.
        is_last_stage: of the pipeline; on the others V1 never gets to a deferred finalize.
        pause: lets some time pass; called between any two hooks.
    """

    rank: int
    connector: SafeCPUOffloadConnector
    engine: SteppedEngine
    device: Device
    is_v2: bool
    defers_finalize: bool
    is_last_stage: bool
    pause: Callable[[int], None]
    num_steps: int = field(default=0)

    def run(self, plan: StepPlan, forward: Forward, finished_req_ids: set[str]) -> StepResult:
        """One step, from the connector's first hook to its last."""
        self.num_steps += 1
        if self.is_v2:
            self._write_early(forward)
            self.connector.handle_preemptions(plan)
        else:
            self.connector.handle_preemptions(plan)
            self.pause(self.rank)
            self._write_early(forward)
        self.connector.bind_connector_metadata(plan)
        self.device.enqueue(lambda: forward.compute(self.device))
        num_operations = self.device.num_enqueued
        self.pause(self.rank)
        self.connector.start_load_kv(None)
        self.pause(self.rank)
        if not self.defers_finalize:
            self.connector.wait_for_save()
            self.pause(self.rank)
        result = self._result(finished_req_ids, num_operations)
        if self.defers_finalize and not (self.is_v2 or self.is_last_stage):
            return result
        if self.defers_finalize:
            self.pause(self.rank)
            self.connector.wait_for_save()
        self.connector.clear_connector_metadata()
        self.pause(self.rank)
        return result

    def _write_early(self, forward: Forward) -> None:
        def zero() -> None:
            for block_id in forward.zeroed:
                self.device.zero(block_id)

        def copy() -> None:
            for source, target in forward.copies:
                self.device.copy_block(source, target)

        if forward.zeroed:
            self.device.enqueue(zero)
        if forward.copies:
            self.device.enqueue(copy)
        self.device.enqueue(lambda: forward.move_states(self.device))

    def _result(self, finished_req_ids: set[str], num_operations: int) -> StepResult:
        results = self.connector.get_transfer_results(finished_req_ids)
        return StepResult(
            results.finished_sending,
            results.finished_recving,
            results.failed_recving,
            self.connector.get_kv_connector_stats(),
            self.connector.build_connector_worker_meta(),
            num_operations,
        )
