"""Prints values that others wrote without secrets and without control characters.

Values of unknown keys, lists and mappings are never shown: a password may be anywhere in them.
"""

import os
import re
from collections.abc import Mapping
from typing import Final

HIDDEN: Final = "***"
SECRET_KEYS: Final = (
    "password_file",
    "key_file",
    "hmac_key_file",
    "encryption_key_file",
    "tenants",
)
"""Settings that may hold the secret itself by mistake."""
NOT_SHOWN: Final = object()
"""Takes the place of a value that may hold anything."""
LENGTH_MAX: Final = 80

_INTEGER_END: Final = 10**30
_PLACE_KEYS: Final = ("url", "endpoint", "disk_path", "ca_file", "cert_file")
_WORD_LENGTH_MAX: Final = 20
"""Longer values, other than places, may be keys or passwords."""
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
    """Return a text in one line, without control characters, truncated if too long."""
    shown = text[: length_max + 1]
    if not shown.isprintable():
        shown = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown
        )
    return shown if len(shown) <= length_max else f"{shown[:length_max]}..."


def without_secrets(text: str) -> str:
    """Return a text with the logins and queries of a url replaced, even of an invalid url."""
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
    """Return a value of a setting, or a name, shortened and without possible secrets."""
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
    """Return the name of an unknown setting, hidden if it is as long as a secret."""
    is_name = not isinstance(key, str) or len(key) <= _KEY_LENGTH_MAX
    return shown(key) if is_name else HIDDEN


def masked(value: object, key: object = "") -> object:
    """Return checked settings for JSON, without secrets."""
    if key in SECRET_KEYS and value is not None:
        return HIDDEN
    if isinstance(value, Mapping):
        return {name: masked(each, name) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [masked(each) for each in value]
    return without_secrets(value) if isinstance(value, str) else value


def secret_file(path: str) -> str:
    """Return the path of a secret's file; hidden, as it may be the secret, without its folder."""
    folder = os.path.dirname(path)
    is_path = os.path.isfile(path) or (folder.strip("/") and os.path.isdir(folder))
    return path if is_path else HIDDEN


def without_arguments(problem: str) -> str:
    """Return vLLM's error about its arguments without their values."""
    problem, mark, arguments = problem.partition(_UNRECOGNIZED)
    options = " ".join(option[0] for option in map(_OPTION.match, arguments.split()) if option)
    return _VALUE.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", problem) + mark + options
