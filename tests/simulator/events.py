"""What happens to an engine in a run: requests, aborts, resets, faults, each with a name.

A run is the list of its events and a seed. Leaving events out gives a smaller run of the same seed,
which is how a failing one is shrunk.
"""

import enum
from dataclasses import dataclass
from typing import Any

from tests.simulator.device import CopyFault
from tests.simulator.tiers import TierFault


class Moment(enum.Enum):
    """When in the life of a request its client goes."""

    UNSEEN = "unseen"
    """Before the scheduler has looked at it."""
    WAITING = "waiting"
    """It has been looked at and waits."""
    MATCHED = "matched"
    """A hit was reported for it, and no block could be allocated."""
    LOADING = "loading"
    """It waits for a load (WAITING_FOR_REMOTE_KVS)."""
    RECEIVED = "received"
    """Its load is there, it has not been scheduled since."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    COMPUTING = "computing"
    """While a step that it is part of is computed."""
    STOPPING = "stopping"
    """While the step is computed in which it stops."""
    FINISHED = "finished"
    """It has ended already."""


class FaultKind(enum.Enum):
    """What goes wrong beside copies."""

    LOOP_DIES = "loop-dies"
    """The event loop of a rank ends."""
    REPORT_TWICE = "report-twice"
    """A rank's report of a step comes twice."""
    REPORT_LATE = "report-late"
    """A rank's reports come some steps late."""
    FOREIGN_IDS = "foreign-ids"
    """Ids that nothing may act on are in the output sets."""
    LOADS_FAIL = "loads-fail"
    """From now on every load of a rank fails."""
    FLIP = "flip"
    """A bit of a slot that can be found flips."""
    BREAK = "break"
    """From now on every call of a rank's backend raises."""
    SPOIL = "spoil"
    """Another connector loads what a request begins with, in the step itself, and mostly fails."""
    SQUEEZE = "squeeze"
    """Another owner takes host slots, and gives them back later."""
    DIE = "die"
    """The process of the engine is killed, and it is started again."""
    TENANTS = "tenants"
    """The file of tenants changes."""


@dataclass(frozen=True, slots=True)
class Send:
    """A request."""

    name: str
    step: int  # it is sent before this step
    request_id: str  # may be used again, once the request before has gone
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    salt: str | None = None
    params: dict[str, Any] | None = None  # kv_transfer_params

    def __str__(self) -> str:
        salt = f", salt {self.salt}" if self.salt else ""
        salt += f", {self.params}" if self.params else ""
        return (
            f"{self.name}: before step {self.step} send {self.request_id}, {len(self.prompt)} "
            f"tokens, {self.max_tokens} wanted, priority {self.priority}{salt}"
        )


@dataclass(frozen=True, slots=True)
class Abort:
    """The client of a request goes, `delay` steps after the moment was first reached."""

    name: str
    request: str
    moment: Moment
    delay: int = 0

    def __str__(self) -> str:
        return f"{self.name}: abort {self.request} when {self.moment.value}, {self.delay} later"


@dataclass(frozen=True, slots=True)
class Reset:
    """vLLM's prefix cache is reset, and the connector's with it or not."""

    name: str
    step: int
    connector: bool
    running: bool
    is_paused: bool = False
    """Once the engine, which is paused for it with what it has, is idle."""

    def __str__(self) -> str:
        what = ["the GPU's cache"] + ["the host's cache"] * self.connector
        what += ["running requests"] * self.running
        paused = ", in a pause" * self.is_paused
        return f"{self.name}: before step {self.step} reset {' and '.join(what)}{paused}"


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Weights are loaded into the model, which nothing but the number of such loads tells."""

    name: str
    step: int
    is_late: bool  # while that step is computed

    def __str__(self) -> str:
        return f"{self.name}: {'in' if self.is_late else 'before'} step {self.step} load weights"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something goes wrong."""

    name: str
    kind: FaultKind | CopyFault | TierFault
    rank: int  # where, if that matters
    number: int  # of the copy on that rank, of the operation of its tiers, or of the step
    amount: int = 0  # slots, or steps

    def __str__(self) -> str:
        where = "step"
        if not isinstance(self.kind, FaultKind):
            where = "copy" if isinstance(self.kind, CopyFault) else "operation"
        return (
            f"{self.name}: {self.kind.value} on rank {self.rank} at {where} {self.number}, "
            f"amount {self.amount}"
        )


Event = Send | Abort | Reset | ModelLoad | Fault
