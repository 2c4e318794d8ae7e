"""Log lines about a Valkey or Redis server: each kind at most once a minute.

Nothing that a server writes is shown except the code of an error: its text may contain a password.
"""

from __future__ import annotations

import logging
from typing import Final

from safe_offload.tiers.base import PlaceError
from safe_offload.tiers.naming import ALL_KEYS
from safe_offload.tiers.rare_log import RareLog
from safe_offload.tiers.valkey.commands import (
    DELETING,
    KNOWN,
    LOOKING,
    READING,
    SLOTS,
    WITH_TTL,
    WRITING,
    allowing,
)
from safe_offload.tiers.valkey.replies import ErrorReply

logger = logging.getLogger(f"vllm.{__name__}")

_FIXES: Final = {
    "OOM": "It is full and evicts nothing: set its maxmemory-policy to allkeys-lru",
    "NOPERM": (
        f"The ACL of its user does not allow it: reading needs {allowing(READING)} (with a ttl "
        f"{allowing(WITH_TTL)}), writing {allowing(WRITING)}, a cluster {allowing([SLOTS])}, all "
        f"for ~{ALL_KEYS}"
    ),
    "NOAUTH": 'It requires a password: put it into "password_file", and the user into the url',
    "READONLY": "It is a replica: name the primary in the url",
    "MISCONF": 'It cannot write its snapshot to disk: check its log, or set its save to ""',
    "LOADING": "It is loading its snapshot: no action needed",
    "MASTERDOWN": "It has lost its primary: check the other servers",
    "CLUSTERDOWN": "Part of its cluster is down: check its other servers",
    "MOVED": (
        "Its cluster redirects in a loop, or its user may not look up key slots: allow "
        f"{allowing([SLOTS])}, and compare the CLUSTER SLOTS of its servers"
    ),
    "TRYAGAIN": "Its cluster is migrating keys: no action needed",
}


class ServerLog(RareLog):
    """Logs refusals of a server, too, with their fixes."""

    def password_in_url(self) -> None:
        """Log that others can see the password."""
        logger.warning(
            "The url of tier %s contains a password, which vLLM logs with its arguments. Fix: "
            'put it into a file, and set "password_file".',
            self._label,
        )

    def refusal(self, answer: ErrorReply) -> None:
        """Log an error reply."""
        code, command = answer.code, _named(answer)
        if self.is_due((code, command)):
            fix = _FIXES.get(code, "Check its log")
            if command:
                fix = f"Its user may not run {command}: {_grant(command)}"
            logger.warning("The server of tier %s answers %s. %s.", self._label, code, fix)


def _named(answer: ErrorReply) -> str:
    """Return the command that its user may not run; empty if it is none of those we send."""
    return answer.command if answer.code == "NOPERM" and answer.command in KNOWN else ""


def _grant(command: str) -> str:
    return f"add {allowing([command])} to its ACL"


def refusal(answer: ErrorReply) -> PlaceError:
    """Return the meaning of a refusal to an operator, and the fix; no word of the server's."""
    if command := _named(answer):
        fix = _grant(command)
        return PlaceError(f"it denies this user {command}", f"{fix[0].upper()}{fix[1:]}")
    if answer.code == "NOPERM":
        return PlaceError(
            "it denies this user required commands or keys",
            f"Log in as a user whose ACL has ~{ALL_KEYS} {allowing(LOOKING)}, and "
            f"{allowing(DELETING)} to delete",
        )
    if answer.code == "LOADING":
        return PlaceError("it is still loading its data", "Try again when it has")
    if answer.code in ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"):
        problem = f"it is a cluster that is changing ({answer.code})"
        return PlaceError(problem, "Try again later")
    return PlaceError(f"it answers with an error ({answer.code})", "Check the server's log")
