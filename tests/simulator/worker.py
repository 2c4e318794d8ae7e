"""One rank: the connector's worker half, its event loop turned step by step, the model runner.

The model runner calls the connector's hooks in the order of vLLM's two model runners (vLLM 0.32.0,
v1/worker/gpu_model_runner.py with kv_connector_model_runner_mixin.py, and v1/worker/gpu/).
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from safe_offload.connector import SafeCPUOffloadConnector
from safe_offload.worker.copies.base import Direction
from safe_offload.worker.loop_thread import Main
from safe_offload.worker.transfers import Transfers
from tests.simulator.device import Device
from tests.simulator.remote import RemoteRank, split
from tests.simulator.virtual_loop import VirtualLoop

logger = logging.getLogger(f"vllm.{__name__}")

T = TypeVar("T")

VERIFY_S = 0.003
"""Virtual time that checksums take: some ticks."""
PATIENCE_STEPS = 40
"""Turns of a loop that is waited for after which seconds pass with each, not milliseconds."""


class SteppedLoop:
    """See `Loop`: an event loop that turns when it is told to, and while it is waited for.

    `device`: time passes on it while the loop is waited for; `event_loop`: not running.
    """

    def __init__(self, device: Device, event_loop: VirtualLoop) -> None:
        self._device = device
        self._event_loop = event_loop
        self._has_ended = False
        self.news = threading.Event()

    def start(self, main: Main, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._main_task = self._event_loop.create_task(main())
        self.turn()

    def turn(self) -> None:
        """Turn the loop once; if that ended it, do what its thread does at its end."""
        if self._has_ended:
            return
        try:
            self._event_loop.run_once()
        except BaseException as error:  # as in `LoopThread._run`
            logger.info("the loop of rank %d died: %r", self._device.rank, error)
            self._finish()
            return
        if self._main_task.done():
            self._finish()

    def kill(self) -> None:
        self._main_task.cancel()

    def call(self, function: Callable[..., object], *args: object) -> None:
        if not self._has_ended:
            self._event_loop.call_soon(function, *args)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        deadline_s = self.now_s() + timeout_s
        num_turns = 0
        while not event.is_set():
            if self.now_s() > deadline_s:
                return False
            self.turn()
            num_turns += 1
            self._pass_time(0.0 if num_turns < PATIENCE_STEPS else 1.0)
        return True

    def now_s(self) -> float:
        return self._device.clock.now_s

    def join(self, timeout_s: float) -> None:
        self._event_loop.close()

    def _finish(self) -> None:
        if self._main_task.done() and not self._main_task.cancelled():
            self._main_task.exception()  # seen, so that asyncio does not complain
        self._has_ended = True
        self._on_end()

    def _pass_time(self, seconds: float) -> None:
        self._device.clock.advance(seconds)
        self._device.advance_compute(1)
        self._device.tick()


class SlowThreads:
    """See `Threads`: checksums take a while, in which everything else goes on."""

    async def run(self, direction: Direction, function: Callable[..., T], *args: object) -> T:
        await asyncio.sleep(VERIFY_S)
        return function(*args)

    def close(self) -> None:
        """See `Threads.close`; what was waiting has ended with the loop."""


@dataclass(slots=True)
class Forward:
    """What the model runners of all ranks do to their memory in one step."""

    zeroed: tuple[int, ...]  # blocks to zero
    copies: tuple[tuple[int, int], ...]  # (source, target) of blocks to copy before the forward
    # Copies Mamba states to the blocks of this step, on one device.
    move_states: Callable[[Device], None]
    # Checks what attention reads and writes what the step computes, on one device.
    compute: Callable[[Device], None]
    # Is told which blocks the step reads that were not loaded, of one rank.
    see_unloaded: Callable[[int, set[int]], None]


@dataclass(slots=True)
class StepResult:
    """What a worker returns for one step, and when it may: at the end of its forward."""

    finished_sending: set[str] | None
    finished_recving: set[str] | None
    failed_recving: set[str]
    invalid_block_ids: set[int]
    stats: Any
    worker_meta: Any
    num_operations: int


@dataclass(slots=True)
class Worker:
    """One worker process."""

    rank: int
    connector: SafeCPUOffloadConnector
    transfers: Transfers
    loop: SteppedLoop
    device: Device
    is_v2: bool  # hooks as in Model Runner V2
    defers_finalize: bool  # stores are started behind the report, as with speculative decoding
    is_last_stage: bool  # of the pipeline; on the others V1 never gets to a deferred finalize
    pause: Callable[[int], None]  # lets some time pass; called between any two hooks
    pool: Any = None  # of several engines; see `node.RankPool`
    remote: RemoteRank | None = None  # another connector's, beside ours
    num_steps: int = field(default=0)

    def run(self, metadata: Any, forward: Forward, finished_req_ids: set[str]) -> StepResult:
        """One step, from the connector's first hook to its last."""
        self.num_steps += 1
        plan, remote_plan = split(metadata)
        if self.is_v2:
            self._write_early(forward)
            self.connector.handle_preemptions(plan)
        else:
            self.connector.handle_preemptions(plan)
            self.pause(self.rank)
            self._write_early(forward)
        self.connector.bind_connector_metadata(plan)
        # vLLM asks behind the forward; of which nothing depends on the answer.
        invalid_block_ids = self.connector.get_block_ids_with_load_errors()
        if invalid_block_ids:
            forward.see_unloaded(self.rank, invalid_block_ids)
        self.device.enqueue(lambda: forward.compute(self.device))
        num_operations = self.device.num_enqueued
        self.pause(self.rank)
        self.connector.start_load_kv(None)
        if self.remote is not None:
            self.remote.start(remote_plan)
        self.pause(self.rank)
        if not self.defers_finalize:
            self.connector.wait_for_save()
            self.pause(self.rank)
        result = self._result(finished_req_ids, num_operations, invalid_block_ids)
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

    def _result(
        self, finished_req_ids: set[str], num_operations: int, invalid_block_ids: set[int]
    ) -> StepResult:
        results = self.connector.get_transfer_results(finished_req_ids)
        if self.remote is not None:
            sent, received, failed = self.remote.report()
            results.finished_sending.update(sent)
            results.finished_recving.update(received)
            results.failed_recving.update(failed)
        return StepResult(
            results.finished_sending,
            results.finished_recving,
            results.failed_recving,
            invalid_block_ids,
            self.connector.get_kv_connector_stats(),
            self.connector.build_connector_worker_meta(),
            num_operations,
        )
