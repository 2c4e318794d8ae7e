"""One request with what happened in the worker meanwhile: steps and copies.

`WorkerProbe` is a worker extension of vLLM's: its methods become methods of the worker, and
`LLM.collective_rpc` calls them. All times are of `time.monotonic`, which is one clock for all
processes of a machine on Linux, and vLLM's own for `queued_ts` and `first_token_ts`.
"""

import ctypes
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

MATCHED, PLANNED, SETTLED = "matched", "planned", "settled"
ONE_COPY_BYTES = 256 << 20
ONE_COPY_TIMES = 9


class WorkerProbe:
    """Becomes part of vLLM's worker; every name here has to be new to it.

    Source: `worker_extension_cls` in vllm/v1/worker/worker_base.py (0.32.0).
    """

    def start_probe(self) -> None:
        """Watch the steps of the worker, and the copies of this connector if it is there."""
        self._probe = Recorder()
        for name in ("execute_model", "sample_tokens"):
            setattr(self, name, self._probe.watch_step(getattr(self, name)))
        self._probe.watch_copies()

    def take_probe(self) -> dict[str, Any]:
        return self._probe.take()

    def time_one_copy(self, size_bytes: int) -> float:
        """Return the seconds of one copy from host memory, over whatever the KV cache holds."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        opened = get_kv_transfer_group().worker.opened
        return time_one_copy(opened.storage, opened.backend.host.tensor, size_bytes)


class Recorder:
    """Records when things happen in a worker, by wrapping methods: the connector holds no clock."""

    def __init__(self) -> None:
        self.take()

    def watch_step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Note begin, end and tokens of a step; `sample_tokens` ends what `execute_model` began."""

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.monotonic()
            result = method(*args, **kwargs)
            num_tokens = getattr(args[0], "total_num_scheduled_tokens", None) if args else None
            if num_tokens is not None:
                self.steps.append([begin_s, time.monotonic(), num_tokens])
            elif self.steps:
                self.steps[-1][1] = time.monotonic()
            return result

        return watched

    def watch_copies(self) -> None:
        """Note when transfers are submitted, when their copies run, and when they are reported."""
        from safe_offload.worker.bridge import WorkerBridge
        from safe_offload.worker.copies.cpu import CpuBackend
        from safe_offload.worker.copies.device import Device
        from safe_offload.worker.copies.driver import Driver
        from safe_offload.worker.copies.gpu import GpuBackend
        from safe_offload.worker.transfers import Transfers

        def submitted(
            begin_s: float, _none: None, _self: Any, direction: Any, it: Any, *_: Any
        ) -> None:
            self.submits.append((begin_s, direction.value, it.transfer_id))

        def loaded(begin_s: float, _none: Any, _self: Any, it: Any, *_: Any) -> None:
            self.submits.append((begin_s, "load", it.transfer_id))

        def issued(begin_s: float, completion: Any, backend: Any, copy: Any, _after: Any) -> None:
            size_bytes = len(copy.block_ids) * backend.slot_bytes

            def ended(_: Any) -> None:
                end_s = time.monotonic()
                self.copies.append((copy.direction.value, begin_s, end_s, size_bytes))

            completion.future.add_done_callback(ended)

        def joined(_begin_s: float, _is_certain: bool, _self: Any, _completion: Any) -> None:
            direction, begin_s, _, size_bytes = self.copies[-1]  # perhaps taken from its thread
            self.copies[-1] = direction, begin_s, time.monotonic(), size_bytes

        def reported(_begin_s: float, report: Any, *_: Any) -> None:
            ids = tuple(outcome.transfer_id for outcome in report.outcomes)
            self.reports.append((time.monotonic(), ids))

        def given(_begin_s: float, _none: None, *_: Any) -> None:
            self.given.append(time.monotonic())

        _record_calls(Transfers, "submit", submitted)
        _record_calls(Transfers, "load_now", loaded)
        _record_calls(Driver, "copy_batch", given)
        _record_calls(Driver, "copy_each", given)
        _record_calls(Device, "launch", given)
        _record_calls(CpuBackend, "issue", issued)
        _record_calls(CpuBackend, "join", joined)
        _record_calls(GpuBackend, "issue", issued)
        _record_calls(WorkerBridge, "report_settled", reported)

    def take(self) -> dict[str, Any]:
        taken = dict(vars(self))
        self.steps: list[list[Any]] = []  # begin, end, tokens
        self.submits: list[tuple[float, str, int]] = []  # time, direction, transfer id
        self.copies: list[tuple[str, float, float, int]] = []  # direction, begin, end, bytes
        self.reports: list[tuple[float, tuple[int, ...]]] = []  # time, transfer ids
        self.given: list[float] = []  # when the driver had taken a piece of a copy
        return taken


def _record_calls(owner: type, name: str, record: Callable[..., None]) -> None:
    """Call `record` after each call of a method: when it began, its result, its arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def recorded(*args: Any) -> Any:
        begin_s = time.monotonic()
        result = method(*args)
        record(begin_s, result, *args)
        return result

    setattr(owner, name, recorded)


def watch_hooks(connector: Any, moments: list[tuple[str, float]]) -> None:
    """Note when hooks of a connector's scheduler side end.

    `SETTLED` only if the workers have reported a transfer's end.
    """

    def watch(hook: str, name: str) -> None:
        method: Callable[..., Any] = getattr(connector, hook)

        def recorded(*what: Any) -> Any:
            found = method(*what)
            report = what[0].kv_connector_worker_meta if name == SETTLED else None
            if name != SETTLED or (report is not None and report.outcomes):
                moments.append((name, time.monotonic()))
            return found

        setattr(connector, hook, recorded)

    watch("get_num_new_matched_tokens", MATCHED)
    watch("build_connector_meta", PLANNED)
    watch("update_connector_output", SETTLED)


def time_one_copy(storage: Any, host: Any, size_bytes: int) -> float:
    """Time one contiguous copy from host memory, the median of some.

    Args:
        storage: torch's, of the KV cache. It is written over.
        host: page-locked in pieces, so that the first one's rate stands for all.
    """
    part: int = min(size_bytes, ONE_COPY_BYTES, storage.nbytes(), host.nbytes)
    target = torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)[:part]
    taken_s = []
    for _ in range(ONE_COPY_TIMES):
        begin_s = time.perf_counter()
        if target.is_cuda:
            target.copy_(host.view(torch.uint8)[:part], non_blocking=True)
            torch.cuda.synchronize(target.device)
        else:
            ctypes.memmove(target.data_ptr(), host.data_ptr(), part)
        taken_s.append(time.perf_counter() - begin_s)
    return statistics.median(taken_s) * size_bytes / part


# ---- in the front end's process ----------------------------------------------------------------


def start_watching(engine: Any, _: None) -> None:
    """Wrap the worker; once."""
    engine.collective_rpc("start_probe")
