"""Tenants: their quotas of host slots, from a file, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

from safe_offload.observe.counters import TENANT_GAUGES, Count, of_tenant
from safe_offload.scheduler.feature import Answer, Feature

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from safe_offload.config.tenants import Tenants, TenantsFile
    from safe_offload.scheduler.cache.slots import SlotPool
    from safe_offload.scheduler.cache.tenants import TenantQuotas
    from safe_offload.scheduler.planner import Planner
    from safe_offload.scheduler.requests import RequestState

LABELS_MAX = 256
"""Labels whose series stay after the file has lost them; beyond that, the oldest end."""


class TenantShares(Feature):
    """Applies the quotas of the tenants file; counts by `RequestState.num_requested`.

    Bound: `LABELS_MAX` labels.
    """

    def __init__(
        self, planner: Planner, slots: SlotPool, quotas: TenantQuotas, file: TenantsFile
    ) -> None:
        self._planner = planner
        self._counters = planner.counters
        self.slots, self.quotas, self.salts, self.file = slots, quotas, quotas.salts, file
        self._num_bad = 0
        self._labels: dict[str, None] = {}
        self._use(file.tenants)
        file.start()

    def _use(self, tenants: Tenants) -> None:
        self._planner.note_change()
        self.slots.use_tenants(tenants)
        for label in tenants.labels:  # they become the newest
            self._labels.pop(label, None)
            self._labels[label] = None
        for label in list(self._labels)[:-LABELS_MAX]:
            del self._labels[label]

    def on_match(self, state: RequestState, num_computed_tokens: int, now_s: float) -> Answer:
        state.num_requested = state.request.num_tokens - num_computed_tokens
        return Answer.SEARCH

    def on_scheduled(self, state: RequestState, num_tokens: int) -> None:
        num_requested, state.num_requested = state.num_requested, None
        if num_requested is not None:
            tenants = self.quotas.tenants
            label = tenants.labels[tenants.number_of(state.request.cache_salt)]
            self._counters[of_tenant("hit_tokens", label)] += num_tokens
            self._counters[of_tenant("missed_tokens", label)] += num_requested - num_tokens

    def on_step(self, output: SchedulerOutput, now_s: float) -> None:
        """Change tenants between two steps only."""
        if self.file.num_bad != self._num_bad:
            self._counters[Count.BAD_TENANT_FILES] += self.file.num_bad - self._num_bad
            self._num_bad = self.file.num_bad
        if self.file.tenants is not self.quotas.tenants:
            self._use(self.file.tenants)
        self.salts.begin_step()
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        tables = [(each.req_id, each.block_ids) for each in new]
        for request_id, table in (*tables, *zip(cached.req_ids, cached.new_block_ids, strict=True)):
            state = self._planner.book.get(request_id)
            if table and state is not None:
                self.salts.allocated(chain.from_iterable(table), state.request.cache_salt)

    def on_step_planned(self) -> None:
        self.salts.end_step()

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of all tenants; labels that the file had stay, at 0."""
        found = {of_tenant(name, label): 0.0 for name in TENANT_GAUGES for label in self._labels}
        policy, slot_bytes = self.quotas.policy, self._planner.options.slot_bytes
        for number, label in enumerate(self.quotas.tenants.labels):
            found[of_tenant("used_bytes", label)] = policy.held[number] * slot_bytes
            found[of_tenant("guaranteed_bytes", label)] = policy.guaranteed[number] * slot_bytes
        return found

    def shutdown(self) -> None:
        self.file.close()
