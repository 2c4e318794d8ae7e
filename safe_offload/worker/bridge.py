"""From vLLM's synchronous worker hooks to the transfer engine and back.

The hooks are on the engine's critical path. They enqueue, order and collect; nothing here waits for
a copy except a fence on a backend without streams.

Order of the hooks in a step (vLLM 0.32.0, v1/worker/gpu_model_runner.py, gpu/kv_connector.py):
`before_step` ahead of the forward, `begin` with the same plan, then `start_loads` behind the
forward (ahead of it if another connector loads synchronously), `start_stores` and `collect` in
either order, `end`. With drafts, V1 calls neither `start_stores` nor `end` on any pipeline stage
but the last: there the stores of a step are started by the `before_step` of the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from safe_offload import compat
from safe_offload.config import OffloadConfig
from safe_offload.errors import ConfigError, DeviceError, SharingError, TransferError
from safe_offload.layout import Geometry, HostLayout, make_geometry
from safe_offload.observe.counters import Count
from safe_offload.protocol import (
    EMPTY_PLAN,
    BadSlots,
    Capacity,
    FailureReason,
    HostFacts,
    MemoryFacts,
    Outcome,
    StepPlan,
    StepReport,
    Transfer,
)
from safe_offload.sides import Side
from safe_offload.units import format_bytes
from safe_offload.worker.backends.base import CopyPath, Direction, ProvableBackend
from safe_offload.worker.backends.cpu import CpuBackend
from safe_offload.worker.backends.device import Device
from safe_offload.worker.backends.gpu import GpuBackend
from safe_offload.worker.checksums import require_xxhash
from safe_offload.worker.engine import TransferEngine
from safe_offload.worker.host_memory import HostMemory, available_host_bytes, check_host_bytes
from safe_offload.worker.page_lock import SLAB_BYTES
from safe_offload.worker.self_test import Rows, SelfTest, TorchRows
from safe_offload.worker.shared_memory import (
    ALONE,
    Share,
    checksum_table,
    meeting_place,
    share_memory,
)
from safe_offload.worker.threads import on_other_cores

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(f"vllm.{__name__}")

SLEEP_TIMEOUT_S = 30.0
"""vLLM sleeps when nothing runs any more, so that only the last copies are waited for."""
POLL_S = 0.001

NOT_SHARED = (
    "Ranks that hold the same KV cache cannot share one copy of it on this machine: %s. Each keeps "
    "a copy of its own, so that the host memory holds that many times fewer tokens."
)


def open_backend(
    storage: Any, device: torch.device, layout: HostLayout, host: HostMemory, config: OffloadConfig
) -> tuple[ProvableBackend, Rows]:
    """Return the backend for a KV cache, and the blocks that it copies.

    Raises:
        ConfigError: there is none for its device.
    """
    address, geometry = storage.data_ptr(), layout.geometry
    try:
        if device.type == "cpu":
            backend = CpuBackend(address, layout, host, config.copy_threads)
            return backend, TorchRows(storage, device, geometry)
        if device.type == "cuda":  # torch's word for ROCm too
            path = CopyPath(config.copy_path) if config.copy_path != "auto" else None
            gpu = Device(device)
            rows = TorchRows(storage, device, geometry, gpu.bind_thread)
            return GpuBackend(gpu, address, layout, host, path), rows
        problem = f"expected a KV cache on 'cpu' or 'cuda', found one on {device.type!r}"
    except DeviceError as error:
        problem = f"the GPU's driver cannot be used: {error}"
    host.close()
    raise ConfigError(f"{problem}. Fix: remove --kv-transfer-config on this machine.")


OpenBackend = Callable[
    [Any, "torch.device", HostLayout, HostMemory, OffloadConfig], tuple[ProvableBackend, Rows]
]


class WorkerBridge(Side):
    """The worker side of one rank.

    Args:
        config: of the connector.
        kv_cache_config: of this rank.
        rank: from 0 to the number of ranks of this engine.
        num_ranks_on_host: ranks that share this machine's memory.
        is_child: vLLM has started this process for the worker.
        open_backend: makes the copies for a KV cache.
    """

    def __init__(
        self,
        config: OffloadConfig,
        kv_cache_config: KVCacheConfig,
        *,
        rank: int,
        num_ranks_on_host: int,
        is_child: bool = False,
        open_backend: OpenBackend = open_backend,
    ) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._rank = rank
        self._share = Share(rank % config.ranks_per_copy, config.ranks_per_copy)
        self._num_ranks_on_host = num_ranks_on_host
        self._is_child = is_child
        self._open_backend = open_backend
        self._backend: ProvableBackend | None = None
        self._num_told_demotions = 0
        self._is_lost = False
        self._engine: TransferEngine | None = None
        self._plan: StepPlan = EMPTY_PLAN
        self._loads: tuple[Transfer, ...] = ()
        self._stores: tuple[Transfer, ...] = ()
        self._failures: tuple[str, ...] = ()
        self._outcomes: list[Outcome] = []
        self._num_told_slots = 0
        self._told_facts: tuple[MemoryFacts, tuple[CopyPath, ...]] | None = None
        self._bad_slots: list[BadSlots] = []
        self._storage: Any = None
        self._running: set[int] = set()
        self._is_asleep = False
        self._is_forward_issued = False
        """Of the step of `_plan`: what comes after it has been called."""

    def register(self, kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> None:
        """Take the host memory and start the engine, once vLLM has allocated its KV cache.

        Args:
            kv_caches: by layer name; views of one storage.

        Raises:
            ConfigError: the layout is not supported, or the memory is not to be had.
        """
        if not kv_caches:
            return
        if self._engine is not None:
            self._register_again(_one_storage(kv_caches.values())[0])
            return
        self._storage, device = _one_storage(kv_caches.values())
        geometry = make_geometry(
            compat.segments(self._kv_cache_config),
            self._kv_cache_config.num_blocks,
            self._storage.nbytes(),
        )
        if self._config.verify_every:
            require_xxhash()
        layout, host = self._take_host_memory(geometry, device)
        is_shared = self._share.count > 1
        is_bound = device.type == "cpu" and self._is_child
        with on_other_cores() if is_bound else contextlib.nullcontext():
            backend, rows = self._open_backend(self._storage, device, layout, host, self._config)
            engine = TransferEngine(
                backend,
                self._config.max_inflight_bytes,
                timeout_s=self._config.transfer_timeout_s,
                verify_every=self._config.verify_every,
                checksums=checksum_table(host, layout) if is_shared else None,
            )
            engine.start()
        if self._config.self_test:
            test = SelfTest(engine, backend, rows, host.tensor.numpy(), layout)
            # Others test in this memory too, each in slots of its own.
            if not test.run(slots=self._share.part(layout.slots_per_slab) if is_shared else None):
                engine.close()
                self._is_lost = True
                return
        self._backend = backend
        self.attach(engine)
        logger.info(
            "Rank %d keeps KV cache in %s of host memory%s: %d slots of %d bytes, %d of them "
            "ready. Copies by %s.",
            self._rank,
            format_bytes(host.size_bytes),
            f", one copy for {self._share.count} ranks" if is_shared else "",
            backend.num_slots,
            backend.slot_bytes,
            backend.num_usable_slots,
            ", ".join(path.value for path in backend.paths),
        )

    def _register_again(self, storage: Any) -> None:
        """The same storage is registered anew; another one cannot be served.

        What the host holds is filed under blocks of the first storage, and copies in flight know
        its addresses only. So with another one every transfer fails, and vLLM recomputes.
        """
        if storage.data_ptr() == self._storage.data_ptr():
            self.restore()
            return
        logger.error(
            "vLLM has registered another KV cache, which does not fit the host memory. The "
            "connector goes on as a cache that always misses; restart the server to use it again."
        )
        self.shutdown()

    def unregister(self) -> None:
        """vLLM is about to take the memory of the KV cache away (sleep); what is stored stays.

        Whatever is in flight has ended when this returns, and nothing is started before `restore`.

        Raises:
            TransferError: a copy does not end; the memory must not be taken from under it.
        """
        self._is_asleep = True
        self._cancel_unstarted()
        deadline_s = time.monotonic() + SLEEP_TIMEOUT_S
        while self._engine is not None:
            self._drain(self._engine)
            if not self._running:
                return
            if time.monotonic() > deadline_s:
                self._is_asleep = False
                raise TransferError(
                    "sleep",
                    f"{len(self._running)} copies did not end within {SLEEP_TIMEOUT_S:g} s, so the "
                    "KV cache cannot be taken away. Try again; if this repeats, look for a "
                    "hanging device.",
                )
            time.sleep(POLL_S)

    def restore(self) -> None:
        """The memory of the KV cache is back, at the same addresses (wake-up)."""
        self._is_asleep = False

    def attach(self, engine: TransferEngine) -> None:
        """Use a running engine."""
        self._engine = engine

    def _take_host_memory(
        self, geometry: Geometry, device: torch.device
    ) -> tuple[HostLayout, HostMemory]:
        """Share a memory with the ranks that hold the same, or take one for this rank alone."""
        if self._share.count > 1:
            layout = self._lay_out(geometry, device)
            check = functools.partial(self._check_host_bytes, layout)
            try:
                address = meeting_place(self._rank - self._share.index)
                return layout, share_memory(self._share, layout, address, check)
            except SharingError as error:
                logger.log(
                    # Of the others once is enough; each of them has a reason of its own.
                    logging.INFO if self._share.index else logging.WARNING,
                    NOT_SHARED,
                    error,
                )
                self._share = ALONE
                self._config = dataclasses.replace(self._config, ranks_per_copy=1)
        layout = self._lay_out(geometry, device)
        self._check_host_bytes(layout)
        return layout, HostMemory.allocate(layout.size_bytes)

    def _lay_out(self, geometry: Geometry, device: torch.device) -> HostLayout:
        num_slots = self._config.num_slots_of(geometry.slot_bytes)
        if device.type == "cpu":
            return HostLayout.in_one_slab(geometry, num_slots)
        return HostLayout.in_slabs(geometry, num_slots, SLAB_BYTES)

    def _check_host_bytes(self, layout: HostLayout) -> None:
        check_host_bytes(
            self._config,
            # What several ranks share is there once.
            pool_bytes_per_rank=layout.size_bytes // self._share.count,
            num_ranks_on_host=self._num_ranks_on_host,
            available_bytes=available_host_bytes(),
        )

    def before_step(self, plan: StepPlan) -> None:
        """handle_preemptions: rescue and fence what this step is about to overwrite."""
        if self._is_forward_issued:
            self.start_stores()  # of the last step, if no hook has
        for transfer in plan.stores_before_forward:
            self._submit(Direction.STORE, transfer)
        if plan.fences and self._engine is not None:
            self._engine.fence(plan.fences)

    def begin(self, plan: StepPlan) -> None:
        """bind_connector_metadata: the plan of this step.

        Nothing of a step that did not come to its end is lost: its transfers are cancelled, its
        failures are named in this one.
        """
        self._cancel_unstarted()
        self._plan, self._is_forward_issued = plan, False
        self._loads, self._stores = plan.loads, plan.stores_after_forward
        self._failures += plan.failures

    def start_loads(self) -> None:
        """start_load_kv."""
        loads, self._loads = self._loads, ()
        for transfer in loads:
            self._submit(Direction.LOAD, transfer)

    def start_stores(self) -> None:
        """wait_for_save: the forward has been issued, its bytes can be stored."""
        stores, self._stores = self._stores, ()
        for transfer in stores:
            self._submit(Direction.STORE, transfer)

    def collect_failures(self) -> tuple[str, ...]:
        """get_transfer_results: ids of requests whose load failed, to be given once."""
        failures, self._failures = self._failures, ()
        return failures

    def report(self) -> StepReport | None:
        """build_connector_worker_meta: what settled since the last call, None if nothing did."""
        self._is_forward_issued = True
        facts = self._new_facts()  # before the slots: memory that is all locked has all its slots
        capacities: tuple[Capacity, ...] = ()
        if self._engine is not None:
            self._drain(self._engine)
            num_slots = self._engine.num_usable_slots
            if num_slots > self._num_told_slots:
                self._num_told_slots = num_slots
                capacities = (Capacity(self._rank, num_slots),)
        lost, self._is_lost = (self._rank,) if self._is_lost else (), False
        if not (self._outcomes or capacities or self._bad_slots or lost or facts):
            return None
        report = StepReport(tuple(self._outcomes), capacities, tuple(self._bad_slots), lost, facts)
        self._outcomes, self._bad_slots = [], []
        return report

    def _new_facts(self) -> tuple[HostFacts, ...]:
        """How this rank keeps and copies, if that has not been reported."""
        if self._backend is None:
            return ()
        facts = (self._backend.memory, self._backend.paths)
        if facts == self._told_facts:
            return ()
        self._told_facts = facts
        memory, paths = facts
        return (HostFacts(self._rank, memory, tuple(path.value for path in paths)),)

    has_changed = True
    """Always, since what it counts is not noted."""

    def take_counts(self) -> dict[str, int]:
        """What happened on this rank since the last call that no report tells."""
        counts: dict[str, int] = {}
        if self._engine is not None:
            counts[Count.OVERDUE_TRANSFERS] = self._engine.take_num_overdue()
        if self._backend is not None:
            num_demotions = self._backend.num_demotions
            counts[Count.COPY_PATH_DEMOTIONS] = num_demotions - self._num_told_demotions
            self._num_told_demotions = num_demotions
        return {name: count for name, count in counts.items() if count}

    def end(self) -> None:
        """clear_connector_metadata: whatever no hook has started will never be."""
        self._cancel_unstarted()
        self._plan = EMPTY_PLAN

    def _cancel_unstarted(self) -> None:
        for transfer in (*self._loads, *self._stores):
            self._fail(transfer, FailureReason.CANCELLED)
        self._loads = self._stores = ()

    def shutdown(self) -> None:
        """End the engine's thread and give the host memory back; a second call does nothing."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if engine.close():
            self._storage = None
        else:  # the storage is kept: the copy may still touch it
            logger.error(
                "A copy did not end within 5 s of shutdown; its thread is left to die with the "
                "process. If this repeats, look for a hanging device."
            )
        self._drain(engine)

    def _drain(self, engine: TransferEngine) -> None:
        for transfer_id, failure in engine.drain():
            self._running.discard(transfer_id)
            self._outcomes.append(Outcome(self._rank, transfer_id, failure))
        # Behind the outcomes: no slot may be granted again between its load's failure and this.
        if slot_ids := engine.take_bad_slots():
            self._bad_slots.append(BadSlots(self._rank, slot_ids))

    def _submit(self, direction: Direction, transfer: Transfer) -> None:
        if self._engine is None or self._is_asleep:
            is_over = self._engine is None
            reason = FailureReason.NOT_RUNNING if is_over else FailureReason.CANCELLED
            self._fail(transfer, reason)
            return
        mine: Transfer | None = transfer
        if direction is Direction.STORE:
            mine = self._share.of_store(transfer)
        if mine is None:  # others store all of it
            self._outcomes.append(Outcome(self._rank, transfer.transfer_id))
            return
        try:
            self._engine.submit(direction, mine)
            self._running.add(transfer.transfer_id)
        except Exception:
            logger.exception("Transfer %d could not be queued", transfer.transfer_id)
            self._fail(transfer, FailureReason.COPY_FAILED)

    def _fail(self, transfer: Transfer, reason: FailureReason) -> None:
        self._outcomes.append(Outcome(self._rank, transfer.transfer_id, reason))


def _one_storage(caches: Iterable[torch.Tensor | list[torch.Tensor]]) -> tuple[Any, torch.device]:
    """The storage that all layers' caches are views of, and its device.

    Raises:
        ConfigError: they do not share one.
    """
    tensors = [t for cache in caches for t in (cache if isinstance(cache, list) else [cache])]
    storage = tensors[0].untyped_storage()
    if any(t.untyped_storage().data_ptr() != storage.data_ptr() for t in tensors):
        raise ConfigError(
            "unsupported KV cache layout: expected one backing allocation for all layers, found "
            "several. vLLM 0.32 and later use one; open an issue that names model and vLLM version."
        )
    return storage, tensors[0].device
