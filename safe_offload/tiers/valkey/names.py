"""What objects are called on a Valkey or Redis server.

One key for each object, and one for the description of its namespace. Keys have no hash tag, so
that the objects of a namespace are spread over all nodes of a cluster.
"""

from __future__ import annotations

from typing import Final

from safe_offload.tiers.base import Name
from safe_offload.tiers.naming import (
    DESCRIPTION_FILE,
    is_namespace_folder,
    name_of,
    namespace_folder,
    path_of,
)

PREFIX: Final = "safe-offload:"
ALL_KEYS: Final = f"{PREFIX}*"
"""The pattern of all keys of ours, for SCAN."""


def key_of(name: Name) -> bytes:
    """Return the key of an object."""
    return f"{PREFIX}{namespace_folder(name.namespace)}:{path_of(name)[1]}".encode()


def name_of_key(key: bytes) -> Name | None:
    """Return the name of the object with this key; None if an object never has it."""
    namespace, file = _parts(key)
    folder = file[-2:]
    found = name_of(namespace, file)
    return found if found is not None and path_of(found) == (folder, file) else None


def description_key(namespace: bytes) -> bytes:
    """Return the key of the description of a namespace."""
    return f"{PREFIX}{namespace_folder(namespace)}:{DESCRIPTION_FILE}".encode()


def namespace_of_key(key: bytes) -> str:
    """Return the namespace in a key of ours; empty if it is none."""
    namespace, file = _parts(key)
    return namespace if file and is_namespace_folder(namespace) else ""


def _parts(key: bytes) -> tuple[str, str]:
    """Return the namespace and the file of a key, empty if it is none of ours."""
    if not key.isascii():
        return "", ""
    prefix, _, rest = key.decode().partition(":")
    namespace, _, file = rest.partition(":")
    return (namespace, file) if f"{prefix}:" == PREFIX else ("", "")
