"""The messages between the engine-core process and the worker processes, and their lifecycle.

A *transfer* is one unit of copying between GPU blocks and host slots, named by a `transfer_id` that
is never used twice. Its life:

1. The scheduler side decides on it, takes or leases the host slots, and puts it into the `StepPlan`
   of the step: a load, a store that runs before the forward, or a store that runs after it.
2. Every rank runs its share: the bytes of its layers, of the same blocks and slots.
3. While it runs, a later plan may *fence* it: some of its source blocks have a new owner, and no
   kernel or load of that step may write before the copy has read them.
4. Every rank reports it exactly once in a `StepReport`, as done or as failed with a reason.
5. When all ranks have reported, the scheduler side settles it: it publishes the slots of a store,
   completes a load, or announces a failed load through `StepPlan.failures` of the next step.

For *tiers* (a directory, a server), a `Probe` asks for blocks, and each rank answers with one
`Presence`. A fetch reads objects into leased slots, a spill writes slots to tiers; both are a
`TierTransfer`, and each rank reports it once, like any transfer.

Reports are keyed by (rank, transfer_id), so that a duplicate cannot stand in for another rank's
report (docs/guarantees.md: I3, I6, I7).
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from safe_offload.compat.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from safe_offload.errors import ProtocolError


class FailureReason(enum.Enum):
    """Why a transfer failed: on a rank, which reports it, or `SOURCE_LOST`."""

    COPY_FAILED = "copy_failed"
    """The copy raised."""
    BAD_PLAN = "bad_plan"
    """A block or slot id lies outside the memory of this rank."""
    FENCE_TIMEOUT = "fence_timeout"
    """The copy had not read its source in time for the block's next owner."""
    NOT_RUNNING = "not_running"
    """The transfer loop of this rank has died or was shut down."""
    CANCELLED = "cancelled"
    """The transfer was cancelled before all of it was issued."""
    TIMED_OUT = "timed_out"
    """The copy had not begun at the deadline of the transfer, and never will."""
    CHECKSUM_MISMATCH = "checksum_mismatch"
    """A slot no longer holds what was stored in it."""
    SOURCE_LOST = "source_lost"
    """No rank reports this: what it copied cannot be trusted. Its blocks had to be written before
    they were read, or another connector failed to load them, or the connector was disabled."""


ALL_TIERS = 0xFF
"""As bits, the nearest tier the lowest."""


def ids_of(numbers: Iterable[int]) -> array[int]:
    """Return ids as messages carry them; a 90,000-token prompt has thousands."""
    return array("i", numbers)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One unit of copying."""

    transfer_id: int  # unique over the life of the engine, growing
    block_ids: array[int]  # GPU blocks, one for each slot
    slot_ids: array[int]  # host slots; `slot_ids[i]` is the partner of `block_ids[i]`

    def __post_init__(self) -> None:
        if len(self.block_ids) != len(self.slot_ids) or not self.block_ids:
            raise ProtocolError(
                f"transfer {self.transfer_id}: expected as many blocks as slots and at least one, "
                f"found {len(self.block_ids)} blocks and {len(self.slot_ids)} slots"
            )


@dataclass(frozen=True, slots=True)
class Keys:
    """Blocks as tiers know them: by KV cache group, below 256, and by vLLM's hash."""

    group_ids: bytes
    hashes: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.group_ids) != len(self.hashes) or not self.hashes:
            raise ProtocolError(
                f"expected as many groups as hashes and at least one, found {len(self.group_ids)} "
                f"groups and {len(self.hashes)} hashes"
            )

    def __len__(self) -> int:
        return len(self.hashes)


@dataclass(frozen=True, slots=True)
class Probe:
    """A question to the tiers: which of these blocks do they have?"""

    probe_id: int  # unique over the life of the engine, growing
    keys: Keys
    generation: str = ""  # a part of the namespace, new after a reset; empty before the first


@dataclass(frozen=True, slots=True)
class TierTransfer:
    """Objects to fetch from the tiers into host slots, or to spill from them."""

    transfer_id: int  # as of a `Transfer`; the two never share one
    keys: Keys
    slot_ids: array[int]  # leased; one for each key
    generation: str = ""  # as of a `Probe`
    # For each key the tier that is known to have it, counted from 1; 0 if none is. Empty: all are
    # 0. A fetch looks there first. A spill goes to all tiers if it is 0, else to those nearer than
    # it that keep (`TierConfig.keep`).
    origins: bytes = b""
    # Of a spill with tenants, for each key that of its tenant (`Tenants.marks`).
    marks: Sequence[int] = ()
    # Of a spill, for each key the tiers that it goes to, as bits of `ALL_TIERS`: not to those that
    # took it before. Empty: to all of them.
    targets: bytes = b""

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.slot_ids):
            raise ProtocolError(
                f"tier transfer {self.transfer_id}: expected as many keys as slots, found "
                f"{len(self.keys)} keys and {len(self.slot_ids)} slots"
            )
        for what, each in (("origins", self.origins), ("targets", self.targets)):
            if each and len(each) != len(self.keys):
                raise ProtocolError(
                    f"tier transfer {self.transfer_id}: expected {what} of each key or of none, "
                    f"found {len(self.keys)} keys and {len(each)} {what}"
                )


