"""I6: what can be found on the host is what was computed for those tokens; I10: from tiers too.

That the forward reads the right words is checked by the model runner itself.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from safe_offload.protocol import StepPlan, Transfer
from safe_offload.scheduler.loads.hits import NO_SLOT
from safe_offload.tiers.base import Name
from tests.simulator.checkers.taps import tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding
from tests.simulator.tiers import StoredObject
from tests.simulator.words import Sequel, place

ENGINES_MAX = 2
PLANS_MAX = 8


class ContentChecker:
    """Compares every slot with its key when it can be found first, and with a hit's prefix.

    What was stored, or was being stored, when the cache was reset must never be found again, nor
    what is computed later from blocks of then: of which time a block is depends on what it was
    computed from.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._index = core.connector.side.hits
        self._node = core.node
        self._prefixes: dict[bytes, tuple[Sequel, int]] = (
            {} if core.node is None else core.node.prefixes
        )
        """What a block hash, without its group, stands for: a prefix and its length."""
        self._requests: list[list[Any]] = []
        self._stale: dict[int, int] = {}
        """Slots of before the last reset that have not been stored anew, and their epochs."""
        self._old_blocks: set[int] = set()
        """GPU blocks that hold what was computed before it, or what another connector failed to
        load, and were not given out since; and what was computed from them, as all that a request
        has which has read one."""
        self._spoilt_blocks: set[int] = set()
        """Those that another connector fails to load in the step that is planned."""
        self._old_tables: list[tuple[Any, str, Any, int]] = []
        """Block tables of requests that have read such: those of a group, the id, its own, and the
        first block that is."""
        self._last_plans: deque[tuple[int, StepPlan]] = deque(maxlen=PLANS_MAX)
        """Of steps that may be in flight, with their numbers."""
        self._flipped: set[int] = set()
        """Slots in which a bit has flipped; no word of theirs may be read, which the forward sees,
        and no store may use them once the scheduler side has been told."""
        self._fetched: dict[int, int] = {}
        """Slots that were filled from a tier last, and the epoch of what was written to them."""
        self._epoch = self._last_epoch = 0
        """Stands for the weights, of which only this engine has those after a reset: 0 before
        the first one; then its number, with that of the engine."""
        tiers = core.config.tiers
        self._is_versioned = bool(tiers) and bool(tiers[0].model_version)
        """What was computed before a reset may be found again, in tiers."""
        self._handed_out: set[int] = set()
        """GPU blocks that vLLM's pool has given away since the last plan."""
        tap(core.pool, "get_new_blocks", self._see_new_blocks)
        tap(core.connector, "build_connector_meta", self._see_plan)
        tap(core.connector, "reset_cache", self._see_reset)
        tap(core.scheduler, "add_request", self._see_request)
        tap(self._index.directory, "publish", self._see_publish)
        tap(self._index, "search", self._see_search)
        tap(self._index, "grown", self._see_growth)
        tap(core.connector, "get_num_new_matched_tokens", self._see_match)
        core.on_unloaded.append(self._see_unloaded)
        self._num_plans = 0
        self._matching: Any = None
        for worker in core.workers:
            worker.device.on_host_write = self._see_host_write
        for tier in (tier for rank in core.tiers for tier in rank.tiers):
            tier.on_fetched, tier.epoch_of = self._see_fetched, self._epoch_of
            tier.on_stored = self._see_stored

    def kept_slots(self) -> list[int]:
        return sorted(self._index.directory.kept())

    def flipped(self, slot: int) -> None:
        """A bit of a slot has flipped on some rank, and this is not what we look for."""
        self._flipped.add(slot)

    def spoil(self, block_ids: set[int]) -> None:
        """Another connector fails to load blocks in the step that is planned."""
        self._spoilt_blocks |= block_ids

    def _see_unloaded(self, number: int, block_ids: set[int]) -> None:
        """Blocks that a step reads were not loaded, which is known when it may be launched."""
        self._old_blocks |= block_ids
        self._find_old(())
        for plan_number, plan in self._last_plans:
            if plan_number >= number:
                self._see_stores(plan.stores_after_forward)

    def _see_request(self, original: Callable[[Any], None], request: Any) -> None:
        sequel = self._core.runner.sequels[request.request_id]
        self._requests.append([request, sequel, 0])
        original(request)

    def _learn(self) -> None:
        hash_tokens = self._core.shape.hash_tokens
        for entry in self._requests:
            request, sequel, num_known = entry
            hashes = request.block_hashes
            for index in range(num_known, len(hashes)):
                self._prefixes[bytes(hashes[index])] = (sequel, (index + 1) * hash_tokens)
            entry[2] = len(hashes)

    def _see_publish(self, original: Callable[[Sequence[int]], None], slots: Sequence[int]) -> None:
        self._learn()  # other engines of a pool may find them at once
        original(slots)
        kept = self._index.directory.kept()
        for slot in slots:
            if slot in kept:
                self._check_published(slot, *kept[slot])

    def _check_published(self, slot: int, group_idx: int, block_hash: bytes) -> None:
        # Larger blocks than hashes: vLLM joins the hashes, and the last says where the block ends.
        last_hash = block_hash[-32:]
        if self._fetched.get(slot, self._epoch) != self._epoch and not self._is_versioned:
            raise Finding("I10", f"slot {slot} is published with what is from before a reset")
        if last_hash not in self._prefixes:
            detail = f"slot {slot} is published under a hash of no request"
            raise Finding(self._promise(slot), detail)
        sequel, end = self._prefixes[last_hash]
        self._check(slot, group_idx, sequel, end, "is published")

    def _see_plan(self, original: Callable[..., StepPlan], scheduler_output: Any) -> StepPlan:
        plan = original(scheduler_output)
        for fetch in plan.fetches:
            self._fetched.update(dict.fromkeys(fetch.slot_ids, self._epoch))
            self._flipped.difference_update(fetch.slot_ids)
            self._freshen(fetch.slot_ids)
        self._see_stores(plan.stores_before_forward)
        self._old_blocks -= self._written(scheduler_output)
        self._old_blocks |= self._spoilt_blocks
        self._spoilt_blocks.clear()
        self._find_old(getattr(scheduler_output, "kv_cache_block_copies", None) or ())
        self._see_stores(plan.stores_after_forward)
        self._last_plans.append((self._num_plans, plan))
        self._num_plans += 1
        return plan

    def _find_old(self, copies: Iterable[Any]) -> None:
        """What is computed in a step from old blocks is old, and so is what is copied from one."""
        old = self._old_blocks
        self._old_tables = [kept for kept in self._old_tables if kept[0].get(kept[1]) is kept[2]]
        for *_, table, first in self._old_tables:
            old.update(block.block_id for block in table[first:] if not block.is_null)
        num_before = -1
        while len(old) > num_before:  # one may read in the same step what another computes
            num_before = len(old)
            old.update(copy.dst_block_id for copy in copies if copy.src_block_id in old)
            for request_id, tables in self._tables_by_request().items():
                if any(block.block_id in old for _, table in tables for block in table):
                    self._add_old(request_id, tables)

    def _tables_by_request(self) -> dict[str, list[tuple[Any, Any]]]:
        """The block tables of each request, with those of their groups."""
        found: dict[str, list[tuple[Any, Any]]] = {}
        for group in self._core.scheduler.kv_cache_manager.coordinator.single_type_managers:
            for request_id, table in group.req_to_blocks.items():
                if table:
                    found.setdefault(request_id, []).append((group.req_to_blocks, table))
        return found

    def _add_old(self, request_id: str, tables: Iterable[tuple[Any, Any]]) -> None:
        for of_group, table in tables:
            first = 0
            if len(self._core.shape.parsed_groups) == 1:  # what comes before may be another's, too
                first = [block.block_id in self._old_blocks for block in table].index(True)
            self._old_tables.append((of_group, request_id, table, first))
            blocks = table[first:]
            self._old_blocks.update(block.block_id for block in blocks if not block.is_null)

    def _see_new_blocks(self, original: Callable[[int], list[Any]], count: int) -> list[Any]:
        blocks = original(count)
        self._handed_out.update(block.block_id for block in blocks)
        return blocks

    def _written(self, scheduler_output: Any) -> set[int]:
        """Blocks that were given away since the last plan, to an owner that writes them.

        A request that was preempted in the step that gave it a block does not; and the target of a
        copy may have no owner.
        """
        blocks = self._core.pool.blocks
        written = {block_id for block_id in self._handed_out if blocks[block_id].ref_cnt}
        copies = getattr(scheduler_output, "kv_cache_block_copies", None)
        written.update(copy.dst_block_id for copy in copies or ())
        self._handed_out.clear()
        return written

    def _see_stores(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            for block_id, slot in zip(transfer.block_ids, transfer.slot_ids, strict=True):
                self._flipped.discard(slot)
                self._fetched.pop(slot, None)
                if block_id in self._old_blocks:
                    self._stale[slot] = self._last_epoch
                else:
                    self._freshen([slot])

    def _freshen(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._stale.pop(slot, None)

    def _see_reset(self, original: Callable[[], bool]) -> bool:
        self.turn_old()
        return original()

    def turn_old(self) -> None:
        """The weights may be others from now on."""
        self._last_epoch = self._epoch
        self._epoch = self._epoch + ENGINES_MAX if self._epoch else ENGINES_MAX + self._core.engine
        for slot in range(self._core.shape.num_slots):
            self._stale.setdefault(slot, self._last_epoch)
        self._old_blocks.update(b.block_id for b in self._core.pool.blocks if not b.is_null)
        self._find_old(())

    def _see_match(self, original: Callable[..., Any], request: Any, num_tokens: int) -> Any:
        self._matching = request
        try:
            answer = original(request, num_tokens)
            if self._node is not None and answer[0]:  # what was not leased may be another's by now
                planner = self._core.connector.side
                self._check_hit(planner.book.find(request).load.hit)
            return answer
        finally:
            self._matching = None

    def _see_search(self, original: Callable[..., Any], *args: Any) -> Any:
        hit, parted_at = original(*args)
        if hit is not None and self._node is None:
            self._check_hit(hit)
        return hit, parted_at

    def _see_growth(self, original: Callable[..., Any], *args: Any) -> Any:
        grown = original(*args)
        if grown is not None and self._node is None:
            self._check_hit(grown[0])
        return grown

    def _check_hit(self, hit: Any) -> None:
        if self._matching is None:
            return
        sequel = self._core.runner.sequels[self._matching.request_id]
        hit_end = hit.num_computed_tokens + hit.num_tokens
        for group_idx, slots in enumerate(hit.slots_by_group):
            block_tokens = self._core.shape.parsed_groups[group_idx].block_tokens
            first = hit.num_computed_tokens // block_tokens
            for index, slot in enumerate(slots):
                if slot != NO_SLOT:
                    end = min((first + index + 1) * block_tokens, hit_end)
                    self._check(slot, group_idx, sequel, end, "is a hit")

    def _check(self, slot: int, group_idx: int, sequel: Sequel, end: int, what: str) -> None:
        if slot in self._stale:
            detail = f"slot {slot} {what} and was stored before a reset, or from spoilt blocks"
            raise Finding(self._promise(slot), detail)
        if slot in self._flipped:
            return
        for worker in self._core.workers:
            words = worker.device.memory.host[slot]
            holder = self._core.shape.holder_of(worker.rank)
            if not self._are_right(words, group_idx, holder, sequel, end):
                raise Finding(
                    self._promise(slot),
                    f"slot {slot} {what} for positions up to {end - 1} of group {group_idx}, "
                    f"rank {worker.rank} does not hold their words",
                )

    def _are_right(
        self, words: list[int | None], group_idx: int, holder: int, sequel: Sequel, end: int
    ) -> bool:
        """Whether these are the words of a block of a rank that ends where a prefix does."""
        group, bits = self._core.shape.parsed_groups[group_idx], place(group_idx, holder)
        if group.kind == "mamba":
            return words == sequel.words(bits, end - 1, end) * len(words)
        expected = sequel.words(bits, (end - 1) // group.block_tokens * group.block_tokens, end)
        return words[: len(expected)] == expected

    def _see_host_write(self, rank: int, slot: int) -> None:
        if slot in self._index.directory.kept():
            self._core.findings.add("I6", f"rank {rank} overwrites slot {slot}, which can be found")

    # ---- what comes from tiers and goes to them ------------------------------------------------

    def _promise(self, slot: int) -> str:
        return "I10" if slot in self._fetched else "I6"

    def _see_fetched(self, rank: int, slot: int, stored: StoredObject) -> None:
        if slot not in self._fetched:
            self._core.findings.add("I10", f"rank {rank} fetches into slot {slot}, unplanned")
        elif stored.flaw is None and stored.epoch != self._epoch:
            self._fetched[slot] = stored.epoch

    def _epoch_of(self, slot: int) -> int:
        return self._stale.get(slot, self._epoch)

    def _see_stored(self, slot: int, name: Name, words: list[int | None]) -> None:
        """What a tier has been given would be published by any engine that finds it."""
        self._learn()
        prefix = self._prefixes.get(name.block_hash[-32:])
        if prefix is None or not self._are_right(words, name.group_idx, name.namespace[0], *prefix):
            self._core.findings.add("I10", f"slot {slot} is spilled and is not what its name says")
