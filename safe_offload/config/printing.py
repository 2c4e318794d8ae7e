"""What may be printed of what others wrote: no secret, and nothing that a terminal obeys.

A value is shown if it is one of a setting that holds no secret. What a user wrote under a key that
is none of ours is never shown, nor a list or a mapping: a password may be anywhere in it.
"""

import os
import re
from collections.abc import Mapping
from typing import Final

HIDDEN: Final = "***"
SECRET_KEYS: Final = ("password_file", "key_file", "hmac_key_file", "tenants")
"""Settings that may hold the secret itself by mistake."""
NOT_SHOWN: Final = object()
"""Stands in the place of a value that may hold anything."""
LENGTH_MAX: Final = 80

_INTEGER_END: Final = 10**30
_PLACE_KEYS: Final = ("url", "endpoint", "disk_path", "ca_file", "cert_file")
_WORD_LENGTH_MAX: Final = 20
"""No other value of a setting is longer, as keys and passwords may be."""
_KEY_LENGTH_MAX: Final = 32

_NOT_IN_PATHS: Final = r"?#@=&;,{}\"'"
_MACHINE: Final = r"[A-Za-z0-9._-]*(?::\d{1,5})?|\[[0-9A-Fa-f:.]*\](?::\d{1,5})?"
_PLACE: Final = re.compile(
    rf"/[^{_NOT_IN_PATHS}]*|(?:{_MACHINE})(?=[/?#]|$)(?:/[^{_NOT_IN_PATHS}\s]*)?", re.ASCII
)
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]{0,19}", re.ASCII | re.IGNORECASE)
_WORD: Final = re.compile(r"[^?@=&{}\"':]*|[a-z]*:[\w.-]{0,12}|/[^?@=&{}\"']*")
_UNRECOGNIZED: Final = "unrecognized arguments: "
_OPTION: Final = re.compile(r"--[a-z][a-z-]*")
_VALUE: Final = re.compile(
    r"(invalid [\w ]*value: ).*|(Value ).*(?= cannot be converted)", re.DOTALL
)


def printable(text: str, length_max: int = LENGTH_MAX) -> str:
    """Return a text in one line that moves no cursor, cut off where it is too long."""
    shown = text[: length_max + 1]
    if not shown.isprintable():
        shown = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown
        )
    return shown if len(shown) <= length_max else f"{shown[:length_max]}..."


def without_secrets(text: str) -> str:
    """Return a text in which logins and queries of a url are replaced, even of a bad one."""
    scheme, is_url, rest = text.partition("://")
    if not is_url:
        return text if _WORD.fullmatch(text) and "PRIVATE KEY" not in text else HIDDEN
    if not _SCHEME.fullmatch(scheme):
        return HIDDEN
    # Up to the last @: a password may have any character.
    login, has_login, rest = rest.rpartition("@")
    place = _PLACE.match(rest)
    if place is None or "?" in login or "#" in login:  # an @ may be in a query
        return f"{scheme}://{HIDDEN}"
    before = HIDDEN + has_login if has_login else ""
    after = HIDDEN if place.end() < len(rest) else ""
    return f"{scheme}://{before}{place[0]}{after}"


def shown(value: object, key: object = "") -> str:
    """Return a value as a user wrote it, short and without what could be a secret.

    `key` is the setting that it was written for; empty if it is a name itself.
    """
    if value is NOT_SHOWN or (key in SECRET_KEYS and value is not None):
        return HIDDEN
    if isinstance(value, str):
        is_place = key in _PLACE_KEYS and ("://" in value or value.startswith("/"))
        if key and not is_place and len(value) > _WORD_LENGTH_MAX:
            return HIDDEN
        return printable(f'"{without_secrets(value)}"')
    if value is None or type(value) in (bool, float):
        return repr(value)
    if type(value) is int and abs(value) < _INTEGER_END:
        return repr(value)
    if isinstance(value, list | tuple | Mapping):
        empty = "{}" if isinstance(value, Mapping) else "[]"
        return f"{empty[0]}{'...' if value else ''}{empty[1]}"
    return f"<{printable(type(value).__name__)}>"


def shown_key(key: object) -> str:
    """Return the name of a setting that is none of ours; none of ours is as long as a secret."""
    is_name = not isinstance(key, str) or len(key) <= _KEY_LENGTH_MAX
    return shown(key) if is_name else HIDDEN


def masked(value: object, key: object = "") -> object:
    """Return settings that have been checked, for JSON: the same without secrets."""
    if key in SECRET_KEYS and value is not None:
        return HIDDEN
    if isinstance(value, Mapping):
        return {name: masked(each, name) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [masked(each) for each in value]
    return without_secrets(value) if isinstance(value, str) else value


def secret_file(path: str) -> str:
    """Return the path of a file with a secret; hidden if no such folder is there.

    The secret may have been written where its path belongs.
    """
    folder = os.path.dirname(path)
    is_path = os.path.isfile(path) or (folder.strip("/") and os.path.isdir(folder))
    return path if is_path else HIDDEN


def without_arguments(problem: str) -> str:
    """Return what vLLM says of its arguments, without their values."""
    problem, mark, arguments = problem.partition(_UNRECOGNIZED)
    options = " ".join(option[0] for option in map(_OPTION.match, arguments.split()) if option)
    return _VALUE.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", problem) + mark + options
