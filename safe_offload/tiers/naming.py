"""The names of objects, and the header that identifies an object.

A *namespace* is a digest of all that the bytes of a block depend on, including the rank: an engine
with the same namespace may use the object. Within it, an object is found by its group and its hash.
Names of folders and files are hexadecimal digits only, so no hash is ever a path.

An object begins with a header of 4 KiB, so its bytes lie on a page. A reader compares the whole
header with the one expected for the name and the bytes. Objects that are signed or encrypted with a
key have versions of their own (seals).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import struct
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from safe_offload.config.units import KIB
from safe_offload.tiers.base import Name, Result

FORMAT_VERSION: Final = 1
SEALED_VERSION: Final = 2
ENCRYPTED_VERSION: Final = 3
HEADER_BYTES: Final = 4096
KEYED_BYTES: Final = 64
"""At the end of a header, which only the owner of a key can make."""
NAMESPACE_BYTES: Final = 16
NAMESPACES_MAX: Final = 100
"""Remembered at most; each reset may begin another."""
HASH_BYTES_MAX: Final = 64
DESCRIPTION_FILE: Final = "namespace.json"
DESCRIPTION_BYTES_MAX: Final = 192 * KIB
"""Read of a description at most: anyone may have written it."""
KEY_BYTES_MAX: Final = 2048

_DEPTH_MAX: Final = 8
"""Of the facts of a description."""

_MAGIC: Final = b"SafeKV\r\n"  # a transfer that changes ends of lines changes it
# Magic, version, group, bytes of the namespace and of the key, bytes of the object, checksum.
_FIELDS: Final = struct.Struct("<8sHHHHQQ")
_FOLDER: Final = re.compile(r"[0-9a-f]{2}")
_NAMESPACE: Final = re.compile(rf"[0-9a-f]{{{2 * NAMESPACE_BYTES}}}")
_OBJECT: Final = re.compile(rf"[0-9a-f]{{6,{4 + 2 * HASH_BYTES_MAX}}}")


# ---- the namespace ----------------------------------------------------------------------------


def namespace(facts: Mapping[str, object], generation: str = "") -> bytes:
    """Return the digest of all facts, in any order, that the bytes depend on; values are JSON's.

    `generation` is of the engine's own after a reset, or empty.
    """
    written = json.dumps(
        {"format": FORMAT_VERSION, "word": generation, "facts": dict(facts)},
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
    )
    return hashlib.sha256(written.encode()).digest()[:NAMESPACE_BYTES]


def description(found: bytes, facts: Mapping[str, object]) -> bytes:
    """Return the text that lies beside the objects of a namespace, for people to read."""
    written = {
        "format": FORMAT_VERSION,
        "after_reset": found != namespace(facts),
        "facts": dict(facts),
    }
    return json.dumps(written, indent=1, sort_keys=True).encode() + b"\n"


def facts_of(described: bytes) -> dict[str, Any]:
    """Return the facts of a description; none if it is not one."""
    facts = _read_description(described).get("facts")
    return facts if isinstance(facts, dict) else {}


def is_after_reset(described: bytes) -> bool:
    """Return whether the namespace of a description includes a generation."""
    return _read_description(described).get("after_reset") is True


def _read_description(described: bytes) -> dict[str, Any]:
    try:
        read = json.loads(described[:DESCRIPTION_BYTES_MAX], parse_constant=_refuse)
    except (ValueError, RecursionError):  # anyone may have written it
        return {}
    return read if isinstance(read, dict) and _is_flat(read) else {}


def _refuse(constant: str) -> NoReturn:
    """Refuse NaN and the infinities, which JSON does not have."""
    raise ValueError(constant)


def _is_flat(read: object, depth: int = 0) -> bool:
    """Return whether a value is shallow enough for any code that prints or copies it."""
    inside = read.values() if isinstance(read, dict) else read if isinstance(read, list) else ()
    return depth < _DEPTH_MAX and all(_is_flat(each, depth + 1) for each in inside)


# ---- names of files ---------------------------------------------------------------------------


def namespace_folder(found: bytes) -> str:
    """Return the name of the folder of a namespace."""
    return found.hex()


def path_of(name: Name) -> tuple[str, str]:
    """Return the folder below that of the namespace, one of 256, and the file of an object."""
    return name.block_hash[-1:].hex(), f"{name.group_idx:04x}{name.block_hash.hex()}"


def name_of(folder: str, file: str) -> Name | None:
    """Return the object in a file of a namespace's folder; None if no object is called that."""
    if not is_namespace_folder(folder) or not _OBJECT.fullmatch(file) or len(file) % 2:
        return None
    return Name(bytes.fromhex(folder), int(file[:4], 16), bytes.fromhex(file[4:]))


