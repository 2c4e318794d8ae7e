"""The part of the namespace that an engine changes while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

logger = logging.getLogger(f"vllm.{__name__}")


class Generation:
    """Which weights what is found and written now is of, as far as the engine knows.

    Args:
        new_generation: makes a name that no process has had.
        has_model_version: the operator says in the configuration which weights they are.

    Attributes:
        name: in each message; empty if all is shared with other engines and later starts.
    """

    def __init__(self, new_generation: Callable[[], str], *, has_model_version: bool) -> None:
        self._new_generation = new_generation
        self._has_model_version = has_model_version
        self.name = ""

    def stand_alone(self, doubts: Sequence[str]) -> None:
        """It is not known what this engine computes: use only what it has written itself."""
        self.name = self._new_generation()
        logger.warning(
            "Nothing in tiers is shared with other engines or found again after a restart: %s. If "
            'the model comes from elsewhere and is the same in every process, write "model_version"'
            " into each tier, and another one whenever it changes. Files of the model must not "
            "change while an engine starts.",
            " and ".join(doubts),
        )

    def reset(self, *, is_vouched_for: bool) -> None:
        """What tiers have may be of other weights from now on; see `Tiers.reset`."""
        if is_vouched_for and self._has_model_version:
            return
        is_first = not self.name
        self.name = self._new_generation()
        if is_first:
            logger.info(
                "After a reset the weights may be others, so what tiers hold by now is not used "
                "any more by this engine, nor is what it writes used by others. To go on with "
                "what they hold, set the tier's model_version."
            )
