"""The part of the namespace that changes while an engine runs."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

logger = logging.getLogger(f"vllm.{__name__}")


class Generation:
    """Identifies the present weights of the engine.

    Args:
        has_model_version: the operator has configured a version of the weights.
    """

    def __init__(self, *, has_model_version: bool) -> None:
        self._has_model_version = has_model_version
        # In each message; empty while objects are shared with other engines and later starts.
        self.name = ""

    def stand_alone(self, doubts: Sequence[str]) -> None:
        """Use only objects of this engine, whose weights cannot be identified."""
        self.name = secrets.token_hex()
        logger.warning(
            "Tiers are neither shared with other engines nor reused after a restart: %s. If the "
            'weights are the same in every process, set "model_version" in each tier, and change '
            "it whenever they change. Model files must not change while an engine starts.",
            " and ".join(doubts),
        )

    def reset(self, *, is_vouched_for: bool) -> None:
        """The objects of tiers may be of other weights from now on; see `Tiers.reset`."""
        if is_vouched_for and self._has_model_version:
            return
        is_first = not self.name
        self.name = secrets.token_hex()
        if is_first:
            logger.info(
                "The weights may have changed with the reset, so this engine stops reading the "
                "present objects of its tiers and sharing new ones. To keep them across resets, "
                "set the tier's model_version."
            )
