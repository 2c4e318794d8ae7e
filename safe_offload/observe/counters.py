"""Counters that explain what the connector did.

`observe/metrics.py` carries them to vLLM's log line and to Prometheus.
"""

from __future__ import annotations

import enum
from collections import Counter

_EVICTED = "Blocks overwritten by others, by whether they had ever been loaded."


class Count(enum.StrEnum):
    """What is counted; the value is the name, and the label if there is one.

    Attributes:
        metric: the metric's name, without the prefix.
        doc: its help text.
        label: name and value of the label that tells counts of one metric apart.
    """

    metric: str
    doc: str
    label: tuple[str, str] | None

    def __new__(cls, metric: str, doc: str, label: tuple[str, str] | None = None) -> Count:
        name = metric if label is None else f'{metric}{{{label[0]}="{label[1]}"}}'
        member = str.__new__(cls, name)
        member._value_ = name
        member.metric, member.doc, member.label = metric, doc, label
        return member

    HIT_TOKENS = "hit_tokens", "Tokens found on the host whose load was begun, however it ended."
    LOADED_TOKENS = "loaded_tokens", "Tokens that came from the host: their load ended well."
    LOADED_BLOCKS = "loaded_blocks", "Blocks loaded from the host, of all KV cache groups."
    STORED_BLOCKS = "stored_blocks", "Blocks that were stored on the host and can be hit."
    RESCUED_BLOCKS = "rescued_blocks", "Blocks of preempted requests stored before their reuse."
    EVICTED_BLOCKS_HIT = "evicted_blocks", _EVICTED, ("hit", "true")
    EVICTED_BLOCKS_UNHIT = "evicted_blocks", _EVICTED, ("hit", "false")
    EVICTED_AGE_SECONDS = "evicted_age_seconds", "Time since the last use, of all evicted blocks."
    RESETS = "resets", "Resets of the host cache: nothing stored before is found any more."
    FENCED_STORES = "fenced_stores", "Stores whose source block was given away while they ran."
    SKIPPED_BLOCKS = "skipped_blocks", "Blocks not stored: no slot was free, or too much waits."
    UNPUBLISHED_BLOCKS = "unpublished_blocks", "Blocks stored but dropped because of a reset."
    FAILED_STORES = "failed_stores", "Stores that failed; their blocks are not kept."
    FAILED_LOADS = "failed_loads", "Loads that failed; their tokens are recomputed."
    OVERDUE_TRANSFERS = (
        "overdue_transfers",
        "Started transfers that had not ended at their deadline.",
    )
    COPY_PATH_DEMOTIONS = "copy_path_demotions", "Ways to copy given up because they failed."
    CHECKSUM_MISMATCHES = "checksum_mismatches", "Host slots retired because their bytes changed."
    GIVEN_UP_REQUESTS = "given_up_requests", "Requests offered no more hits: too many loads failed."
    SKIPPED_STORES = "skipped_stores", "Stores put off or made smaller: too many bytes wait."
    UNUSABLE_HITS = "unusable_hits", "Hits that vLLM accepted in part and that could not be loaded."
    POSTPONED_HITS = "postponed_hits", "Hits not used: pending loads hold too many GPU blocks."
    SHARED_WAITS = "shared_waits", "Requests that waited for another's load of the same blocks."
    SHARED_WAITS_CUT = "shared_waits_cut", "Of shared_waits, those that reached the time limit."
    UNPAID_HITS = (
        "unpaid_hits",
        "Hits not offered: computing their tokens is expected to be faster.",
    )
    STALE_REPORTS = "stale_reports", "Worker reports of unknown or already settled transfers."
    DUPLICATE_REPORTS = "duplicate_reports", "Worker reports that came twice from one rank."
    DROPPED_UNKNOWN_IDS = "dropped_unknown_ids", "Finished ids of requests that do not exist."
    DROPPED_PREMATURE_IDS = "dropped_premature_ids", "Finished ids of requests still being loaded."
    DROPPED_DUPLICATE_IDS = "dropped_duplicate_ids", "Finished ids that had been reported before."
    DROPPED_UNOWNED_IDS = "dropped_unowned_ids", "Finished ids that vLLM does not wait for."
    BAD_REQUEST_PARAMS = "bad_request_params", "Requests with unusable kv_transfer_params, served."
    CONTAINED_ERRORS = "contained_errors", "Errors inside a hook that were kept from the engine."


def is_milestone(count: int) -> bool:
    """Return whether the count-th event of a kind is logged: the 1st, 10th, 100th ..."""
    return count > 0 and str(count).strip("0") == "1"


class Counters(Counter[str]):
    """Counts since the last `take`."""

    def __init__(self) -> None:
        super().__init__()
        self._part_s: dict[str, float] = {}

    def add_seconds(self, name: str, seconds: float) -> None:
        """Count whole seconds, and carry the rest over."""
        total_s = self._part_s.get(name, 0.0) + seconds
        if total_s >= 1:
            self[name] += int(total_s)
        self._part_s[name] = total_s - int(total_s)

    def take(self) -> dict[str, int]:
        """Return what was counted since the last call, and start again from zero."""
        taken = {str(name): number for name, number in self.items() if number}
        self.clear()
        return taken
