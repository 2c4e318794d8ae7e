"""Log lines about a tier that would come with every object when something is wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from typing import Final

from safe_offload.tiers.base import Result, reason_of

logger = logging.getLogger(f"vllm.{__name__}")

LOG_EVERY_S: Final = 60.0
KINDS_MAX: Final = 100
KIND_CHARS: Final = 80


class RareLog:
    """Logs each kind of line about a tier at most once a minute; any thread may call it."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._logged_at_s: dict[Hashable, float] = {}

    def is_due(self, kind: Hashable) -> bool:
        """Return whether a line of this kind is due."""
        now_s = time.monotonic()
        if now_s - self._logged_at_s.get(kind, -LOG_EVERY_S) < LOG_EVERY_S:
            return False
        if len(self._logged_at_s) >= KINDS_MAX:
            self._logged_at_s.clear()
        self._logged_at_s[kind] = now_s
        return True

    def failure(self, error: OSError) -> None:
        """Log that the place failed, and the fix if the error has one."""
        reason = reason_of(error)
        if self.is_due(reason[:KIND_CHARS]):
            logger.warning("Tier %s failed to use its store: %s.", self._label, reason)

    def bad_object(self, result: Result, name: str) -> None:
        """Log that an object is not what it should be."""
        if self.is_due(result):
            logger.warning(
                "Unusable object in tier %s, it is %s: %s", self._label, result.value, name
            )
