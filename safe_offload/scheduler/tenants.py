"""The scheduler side with tenants: for whom slots are granted, and what each of them gets."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from safe_offload.observe.counters import TENANT_GAUGES, Count, of_tenant
from safe_offload.protocol import ids_of
from safe_offload.scheduler.cache.tenants import TenantSlots
from safe_offload.scheduler.planner import Planner
from safe_offload.scheduler.stores.stores import Stores

if TYPE_CHECKING:
    from safe_offload.config.tenants import Tenants, TenantsFile
    from safe_offload.observe.counters import Counters
    from safe_offload.protocol import StepPlan
    from safe_offload.scheduler.blocks import BlockSet
    from safe_offload.scheduler.requests import RequestState


LABELS_MAX = 256
"""Labels that the file had and whose series stay; the oldest are no longer told."""


class TenantStores(Stores):
    """Stores that ask for slots in the name of the tenant whose blocks they store.

    `salts` has by GPU block for which salt it was allocated last, before the step that is planned,
    `new_salts` those of this step. What is stored at a boundary was computed for the latter.

    Bound: an entry for each block of the GPU.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self._hits.slots, TenantSlots)
        self.slots = self._hits.slots
        self.salts: dict[int, str | None] = {}
        self.new_salts: dict[int, str | None] = {}
        self.boundary_group_ids: tuple[int, ...] = ()

    def add(self, blocks: BlockSet, owner: RequestState | None, *, is_intact: bool) -> int:
        """See `Stores`; blocks of no known request are those of whom they were allocated for."""
        if owner is not None:
            self.slots.serve(owner.request.cache_salt)
            return super().add(blocks, owner, is_intact=is_intact)
        salts: Mapping[int, str | None] = self.salts
        num_stored = start = 0
        if blocks.group_idx in self.boundary_group_ids:
            salts = ChainMap(self.new_salts, self.salts)
        for salt, run in groupby(salts.get(block.block_id) for block in blocks.blocks):
            end = start + len(list(run))
            self.slots.serve(salt)
            num_stored += super().add(blocks.part(range(start, end)), None, is_intact=is_intact)
            start = end
        return num_stored

    def add_whole(
        self, blocks: BlockSet, owners: list[tuple[RequestState, int]], *, is_intact: bool
    ) -> bool:
        """See `Stores`; what several tenants store goes request by request."""
        number_of = self.slots.tenants.number_of
        self.slots.serve(owners[0][0].request.cache_salt)
        is_one = len({number_of(owner.request.cache_salt) for owner, _ in owners}) == 1
        return is_one and super().add_whole(blocks, owners, is_intact=is_intact)


class TenantPlanner(Planner):
    """A planner whose host slots are divided among tenants, as a file says.

    Its state beside that of `Planner`: the bad changes of the file that it has counted, the labels
    that metrics have had, and how much each waiting request has asked the host for.

    Bound: the requests that vLLM has, and `LABELS_MAX` labels.
    """

    make_stores = TenantStores
    stores: TenantStores

    def __init__(self, *args: Any, file: TenantsFile) -> None:
        super().__init__(*args)
        self.slots, self.file = self.stores.slots, file
        if not self.options.is_lazy:
            self.stores.boundary_group_ids = self.options.state_group_ids
        self._num_bad = 0
        self._asked: dict[str, int] = {}
        self._labels: dict[str, None] = {}
        self._use(file.tenants)
        file.start()

    def _use(self, tenants: Tenants) -> None:
        self.count_into(self._counters)  # by the labels of before
        self.has_changed = True
        self.slots.use(tenants)
        for label in tenants.labels:  # they become the newest
            self._labels.pop(label, None)
            self._labels[label] = None
        for label in list(self._labels)[:-LABELS_MAX]:
            del self._labels[label]

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, now_s: float
    ) -> int | None:
        self._asked[request.request_id] = request.num_tokens - num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens, now_s)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        num_asked = self._asked.pop(request.request_id, None)
        if num_asked is not None:
            tenants = self.slots.tenants
            label = tenants.labels[tenants.number_of(request.cache_salt)]
            self._counters[of_tenant("hit_tokens", label)] += num_external_tokens
            self._counters[of_tenant("missed_tokens", label)] += num_asked - num_external_tokens
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Any) -> Any:
        self._asked.pop(request.request_id, None)
        return super().request_finished(request)

    def build_connector_meta(self, scheduler_output: Any, now_s: float) -> StepPlan:
        """See `Planner`; the tenants change between two steps."""
        if self.file.tenants is not self.slots.tenants:
            self._use(self.file.tenants)
        new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        self.stores.new_salts = salts = {}
        tables = [(each.req_id, each.block_ids) for each in new]
        for request_id, table in (*tables, *zip(cached.req_ids, cached.new_block_ids, strict=True)):
            state = self.book.get(request_id)
            if table and state is not None:
                salt = state.request.cache_salt
                salts.update(dict.fromkeys(chain.from_iterable(table), salt))
        plan = super().build_connector_meta(scheduler_output, now_s)
        self.stores.salts.update(salts)
        return self._marked(plan) if plan.spills else plan

    def _marked(self, plan: StepPlan) -> StepPlan:
        owners, marks = self.slots.by_tenant.owners, self.slots.tenants.marks
        spills = (
            replace(spill, marks=ids_of(marks[owners[slot]] for slot in spill.slot_ids))
            for spill in plan.spills
        )
        return replace(plan, spills=tuple(spills))

    def count_into(self, counters: Counters) -> None:
        """See `Side`."""
        labels, evicted = self.slots.tenants.labels, self.slots.by_tenant.evicted
        for number, count in evicted.items():
            counters[of_tenant("evicted_blocks", labels[number])] += count
        evicted.clear()
        num_bad = self.file.num_bad
        counters[Count.BAD_TENANT_FILES] += num_bad - self._num_bad
        self._num_bad = num_bad

    def gauges(self) -> dict[str, float]:
        """See `Planner`; labels that the file had stay, at 0."""
        found = {of_tenant(name, label): 0.0 for name in TENANT_GAUGES for label in self._labels}
        policy, slot_bytes = self.slots.by_tenant, self.options.slot_bytes
        for number, label in enumerate(self.slots.tenants.labels):
            found[of_tenant("used_bytes", label)] = policy.held[number] * slot_bytes
            found[of_tenant("guaranteed_bytes", label)] = policy.guaranteed[number] * slot_bytes
        return super().gauges() | found

    def shutdown(self) -> None:
        """See `SchedulerSide`."""
        self.file.close()
