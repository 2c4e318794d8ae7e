"""What the connector does in its role: beside the scheduler, in a worker, or nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from safe_offload.protocol import EMPTY_PLAN, StepPlan, StepReport

if TYPE_CHECKING:
    from safe_offload.observe.counters import Counters

NO_LABELS: Mapping[str, str] = {}


class Side:
    """Does nothing: it stands where nothing could be hit, and until vLLM has bound its blocks.

    `scheduler.planner.Planner` and `worker.bridge.WorkerBridge` do the work of their role.

    Attributes:
        has_changed: a count, a gauge or a label may have changed since `changes_taken`.
    """

    has_changed = False

    # ---- beside the scheduler: see `Planner` ---------------------------------------------------

    def see(self, request: Any) -> Any:
        """A request is new."""

    def match(self, request: Any, num_computed_tokens: int, now_s: float) -> int | None:
        """Return how many tokens more can be loaded."""
        return 0

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request was given blocks."""

    def owe_failure(self, request: Any) -> None:
        """A load that vLLM waits for was not planned."""

    def plan(self, scheduler_output: Any, now_s: float) -> StepPlan:
        """Return what the workers do in this step."""
        return EMPTY_PLAN

    def plan_nothing(self) -> StepPlan:
        """Return the plan of a step whose planning failed."""
        return EMPTY_PLAN

    def settle(self, output: Any) -> None:
        """The workers have reported."""

    def finish(self, request: Any) -> None:
        """A request ends."""

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping until transfers have settled."""
        return False

    def reset(self, cause: str | None = None) -> None:
        """Forget what is stored."""

    def disable(self, report: object = None) -> None:
        """After an error inside: only finish what is in flight."""

    def check_invariants(self) -> None:
        """Compare all bookkeeping with itself."""

    def gauges(self) -> dict[str, float]:
        """Return how the host pool stands now."""
        return {}

    @property
    def host_labels(self) -> Mapping[str, str]:
        """How the ranks keep and copy; another object when that has changed."""
        return NO_LABELS

    # ---- in a worker: see `WorkerBridge` -------------------------------------------------------

    def register(self, kv_caches: dict[str, Any]) -> None:
        """vLLM has allocated its KV cache."""

    def unregister(self) -> None:
        """vLLM is about to free its KV cache."""

    def restore(self) -> None:
        """vLLM has its KV cache again."""

    def before_step(self, plan: StepPlan) -> None:
        """Nothing of a step has been written."""

    def begin(self, plan: StepPlan) -> None:
        """A step begins."""

    def start_loads(self) -> None:
        """The forward is about to begin."""

    def start_stores(self) -> None:
        """The forward has been launched."""

    def collect_failures(self) -> Collection[str]:
        """Return the requests whose load has failed."""
        return ()

    def report(self) -> StepReport | None:
        """Return what has ended."""
        return None

    def end(self) -> None:
        """A step has ended."""

    def shutdown(self) -> None:
        """The engine ends."""

    def changes_taken(self) -> None:
        """What has changed was reported to vLLM."""

    def count_into(self, counters: Counters) -> None:
        """Count what happened since the last call and is not counted when it happens."""
