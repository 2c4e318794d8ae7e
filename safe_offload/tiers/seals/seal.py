"""The seal of an object: the header before its bytes, by which they are judged when they are read.

Without a key, the header contains the XXH3 of the bytes, which detects damage, but which an
attacker can compute. With a key for signing, the last 64 bytes of the header are the BLAKE3 of the
bytes and the HMAC-SHA256 of the preceding header: nobody without the key can write an object that
is accepted. With keys for encryption (encryption.py), nobody can read its bytes either.

Engines with different keys for signing, or none, have namespaces of their own, and neither see nor
delete each other's objects.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import xxhash
from blake3 import blake3

from safe_offload.errors import ConfigError
from safe_offload.threads import start_threads
from safe_offload.tiers import naming
from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.naming import FORMAT_VERSION, KEYED_BYTES, SEALED_VERSION
from safe_offload.tiers.waiting import outlast

logger = logging.getLogger(f"vllm.{__name__}")

T = TypeVar("T")

FACT: Final = "seal"
"""Name of the fact with the key of a namespace's objects."""
NOT_CHECKED: Final = "it is sealed with a key: not checked"

_DIGEST_BYTES: Final = 32  # of BLAKE3, and of HMAC-SHA256
_FINGERPRINT_BYTES: Final = 8
# No header begins like this, so it reveals nothing about the seal of any object.
_FINGERPRINT_OF: Final = b"safe_offload: fingerprint of a key"
_OFF_LOOP_BYTES: Final = 512 << 10
"""From here on a digest takes longer than the way to another thread and back."""
_NUM_THREADS: Final = 2

Room = Callable[[int], memoryview]
"""Returns writable memory of a length, for bytes that are not stored as they are in the slot."""


def new_room(size_bytes: int) -> memoryview:
    """Return new memory, which is not cleared: that would cost half of encrypting it."""
    return np.empty(size_bytes, np.uint8).data


class Digest(Protocol):
    """A digest of bytes that arrive piece by piece."""

    def update(self, piece: memoryview, /) -> None:
        """Add the next bytes."""

    def digest(self) -> bytes:
        """Return the digest of the bytes so far."""


