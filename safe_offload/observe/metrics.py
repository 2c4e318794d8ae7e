"""The connector's counts on their way to vLLM's log line and to Prometheus.

Metrics are named `vllm:safe_offload_<name>`; docs/operations.md lists them. All series exist from
startup, so that an alert can be written before the first failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from safe_offload.observe.counters import Count, Counters
from safe_offload.sides import Side

GAUGES = {
    "slots": "Host slots, each as large as one GPU block.",
    "leased_slots": "Host slots that may not be evicted now.",
    "retired_slots": "Host slots not used any more because their bytes changed in memory.",
    "is_disabled": "1 if the connector has given up and only finishes what is in flight.",
    "stores_in_flight": "Stores that not all ranks have finished.",
    "loads_in_flight": "Loads that not all ranks have finished.",
    "compute_tokens_per_s": "Tokens that the largest steps compute in a second, as measured.",
    "load_tokens_per_s": "Tokens that the largest loads bring in a second, as measured.",
    "load_latency_us": "Time of the smallest loads in microseconds, as measured.",
}

INFO = (
    *("version", "stores", "eviction_policy", "load_failure_policy", "copy_path", "self_test"),
    *("ranks", "slots_per_rank", "host_bytes_per_rank", "ranks_per_copy", "tokens"),
    *("longest_requests", "gpu_pools", "groups"),
    *("memory", "huge_pages", "numa_node", "copies_by"),
)
"""Labels of the metric `info`. All ranks have reported the last four."""

_COUNTS, _GAUGES, _INFO, _OLD_INFO = "counts", "gauges", "info", "old_info"


class OffloadStats(KVConnectorStats):
    """Counts of an interval and the last state.

    `data` is {"counts": {...}, "gauges": {...}}. When the set-up is first known or changes, it also
    has "info" and, if there was one, the "old_info" that it replaces.
    """

    data: dict[str, Any]

    @classmethod
    def of(
        cls,
        counts: dict[str, int],
        gauges: dict[str, int],
        info: dict[str, str] | None = None,
        old_info: dict[str, str] | None = None,
    ) -> OffloadStats:
        """Return the statistics of these counts, gauges and labels."""
        labels = {_INFO: info, _OLD_INFO: old_info}
        said = {name: values for name, values in labels.items() if values}
        return cls(data={_COUNTS: counts, _GAUGES: gauges, **said})

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> OffloadStats:
        """Add the counts of a later interval and take over its state.

        The mappings that `data` was made of are not changed: vLLM hands them to several loggers,
        and the connector compares its gauges with the last that it handed out.
        """
        counts = dict(self.data.get(_COUNTS, {}))
        for name, number in other.data.get(_COUNTS, {}).items():
            counts[name] = counts.get(name, 0) + number
        gauges = {**self.data.get(_GAUGES, {}), **other.data.get(_GAUGES, {})}
        latest = other.data if _INFO in other.data else self.data
        info, old_info = latest.get(_INFO), latest.get(_OLD_INFO)
        self.data = OffloadStats.of(counts, gauges, info, old_info).data
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM logs: every count that is not 0, and the state."""
        return {**self.data.get(_COUNTS, {}), **self.data.get(_GAUGES, {})}

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        return not any(self.data.get(part) for part in (_COUNTS, _GAUGES, _INFO))


class StatsReporter:
    """Hands out what has changed; its state is what it has handed out last.

    Args:
        counters: what was counted on this side.
        info: how the connector is set up, by labels of `INFO`; empty if unknown.
    """

    def __init__(self, counters: Counters, info: Mapping[str, str]) -> None:
        self._counters = counters
        self._info = info
        self._last_gauges: dict[str, int] = {}
        self._last_info: dict[str, str] = {}
        self._last_host: Mapping[str, str] = {}

    def take(self, side: Side) -> OffloadStats | None:
        """Return counts since the last call and the state of the host pool, if either changed."""
        if not (side.has_changed or self._counters):
            return None  # most steps
        side.changes_taken()
        counts, gauges = {**self._counters.take(), **side.take_counts()}, side.gauges()
        info: dict[str, str] = {}
        old_info = self._last_info
        host = side.host_labels
        if self._info and host is not self._last_host:
            self._last_host, info = host, {**self._info, **host}
            self._last_info = info
        if not counts and gauges == self._last_gauges and not info:
            return None
        self._last_gauges = gauges
        return OffloadStats.of(counts, gauges, info, old_info if info else None)


class OffloadPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the connector, one set for each engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters: dict[str, Any] = self._make_counters()
        self._gauges: dict[str, Any] = {
            name: self._per_engine(
                self._make(self._gauge_cls, name, doc, multiprocess_mode="mostrecent")
            )
            for name, doc in GAUGES.items()
        }
        doc = "How the connector is set up, in labels: 1, or 0 for labels that have changed since."
        self._info = self._make(self._gauge_cls, "info", doc, INFO, multiprocess_mode="mostrecent")

    def _make_counters(self) -> dict[str, Any]:
        """Make one metric for all counts of one name, which a label tells apart."""
        made: dict[str, Any] = {}
        counters: dict[str, Any] = {}
        for count in Count:
            names, values = ([count.label[0]], [count.label[1]]) if count.label else ([], [])
            if count.metric not in made:
                made[count.metric] = self._make(
                    self._counter_cls, f"{count.metric}_total", count.doc, names
                )
            counters[count] = self._per_engine(made[count.metric], values)
        return counters

    def _make(
        self, cls: Any, name: str, doc: str, more_labels: Sequence[str] = (), **kwargs: Any
    ) -> Any:
        return cls(
            name=f"vllm:safe_offload_{name}",
            documentation=doc,
            labelnames=[*self._labelnames, *more_labels],
            **kwargs,
        )

    def _per_engine(self, metric: Any, more_values: Sequence[str] = ()) -> dict[int, Any]:
        return {
            engine_idx: metric.labels(*values, *more_values)
            for engine_idx, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts; unknown names are ignored."""
        for name, number in transfer_stats_data.get(_COUNTS, {}).items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(number)
        for name, value in transfer_stats_data.get(_GAUGES, {}).items():
            if name in self._gauges:
                self._gauges[name][engine_idx].set(value)
        # Old labels are set to 0, not removed: another process may still have them.
        for part, value in ((_OLD_INFO, 0), (_INFO, 1)):
            if info := transfer_stats_data.get(part):
                values = (info.get(label, "") for label in INFO)
                self._info.labels(*self.per_engine_labelvalues[engine_idx], *values).set(value)
