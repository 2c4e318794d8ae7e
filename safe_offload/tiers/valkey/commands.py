"""The commands that are sent to a Valkey or Redis server, by their names in an ACL.

This is the one list: the tier sends nothing else, and its log, the commands for operators and
docs/guides/security.md derive from it what to allow.

Source: https://valkey.io/topics/acl/; AUTH is always allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from safe_offload.config.tiers import ValkeyConfig

SELECT: Final = "select"
SETNAME: Final = "client|setname"
SLOTS: Final = "cluster|slots"
EXISTS: Final = "exists"
GET: Final = "get"
GETEX: Final = "getex"
SET: Final = "set"
PEXPIRE: Final = "pexpire"
DEL: Final = "del"

LOGIN: Final = (SELECT, SETNAME)
READING: Final = (GET, EXISTS)
WRITING: Final = (SET, DEL)
WITH_TTL: Final = (GETEX, PEXPIRE)
EVERY: Final = (*READING, *WRITING, *WITH_TTL, SLOTS, *LOGIN)
"""All commands of tiers."""
NOT_NEEDED: Final = frozenset({GETEX, DEL, SETNAME, SLOTS})
"""Without them, a tier reads with GET, which extends no ttl; keeps damaged objects; has no name in
CLIENT LIST; and cannot use a cluster."""

NO_TOUCH: Final = "client|no-touch"
IDLE: Final = "object|idletime"
SIZE: Final = "memory|usage"
LOOKING: Final = ("scan", "strlen", "getrange", "exists", IDLE, SIZE, SELECT, SLOTS)
DELETING: Final = ("unlink",)
"""Sent by `safe-offload cache`, with NO_TOUCH if that is known and allowed, else SIZE."""
KNOWN: Final = frozenset({*EVERY, *LOOKING, *DELETING, NO_TOUCH})


def sent_by(config: ValkeyConfig) -> tuple[str, ...]:
    """Return the commands of a tier of this configuration."""
    read, write = (GET, ()) if config.ttl_s is None else (GETEX, (PEXPIRE,))
    select = (SELECT,) if config.location.database else ()
    return (*select, SETNAME, SLOTS, EXISTS, read, SET, *write, DEL)


def words_of(name: str) -> tuple[bytes, ...]:
    """Return a command as it is sent."""
    return tuple(name.upper().encode().split(b"|"))


def allowing(names: Iterable[str]) -> str:
    """Return the part of an ACL that allows commands."""
    return " ".join(f"+{name}" for name in names)
