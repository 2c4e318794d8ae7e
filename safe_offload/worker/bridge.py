"""The bridge between vLLM's synchronous worker hooks and the asynchronous transfers.

The hooks are on vLLM's critical path: nothing here waits for a copy, except a fence on a backend
without streams.

Order of the hooks in a step (vLLM 0.32.0, v1/worker/gpu_model_runner.py, gpu/kv_connector.py):
`handle_preemptions` before the forward, `bind_connector_metadata` with the same plan right before
it, when vLLM has zeroed the new blocks of the step, then `start_load_kv` after the forward has been
issued (before it if another connector loads synchronously), `wait_for_save` and
`build_connector_worker_meta` in either order, `clear_connector_metadata`. It is so on both runners
of 0.31 to 0.33. With drafts, V1 calls neither `wait_for_save` nor `clear_connector_metadata` on any
pipeline stage but the last: there the stores of a step are started by the `handle_preemptions` of
the next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from safe_offload.errors import TransferError
from safe_offload.observe.counters import (
    LOAD_QUEUED_S,
    LOAD_S,
    LOAD_SIZE_BYTES,
    STORE_QUEUED_S,
    STORE_S,
    STORE_SIZE_BYTES,
    Count,
    Counters,
)
from safe_offload.protocol import (
    BadSlots,
    Capacity,
    FailureReason,
    HostFacts,
    MemoryFacts,
    Outcome,
    Presence,
    StepPlan,
    StepReport,
    Transfer,
)
from safe_offload.sides import WorkerSide
from safe_offload.worker.copies.base import CopyPath, Direction
from safe_offload.worker.opening import Opened, Opening, storage_of
from safe_offload.worker.self_test import IdleTiming

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(f"vllm.{__name__}")

SLEEP_TIMEOUT_S = 30.0
"""Maximum wait for copies before sleep: vLLM sleeps when idle, so only the last ones remain."""
POLL_S = 0.001
IDLE_WAIT_S = 0.002
"""Maximum wait for transfers in a step without computation. Without it, vLLM would spin through
steps that take CPU time from the copying threads."""
_SERIES = {
    Direction.LOAD: (Count.LOAD_BYTES, LOAD_S, LOAD_QUEUED_S, LOAD_SIZE_BYTES),
    Direction.STORE: (Count.STORE_BYTES, STORE_S, STORE_QUEUED_S, STORE_SIZE_BYTES),
}


class WorkerBridge(WorkerSide):
    """The worker side of one rank. Only the thread of vLLM's hooks uses it.

    It `is_beside_scheduler` if that is the scheduler's thread, which may ask again for settled
    transfers. `opened` is None until vLLM has allocated its KV cache, and after `shutdown`.
    """

    has_changed = True  # changes are not tracked here

    def __init__(self, opening: Opening, *, is_beside_scheduler: bool = False) -> None:
        self._opening = opening
        self._is_beside_scheduler = is_beside_scheduler
        self._rank = opening.rank
        self.opened: Opened | None = None
        self._left_behind: Opened | None = None
        """Memory that a copy may still touch after `shutdown`."""
        self._is_asleep = False
        self._idle_timing: IdleTiming | None = None  # until the first step
        # Of the last plan: what no hook has started, whether one after its forward was called, and
        # whether the step may wait.
        self._loads: tuple[Transfer, ...] = ()
        self._stores: tuple[Transfer, ...] = ()
        self._loads_mark: Any = None
        self._is_forward_issued = False
        self._may_wait = False
        self._is_gathered = False  # for the next report, by `take_changes`
        self._last_held_id = -1  # of all plans
        # Submitted and not drained; drained or failed and not reported.
        self._running: dict[int, Direction] = {}
        self._outcomes: list[Outcome] = []
        # Of stores among them, and of loads in the step: reported with the output of their step.
        self._held_ids: set[int] = set()
        self._bad_slots: list[BadSlots] = []
        self._presences: list[Presence] = []
        self._failures: tuple[str, ...] = ()
        self._unloaded: set[int] = set()  # blocks that the forward of this step reads
        self._is_lost = False
        # What has been reported.
        self._reported_num_slots = 0
        self._reported_facts: (
            tuple[MemoryFacts, tuple[CopyPath, ...], tuple[str, ...], float] | None
        ) = None
        self._counted = (0, 0)  # overdue transfers, demotions of copy paths

    def __repr__(self) -> str:
        state = "asleep" if self._is_asleep else "open" if self.opened else "closed"
        return f"<WorkerBridge of rank {self._rank}, {state}: {len(self._running)} running>"

    # ---- from start to end ---------------------------------------------------------------------

    def register_kv_caches(
        self, kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]]
    ) -> None:
        """Open the transfers, once vLLM has allocated its KV cache; see `Opening.open`."""
        if not kv_caches:
            return
        if self.opened is None:
            opened = self._opening.open(kv_caches)
            self._is_lost = opened is None
            if opened is not None:
                self.attach(opened)
        elif storage_of(kv_caches)[0].data_ptr() == self.opened.storage.data_ptr():
            self.restore_kv_caches()
        else:
            # What the host holds is filed under blocks of the first storage, and copies in flight
            # know its addresses only.
            logger.error(
                "vLLM registered another KV cache, which does not match the host memory. "
                "Offloading is off until the server is restarted; vLLM serves without host hits."
            )
            self.shutdown()

    def attach(self, opened: Opened) -> None:
        """Use running transfers."""
        assert self.opened is None
        opened.transfers.take_copied()  # of the self-test
        self.opened, self._idle_timing = opened, opened.idle_timing

    def engine_has_started(self) -> None:
        """Repeat the timing of copies until the first step; CUDA graphs are captured by now."""
        if self._idle_timing is not None:
            self._idle_timing.start()

    def _end_idle_timing(self) -> None:
        timing, self._idle_timing = self._idle_timing, None
        if timing is None:
            return
        has_ended = timing.stop()
        if self.opened is not None:
            self.opened.transfers.take_copied()
        if not has_ended:
            logger.error(
                "A copy timed before the first step did not end. Offloading is off until the "
                "server is restarted; vLLM serves without host hits. Fix: check for a hung device."
            )
            self._is_lost = True
            self.shutdown()

    def unregister_kv_caches(self) -> None:
        """Wait for the copies in flight before vLLM frees the KV cache's memory (sleep).

        No copy starts before `restore_kv_caches`. TransferError: a copy does not end, so the memory
        must not be freed.
        """
        self._is_asleep = True
        self._end_idle_timing()
        self._cancel_unstarted()
        deadline_s = time.monotonic() + SLEEP_TIMEOUT_S
        while self.opened is not None:
            self._drain(self.opened)
            if not self._running:
                return
            if time.monotonic() > deadline_s:
                self._is_asleep = False
                raise TransferError(
                    "sleep",
                    f"{len(self._running)} copies did not end within {SLEEP_TIMEOUT_S:g} s, so "
                    "the KV cache cannot be released. Try again; if this recurs, check for a hung "
                    "device.",
                )
            time.sleep(POLL_S)

    def restore_kv_caches(self) -> None:
        """Resume after a sleep: the KV cache's memory is back, at the same addresses."""
        self._is_asleep = False

    def shutdown(self) -> None:
        """End the transfers and free the host memory; a second call does nothing."""
        self._end_idle_timing()
        opened, self.opened = self.opened, None
        if opened is None:
            return
        if not opened.transfers.close():
            self._left_behind = opened
            logger.error(
                "A copy%s did not end within 5 s of shutdown; its thread is abandoned. If this "
                "recurs, check for a hung device.",
                " or a tier" if opened.tiers else "",
            )
        elif opened.pool is not None:
            opened.pool.close()
        self._drain(opened)

    # ---- a step --------------------------------------------------------------------------------

    def handle_preemptions(self, plan: StepPlan) -> None:
        """Start the stores before the forward pass, and wait for the fences of this step."""
        if self._idle_timing is not None:
            self._end_idle_timing()
        if self._is_forward_issued:
            self.wait_for_save()  # of the last step, if no hook has
        for transfer in plan.stores_before_forward:
            self._submit(Direction.STORE, transfer)
        if plan.fences and self.opened is not None:
            self.opened.transfers.fence(plan.fences)

    def bind_connector_metadata(self, plan: StepPlan) -> None:
        """Take the plan of a step; cancel transfers of the last step that no hook has started."""
        # Before anything may fail: whatever does, no block that was not loaded counts as loaded.
        self._unloaded.update(plan.unloaded)
        for transfer in plan.loads_in_step:
            self._unloaded.update(transfer.block_ids)
            self._held_ids.add(transfer.transfer_id)
        if self._idle_timing is not None:
            self._end_idle_timing()
        self._cancel_unstarted()
        self._is_forward_issued = False
        self._may_wait = plan.is_idle
        self._loads, self._stores = plan.loads, plan.stores_after_forward
        if held := plan.loads_in_step + plan.stores_before_forward + plan.stores_after_forward:
            self._last_held_id = held[-1].transfer_id
        if plan.loads or plan.loads_in_step:
            self._mark_loads(plan.loads_in_step)
        self._failures += plan.failures
        if plan.probes or plan.fetches or plan.spills:
            self._pass_to_tiers(plan)

    def start_load_kv(self) -> None:
        loads, self._loads = self._loads, ()
        for transfer in loads:
            self._submit(Direction.LOAD, transfer, self._loads_mark)
        self._loads_mark = None

    def take_unloaded(self) -> set[int]:
        """Return the blocks that the forward of this step reads and that were not loaded."""
        unloaded, self._unloaded = self._unloaded, set()
        return unloaded

    def wait_for_save(self) -> None:
        """Start the stores after the forward pass, which has been issued."""
        stores, self._stores = self._stores, ()
        for transfer in stores:
            self._submit(Direction.STORE, transfer)

    def get_transfer_results(self) -> tuple[str, ...]:
        """Return the ids of requests whose load failed, each once."""
        failures, self._failures = self._failures, ()
        return failures

    def build_connector_worker_meta(self) -> StepReport | None:
        """Return the report since the last call; None if there is nothing to report."""
        self._is_forward_issued = True
        facts = self._new_facts()  # before the slots: memory that is all locked has all its slots
        capacities: tuple[Capacity, ...] = ()
        if self.opened is not None:
            if not self._is_gathered:
                self._gather(self.opened)
            self._is_gathered = False
            num_slots = self.opened.backend.num_usable_slots
            if num_slots > self._reported_num_slots:
                self._reported_num_slots = num_slots
                capacities = (Capacity(self._rank, num_slots),)
        lost, self._is_lost = (self._rank,) if self._is_lost else (), False
        has_settled = self._outcomes or self._bad_slots or self._presences
        settled = partial(self.report_settled, self._last_held_id)
        if self._is_beside_scheduler and (has_settled or self._is_loading):
            return StepReport((), capacities, (), lost, facts, later=settled)
        if not (has_settled or capacities or lost or facts):
            return None
        return replace(settled(), capacities=capacities, lost_ranks=lost, host_facts=facts)

    def report_settled(self, last_held_id: int) -> StepReport:
        """Return unreported settled transfers; up to this moment, if a load is in flight.

        vLLM reads the report of a step after it has given the worker the next step. On the
        scheduler's thread, it then also gets the results of that next step and later ones, so that
        a loaded request runs one or two steps sooner.

        Args:
            last_held_id: of the reporting step. Later stores and loads in the step wait for their
                own step's output, which may name blocks that were not loaded.
        """
        if self.opened is not None and self._is_beside_scheduler and self._is_loading:
            self._drain(self.opened)
        early = {held_id for held_id in self._held_ids if held_id > last_held_id}
        outcomes = tuple(o for o in self._outcomes if o.transfer_id not in early)
        settled = outcomes, (), tuple(self._bad_slots), (), (), tuple(self._presences)
        self._outcomes = [o for o in self._outcomes if o.transfer_id in early]
        self._held_ids, self._bad_slots, self._presences = early, [], []
        return StepReport(*settled)

    def take_changes(self, counters: Counters) -> None:
        """Count the transfers of this rank since the last call, and observe their times.

        vLLM calls this before the report. Both cover the same transfers: after the last report,
        there may be no step to return counts in.
        """
        if self.opened is None:
            return
        self._gather(self.opened)
        self._is_gathered = True
        transfers = self.opened.transfers
        numbers = (transfers.num_overdue, self.opened.backend.num_demotions)
        if numbers != self._counted:  # seldom, and vLLM asks in every step
            names = (Count.OVERDUE_TRANSFERS, Count.COPY_PATH_DEMOTIONS)
            for name, number, before in zip(names, numbers, self._counted, strict=True):
                counters[name] += max(0, number - before)
            self._counted = numbers
        for copied in transfers.take_copied():
            count, seconds, queued_s, size_bytes = _SERIES[copied.direction]
            counters[count] += copied.size_bytes
            counters.observe(seconds, copied.copying_s)
            counters.observe(queued_s, copied.queued_s)
            counters.observe(size_bytes, copied.size_bytes)
        if self.opened.tiers is not None:
            self.opened.tiers.count_into(counters)

    def gauges(self) -> dict[str, float]:
        """Return the gauges of this rank's tiers."""
        tiers = None if self.opened is None else self.opened.tiers
        return {} if tiers is None else tiers.gauges()

    def clear_connector_metadata(self) -> None:
        self._cancel_unstarted()

    def _new_facts(self) -> tuple[HostFacts, ...]:
        if self.opened is None:
            return ()
        tiers, backend = self.opened.tiers, self.opened.backend
        doubts = () if tiers is None else tiers.doubts
        memory, paths, load_block_s = backend.memory, backend.paths, backend.load_block_s
        facts = (memory, paths, doubts, load_block_s)
        if facts == self._reported_facts:
            return ()
        self._reported_facts = facts
        copy_paths, num_sharing = tuple(path.value for path in paths), self.opened.share.count
        where = pool.facts if (pool := self.opened.pool) else None
        return (
            HostFacts(self._rank, memory, copy_paths, num_sharing, doubts, where, load_block_s),
        )

    def _pass_to_tiers(self, plan: StepPlan) -> None:
        tiers = None if self.opened is None else self.opened.tiers
        if tiers is not None:
            for probe in plan.probes:
                tiers.probe(probe)
            for fetch in plan.fetches:
                tiers.fetch(fetch)
            for spill in plan.spills:
                tiers.spill(spill)
            return
        nothing = (Presence(self._rank, p.probe_id, bytes(len(p.keys))) for p in plan.probes)
        self._presences.extend(nothing)
        for transfer in (*plan.fetches, *plan.spills):
            failure = FailureReason.NOT_RUNNING
            self._outcomes.append(Outcome(self._rank, transfer.transfer_id, failure))

    def _cancel_unstarted(self) -> None:
        for transfer in (*self._loads, *self._stores):
            self._fail(transfer, FailureReason.CANCELLED)
        self._loads = self._stores = ()

    def _gather(self, opened: Opened) -> None:
        """Take settled transfers; a step that may wait waits a little if there are none."""
        self._drain(opened)
        if self._may_wait and not (self._outcomes or self._presences):
            opened.transfers.wait_for_news(IDLE_WAIT_S)
            self._drain(opened)

    @property
    def _is_loading(self) -> bool:
        return Direction.LOAD in self._running.values()

    def _drain(self, opened: Opened) -> None:
        for transfer_id, failure in opened.transfers.drain():
            if self._running.pop(transfer_id, None) is Direction.STORE:
                self._held_ids.add(transfer_id)
            self._outcomes.append(Outcome(self._rank, transfer_id, failure))
        if opened.tiers is not None:
            answers = opened.tiers.drain()
            self._presences.extend(answers.presences)
            self._outcomes.extend(answers.outcomes)
        # After the outcomes: no slot may be granted again between its load's failure and this.
        if slot_ids := opened.transfers.take_bad_slots():
            self._bad_slots.append(BadSlots(self._rank, slot_ids))

    def _mark_loads(self, loads_in_step: Sequence[Transfer]) -> None:
        """Let the loads of this step wait for the work issued to the compute stream so far.

        Only that may still use their blocks: earlier steps, fences, vLLM's zeroing. The next
        forward pass does not, so the loads run concurrently with it, except those in the step.
        """
        if self.opened is None:
            for transfer in loads_in_step:
                self._fail(transfer, FailureReason.NOT_RUNNING)
            return
        try:
            self._loads_mark = self.opened.transfers.mark()
        except Exception:
            logger.exception("The loads of a step could not be queued")
            for transfer in (*loads_in_step, *self._loads):
                self._fail(transfer, FailureReason.COPY_FAILED)
            self._loads = loads_in_step = ()
        for transfer in loads_in_step:
            self._load_now(self.opened, transfer)
        if self._loads_mark is None:  # without streams it has ended, and the forward takes long
            self.start_load_kv()

    def _submit(self, direction: Direction, transfer: Transfer, mark: Any = None) -> None:
        if self.opened is None or self._is_asleep:
            is_over = self.opened is None
            reason = FailureReason.NOT_RUNNING if is_over else FailureReason.CANCELLED
            self._fail(transfer, reason)
            return
        mine: Transfer | None = transfer
        if direction is Direction.STORE:
            mine = self.opened.share.of_store(transfer)
        if mine is None:  # others store all of it
            self._outcomes.append(Outcome(self._rank, transfer.transfer_id))
            return
        try:
            self.opened.transfers.submit(direction, mine, mark)
            self._running[transfer.transfer_id] = direction
        except Exception:
            logger.exception("Transfer %d could not be queued", transfer.transfer_id)
            self._fail(transfer, FailureReason.COPY_FAILED)

    def _load_now(self, opened: Opened, transfer: Transfer) -> None:
        """Load blocks that the forward of this step reads, before it."""
        if self._is_asleep:
            self._fail(transfer, FailureReason.CANCELLED)
            return
        try:
            is_certain = opened.transfers.load_now(transfer, self._loads_mark)
        except Exception:
            logger.exception("Transfer %d could not be queued", transfer.transfer_id)
            self._fail(transfer, FailureReason.COPY_FAILED)
            return
        self._running[transfer.transfer_id] = Direction.LOAD
        if is_certain:
            self._unloaded.difference_update(transfer.block_ids)

    def _fail(self, transfer: Transfer, reason: FailureReason) -> None:
        self._outcomes.append(Outcome(self._rank, transfer.transfer_id, reason))
