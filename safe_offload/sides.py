"""The interface of the connector's two roles; methods named like vLLM's hooks answer these.

`Planner` and `WorkerBridge` do the work. The classes here do nothing: they stand where no hit is
possible, in the other role, and until vLLM has bound its blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from safe_offload.protocol import EMPTY_PLAN, StepPlan, StepReport

if TYPE_CHECKING:
    from safe_offload.observe.counters import Counters

NO_LABELS: Mapping[str, str] = {}


class Side:
    """The common interface of both roles."""

    has_changed = False  # a count, a gauge or a label may have changed since `take_changes`

    def disable(self, report: object = None) -> None:
        """After an internal error, only finish the transfers in flight."""

    def take_changes(self, counters: Counters) -> None:
        """Add the counts that are only determined now, and clear `has_changed`."""

    def gauges(self) -> dict[str, float]:
        """Return the present gauges of the host pool, or of a rank's tiers."""
        return {}

    @property
    def host_labels(self) -> Mapping[str, str]:
        """Return the labels of the ranks' memory and copies; a new object after each change."""
        return NO_LABELS


class SchedulerSide(Side):
    """The scheduler's role, without a host cache."""

    def on_new_request(self, request: Any) -> Any:
        """Add a new request."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, now_s: float
    ) -> int | None:
        """Return how many more tokens can be loaded; None if that is not known yet."""
        return 0

    def loads_in_step(self, request: Any, now_s: float) -> bool:
        """Return whether the hit just reported is loaded in the step that computes the rest."""
        return False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin the load of a request that was given blocks, or run it."""

    def announce_failure(self, request: Any) -> None:
        """Let vLLM recompute a request whose load was not planned."""

    def build_connector_meta(self, scheduler_output: Any, now_s: float) -> StepPlan:
        """Return the plan of a step."""
        return EMPTY_PLAN

    def plan_nothing(self) -> StepPlan:
        """Return the plan of a step whose planning failed."""
        return EMPTY_PLAN

    def update_connector_output(self, output: Any) -> None:
        """Settle what the workers have reported."""

    def request_finished(self, request: Any) -> Any:
        """End a request; return fields of its response, if any."""

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must keep stepping until transfers have settled."""
        return False

    def shutdown(self) -> None:
        """Free all resources."""

    def reset_cache(self, cause: str | None = None) -> None:
        """Invalidate all stored blocks."""

    def check_invariants(self) -> None:
        """Raise an InvariantError if the bookkeeping is inconsistent; called between steps."""


class WorkerSide(Side):
    """A worker's role, without host memory."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Start with the KV cache that vLLM has allocated."""

    def unregister_kv_caches(self) -> None:
        """Stop using the KV cache, which vLLM is about to free."""

    def restore_kv_caches(self) -> None:
        """Continue with the KV cache after a sleep."""

    def engine_has_started(self) -> None:
        """Record that no graph is captured any more; a step may come at any moment."""

    def handle_preemptions(self, plan: StepPlan) -> None:
        """Honor fences, before the step writes anything."""

    def bind_connector_metadata(self, plan: StepPlan) -> None:
        """Begin a step."""

    def start_load_kv(self) -> None:
        """Start loads, just before the forward pass."""

    def wait_for_save(self) -> None:
        """Start stores, after the launch of the forward pass."""

    def take_unloaded(self) -> set[int]:
        """Return the blocks that the forward pass reads and that were not loaded."""
        return set()

    def get_transfer_results(self) -> Collection[str]:
        """Return the requests whose load has failed."""
        return ()

    def build_connector_worker_meta(self) -> StepReport | None:
        """Return a report of the settled transfers."""
        return None

    def clear_connector_metadata(self) -> None:
        """End a step."""

    def shutdown(self) -> None:
        """Stop all copies and free all memory."""
