"""Reads the files of keys that tiers name."""

from __future__ import annotations

import contextlib
import logging
import stat
from typing import Final

from safe_offload.config.files import read_file
from safe_offload.config.printing import secret_file
from safe_offload.errors import ConfigError
from safe_offload.tiers.seals.seal import PLAIN, Seal

logger = logging.getLogger(f"vllm.{__name__}")

KEY_BYTES_MIN: Final = 32

_FILE_BYTES_MAX: Final = 4096
_DISTINCT_MIN: Final = 12  # of 32 random bytes fewer are different once in 10**20 keys
_MAKE_ONE: Final = (
    "create one with `openssl rand -hex 32`, and give the same file to all engines that share"
)


def open_seal(path: str | None) -> Seal:
    """Return the seal with the key in a file, in hexadecimal digits or as it is; PLAIN without one.

    Whitespace around text is not part of the key.

    Raises:
        ConfigError: there is no key in the file, or one that can be guessed.
    """
    return PLAIN if path is None else Seal(_read_key(path))


def _read_key(path: str) -> bytes:
    try:
        content, mode = read_file(path, _FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f'the key in "hmac_key_file", {secret_file(path)}, cannot be read: {error.strerror}. '
            f"Fix: name a file that vLLM's user can read; {_MAKE_ONE}."
        ) from None
    key = content.strip() if content.isascii() else content
    with contextlib.suppress(ValueError):  # else it is the key itself
        key = bytes.fromhex(key.decode())
    problem = _problem_of_key(key, len(content))
    if problem:
        raise ConfigError(f'the key in "hmac_key_file", {path}, {problem}. Fix: {_MAKE_ONE}.')
    if mode & stat.S_IRWXO:
        logger.warning(
            "The key in %s can be read by every user of this machine (mode %04o): anyone with the "
            "key can forge objects. Set its mode to 0400, or 0440 in a Kubernetes secret "
            "(defaultMode).",
            *(path, stat.S_IMODE(mode)),
        )
    return key


def _problem_of_key(key: bytes, num_content_bytes: int) -> str:
    if num_content_bytes > _FILE_BYTES_MAX:
        return f"is longer than {_FILE_BYTES_MAX} bytes"
    if len(key) < KEY_BYTES_MIN:
        return f"has {len(key)} bytes; expected at least {KEY_BYTES_MIN} random ones"
    if len(set(key)) < _DISTINCT_MIN:
        return f"is not random: it has {len(set(key))} different bytes"
    return ""
