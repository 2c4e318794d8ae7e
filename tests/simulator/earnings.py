"""What a run has earned: how much was stored, loaded and hit, of what there was to earn.

A run that stores nothing breaks no promise. So each kind of run has a floor. It is measured at the
borders, as checkers do: in the plans, in what the ranks report, in what vLLM takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

from safe_offload.protocol import StepPlan
from tests.simulator.checkers.ledger import Ledger, loads_in, writes_of
from tests.simulator.checkers.taps import RESETS, tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.tiers import StoredObject


@dataclass(frozen=True, slots=True)
class Floor:
    """What the runs of a profile must earn together, at least."""

    stored: float  # blocks stored, for each block of tokens that was computed for the first time
    loaded: float  # share of the loads that delivered
    # Share of the tokens that vLLM took as hits, of those that a GPU cache without end would have
    # had and the GPU's own did not.
    hit: float
    # Blocks fetched from tiers, for each block of tokens that was computed for the first time.
    fetched: float = 0.0
    shared: float = 0.0  # blocks loaded from the host that another engine had computed, likewise

    def __str__(self) -> str:
        said = f"stored {self.stored:.2f} loaded {self.loaded:.2f} hit {self.hit:.2f}"
        said += f" fetched {self.fetched:.2f}" if self.fetched else ""
        return f"{said} shared {self.shared:.2f}" if self.shared else said


@dataclass(slots=True)
class Earned:
    """Counts of a run, or of several."""

    blocks_stored: int = 0  # of stores that went well on every rank
    blocks_computed: int = 0  # of tokens, each prefix once
    loads_good: int = 0  # that delivered on every rank
    loads: int = 0  # all of them
    tokens_hit: int = 0  # that vLLM wanted loaded
    tokens_missing: int = 0  # that a GPU cache without end would have had, and the GPU's did not
    blocks_fetched: int = 0  # that every rank had from its tiers
    blocks_shared: int = 0  # of loads that delivered, what another engine had computed

    def __add__(self, other: Earned) -> Earned:
        return Earned(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def shares(self) -> Floor:
        return Floor(
            self.blocks_stored / max(self.blocks_computed, 1),
            self.loads_good / max(self.loads, 1),
            self.tokens_hit / max(self.tokens_missing, 1),
            self.blocks_fetched / max(self.blocks_computed, 1),
            self.blocks_shared / max(self.blocks_computed, 1),
        )

    def what_is_below(self, floor: Floor) -> str:
        """In words, what is less than it must be; empty if nothing is."""
        found = self.shares()
        return ", ".join(
            f"{name} {getattr(found, name):.2f} of at least {getattr(floor, name):.2f}"
            for name in ("stored", "loaded", "hit", "fetched", "shared")
            if getattr(found, name) < getattr(floor, name)
        )


class Earnings:
    """Watches one engine. `core`: the engine; `ledger`: what became of each transfer."""

    def __init__(self, core: EngineCore, ledger: Ledger) -> None:
        self._core = core
        self._ledger = ledger
        self._hash_tokens = core.shape.hash_tokens
        self._earned = Earned()
        self._computed: set[bytes] = set()
        """Hashes of what has been computed since the host forgot everything last."""
        self._num_known: dict[str, int] = {}
        self._on_gpu: dict[str, int] = {}
        self._others: set[int] = set()
        """Slots that hold what another engine has computed."""
        self._num_others: dict[int, int] = {}
        """How many of them a load reads, by transfer id."""
        ledger.on_plan.append(self._see_plan)
        if core.node is not None:
            core.node.watch(core, self._others.update)
        for tier in (tier for rank in core.tiers for tier in rank.tiers):
            tap(tier, "on_fetched", self._see_fetched)
        tap(core.connector, "get_num_new_matched_tokens", self._see_match)
        tap(core.connector, "update_state_after_alloc", self._see_allocation)
        tap(core.connector, "request_finished_all_groups", self._see_finish)
        for name in RESETS:
            tap(core.connector, name, self._see_reset)

    def _see_match(self, original: Callable[..., Any], request: Any, num_computed: int) -> Any:
        self._on_gpu[request.request_id] = num_computed
        return original(request, num_computed)

    def _see_allocation(
        self, original: Callable[..., None], request: Any, blocks: Any, num_tokens: int
    ) -> None:
        original(request, blocks, num_tokens)
        on_gpu = self._on_gpu.pop(request.request_id, None)
        if on_gpu is not None:  # else its load has landed
            self._earned.tokens_hit += num_tokens
            self._earned.tokens_missing += max(0, self._num_had(request) - on_gpu)

    def _num_had(self, request: Any) -> int:
        """Leading tokens that have been computed before, in whole blocks; never the last token."""
        count = 0
        for block_hash in request.block_hashes:
            if block_hash not in self._computed:
                break
            count += 1
        num_whole: int = (request.num_tokens - 1) // self._hash_tokens
        return min(count, num_whole) * self._hash_tokens

    def _see_reset(self, original: Callable[..., Any], *args: Any) -> Any:
        self._computed.clear()
        self._num_known.clear()
        return original(*args)

    def _see_plan(self, plan: StepPlan) -> None:
        for load in loads_in(plan):
            self._num_others[load.transfer_id] = len(self._others.intersection(load.slot_ids))
        for _, slots in writes_of(plan):
            self._others.difference_update(slots)

    def _see_fetched(
        self, original: Callable[..., None], rank: int, slot: int, stored: StoredObject
    ) -> None:
        original(rank, slot, stored)
        if stored.engine != self._core.engine:
            self._others.add(slot)

    def _see_finish(self, original: Callable[..., Any], request: Any, blocks: Any) -> Any:
        self._learn(request)
        self._num_known.pop(request.request_id, None)
        return original(request, blocks)

    def after_step(self) -> None:
        for request in self._core.scheduler.running:
            self._learn(request)

    def _learn(self, request: Any) -> None:
        num_known = self._num_known.get(request.request_id, 0)
        num_computed = request.num_computed_tokens - request.num_output_placeholders
        num_blocks = min(num_computed // self._hash_tokens, len(request.block_hashes))
        if num_blocks > num_known:
            self._num_known[request.request_id] = num_blocks
            hashes = set(request.block_hashes[num_known:num_blocks])
            self._earned.blocks_computed += len(hashes - self._computed)
            self._computed |= hashes

    def total(self) -> Earned:
        records = list(self._ledger.records())
        good = [record for record in records if record.is_over and not record.has_failed]
        stores = [record.transfer for record in good if record.is_store]
        return self._earned + Earned(
            blocks_stored=sum(len(transfer.block_ids) for transfer in stores),
            loads=sum(not record.is_store for record in records),
            loads_good=len(good) - len(stores),
            blocks_fetched=sum(fetch.num_good for fetch in self._ledger.fetches.values()),
            blocks_shared=sum(
                self._num_others[record.transfer.transfer_id]
                for record in good
                if not record.is_store
            ),
        )
