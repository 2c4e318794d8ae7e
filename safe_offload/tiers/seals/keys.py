"""Reads the files of keys that tiers name."""

from __future__ import annotations

import contextlib
import logging
import re
import stat
from typing import TYPE_CHECKING, Final

from safe_offload.config.files import read_file
from safe_offload.config.printing import secret_file
from safe_offload.errors import ConfigError
from safe_offload.tiers.seals.seal import PLAIN, Seal

if TYPE_CHECKING:
    from safe_offload.config.tiers import TierConfig

logger = logging.getLogger(f"vllm.{__name__}")

_HMAC_KEY_BYTES_MIN: Final = 32
_ENCRYPTION_KEY: Final = re.compile(rb"[0-9A-Fa-f]{64}")
_FILE_BYTES_MAX: Final = 4096
_DISTINCT_MIN: Final = 12  # of 32 random bytes fewer are different once in 10**20 keys
_MAKE_ONE: Final = (
    "create one with `openssl rand -hex 32`, and give the same file to all engines that share"
)
_HIDE_IT: Final = "set its mode to 0400, or 0440 in a Kubernetes secret (defaultMode)"


def open_seal(config: TierConfig) -> Seal:
    """Return the seal of a tier: PLAIN without a file of keys.

    ConfigError: a file has no key, one that can be guessed, or is not kept from others.
    """
    if config.encryption_key_file is not None:
        from safe_offload.tiers.seals.encryption import Encryption

        return Encryption(_read_encryption_keys(config.encryption_key_file))
    path = config.hmac_key_file
    return PLAIN if path is None else Seal(_read_hmac_key(path))


def _read_hmac_key(path: str) -> bytes:
    """Return the key, in hexadecimal digits or as it is; white space around text is not part."""
    key, mode = _read("hmac_key_file", path)
    if key.isascii():
        key = key.strip()
    with contextlib.suppress(ValueError):  # else it is the key itself
        key = bytes.fromhex(key.decode())
    if len(key) < _HMAC_KEY_BYTES_MIN:
        problem = f"has {len(key)} bytes; expected at least {_HMAC_KEY_BYTES_MIN} random ones"
        raise _refused("hmac_key_file", path, problem)
    _require_random("hmac_key_file", path, key)
    if mode & stat.S_IRWXO:
        logger.warning(
            "The key in %s can be read by every user of this machine (mode %04o): anyone with the "
            "key can forge objects. Fix: %s.",
            *(path, stat.S_IMODE(mode), _HIDE_IT),
        )
    return key


def _read_encryption_keys(path: str) -> list[bytes]:
    """Return the keys, one a line, each of 64 hexadecimal digits."""
    setting = "encryption_key_file"
    content, mode = _read(setting, path)
    if mode & stat.S_IRWXO:
        raise ConfigError(
            f'the keys in "{setting}", {path}, can be read by every user of this machine (mode '
            f"{stat.S_IMODE(mode):04o}). Fix: {_HIDE_IT}."
        )
    words = content.split()
    for number, word in enumerate(words or [b""], start=1):
        if not _ENCRYPTION_KEY.fullmatch(word):
            raise _refused(setting, path, f"is not 64 hexadecimal digits (key {number})")
    keys = [bytes.fromhex(word.decode()) for word in words]
    for key in keys:
        _require_random(setting, path, key)
    return keys


def _read(setting: str, path: str) -> tuple[bytes, int]:
    try:
        content, mode = read_file(path, _FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f'the key in "{setting}", {secret_file(path)}, cannot be read: {error.strerror}. '
            f"Fix: name a file that vLLM's user can read; {_MAKE_ONE}."
        ) from None
    if len(content) > _FILE_BYTES_MAX:
        raise _refused(setting, path, f"is longer than {_FILE_BYTES_MAX} bytes")
    return content, mode


def _require_random(setting: str, path: str, key: bytes) -> None:
    if len(set(key)) < _DISTINCT_MIN:
        problem = f"is not random: it has {len(set(key))} different bytes"
        raise _refused(setting, path, problem)


def _refused(setting: str, path: str, problem: str) -> ConfigError:
    return ConfigError(f'the key in "{setting}", {path}, {problem}. Fix: {_MAKE_ONE}.')
