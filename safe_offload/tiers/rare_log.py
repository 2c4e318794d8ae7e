"""Log lines about a tier that come with every object when something is wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from typing import Final

from safe_offload.tiers.base import Result

logger = logging.getLogger(f"vllm.{__name__}")

LOG_EVERY_S: Final = 60.0
KINDS_MAX: Final = 100


class RareLog:
    """Says of each kind of line whether it is due: at most once a minute. Any thread may ask.

    `label` is what the tier is called.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._said_at_s: dict[Hashable, float] = {}

    def is_due(self, kind: Hashable) -> bool:
        """Return whether to write a line of this kind now."""
        now_s = time.monotonic()
        if now_s - self._said_at_s.get(kind, -LOG_EVERY_S) < LOG_EVERY_S:
            return False
        if len(self._said_at_s) >= KINDS_MAX:
            self._said_at_s.clear()
        self._said_at_s[kind] = now_s
        return True

    def bad_object(self, result: Result, name: str) -> None:
        """Say that an object of a tier is not what it should be."""
        if self.is_due(result):
            logger.warning(
                "Unusable object in tier %s, it is %s: %s", self._label, result.value, name
            )
