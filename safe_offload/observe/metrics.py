"""Export of counters and histograms to vLLM's log line and to Prometheus.

All series exist from startup, so that an alert can be written before the first failure.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from safe_offload.config.options import OffloadConfig
from safe_offload.config.tier_url import FILE
from safe_offload.observe.counters import (
    BYTES,
    COUNTERS,
    HISTOGRAMS,
    LOAD_S,
    LOAD_SIZE_BYTES,
    STORE_S,
    STORE_SIZE_BYTES,
    TENANT_COUNTERS,
    TENANT_GAUGES,
    TIER_SERIES,
    TIERS_NOT_READY,
    Counters,
    Observed,
    Series,
)
from safe_offload.sides import Side

GAUGES = {
    "slots": "Host slots, each as large as one GPU block.",
    "configured_slots": "Host slots once all memory is ready.",
    "used_slots": "Host slots with blocks that can be hit.",
    "capacity_bytes": "Host memory of all slots, all ranks.",
    "leased_slots": "Host slots protected from eviction, without pins.",
    "pinned_slots": "Host slots of pinned prompts.",
    "pins": "Pinned prompts.",
    "retired_slots": "Host slots retired because their bytes changed in memory.",
    "pool_engines": "Engines that share the host memory.",
    "own_slots": "Host slots that this engine stores into.",
    "is_disabled": "1 if the connector switched itself off.",
    "stores_in_flight": "Stores unfinished on some rank.",
    "loads_in_flight": "Loads unfinished on some rank.",
    "compute_tokens_per_second": "Measured compute rate of the largest steps.",
    "load_tokens_per_second": "Measured rate of the largest loads.",
    "load_latency_seconds": "Measured time of the smallest loads.",
    "fetches_in_flight": "Fetches from tiers unfinished on some rank.",
    "spills_in_flight": "Spills to tiers unfinished on some rank.",
    "fetch_bytes_per_second": "Measured bandwidth of the largest fetches.",
    "fetch_latency_seconds": "Measured time of the smallest fetches.",
    TIERS_NOT_READY: "1 until the model's files are read and tiers are used.",
}

INFO = (
    *("version", "stores", "eviction_policy", "load_failure_policy", "copy_path", "self_test"),
    *("ranks", "slots_per_rank", "host_bytes_per_rank", "tokens"),
    *("longest_requests", "gpu_pools", "groups"),
    *("memory", "huge_pages", "numa_node", "copies_by", "ranks_per_copy"),
)
"""Labels of the metric `info`. The last five come from the reports of all ranks."""

_COUNTS, _GAUGES, _OBSERVED = "counts", "gauges", "observed"
_INFO, _OLD_INFO = "info", "old_info"

_VLLM_COUNTERS = {
    "load_bytes": (LOAD_SIZE_BYTES, "Total bytes loaded from offload storage to GPU."),
    "load_time": (LOAD_S, "Total load time from offload storage to GPU, in seconds."),
    "store_bytes": (STORE_SIZE_BYTES, "Total bytes stored from GPU to offload storage."),
    "store_time": (STORE_S, "Total store time from GPU to offload storage, in seconds."),
}
_VLLM_HISTOGRAMS = {
    "load_size": (LOAD_SIZE_BYTES, "Histogram of KV offload load operation size, in bytes."),
    "store_size": (STORE_SIZE_BYTES, "Histogram of KV offload store operation size, in bytes."),
}
_VLLMS = {**_VLLM_COUNTERS, **_VLLM_HISTOGRAMS}
"""Metrics of vLLM's OffloadingConnector, `vllm:kv_offload_<name>`: a sum of a histogram here, or
the same histogram."""


class OffloadStats(KVConnectorStats):
    """Counts and observed values of an interval, and the last gauges.

    When the set-up becomes known or changes, `data` also has "info" and, after a change, the
    previous one as "old_info".
    """

    data: dict[str, Any]

    @classmethod
    def of(
        cls,
        counts: dict[str, int],
        gauges: dict[str, float],
        observed: Observed | None = None,
        info: dict[str, str] | None = None,
        old_info: dict[str, str] | None = None,
    ) -> OffloadStats:
        """Return statistics with these counts, gauges, observed values and labels."""
        data: dict[str, Any] = {_COUNTS: counts, _GAUGES: gauges}
        if observed:
            data[_OBSERVED] = observed
        if info:
            data[_INFO] = info
        if old_info:
            data[_OLD_INFO] = old_info
        return cls(data=data)

    def reset(self) -> None:
        """Remove all data."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> OffloadStats:
        """Add the counts of a later interval and adopt its gauges.

        Mappings passed in are not modified: vLLM passes them to several loggers, and the connector
        compares its gauges with the last ones returned.
        """
        counts = dict(self.data.get(_COUNTS, {}))
        for name, number in other.data.get(_COUNTS, {}).items():
            counts[name] = counts.get(name, 0) + number
        gauges = {**self.data.get(_GAUGES, {}), **other.data.get(_GAUGES, {})}
        observed = _added(self.data.get(_OBSERVED, {}), other.data.get(_OBSERVED, {}))
        latest = other.data if _INFO in other.data else self.data
        info, old_info = latest.get(_INFO), latest.get(_OLD_INFO)
        self.data = OffloadStats.of(counts, gauges, observed, info, old_info).data
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM logs: non-zero counts, the mean of each time, and gauges."""
        observed = self.data.get(_OBSERVED, {}).items()
        means = {
            f"mean_{name}": float(f"{_mean(cells):.3g}")
            for name, cells in observed
            if "seconds" in name
        }
        return {**self.data.get(_COUNTS, {}), **means, **self.data.get(_GAUGES, {})}

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        return not any(self.data.get(part) for part in (_COUNTS, _GAUGES, _OBSERVED, _INFO))


def _added(some: Observed, more: Observed) -> Observed:
    total = dict(some)
    for name, cells in more.items():
        sums = total[name] = dict(total.get(name, {}))
        for bucket, (count, value) in cells.items():
            old_count, old_value = sums.get(bucket, (0, 0.0))
            sums[bucket] = old_count + count, old_value + value
    return total


def _mean(cells: Mapping[int, tuple[int, float]]) -> float:
    return _total(cells) / sum(count for count, _ in cells.values())


def _total(cells: Mapping[int, tuple[int, float]]) -> float:
    return sum(total for _, total in cells.values())


class StatsReporter:
    """Returns statistics when they have changed; its state is the last ones returned.

    Bound: an entry for each name.
    """

    def __init__(self, counters: Counters, info: Mapping[str, str]) -> None:
        self._counters = counters
        self._info = info  # the set-up, by labels of `INFO`; empty if unknown
        self._last_gauges: dict[str, float] = {}
        self._last_info: dict[str, str] = {}
        self._last_host: Mapping[str, str] = {}

    def take(self, side: Side) -> OffloadStats | None:
        """Return counts since the last call and gauges, if any changed."""
        if not (side.has_changed or self._counters):
            return None  # most steps
        side.take_changes(self._counters)
        counts, gauges = self._counters.take(), side.gauges()
        observed = self._counters.take_observed()
        info: dict[str, str] = {}
        old_info = self._last_info
        if self._info and (host := side.host_labels) is not self._last_host:
            self._last_host, info = host, {**self._info, **host}
            self._last_info = info
        if not (counts or observed or info) and gauges == self._last_gauges:
            return None
        self._last_gauges = gauges
        return OffloadStats.of(counts, gauges, observed, info, old_info if info else None)


class OffloadPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the connector, one set per engine. Bound: an entry for each name."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        extra = getattr(self._kv_transfer_config, "kv_connector_extra_config", None)
        config = OffloadConfig.from_extra_config(extra, world_size=1)
        tiers = TIER_SERIES[: len(config.tiers)]
        counters = [*COUNTERS, *(series for tier in tiers for series in tier.counters)]
        self._counters = self._make_series(self._counter_cls, counters, "_total")
        own = [series for series in HISTOGRAMS.values() if series.buckets is not BYTES]
        own += [series for tier in tiers for series in tier.seconds.values()]
        self._histograms = self._make_series(self._histogram_cls, own)
        self._gauges: dict[str, Any] = {
            name: self._per_engine(
                self._make(self._gauge_cls, name, doc, multiprocess_mode="mostrecent")
            )
            for name, doc in GAUGES.items()
        }
        of_tiers = [
            series
            for tier, written in zip(tiers, config.tiers, strict=True)
            for series in tier.gauges
            if series is not tier.stored_bytes or written.location.scheme == FILE
        ]
        self._gauges |= self._make_series(self._gauge_cls, of_tiers, multiprocess_mode="mostrecent")
        self._of_tenants: dict[str, Any] = {}
        if config.tenants is not None:
            for cls, suffix, docs, more in (
                (self._counter_cls, "_total", TENANT_COUNTERS, {}),
                (self._gauge_cls, "", TENANT_GAUGES, {"multiprocess_mode": "mostrecent"}),
            ):
                for name, doc in docs.items():
                    made = self._make(cls, f"tenant_{name}{suffix}", doc, ["tenant"], **more)
                    self._of_tenants[f"tenant_{name}"] = made
        doc = "The set-up as labels: 1, or 0 for outdated labels."
        self._info = self._make(self._gauge_cls, "info", doc, INFO, multiprocess_mode="mostrecent")
        self._vllms: dict[str, Any] | None = None

    def _make_series(
        self, cls: Any, kind: Iterable[Series], suffix: str = "", **kwargs: Any
    ) -> dict[str, Any]:
        """Create one metric for all series of one name, distinguished by labels."""
        made: dict[str, Any] = {}
        by_series: dict[str, Any] = {}
        for series in kind:
            if series.metric not in made:
                labels = [name for name, _ in series.labels]
                buckets = {"buckets": series.buckets} if series.buckets else {}
                name, more = f"{series.metric}{suffix}", {**buckets, **kwargs}
                made[series.metric] = self._make(cls, name, series.doc, labels, **more)
            values = [value for _, value in series.labels]
            by_series[str(series)] = self._per_engine(made[series.metric], values)
        return by_series

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
        """Add the counts and values of an interval; unknown names are ignored."""
        counts, gauges = (transfer_stats_data.get(part, {}) for part in (_COUNTS, _GAUGES))
        observed: Observed = transfer_stats_data.get(_OBSERVED, {})
        for name, number in counts.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(number)
            elif metric := self._of_tenant(name, engine_idx):
                metric.inc(number)
        for name, value in gauges.items():
            if name in self._gauges:
                self._gauges[name][engine_idx].set(value)
            elif metric := self._of_tenant(name, engine_idx):
                metric.set(value)
        for name, cells in observed.items():
            if name in self._histograms:
                _observe(self._histograms[name][engine_idx], cells)
        # Outdated labels are set to 0, not removed: another process may still have them.
        for part, value in ((_OLD_INFO, 0), (_INFO, 1)):
            if info := transfer_stats_data.get(part):
                values = (info.get(label, "") for label in INFO)
                self._info.labels(*self.per_engine_labelvalues[engine_idx], *values).set(value)
        if self._vllms is None:
            self._vllms = self._make_vllms()
        for name, metric in self._vllms.items():
            cells = observed.get(_VLLMS[name][0], {})
            if name in _VLLM_HISTOGRAMS:
                _observe(metric[engine_idx], cells)
            else:
                metric[engine_idx].inc(_total(cells))

    def _of_tenant(self, name: str, engine_idx: int) -> Any:
        """Return the series of a tenant by its name; None for another name."""
        metric, _, label = name.partition('{tenant="')
        if metric not in self._of_tenants:
            return None
        values = *self.per_engine_labelvalues[engine_idx], label.removesuffix('"}')
        for name in TENANT_COUNTERS:  # they exist from the first gauge on
            self._of_tenants[f"tenant_{name}"].labels(*values)
        return self._of_tenants[metric].labels(*values)

    def _make_vllms(self) -> dict[str, Any]:
        """Create the metrics of vLLM's OffloadingConnector, unless that connector did.

        At the first statistics, because by then MultiConnector has created the metrics of all
        connectors. Earlier, duplicates would end the start.
        """
        made: dict[str, Any] = {}
        for name, (_, doc) in _VLLMS.items():
            is_counter = name in _VLLM_COUNTERS
            cls = (
                self._counter_cls
                if is_counter
                else functools.partial(self._histogram_cls, buckets=BYTES)
            )
            labels = self._labelnames
            try:
                metric = cls(name=f"vllm:kv_offload_{name}", documentation=doc, labelnames=labels)
            except ValueError:
                return {}
            made[name] = self._per_engine(metric)
        return made


def _observe(metric: Any, cells: Mapping[int, tuple[int, float]]) -> None:
    """Observe the mean of each bucket, as often as it has values: counts and sum are exact."""
    for count, total in cells.values():
        for _ in range(count):
            metric.observe(total / count)