class Seal:
    """Makes the header of an object, and judges an object by it; any thread may use it.

    Without `key`, random bytes (keys.py), headers are not signed. `facts` are added to those of a
    namespace; they reveal no more of a key than any object.
    """

    def __init__(self, key: bytes = b"") -> None:
        self._key = key
        self.version = SEALED_VERSION if key else FORMAT_VERSION
        self.facts: Mapping[str, str] = {}
        if key:
            fingerprint = hmac.digest(key, _FINGERPRINT_OF, "sha256")[:_FINGERPRINT_BYTES]
            self.facts = {FACT: f"hmac-sha256 blake3, key {fingerprint.hex()}"}

    def header(self, name: Name, buffers: Sequence[memoryview]) -> bytes:
        """Return the header of an object, HEADER_BYTES long; `buffers` are its bytes."""
        return self._header(name, *self._digest(buffers))

    def seal(self, name: Name, buffers: Buffers, room: Room = new_room) -> tuple[bytes, Buffers]:
        """Return an object as it is stored: its header, and its bytes.

        These are `buffers` themselves, or made of them in memory that `room` returns.
        """
        return self.header(name, buffers), buffers

    def judge(self, found: bytes, name: Name, buffers: Sequence[memoryview]) -> Result:
        """Judge an object by the header and bytes that were read: see `naming.compare`.

        If it is DONE, `buffers` contain what was sealed; else they may contain anything.
        """
        return self.examine(found, name, buffers)[1]

    def examine(self, found: bytes, name: Name, pieces: Iterable[memoryview]) -> tuple[int, Result]:
        """Return the number of bytes of an object, and what `judge` would say; nothing is changed.

        `found` is a header of this version.
        """
        length_bytes, digest = self._digest(pieces)
        return length_bytes, naming.compare(found, self._header(name, length_bytes, digest), name)

    async def seal_async(self, name: Name, buffers: Buffers) -> tuple[bytes, Buffers]:
        """Seal an object, on another thread if that takes long.

        When this returns or raises, nothing reads the buffers any more, except the caller.
        """
        return await self._off_loop(buffers, self.seal, name, buffers)

    def begin_digest(self) -> Digest | None:
        """Return a digest to update while the bytes of an object are in the processor's cache.

        None with a key: that takes longer, and is done on another thread.
        """
        return None if self._key else self._new_digest()

    async def judge_async(
        self,
        found: bytes,
        name: Name,
        buffers: Sequence[memoryview],
        digest: Digest | None = None,
    ) -> Result:
        """Judge an object as `judge`, off the loop as `seal_async`.

        `digest`: of the bytes, if it was made while they arrived.
        """
        if digest is not None:
            length_bytes = sum(buffer.nbytes for buffer in buffers)
            return naming.compare(found, self._header(name, length_bytes, digest.digest()), name)
        return await self._off_loop(buffers, self.judge, found, name, buffers)

    def closed_description(self, namespace: bytes, text: bytes) -> bytes:
        """Return the description of a namespace as it is stored beside its objects."""
        return text

    def opened_description(self, namespace: bytes, stored: bytes) -> bytes:
        """Return the text of a stored description; unchanged if it cannot be decrypted."""
        return stored

    def problem_of(self, found: bytes, name: Name, pieces: Iterable[memoryview]) -> str:
        """Return the problem of an object, for people to read; empty if there is none.

        NOT_CHECKED if its header is right as far as can be seen without its key.
        """
        version = naming.version_of(found)
        if version == self.version:
            length_bytes, result = self.examine(found, name, pieces)
        elif naming.is_sealed(found):
            length_bytes = sum(piece.nbytes for piece in pieces)
            result = judge_open_part(found, name, length_bytes, version)
        else:
            return "it has no header of this version"
        if result is Result.DONE:
            return "" if version == self.version else NOT_CHECKED
        if result is Result.UNDECRYPTABLE:
            return NOT_CHECKED
        if result is Result.FOREIGN:
            return "its header names another object"
        says_bytes = naming.length_of(found)
        if says_bytes != length_bytes:
            return f"it has {length_bytes} bytes, its header says {says_bytes}"
        return "its seal is wrong" if naming.is_sealed(found) else "its checksum is wrong"

    def _digest(self, pieces: Iterable[memoryview]) -> tuple[int, bytes]:
        state = self._new_digest()
        length_bytes = 0
        for piece in pieces:
            state.update(piece)
            length_bytes += piece.nbytes
        return length_bytes, state.digest()

    def _new_digest(self) -> Digest:
        state: Any = blake3() if self._key else xxhash.xxh3_64()
        return state  # type: ignore[no-any-return]

    def _header(self, name: Name, length_bytes: int, digest: bytes) -> bytes:
        if not self._key:
            return naming.header(name, length_bytes, int.from_bytes(digest, "big"))
        head = naming.header(name, length_bytes, 0, version=SEALED_VERSION)
        signed = head[:-KEYED_BYTES] + digest
        return signed + hmac.digest(self._key, signed, "sha256")

    async def _off_loop(
        self, buffers: Sequence[memoryview], work: Callable[..., T], *args: object
    ) -> T:
        if not self._key or sum(buffer.nbytes for buffer in buffers) < _OFF_LOOP_BYTES:
            return work(*args)
        try:
            job = _threads().submit(work, *args)
        except ConfigError as error:  # there are none to be had
            logger.debug("Digests are made on the event loop: %s", error)
            return work(*args)
        future = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            job.cancel()
            await outlast([future], job.cancel)
            raise


def judge_open_part(found: bytes, name: Name, length_bytes: int, version: int) -> Result:
    """Judge what anyone can see of the header of a sealed object."""
    expected = naming.header(name, length_bytes, 0, version=version)
    return naming.compare(found[:-KEYED_BYTES], expected[:-KEYED_BYTES], name)


PLAIN: Final = Seal()


def seal_of(facts: Mapping[str, object], *seals: Seal) -> Seal | None:
    """Return the seal with the key that facts name: PLAIN, one of `seals`, or None."""
    found = facts.get(FACT)
    return next((each for each in (PLAIN, *seals) if each.facts.get(FACT) == found), None)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads of all seals of this process; raise ConfigError if there are none."""
    return start_threads(_NUM_THREADS, "safe-offload-seal")