@dataclass(frozen=True)
class StepPlan(KVConnectorMetadata):
    """What the workers do in one step; travels as vLLM's connector metadata."""

    loads: tuple[Transfer, ...] = ()  # host to GPU, into blocks of requests that wait for them
    # GPU to host, before everything that this step writes.
    stores_before_forward: tuple[Transfer, ...] = ()
    stores_after_forward: tuple[Transfer, ...] = ()  # GPU to host, after the forward of this step
    # Ids of stores that must have read their source before this step writes anything.
    fences: tuple[int, ...] = ()
    # Ids of requests whose load failed; every rank reports them to vLLM as received and failed, and
    # vLLM recomputes them.
    failures: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ()  # questions to the tiers
    fetches: tuple[TierTransfer, ...] = ()  # tiers to host
    spills: tuple[TierTransfer, ...] = ()  # host to tiers
    # No computing step is in flight, so the workers may wait briefly for transfers.
    is_idle: bool = False
    # Host to GPU, into blocks that the forward of this step reads.
    loads_in_step: tuple[Transfer, ...] = ()
    # Blocks that it reads although no load of them could be planned; every rank reports them to
    # vLLM.
    unloaded: tuple[int, ...] = ()


EMPTY_PLAN = StepPlan()
IDLE_PLAN = StepPlan(is_idle=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one transfer on one rank; `failure` is None if its bytes are in place."""

    rank: int
    transfer_id: int
    failure: FailureReason | None = None
    # Indices of keys of a fetch or a spill whose bytes are not in place all the same: the tier did
    # not have them, or no tier took them, or some tier may take them later.
    missing: tuple[int, ...] = ()
    # Of a spill, for each of these the tiers to write it to again, as bits; 0 if it was refused for
    # good. Empty: all of them to all tiers.
    again: bytes = b""


@dataclass(frozen=True, slots=True)
class Presence:
    """The answer of one rank to a probe."""

    rank: int
    probe_id: int
    # For each key of the probe the nearest tier that has it, counted from 1; 0 if none has, or none
    # could say.
    tiers: bytes


@dataclass(frozen=True, slots=True)
class Capacity:
    """The number of host slots, from the first on, that a rank can use; reported when it grows."""

    rank: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class BadSlots:
    """Slots whose bytes changed on a rank; reported before the failure of their load."""

    rank: int
    slot_ids: tuple[int, ...]


class MemoryKind(enum.Enum):
    """How the system keeps the host memory of a rank."""

    LOCKING = "being page-locked"
    PAGE_LOCKED = "page-locked"
    PAGEABLE = "pageable"


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """The host memory of a rank."""

    kind: MemoryKind
    huge_pages: str  # their share, as "99 %"; before memory is touched, whether they were requested
    numa_nodes: tuple[int, ...] = ()  # empty if unknown


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The host memory of a rank that other engines use too."""

    place: tuple[str, bytes]  # the folder, and the id of the table in it; the same for all ranks
    token: int  # a lock that this rank holds for as long as it may copy
    grace_s: float = 0.0  # how long after its death a device may still write what it was given


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The memory and copy paths of a rank, reported at the start and after each change."""

    rank: int
    memory: MemoryFacts
    copy_paths: tuple[str, ...]  # in use, the first one preferred
    num_sharing: int = 1  # consecutive ranks that have one host memory, this one among them
    # Reasons why objects of its tiers may not mean what it computes; see `Tiers.stand_alone`.
    doubts: tuple[str, ...] = ()
    pool: PoolFacts | None = None  # None if no other engine uses this memory
    load_block_s: float = 0.0  # of a load, per block on an idle device; 0: not timed


@dataclass(frozen=True)
class StepReport(KVConnectorWorkerMetadata):
    """Transfers settled on the workers since the last step; travels as vLLM's worker metadata."""

    outcomes: tuple[Outcome, ...] = ()
    capacities: tuple[Capacity, ...] = ()
    bad_slots: tuple[BadSlots, ...] = ()
    lost_ranks: tuple[int, ...] = ()  # ranks that cannot copy and never will, reported once
    host_facts: tuple[HostFacts, ...] = ()
    presences: tuple[Presence, ...] = ()
    # Of a worker on the scheduler's own thread: returns what has settled when the report is read,
    # stores of later steps excepted; such a report is never sent.
    later: Callable[[], StepReport] | None = field(default=None, compare=False, repr=False)

    def completed(self) -> StepReport | None:
        """Return it with the result of `later`; None for nothing."""
        if self.later is None:
            return self
        whole = replace(self, later=None).aggregate(self.later())
        return whole if whole != StepReport() else None

    def __bool__(self) -> bool:
        """True: vLLM drops a worker output whose parts are all false (v1/outputs.py, is_empty)."""
        return True

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Join the reports of several ranks; nothing is counted, so nothing can be lost."""
        if not isinstance(other, StepReport):
            raise ProtocolError(f"expected a StepReport to aggregate, found {type(other).__name__}")
        return StepReport(
            self.outcomes + other.outcomes,
            self.capacities + other.capacities,
            self.bad_slots + other.bad_slots,
            self.lost_ranks + other.lost_ranks,
            self.host_facts + other.host_facts,
            self.presences + other.presences,
            self.later or other.later,
        )
