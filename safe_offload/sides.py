"""What the connector asks of its role: beside the scheduler, or in a worker.

`scheduler.planner.Planner` and `worker.bridge.WorkerBridge` do the work. The classes here do
nothing: they stand where nothing could be hit, in the other role, and until vLLM has bound its
blocks. Methods of the names of vLLM's hooks answer these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from safe_offload.protocol import EMPTY_PLAN, StepPlan, StepReport

if TYPE_CHECKING:
    from safe_offload.observe.counters import Counters

NO_LABELS: Mapping[str, str] = {}


class Side:
    """What both roles have: how they stand, and the end of all work after an error.

    Attributes:
        has_changed: a count, a gauge or a label may have changed since `take_changes`.
    """

    has_changed = False

    def disable(self, report: object = None) -> None:
        """After an error inside: only finish what is in flight."""

    def take_changes(self, counters: Counters) -> None:
        """Count what is only counted now; from here on, nothing has changed."""

    def gauges(self) -> dict[str, float]:
        """Return how the host pool, or the tiers of a rank, stand now."""
        return {}

    @property
    def host_labels(self) -> Mapping[str, str]:
        """How the ranks keep and copy; another object when that has changed."""
        return NO_LABELS


class SchedulerSide(Side):
    """Beside the scheduler, without a host cache."""

    def on_new_request(self, request: Any) -> Any:
        """A request is new."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, now_s: float
    ) -> int | None:
        """Return how many tokens more can be loaded; None if that is not known yet."""
        return 0

    def loads_in_step(self, request: Any) -> bool:
        """Return whether the hit just reported is loaded in the very step that needs it."""
        return False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request was given blocks."""

    def announce_failure(self, request: Any) -> None:
        """A load that vLLM waits for was not planned."""

    def build_connector_meta(self, scheduler_output: Any, now_s: float) -> StepPlan:
        """Return what the workers do in this step."""
        return EMPTY_PLAN

    def plan_nothing(self) -> StepPlan:
        """Return the plan of a step whose planning failed."""
        return EMPTY_PLAN

    def update_connector_output(self, output: Any) -> None:
        """The workers have reported."""

    def request_finished(self, request: Any) -> Any:
        """A request ends; return what vLLM hands on to its client, a mapping, if anything."""

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping until transfers have settled."""
        return False

    def shutdown(self) -> None:
        """The engine ends."""

    def reset_cache(self, cause: str | None = None) -> None:
        """Forget what is stored."""

    def check_invariants(self) -> None:
        """Compare all bookkeeping with itself, between steps; an InvariantError if it differs."""


class WorkerSide(Side):
    """In a worker, without host memory."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM has allocated its KV cache."""

    def unregister_kv_caches(self) -> None:
        """vLLM is about to free its KV cache."""

    def restore_kv_caches(self) -> None:
        """vLLM has its KV cache again."""

    def engine_has_started(self) -> None:
        """Nothing is captured any more; the first step may come at any moment."""

    def handle_preemptions(self, plan: StepPlan) -> None:
        """Nothing of a step has been written."""

    def bind_connector_metadata(self, plan: StepPlan) -> None:
        """A step begins."""

    def start_load_kv(self) -> None:
        """The forward is about to begin."""

    def wait_for_save(self) -> None:
        """The forward has been launched."""

    def take_unloaded(self) -> set[int]:
        """Return the blocks that the forward reads and that were not loaded."""
        return set()

    def get_transfer_results(self) -> Collection[str]:
        """Return the requests whose load has failed."""
        return ()

    def build_connector_worker_meta(self) -> StepReport | None:
        """Return what has ended."""
        return None

    def clear_connector_metadata(self) -> None:
        """A step has ended."""

    def shutdown(self) -> None:
        """The engine ends."""
