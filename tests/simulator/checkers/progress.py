"""I7: every load ends, no error reaches vLLM, no request waits for ever."""

from collections.abc import Callable

from safe_offload.errors import InvariantError
from safe_offload.protocol import StepPlan
from tests.simulator.checkers.ledger import Ledger
from tests.simulator.checkers.taps import tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding
from tests.simulator.groups import PAGE_BYTES

IDLE_STEPS_MAX = 150
"""An idle step takes a second, and the longest copy a minute."""
ANNOUNCE_STEPS_MAX = 40
"""From the end of a load on all ranks to the end of its request's wait; reports may come late."""


class ProgressChecker:
    """Watches for errors, for loads that ended and were not told, and for standstill."""

    def __init__(self, core: EngineCore, ledger: Ledger) -> None:
        self._core = core
        self._ledger = ledger
        self._seen: tuple[int, ...] = ()
        self._moved_at = 0
        self._store_blocks_max = max(1, 4 * core.config.max_inflight_bytes // PAGE_BYTES)
        self._dead_since: int | None = None
        ledger.on_plan.append(self._see_plan)
        for connector in [core.connector, *(worker.connector for worker in core.workers)]:
            tap(connector, "_contain", self._see_error)

    def _see_error(
        self, original: Callable[..., None], hook: str, error: Exception, *report: object
    ) -> None:
        if isinstance(error, Finding | InvariantError):
            raise error
        self._core.findings.add("I7", f"{hook} raised {error!r}")
        original(hook, error, *report)

    def _see_plan(self, plan: StepPlan) -> None:
        """What waits is bounded, and a rank that is known to be dead is left alone."""
        stores = (*plan.stores_before_forward, *plan.stores_after_forward)
        if not stores:
            return
        waiting = [record.transfer for record in self._ledger.open_stores()]
        num_blocks = sum(len(transfer.block_ids) for transfer in (*waiting, *stores))
        if num_blocks > self._store_blocks_max:
            raise Finding("I7", f"stores of {num_blocks} blocks wait, {self._store_blocks_max} may")
        if self._dead_since is None:
            self._dead_since = self._core.num_steps if self._ledger.dead_ranks else None
        elif self._core.num_steps > self._dead_since + 1:
            raise Finding("I7", f"a store is planned, and ranks {self._ledger.dead_ranks} are dead")

    def check_all_went_well(self) -> None:
        """Of a run in which nothing went wrong: no transfer failed."""
        for record in self._ledger.records():
            if record.has_failed:
                reasons = {rank: reason for rank, reason in record.reported.items() if reason}
                raise Finding("I7", f"transfer {record.transfer.transfer_id} failed: {reasons}")
        tier_records = {**self._ledger.fetches, **self._ledger.spills}
        for transfer_id, tier_record in tier_records.items():
            failures = {rank: one.failure for rank, one in tier_record.reported.items() if one}
            if any(failures.values()):
                raise Finding("I7", f"tier transfer {transfer_id} failed: {failures}")

    def check(self) -> None:
        """Something moves."""
        from vllm.v1.request import RequestStatus

        core = self._core
        requests = core.scheduler.requests
        seen = (
            sum(len(answer) for answer in core.answers.values()),
            len(requests),
            sum(request.num_computed_tokens for request in requests.values()),
            # What is still to be spilled keeps an engine stepping that has no request.
            len(self._ledger.spills),
        )
        if seen != self._seen or not core.has_work:
            self._seen, self._moved_at = seen, core.num_steps
        if core.num_steps - self._moved_at > IDLE_STEPS_MAX:
            states = {name: request.status.name for name, request in requests.items()}
            raise Finding("I7", f"nothing has moved for {IDLE_STEPS_MAX} steps: {states}")
        for request in requests.values():
            if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                continue
            if request.request_id in core.scheduler.finished_recving_kv_req_ids:
                continue  # vLLM has been told; it waits for blocks
            loads = self._ledger.loads_of(request)
            over_at = loads[-1].over_at if loads else None
            if over_at is not None and core.num_steps - over_at > ANNOUNCE_STEPS_MAX:
                raise Finding(
                    "I7",
                    f"the load of {request.request_id} ended {core.num_steps - over_at} steps ago "
                    "and vLLM still waits for it",
                )
