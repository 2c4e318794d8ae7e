"""The hooks of an optional feature; `python -m tests.hooks` prints who defines and calls each."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from safe_offload.protocol import StepReport
    from safe_offload.scheduler.requests import RequestState


class Answer(enum.Enum):
    """The answer of a feature when vLLM asks for the hit of a request."""

    SEARCH = "search"
    """The planner looks for a hit."""
    NO_HIT = "no hit"
    ASK_AGAIN = "ask again"
    """The request waits: there may be a hit later."""


class Feature:
    """An optional feature, with the hooks that it needs; the planner calls no others.

    Features are called in the order in which they were given. They read what the planner has,
    change only their own state, and know nothing of one another. What two of them need is in
    `RequestState` or in the pool of slots.
    """

    # ---- a request -----------------------------------------------------------------------------

    def on_new_request(self, state: RequestState) -> None:
        """A request is new, and something of it may be stored."""

    def on_match(self, state: RequestState, num_computed_tokens: int, now_s: float) -> Answer:
        """Return whether to look for a hit of a request that may read."""
        return Answer.SEARCH

    def on_scheduled(self, state: RequestState, num_tokens: int) -> None:
        """VLLM has given a request blocks: to load `num_tokens` tokens, or with 0 to run."""

    def on_request_finished(self, state: RequestState) -> None:
        """A request has ended."""

    # ---- a step --------------------------------------------------------------------------------

    def on_step(self, output: SchedulerOutput, now_s: float) -> None:
        """A step is about to be planned."""

    def on_step_planned(self) -> None:
        """A step is planned."""

    def on_report(self, report: StepReport) -> None:
        """Workers have reported; nothing of that is settled yet."""

    def on_settled(self) -> None:
        """All that vLLM has passed on from the workers is settled, if there was anything."""

    # ---- what goes wrong -----------------------------------------------------------------------

    def on_reset(self, cause: str | None) -> None:
        """Nothing stored so far is found again; see `Planner.reset_cache`."""

    def on_disabled(self) -> None:
        """After an internal error: only what the workers copy goes on."""

    # ---- what the planner asks -----------------------------------------------------------------

    def has_work(self) -> bool:
        """Return whether the engine must keep stepping."""
        return False

    def gauges(self) -> Mapping[str, float]:
        """Return gauges of the feature."""
        return {}

    def check_invariants(self) -> None:
        """See `SchedulerSide`."""

    def shutdown(self) -> None:
        """The engine ends."""


class Hooks:
    """For each hook that is called often, the features that define it: others cost nothing.

    Bound: the features.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        own = Feature
        self.on_new_request = [
            f for f in features if type(f).on_new_request is not own.on_new_request
        ]
        self.on_match = [f for f in features if type(f).on_match is not own.on_match]
        self.on_scheduled = [f for f in features if type(f).on_scheduled is not own.on_scheduled]
        self.on_request_finished = [
            f for f in features if type(f).on_request_finished is not own.on_request_finished
        ]
        self.on_step = [f for f in features if type(f).on_step is not own.on_step]
        self.on_step_planned = [
            f for f in features if type(f).on_step_planned is not own.on_step_planned
        ]
        self.on_report = [f for f in features if type(f).on_report is not own.on_report]
        self.on_settled = [f for f in features if type(f).on_settled is not own.on_settled]
        self.has_work = [f for f in features if type(f).has_work is not own.has_work]
        self.gauges = [f for f in features if type(f).gauges is not own.gauges]
        self.check_invariants = [
            f for f in features if type(f).check_invariants is not own.check_invariants
        ]
