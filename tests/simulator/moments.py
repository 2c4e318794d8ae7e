"""When clients go: at chosen moments in the lives of their requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tests.simulator.events import Abort, Moment, Send
from tests.simulator.model_runner import Batch

if TYPE_CHECKING:
    from tests.simulator.checkers import Checkers
    from tests.simulator.engine_core import EngineCore


class Moments:
    """Tells which aborts are due.

    `core`: whose requests are watched; `checkers`: know which hits were reported; `aborts`: each
    goes off once.
    """

    def __init__(self, core: EngineCore, checkers: Checkers, aborts: list[Abort]) -> None:
        self._core = core
        self._offered = checkers.hits.offered
        self._left = list(aborts)
        self._requests: dict[str, Any] = {}
        self._num_steps_seen: dict[str, int] = {}
        self._reached_at: dict[str, int] = {}
        core.before_update.append(self._while_computing)

    def stop(self) -> None:
        self._left.clear()

    def sent(self, send: Send, request: Any) -> None:
        self._requests[send.name] = request
        self._num_steps_seen[send.name] = self._core.num_steps

    def request_id(self, abort: Abort) -> str:
        request_id: str = self._requests[abort.request].request_id
        return request_id

    def before_schedule(self) -> Iterator[Abort]:
        """Aborts that are due between two steps."""
        for abort in list(self._left):
            if abort.request in self._requests and self._is_due(abort):
                self._left.remove(abort)
                if self._core.scheduler.requests.get(self.request_id(abort)) in (
                    None,
                    self._requests[abort.request],
                ):
                    yield abort

    def _is_due(self, abort: Abort) -> bool:
        if abort.name not in self._reached_at:
            if not self._is_reached(abort.moment, abort.request):
                return False
            self._reached_at[abort.name] = self._core.num_steps
        return self._core.num_steps - self._reached_at[abort.name] >= abort.delay

    def _is_reached(self, moment: Moment, name: str) -> bool:
        from vllm.v1.request import RequestStatus

        request = self._requests[name]
        request_id = request.request_id
        is_waiting = request.status == RequestStatus.WAITING
        is_fresh = self._core.num_steps == self._num_steps_seen[name]
        is_received = request_id in self._core.scheduler.finished_recving_kv_req_ids
        is_remote = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        reached: dict[Moment, bool] = {
            Moment.UNSEEN: is_waiting and is_fresh,
            Moment.WAITING: is_waiting and not is_fresh,
            Moment.MATCHED: request_id in self._offered,
            Moment.LOADING: is_remote and not is_received,
            Moment.RECEIVED: is_remote and is_received,
            Moment.RUNNING: request.status == RequestStatus.RUNNING,
            Moment.PREEMPTED: request.status == RequestStatus.PREEMPTED,
            Moment.FINISHED: request.is_finished(),
        }
        return reached.get(moment, False)

    def _while_computing(self, batch: Batch) -> None:
        """Aborts that come while a step is computed."""
        sampled = dict(zip(batch.request_ids, batch.sampled, strict=True))
        for abort in list(self._left):
            request = self._requests.get(abort.request)
            if request is None or request.request_id not in sampled:
                continue
            num_tokens = request.num_output_tokens + len(sampled[request.request_id])
            is_stopping = num_tokens >= request.max_tokens
            if abort.moment is Moment.COMPUTING or (
                abort.moment is Moment.STOPPING and is_stopping
            ):
                self._left.remove(abort)
                self._core.abort_before_update(request.request_id)