def is_namespace_folder(name: str) -> bool:
    """Return whether the folder of a namespace may be called that."""
    return _NAMESPACE.fullmatch(name) is not None


def is_object_folder(name: str) -> bool:
    """Return whether one of the 256 folders of a namespace is called that."""
    return _FOLDER.fullmatch(name) is not None


# ---- the header -------------------------------------------------------------------------------


def header(name: Name, length_bytes: int, digest: int, *, version: int = FORMAT_VERSION) -> bytes:
    """Return the header of an object, HEADER_BYTES long."""
    key, lengths = name.block_hash, (len(name.namespace), len(name.block_hash))
    fields = _FIELDS.pack(_MAGIC, version, name.group_idx, *lengths, length_bytes, digest)
    return (fields + name.namespace + key).ljust(HEADER_BYTES, b"\0")


def version_of(found: bytes) -> int:
    """Return the version of a header; 0 if it is none."""
    if len(found) < HEADER_BYTES or not found.startswith(_MAGIC):
        return 0
    version: int = _FIELDS.unpack_from(found)[1]
    return version


def length_of(found: bytes) -> int:
    """Return the number of bytes of the object by its header, of any version."""
    length_bytes: int = _FIELDS.unpack_from(found)[5]
    return length_bytes


def is_sealed(found: bytes) -> bool:
    """Return whether an object was signed or encrypted with a key, by its header."""
    return version_of(found) in (SEALED_VERSION, ENCRYPTED_VERSION)


def compare(found: bytes, expected: bytes, name: Name) -> Result:
    """Judge an object by its header and the expected one.

    DONE, FOREIGN if the header names another object, or CORRUPT. The time that this takes does not
    reveal how much of the header is right.
    """
    if hmac.compare_digest(found, expected):
        return Result.DONE
    start, end = len(_MAGIC), _FIELDS.size
    identity_end = end + len(name.namespace) + len(name.block_hash)
    # Between the two lie the length and the checksum.
    same_name = (
        found[start : end - 16] == expected[start : end - 16]
        and found[end:identity_end] == expected[end:identity_end]
    )
    is_header = found[:start] == _MAGIC
    return Result.CORRUPT if same_name or not is_header else Result.FOREIGN


# ---- in a store of keys: a server, or Mooncake Store ---------------------------------------------
# Keys have no hash tag, so that the objects of a namespace are spread over all nodes of a cluster.

PREFIX: Final = "safe-offload:"
ALL_KEYS: Final = f"{PREFIX}*"
"""The pattern of all keys of ours, for SCAN."""


def key_of(name: Name) -> bytes:
    """Return the key of an object."""
    return f"{PREFIX}{namespace_folder(name.namespace)}:{path_of(name)[1]}".encode()


def name_of_key(key: bytes) -> Name | None:
    """Return the name of the object with this key; None if an object never has it."""
    return name_of(*_parts(key))


def description_key(namespace: bytes) -> bytes:
    """Return the key of the description of a namespace."""
    return f"{PREFIX}{namespace_folder(namespace)}:{DESCRIPTION_FILE}".encode()


def namespace_of_key(key: bytes) -> str:
    """Return the namespace in a key of ours; empty if it is none."""
    namespace, file = _parts(key)
    return namespace if file and is_namespace_folder(namespace) else ""


def _parts(key: bytes) -> tuple[str, str]:
    """Return the namespace and the file of a key, empty if it is none of ours."""
    if len(key) > KEY_BYTES_MAX or not key.isascii():
        return "", ""
    prefix, _, rest = key.decode().partition(":")
    namespace, _, file = rest.partition(":")
    return (namespace, file) if f"{prefix}:" == PREFIX else ("", "")
