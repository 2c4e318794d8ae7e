"""The rig with a tier that a test moves by hand: it decides what comes, when, and on which rank.

Between vLLM's scheduler and the workers it takes what a plan says of tiers, and adds what the ranks
would report. What it brings are the words that some engine has spilled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from safe_offload.config.options import OffloadConfig
from safe_offload.config.tier_url import Location
from safe_offload.config.tiers import TierConfig
from safe_offload.protocol import (
    ALL_TIERS,
    EMPTY_PLAN,
    FailureReason,
    Keys,
    Outcome,
    Presence,
    Probe,
    StepPlan,
    StepReport,
    TierTransfer,
)
from tests.scheduler.rig import Rig

Place = tuple[int, str, int, bytes]
"""Rank, generation, KV cache group and hash of an object."""
WAIT_S = 60.0
"""An idle step of the simulator takes a second."""
WIDE: dict[str, Any] = {"max_seqs": 16, "max_batched_tokens": 512, "num_slots": 200}


@dataclass
class StandInTier:
    """Objects, which several rigs may share."""

    objects: dict[Place, list[int | None]] = field(default_factory=dict)
    # Kinds of messages that nothing answers: "probe", "fetch", "spill".
    held: set[str] = field(default_factory=set)
    # Hashes that are there and do not come, by rank.
    lost: set[tuple[int, bytes]] = field(default_factory=set)
    refused: bool = False  # nothing is taken, now or later
    # What is not taken, by rank and hash, although it may be later: asked for each write.
    fails: Callable[[int, bytes], bool] = lambda *_: False
    again: int = ALL_TIERS  # which tiers have failed to take that
    failure: FailureReason | None = None  # of all fetches and spills
    number: int = 1  # which of the tiers it stands for, when it is asked what it has


class TierRig(Rig):
    """See the module. `tiers`: of the configuration."""

    def __init__(
        self,
        *,
        tier: StandInTier | None = None,  # what it has is there from the start
        tiers: tuple[TierConfig, ...] = (TierConfig(Location("file", "/nowhere"), wait_s=WAIT_S),),
        **shape: Any,  # see `Rig`
    ) -> None:
        read = OffloadConfig.from_extra_config

        def with_tiers(extra: Any, *, world_size: int) -> OffloadConfig:
            return replace(read(extra, world_size=world_size), tiers=tiers)

        # Written too: only then are the hashes those that tiers need.
        shape["extra"] = {**shape.get("extra", {}), "tiers": [{"url": "file:///nowhere"}]}
        with mock.patch.object(OffloadConfig, "from_extra_config", with_tiers):
            super().__init__(**shape)
        self.tier = tier if tier is not None else StandInTier()
        self.probes: list[Probe] = []
        self.fetches: list[TierTransfer] = []
        self.spills: list[TierTransfer] = []
        self._asked: list[tuple[int, str, Any]] = []
        self._free: list[Any] = []
        self.mutate_outputs.append(self._report)
        self.after_report: Callable[[StepReport], StepReport] = lambda report: report

    def schedule(self) -> Any:
        """See `Stepper.schedule`; the workers are told nothing of tiers."""
        output = super().schedule()
        plan: StepPlan = output.kv_connector_metadata
        for kind, messages, seen in (
            ("probe", plan.probes, self.probes),
            ("fetch", plan.fetches, self.fetches),
            ("spill", plan.spills, self.spills),
        ):
            seen.extend(messages)  # type: ignore[arg-type]
            ranks = range(self.shape.num_ranks)
            self._asked += [(rank, kind, message) for message in messages for rank in ranks]
        rest = replace(plan, probes=(), fetches=(), spills=())
        output.kv_connector_metadata = EMPTY_PLAN if rest == EMPTY_PLAN else rest
        return output

    def answer(self, messages: Sequence[Any]) -> None:
        """Let these be answered with the next report, although their kind is held."""
        self._free += messages

    def finish(self) -> None:
        """Answer all that is held, and wait until nothing is left to do."""
        self.tier.held.clear()
        self.drain()

    def _report(self, number: int, outputs: list[Any]) -> None:
        def is_held(asked: tuple[int, str, Any]) -> bool:
            return asked[1] in self.tier.held and asked[2] not in self._free

        due = [asked for asked in self._asked if not is_held(asked)]
        self._asked = [asked for asked in self._asked if is_held(asked)]
        for rank, kind, message in due:
            answer = self._answer(rank, kind, message)
            self.add_report(outputs[rank], answer)

    def add_report(self, output: Any, report: StepReport) -> None:
        """Let a rank report this too."""
        before = output.kv_connector_worker_meta
        report = self.after_report(report)
        output.kv_connector_worker_meta = report if before is None else before.aggregate(report)

    def _answer(self, rank: int, kind: str, message: Any) -> StepReport:
        tier = self.tier
        places = places_of(rank, message.generation, message.keys)
        if kind == "probe":
            has = bytes(tier.number * (place in tier.objects) for place in places)
            return StepReport(presences=(Presence(rank, message.probe_id, has),))
        if tier.failure is not None:
            return StepReport((Outcome(rank, message.transfer_id, tier.failure),))
        host = self.devices[rank].memory.host
        missing, again = [], b""
        for index, (place, slot) in enumerate(zip(places, message.slot_ids, strict=True)):
            if kind == "spill":
                is_failed = tier.fails(rank, place[3])
                if tier.refused or is_failed:
                    missing.append(index)
                    again += bytes([0 if tier.refused else tier.again])
                else:
                    tier.objects[place] = list(host[slot])
            elif place not in tier.objects or (rank, place[3]) in tier.lost:
                missing.append(index)
                host[slot][:] = [None] * len(host[slot])
            else:
                host[slot][:] = tier.objects[place]
        return StepReport((Outcome(rank, message.transfer_id, None, tuple(missing), again),))


def places_of(rank: int, generation: str, keys: Keys) -> list[Place]:
    """Where a rank's objects of these keys are."""
    pairs = zip(keys.group_ids, keys.hashes, strict=True)
    return [(rank, generation, group_idx, block_hash) for group_idx, block_hash in pairs]
