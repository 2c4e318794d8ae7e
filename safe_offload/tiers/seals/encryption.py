"""Encrypted objects: AES-256-GCM, whose tag takes the place of a checksum or a signature.

The last 64 bytes of the header are the id of the key (16), a random salt (32) and the tag (16);
what precedes the tag is associated data, so an object is accepted under its own name, in its own
namespace, only. Each object has a key of its own, HKDF-SHA256 of the key and the salt, and so its
nonce may be constant: two objects would have to draw the same 256 bits, however many there are.

All keys of a file have the same namespaces, in which other objects, plain ones too, are misses: who
can write to a tier could plant them.

Source: NIST SP 800-38D; RFC 5869.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from safe_offload.tiers import naming
from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.naming import DESCRIPTION_FILE, ENCRYPTED_VERSION, HEADER_BYTES, KEYED_BYTES
from safe_offload.tiers.seals.seal import FACT, Room, Seal, judge_open_part, new_room

_KEY_BYTES: Final = 32
_ID_BYTES: Final = 16
_SALT_BYTES: Final = 32
_TAG_BYTES: Final = 16
_NONCE: Final = bytes(12)
_PIECE_BYTES: Final = 64 << 10
"""Decrypted at once: they are in the processor's cache, and their copy is memory of the heap."""


class Encryption(Seal):
    """Encrypts objects with the first of `keys`, random ones of 32 bytes, and decrypts with all."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        super().__init__(keys[0])
        self.version = ENCRYPTED_VERSION
        self._keys = {_derived(key, None, b"id")[:_ID_BYTES]: key for key in keys}
        self.facts = {FACT: "aes-256-gcm"}

    def seal(self, name: Name, buffers: Buffers, room: Room = new_room) -> tuple[bytes, Buffers]:
        length_bytes = sum(buffer.nbytes for buffer in buffers)
        key_id, key = next(iter(self._keys.items()))
        salt = secrets.token_bytes(_SALT_BYTES)
        fields = naming.header(name, length_bytes, 0, version=self.version)
        head = fields[:-KEYED_BYTES] + key_id + salt
        encryptor = _cipher(key, salt).encryptor()
        encryptor.authenticate_additional_data(head)
        body = room(length_bytes)
        start = 0
        for buffer in buffers:
            end = start + buffer.nbytes
            encryptor.update_into(buffer, body[start:end])
            start = end
        encryptor.finalize()
        return head + encryptor.tag, (body,)

    def judge(self, found: bytes, name: Name, buffers: Sequence[memoryview]) -> Result:
        if (decryptor := self._decryptor(found)) is not None:
            for buffer in buffers:
                for start in range(0, buffer.nbytes, _PIECE_BYTES):
                    piece = buffer[start : start + _PIECE_BYTES]
                    # The library leaves open what becomes of memory that is source and target.
                    decryptor.update_into(bytes(piece), piece)
        return _verdict(decryptor, found, name, sum(buffer.nbytes for buffer in buffers))

    def examine(self, found: bytes, name: Name, pieces: Iterable[memoryview]) -> tuple[int, Result]:
        decryptor = self._decryptor(found)
        length_bytes = 0
        for piece in pieces:
            if decryptor is not None:
                decryptor.update(piece)
            length_bytes += piece.nbytes
        return length_bytes, _verdict(decryptor, found, name, length_bytes)

    def closed_description(self, namespace: bytes, text: bytes) -> bytes:
        """See `Seal.closed_description`: an object of its own, under the name of its file."""
        head, body = self.seal(_description_of(namespace), (memoryview(text),))
        return b"".join((head, *body))

    def opened_description(self, namespace: bytes, stored: bytes) -> bytes:
        head, text = stored[:HEADER_BYTES], bytearray(stored[HEADER_BYTES:])
        result = self.judge(head, _description_of(namespace), [memoryview(text)])
        return bytes(text) if result is Result.DONE else stored

    def _decryptor(self, found: bytes) -> AEADDecryptionContext | None:
        """Return a decryptor of the bytes after a header; None without their key."""
        key_and_salt = found[-KEYED_BYTES:-_TAG_BYTES]
        if (key := self._keys.get(key_and_salt[:_ID_BYTES])) is None:
            return None
        salt = key_and_salt[_ID_BYTES:]
        decryptor = _cipher(key, salt).decryptor()
        decryptor.authenticate_additional_data(found[:-_TAG_BYTES])
        return decryptor


def _verdict(
    decryptor: AEADDecryptionContext | None, found: bytes, name: Name, length_bytes: int
) -> Result:
    """Judge an object whose bytes have been decrypted, if its key is known."""
    result = judge_open_part(found, name, length_bytes, ENCRYPTED_VERSION)
    if result is not Result.DONE:
        return result
    if decryptor is None:
        return Result.UNDECRYPTABLE
    try:
        decryptor.finalize_with_tag(found[-_TAG_BYTES:])
    except InvalidTag:
        return Result.CORRUPT
    return Result.DONE


def _cipher(key: bytes, salt: bytes) -> Cipher[GCM]:
    return Cipher(AES256(_derived(key, salt, b"object")), GCM(_NONCE))


def _derived(key: bytes, salt: bytes | None, purpose: bytes) -> bytes:
    return HKDF(SHA256(), _KEY_BYTES, salt, b"safe_offload: " + purpose).derive(key)


def _description_of(namespace: bytes) -> Name:
    return Name(namespace, 0, DESCRIPTION_FILE.encode())
