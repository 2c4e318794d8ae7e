"""I3: vLLM is told once for each load that it waits for, and of no request it does not own."""

from collections.abc import Callable
from typing import Any

from tests.simulator.checkers.ledger import Ledger
from tests.simulator.checkers.taps import tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding


class CompletionChecker:
    """Judges every id that passes `update_connector_output`, before vLLM acts on it."""

    def __init__(self, core: EngineCore, ledger: Ledger) -> None:
        self._core = core
        self._ledger = ledger
        tap(core.connector, "update_connector_output", self._see_output)

    def _see_output(self, original: Callable[[Any], None], output: Any) -> None:
        original(output)
        from tests.simulator.engine_core import SortedIds

        received = SortedIds(output.finished_recving or ())
        sent = SortedIds(output.finished_sending or ())
        for request_id in received:
            self._check_received(request_id, output)
        for request_id in sent:
            self._check_sent(request_id)
        if received & sent:
            raise Finding("I3", f"{sorted(received & sent)} are in both sets")
        output.finished_recving = received or None
        output.finished_sending = sent or None

    def _request(self, request_id: str) -> Any:
        request = self._core.scheduler.requests.get(request_id)
        if request is None:
            raise Finding("I3", f"{request_id} is told to vLLM, which does not know it")
        return request

    def _holds_blocks(self, request_id: str) -> bool:
        managers = self._core.scheduler.kv_cache_manager.coordinator.single_type_managers
        return any(manager.req_to_blocks.get(request_id) for manager in managers)

    def _check_received(self, request_id: str, output: Any) -> None:
        from vllm.v1.request import RequestStatus

        request = self._request(request_id)
        loads = self._ledger.loads_of(request)
        if any(not (load.is_over or load.is_in_step) for load in loads):
            raise Finding("I3", f"{request_id} is told while a rank still copies its load")
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            if request_id in self._core.scheduler.finished_recving_kv_req_ids:
                raise Finding("I3", f"{request_id} is told twice")
            if loads and loads[-1].has_failed and request_id not in output.failed_recving:
                raise Finding("I6", f"the load of {request_id} failed and is told as good")
        elif not (request.is_finished() and self._holds_blocks(request_id)):
            raise Finding("I3", f"{request_id} is told while it is {request.status.name}")

    def _check_sent(self, request_id: str) -> None:
        request = self._request(request_id)
        if not (request.is_finished() and self._holds_blocks(request_id)):
            raise Finding("I3", f"{request_id} is told as sent while it is {request.status.name}")
        if any(not (r.is_over or r.is_in_step) for r in self._ledger.loads_of(request)):
            raise Finding("I3", f"{request_id} is told as sent while a rank copies its load")
