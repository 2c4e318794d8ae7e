"""What is logged about a Valkey or Redis server: each kind of line at most once a minute.

What a server writes is never shown, but for the code of an error: its text may hold a password.
"""

from __future__ import annotations

import logging
from typing import Final

from safe_offload.tiers.rare_log import RareLog
from safe_offload.tiers.valkey.commands import READING, SLOTS, WITH_TTL, WRITING, allowing
from safe_offload.tiers.valkey.names import ALL_KEYS

logger = logging.getLogger(f"vllm.{__name__}")

_FIXES: Final = {
    "OOM": "It is full and evicts nothing: set its maxmemory-policy to allkeys-lru",
    "NOPERM": (
        f"The ACL of its user does not allow it: reading needs {allowing(READING)} (with a ttl "
        f"{allowing(WITH_TTL)}), writing {allowing(WRITING)}, a cluster {allowing([SLOTS])}, all "
        f"for ~{ALL_KEYS}"
    ),
    "NOAUTH": 'It wants a password: give it in "password_file", and the user in the url',
    "READONLY": "It is a replica: name the primary in the url",
    "MISCONF": "It cannot write its snapshot to disk: look at its log, or set its save to nothing",
    "LOADING": "It is starting, and reads its snapshot: nothing is to be done",
    "MASTERDOWN": "It has lost its primary: look at the other servers",
    "CLUSTERDOWN": "A part of its cluster is missing: look at the other servers of it",
    "MOVED": (
        "Its cluster sends us round in a circle, or its user may not ask where keys are: allow "
        f"{allowing([SLOTS])}, and compare the CLUSTER SLOTS of its servers"
    ),
    "TRYAGAIN": "Its cluster moves keys at the moment: nothing is to be done",
}


class ServerLog(RareLog):
    """Says what went wrong with a tier."""

    def password_in_url(self) -> None:
        """The password is where others can see it."""
        logger.warning(
            "The url of tier %s has a password in it, which vLLM writes to its log with its "
            'arguments. Put it into a file, and name that in "password_file".',
            self._label,
        )

    def failure(self, error: OSError) -> None:
        """A server cannot be used, or its connection was lost."""
        if self.is_due(str(error)[:80]):
            logger.warning("Tier %s failed to use its server: %s.", self._label, error)

    def refusal(self, code: str) -> None:
        """A server has answered an error."""
        if self.is_due(code):
            fix = _FIXES.get(code, "Look at its log")
            logger.warning("The server of tier %s answers %s. %s.", self._label, code, fix)
