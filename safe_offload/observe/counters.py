"""Counters that explain what the connector did, by name.

Both processes count into a `Counters`; `observe/metrics.py` carries them to vLLM's log line and to
Prometheus. A name is an attribute of `Count`, so that a misspelt one cannot exist.
"""

from __future__ import annotations

import enum
from collections import Counter


class Count(enum.StrEnum):
    """What is counted; the value is the name, and the label if there is one.

    Attributes:
        metric: the metric's name, without what all have in common.
        doc: its help text.
        label: that tells this count from others of the same metric, and its value.
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

    HIT_TOKENS = (
        "hit_tokens",
        "Tokens that were found on the host and whose load was begun, however it ended.",
    )
    LOADED_TOKENS = "loaded_tokens", "Tokens that came from the host: their load ended well."
    LOADED_BLOCKS = (
        "loaded_blocks",
        "Blocks that were loaded from the host, of all KV cache groups.",
    )
    STORED_BLOCKS = "stored_blocks", "Blocks that were stored on the host and can be hit."
    RESCUED_BLOCKS = (
        "rescued_blocks",
        "Blocks of preempted requests stored before they were reused.",
    )
    EVICTED_BLOCKS_HIT = (
        "evicted_blocks",
        "Blocks overwritten by others, by whether they had ever been loaded.",
        ("hit", "true"),
    )
    EVICTED_BLOCKS_UNHIT = (
        "evicted_blocks",
        "Blocks overwritten by others, by whether they had ever been loaded.",
        ("hit", "false"),
    )
    EVICTED_AGE_SECONDS = (
        "evicted_age_seconds",
        "Time that the evicted blocks had not been used, all blocks together.",
    )
    RESETS = "resets", "Resets of the host cache: nothing stored before is found any more."
    FENCED_STORES = "fenced_stores", "Stores whose source block was given away while they ran."
    SKIPPED_BLOCKS = (
        "skipped_blocks",
        "Blocks not stored: no slot was free, or too much waits.",
    )
    UNPUBLISHED_BLOCKS = (
        "unpublished_blocks",
        "Blocks stored but not kept: the cache was reset meanwhile.",
    )
    FAILED_STORES = "failed_stores", "Stores that failed; their blocks are not kept."
    FAILED_LOADS = "failed_loads", "Loads that failed; their tokens are recomputed."
    OVERDUE_TRANSFERS = (
        "overdue_transfers",
        "Transfers that were started and had not ended at their deadline.",
    )
    COPY_PATH_DEMOTIONS = (
        "copy_path_demotions",
        "Ways to copy that were left for a slower one because they failed.",
    )
    CHECKSUM_MISMATCHES = (
        "checksum_mismatches",
        "Host slots whose bytes changed while they were kept; they are not used again.",
    )
    GIVEN_UP_REQUESTS = (
        "given_up_requests",
        "Requests that are offered no more hits because too many of their loads failed.",
    )
    SKIPPED_STORES = (
        "skipped_stores",
        "Stores put off or made smaller because too many bytes wait to be stored.",
    )
    UNUSABLE_HITS = "unusable_hits", "Hits that vLLM accepted in part and that could not be loaded."
    POSTPONED_HITS = (
        "postponed_hits",
        "Hits not used because the requests that wait for loads hold too many GPU blocks.",
    )
    SHARED_WAITS = (
        "shared_waits",
        "Requests that waited for another's load of the same blocks instead of loading them too.",
    )
    SHARED_WAITS_CUT = (
        "shared_waits_cut",
        "Of these, those that waited as long as they may, and loaded the blocks themselves.",
    )
    UNPAID_HITS = (
        "unpaid_hits",
        "Hits not offered because computing their tokens is expected to be faster.",
    )
    STALE_REPORTS = "stale_reports", "Worker reports of unknown or already settled transfers."
    DUPLICATE_REPORTS = "duplicate_reports", "Worker reports that came twice from one rank."
    DROPPED_UNKNOWN_IDS = "dropped_unknown_ids", "Finished ids of requests that do not exist."
    DROPPED_PREMATURE_IDS = "dropped_premature_ids", "Finished ids of requests still being loaded."
    DROPPED_DUPLICATE_IDS = "dropped_duplicate_ids", "Finished ids that had been reported before."
    DROPPED_UNOWNED_IDS = (
        "dropped_unowned_ids",
        "Finished ids of requests that are not waiting, or whose blocks are free already.",
    )
    BAD_REQUEST_PARAMS = (
        "bad_request_params",
        "Requests whose kv_transfer_params could not be used; they were served without limits.",
    )
    CONTAINED_ERRORS = "contained_errors", "Errors inside a hook that were kept from the engine."


def is_milestone(count: int) -> bool:
    """Whether the count-th event of a kind is worth a line in the log: 1st, 10th, 100th, ...

    A limit that needs no clock, for what clients can make happen as often as they like.
    """
    return count > 0 and str(count).strip("0") == "1"


class Counters(Counter[str]):
    """Counts since the last `take`."""

    def __init__(self) -> None:
        super().__init__()
        self._part_s: dict[str, float] = {}

    def add_seconds(self, name: str, seconds: float) -> None:
        """Count whole seconds, and keep the rest for the next time."""
        total_s = self._part_s.get(name, 0.0) + seconds
        if total_s >= 1:
            self[name] += int(total_s)
        self._part_s[name] = total_s - int(total_s)

    def take(self) -> dict[str, int]:
        """Return what was counted since the last call, and start again from zero."""
        taken = {str(name): number for name, number in self.items() if number}
        self.clear()
        return taken
