"""The connector's counters and histograms, which `observe/metrics.py` exports."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import Counter
from typing import Any, Self

from safe_offload.config.tiers import MAX_TIERS
from safe_offload.protocol import FailureReason

Label = tuple[str, str]
"""Name and value."""
Observed = dict[str, dict[int, tuple[int, float]]]
"""By histogram name and bucket index: the number of values and their sum."""

_EVICTED = "Blocks evicted, by whether they were hit."
_LOADS = "Loads started, by whether in the very step that computes the rest of the prompt."
_HINTS = "Actions of request hints; unknown ones are ignored."
_DROPPED_SPILLS = "Blocks not written to tiers."
_DROPPED = "Finished request ids kept from vLLM's scheduler, which would have crashed on them."


class Series(str):
    """One series of a metric: its name, with labels if it has any."""

    metric: str  # the metric's name, without the prefix
    doc: str
    labels: tuple[Label, ...]
    buckets: tuple[float, ...]  # inclusive upper bounds of a histogram's buckets

    def __new__(
        cls, metric: str, doc: str, *labels: Label, buckets: tuple[float, ...] = ()
    ) -> Self:
        inner = ",".join(f'{name}="{value}"' for name, value in labels)
        series = super().__new__(cls, f"{metric}{{{inner}}}" if labels else metric)
        series.metric, series.doc, series.labels, series.buckets = metric, doc, labels, buckets
        return series


class Count(Series, enum.ReprEnum):
    """The counters."""

    HIT_TOKENS = "hit_tokens", "Tokens of hits whose load started."
    LOADS_IN_STEP = "loads", _LOADS, ("in_step", "true")
    LOADS_AHEAD = "loads", _LOADS, ("in_step", "false")
    LOADED_TOKENS = "loaded_tokens", "Tokens of hits loaded successfully."
    SAVED_SECONDS = "saved_seconds", "Lower bound of the time to compute loaded_tokens."
    LOADED_BLOCKS = "loaded_blocks", "Blocks loaded from the host, all KV cache groups."
    STORED_BLOCKS = "stored_blocks", "Blocks stored on the host."
    RESCUED_BLOCKS = "rescued_blocks", "Blocks of preempted requests stored just before reuse."
    EVICTED_BLOCKS_HIT = "evicted_blocks", _EVICTED, ("hit", "true")
    EVICTED_BLOCKS_UNHIT = "evicted_blocks", _EVICTED, ("hit", "false")
    EVICTED_AGE_SECONDS = (
        "evicted_age_seconds",
        "Sum over evicted blocks of the time since last use.",
    )
    RESETS = "resets", "Resets of the host cache."
    FENCED_STORES = "fenced_stores", "Stores whose source block was reallocated meanwhile."
    SKIPPED_BLOCKS = "skipped_blocks", "Blocks not stored: no slot, too much in flight, no gain."
    UNPUBLISHED_BLOCKS = "unpublished_blocks", "Blocks dropped by a reset during their store."
    LOAD_BYTES = "load_bytes", "Bytes copied from host to GPU, all ranks."
    STORE_BYTES = "store_bytes", "Bytes copied from GPU to host, all ranks."
    OVERDUE_TRANSFERS = "overdue_transfers", "Transfers still running at their deadline."
    COPY_PATH_DEMOTIONS = "copy_path_demotions", "Fallbacks to a slower copy path."
    CHECKSUM_MISMATCHES = "checksum_mismatches", "Host slots retired because their bytes changed."
    GIVEN_UP_REQUESTS = "given_up_requests", "Requests denied further hits after failed loads."
    SKIPPED_STORES = "skipped_stores", "Stores postponed or shortened: too much in flight."
    UNUSABLE_HITS = "unusable_hits", "Partially accepted hits that could not be loaded."
    POSTPONED_HITS = "postponed_hits", "Hits postponed: loads hold too many GPU blocks."
    SHARED_WAITS = "shared_waits", "Requests that waited for another request's load."
    SHARED_WAITS_CUT = "shared_waits_cut", "Of shared_waits, those that hit the limit."
    SKIPPED_HITS = "skipped_hits", "Hits skipped because recomputing is faster."
    TIER_LOOKUPS = "tier_lookups", "Requests that looked up tiers."
    TIER_WAITS_CUT = "tier_waits_cut", "Of tier_lookups, those that hit the wait limit."
    FETCHED_BLOCKS = "fetched_blocks", "Blocks fetched from a tier."
    MISSED_BLOCKS = "missed_blocks", "Blocks whose fetch from a tier failed."
    SKIPPED_FETCH_TOKENS = (
        "skipped_fetch_tokens",
        "Tokens not fetched because recomputing is faster.",
    )
    FETCH_BLOCKS_NO_SLOT = "fetch_blocks_no_slot", "Blocks not fetched for lack of host slots."
    SPILLED_BLOCKS = "spilled_blocks", "Blocks written to all tiers."
    RETRIED_SPILL_BLOCKS = (
        "retried_spill_blocks",
        "Blocks written to tiers again after a failed write.",
    )
    KEPT_BLOCKS = "kept_blocks", "Blocks copied from a farther tier to nearer ones."
    DROPPED_SPILLS_EVICTED = "dropped_spill_blocks", _DROPPED_SPILLS, ("reason", "evicted")
    DROPPED_SPILLS_REFUSED = "dropped_spill_blocks", _DROPPED_SPILLS, ("reason", "refused")
    STALE_REPORTS = "stale_reports", "Worker reports of unknown or settled transfers."
    DUPLICATE_REPORTS = "duplicate_reports", "Duplicate worker reports from one rank."
    DROPPED_UNKNOWN_IDS = "dropped_ids", _DROPPED, ("reason", "unknown")
    DROPPED_PREMATURE_IDS = "dropped_ids", _DROPPED, ("reason", "premature")
    DROPPED_DUPLICATE_IDS = "dropped_ids", _DROPPED, ("reason", "duplicate")
    DROPPED_UNOWNED_IDS = "dropped_ids", _DROPPED, ("reason", "unowned")
    BAD_REQUEST_PARAMS = "bad_request_params", "Requests with invalid kv_transfer_params, served."
    UNPINNED_TOKENS = "unpinned_tokens", "Prompt tokens that could not be pinned."
    FETCH_HINTS = "hints", _HINTS, ("action", "fetch")
    RETAIN_HINTS = "hints", _HINTS, ("action", "retain")
    UNKNOWN_HINTS = "hints", _HINTS, ("action", "unknown")
    BAD_TENANT_FILES = "bad_tenant_files", "Invalid versions of the tenants file."
    BORROWED_BLOCKS = "borrowed_blocks", "Leases of blocks in other engines' slots."
    LOST_BLOCKS = "lost_blocks", "Blocks overwritten by other engines before a lease."
    DAMAGED_ENTRIES = "damaged_entries", "Invalid table entries of a shared pool."
    POOL_STALLS = "pool_stalls", "Times another process blocked access to a shared pool."
    CONTAINED_ERRORS = "contained_errors", "Exceptions in a hook, contained."


def _failures(direction: str) -> dict[FailureReason, Series]:
    return {
        reason: Series(
            "transfer_failures",
            "Failed transfers, counted once, with the first rank's reason.",
            ("direction", direction),
            ("reason", reason.value),
        )
        for reason in FailureReason
    }


FAILED_LOADS, FAILED_STORES, FAILED_FETCHES, FAILED_SPILLS = map(
    _failures, ("load", "store", "fetch", "spill")
)
_FAILED = (FAILED_LOADS, FAILED_STORES, FAILED_FETCHES, FAILED_SPILLS)
COUNTERS: tuple[Series, ...] = (*Count, *(s for failed in _FAILED for s in failed.values()))


def _both(metric: str, doc: str, buckets: tuple[float, ...]) -> tuple[Series, Series]:
    load, store = (
        Series(metric, doc, ("direction", name), buckets=buckets) for name in ("load", "store")
    )
    return load, store


SECONDS = (*(n * 10.0**e for e in range(-4, 1) for n in (1, 2.5, 5)), 10.0, 25.0)
TOKENS = tuple(2.0**k for k in range(4, 21))
BYTES = tuple(n * 1e6 for n in (1, 5, 10, 20, 40, 60, 80, 100, 150, 200))
"""As in vLLM 0.32.0, distributed/kv_transfer/kv_connector/v1/offloading/metrics.py."""

LOAD_S, STORE_S = _both(
    "transfer_seconds", "Duration of one copy on one rank, without queueing.", SECONDS
)
LOAD_QUEUED_S, STORE_QUEUED_S = _both(
    "transfer_wait_seconds", "Queueing time of one transfer on one rank.", SECONDS
)
LOAD_SIZE_BYTES, STORE_SIZE_BYTES = _both("transfer_bytes", "Bytes of one copy on one rank.", BYTES)
LOAD_WAIT_S, TIER_WAIT_S, PROBE_S, FETCH_S = (
    Series(f"{name}_seconds", doc, buckets=SECONDS)
    for name, doc in (
        ("load_wait", "A request's wait for its load."),
        ("tier_wait", "A request's total wait for tiers, if it waited."),
        ("probe", "Time from a lookup to all responses."),
        ("fetch", "Time from a request's fetch to its last block."),
    )
)
HIT_TOKENS = Series("hit_length_tokens", "Tokens of one hit whose load started.", buckets=TOKENS)
HISTOGRAMS = {
    str(series): series
    for series in (
        *(LOAD_S, STORE_S, LOAD_QUEUED_S, STORE_QUEUED_S),
        *(LOAD_SIZE_BYTES, STORE_SIZE_BYTES, LOAD_WAIT_S, HIT_TOKENS),
        *(TIER_WAIT_S, PROBE_S, FETCH_S),
    )
}


class TierSeries:
    """The metrics of one tier, over all ranks; `number` 1 is the nearest.

    Bound: an entry for each word.
    """

    def __init__(self, number: int) -> None:
        self.counters: list[Series] = []
        self.gauges: list[Series] = []

        def series(metric: str, doc: str, *labels: Label, **options: Any) -> Series:
            return Series(f"tier_{metric}", doc, ("tier", str(number)), *labels, **options)

        def counter(metric: str, doc: str, *labels: Label) -> Series:
            self.counters.append(series(metric, doc, *labels))
            return self.counters[-1]

        def gauge(metric: str, doc: str, *labels: Label) -> Series:
            self.gauges.append(series(metric, doc, *labels))
            return self.gauges[-1]

        self.read_objects = counter("read_objects", "Blocks read from a tier.")
        self.read_bytes = counter("read_bytes", "Bytes of blocks read from a tier.")
        self.written_objects = counter("written_objects", "Blocks written to a tier.")
        self.written_bytes = counter("written_bytes", "Bytes written to a tier.")
        doc = "Objects evicted because a tier had reached its capacity."
        self.evicted_objects = counter("evicted_objects", doc)
        self.restarts = counter("restarts", "Starts of a tier's process after one had ended.")
        doc = "Blocks requested from a tier but not read, by reason."
        self.misses = {why: counter("misses", doc, ("reason", why)) for why in TIER_MISSES}
        doc = "Blocks not written to a tier, by reason; without those already present."
        self.dropped_spills = {
            why: counter("dropped_spills", doc, ("reason", why)) for why in TIER_DROPS
        }
        doc = "Time of one call to a tier on one rank."
        self.seconds = {
            name: series("call_seconds", doc, ("operation", name), buckets=SECONDS)
            for name in ("probe", "fetch", "spill")
        }
        doc = "Bytes used in a directory by all engines, as of this engine's last write or count."
        self.stored_bytes = gauge("stored_bytes", doc)
        self.capacity_bytes = gauge("capacity_bytes", "Capacity of a tier.")
        doc = "1 from when a tier's circuit breaker opens until a call of that kind works."
        self.is_out = {
            name: gauge("is_out", doc, ("operation", name)) for name in ("read", "write")
        }


TIER_TROUBLE = ("failed", "timed_out", "left_alone", "cancelled", "unreadable")
TIER_MISSES = ("absent", "corrupt", "foreign", "undecryptable", *TIER_TROUBLE)
TIER_DROPS = ("full", *TIER_TROUBLE)
TIER_SERIES = tuple(map(TierSeries, range(1, MAX_TIERS + 1)))
"""By tier, nearest first."""
TIERS_NOT_READY = "tiers_not_ready"
"""A gauge of the workers."""


TENANT_COUNTERS = {
    "hit_tokens": "Tokens of hits whose load started, by tenant.",
    "missed_tokens": "Prompt tokens missing on GPU and host, by tenant.",
    "evicted_blocks": "Blocks evicted, by tenant.",
}
TENANT_GAUGES = {
    "used_bytes": "Host memory in use by a tenant, all ranks.",
    "guaranteed_bytes": "Quota of a tenant in host memory, all ranks.",
}


def of_tenant(name: str, label: str) -> str:
    """Return the series of a tenant, whose label comes from the tenants file."""
    return f'tenant_{name}{{tenant="{label}"}}'


def is_milestone(count: int) -> bool:
    """Return whether to log the count-th event of a kind: the 1st, 10th, 100th ..."""
    return count > 0 and str(count).strip("0") == "1"


class Counters(Counter[str]):
    """Counts since the last `take`. Bound: an entry for each name and bucket."""

    def __init__(self) -> None:
        super().__init__()
        self._part_s: dict[str, float] = {}
        self._observed: Observed = {}

    def add_seconds(self, name: str, seconds: float) -> None:
        """Count whole seconds and carry the fraction over."""
        total_s = self._part_s.get(name, 0.0) + seconds
        if total_s >= 1:
            self[name] += int(total_s)
        self._part_s[name] = total_s - int(total_s)

    def take(self) -> dict[str, int]:
        """Return the counts since the last call, and reset them."""
        taken = {str(name): number for name, number in self.items() if number}
        self.clear()
        return taken

    def observe(self, histogram: Series, value: float) -> None:
        """Record one value."""
        cells = self._observed.setdefault(str(histogram), {})
        bucket = bisect_left(histogram.buckets, value)
        count, total = cells.get(bucket, (0, 0.0))
        cells[bucket] = count + 1, total + value

    def take_observed(self) -> Observed:
        """Return the observed values since the last call, by histogram and bucket."""
        taken, self._observed = self._observed, {}
        return taken
