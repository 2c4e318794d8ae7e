"""What an optional feature may do on the scheduler side: the hooks that the planner calls."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from safe_offload.observe.counters import Counters
    from safe_offload.protocol import Outcome, Probe, StepPlan, StepReport, TierTransfer
    from safe_offload.scheduler.cache.leases import Lease
    from safe_offload.scheduler.pending import Load, Store
    from safe_offload.scheduler.requests import RequestState


class Answer(enum.Enum):
    """What a feature says when vLLM asks how many tokens the host has of a request."""

    SEARCH = "search"
    """The planner looks for a hit."""
    NO_HIT = "no hit"
    ASK_AGAIN = "ask again"
    """The request waits: there may be a hit later."""


class TierMessages(NamedTuple):
    """What a plan tells the workers about tiers; see `StepPlan`."""

    probes: tuple[Probe, ...] = ()
    fetches: tuple[TierTransfer, ...] = ()
    spills: tuple[TierTransfer, ...] = ()


NO_MESSAGES = TierMessages()


class Feature:
    """An optional feature. It defines the hooks that it needs; the planner calls no others.

    Features are called in the order in which they were given. They read what the planner has,
    change only what is their own, and know nothing of one another.
    """

    # ---- a request -----------------------------------------------------------------------------

    def seen(self, state: RequestState, *, may_read: bool) -> None:
        """A request is new, and something of it may be stored.

        Args:
            may_read: what is stored may be loaded for it.
        """

    def asked(self, state: RequestState, num_computed_tokens: int) -> None:
        """VLLM asks for a hit, once more perhaps."""

    def answer(self, state: RequestState, num_computed_tokens: int, now_s: float) -> Answer:
        """Return whether a hit is looked for now, in a request that may read."""
        return Answer.SEARCH

    def is_lost(self) -> bool:
        """Return whether something was overwritten since the last call while it was leased."""
        return False

    def matched(self, state: RequestState) -> None:
        """VLLM is told of a hit, or that there is none."""

    def scheduled(self, state: RequestState, num_tokens: int) -> None:
        """VLLM has given a request blocks: to load `num_tokens` tokens, or with 0 to run."""

    def hit_tokens(self, load: Load, num_tokens: int) -> Mapping[int, int]:
        """Return how many tokens of a load that just began come from which tier; 0: the host."""
        return {}

    def preempted(self, state: RequestState) -> None:
        """VLLM has taken a running request's blocks away; the rest is still to be stored."""

    def finishing(self, state: RequestState) -> None:
        """A request ends. It has its blocks; the rest of it is stored after this, if it may be."""

    def ended(self, state: RequestState) -> None:
        """A request has ended."""

    # ---- a step --------------------------------------------------------------------------------

    def planning(self, output: SchedulerOutput, now_s: float) -> None:
        """A step is about to be planned."""

    def messages(self, now_s: float) -> TierMessages:
        """Return what the workers are told of tiers; `NO_MESSAGES` itself for nothing.

        One feature at most has this.
        """
        return NO_MESSAGES

    def planned(self, plan: StepPlan) -> StepPlan:
        """Return the plan of a step, perhaps with more in it."""
        return plan

    def sent(self, now_s: float) -> None:
        """The workers are told of what `messages` returned."""

    def reported(self, report: StepReport) -> None:
        """Workers have reported; nothing of that is settled yet."""

    def note(self, outcome: Outcome) -> bool:
        """Note what a rank says of a transfer that is no load and no store; False if unknown."""
        return False

    def stored(self, store: Store) -> None:
        """All ranks have reported a store, which is settled after this."""

    def settled(self, report: StepReport) -> None:
        """Loads and stores of a report are settled."""

    def updated(self) -> None:
        """All that vLLM has told of the workers' step is noted."""

    # ---- what goes wrong -----------------------------------------------------------------------

    def doubted(self, doubts: Sequence[str]) -> None:
        """A rank cannot tell what this engine computes; each time with the reasons."""

    def stopped(self) -> None:
        """A rank copies no more: begin nothing. What is in flight goes on."""

    def given_up(self) -> None:
        """After an internal error: only what the workers copy goes on."""

    def resetting(self) -> None:
        """All that is stored is about to be forgotten."""

    def reset(self, cause: str | None) -> None:
        """Nothing stored so far is found again; see `Planner.reset_cache`."""

    def leases(self) -> Iterable[Lease]:
        """Of what is in flight."""
        return ()

    # ---- the rest ------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Return whether the engine must keep stepping."""
        return False

    def gauges(self) -> Mapping[str, float]:
        """Return gauges, also such as the planner has, which they replace."""
        return {}

    def statistics(self) -> Mapping[str, int]:
        """Return fields of `Statistics`."""
        return {}

    def count_into(self, counters: Counters) -> None:
        """See `Side`."""

    def check_invariants(self) -> None:
        """See `SchedulerSide`."""

    def shutdown(self) -> None:
        """The engine ends."""


def methods(features: Sequence[Feature], name: str) -> tuple[Callable[..., Any], ...]:
    """Return the methods of a name of those features that define it."""
    unused = getattr(Feature, name)
    return tuple(
        getattr(feature, name) for feature in features if getattr(type(feature), name) is not unused
    )


def together(features: Sequence[Feature], name: str) -> Callable[..., None] | None:
    """Return what calls the methods of a name, in order; None if no feature defines it."""
    calls = methods(features, name)
    if len(calls) < 2:
        return calls[0] if calls else None

    def call_all(*args: Any, **kwargs: Any) -> None:
        for call in calls:
            call(*args, **kwargs)

    return call_all
