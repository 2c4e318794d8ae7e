"""Reading one setting: what is allowed, and an error that names the key, the value and the fix."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

from safe_offload.errors import ConfigError

SIZE_FORMS: Final = (
    'a whole number of bytes, or a string with a unit such as "64GiB" (2**30) or "64GB" (10**9)'
)
_SAMPLE_PATTERN: Final = re.compile(r"sample:(?P<every>[0-9]{1,9})")
_SHOWN_LENGTH_MAX: Final = 80


def read_count(settings: Mapping[str, object], key: str, *, maximum: int) -> int:
    """Return a whole number of 1 to `maximum`."""
    value = settings[key]
    allowed = f"a whole number of 1 to {maximum}"
    if isinstance(value, str):
        raise value_error(
            key,
            value,
            problem="this is a string",
            allowed=allowed,
            fix=f'write the number without quotes, such as "{key}": 1',
        )
    count = integer(key, value, allowed=allowed, example="1")
    if 1 <= count <= maximum:
        return count
    problem = "it is too large" if count > maximum else "it is too small"
    raise value_error(
        key, value, problem=problem, allowed=allowed, fix="choose a number in that range"
    )


def read_count_or_auto(settings: Mapping[str, object], key: str, *, maximum: int) -> int | None:
    """Return a whole number of 0 to `maximum`; None for "auto" or where the key is missing."""
    value = settings.get(key, "auto")
    if isinstance(value, str) and value == "auto":
        return None
    allowed = f'"auto", or a whole number of 0 to {maximum}'
    fix = f'write "{key}": "auto" or "{key}": 256, or leave it out for "auto"'
    if isinstance(value, str):
        problem = "this is a string"
    else:
        count = integer(key, value, allowed=allowed, example="256")
        if 0 <= count <= maximum:
            return count
        problem = "it is too large" if count > maximum else "it is negative"
    raise value_error(key, value, problem=problem, allowed=allowed, fix=fix)


def read_seconds(settings: Mapping[str, object], key: str, *, maximum: int) -> float:
    """Return a time in seconds, more than 0 and at most `maximum`."""
    value = settings[key]
    fix = f'write the number of seconds without quotes, such as "{key}": 30'
    if isinstance(value, bool) or not isinstance(value, int | float):
        problem = f"this is {type_name(value)}, not a number"
    elif 0 < value <= maximum:  # false too for what is not a number
        return float(value)
    else:
        problem = "it is too large" if value > maximum else "it is not more than 0"
    allowed = f"seconds, more than 0 and at most {maximum}"
    raise value_error(key, value, problem=problem, allowed=allowed, fix=fix)


def read_sampling(settings: Mapping[str, object], key: str) -> int:
    """Return one in how many is looked at: 0 for "off", 1 for "load", N for "sample:N"."""
    value = settings.get(key, "off")
    if isinstance(value, str):
        if value in ("off", "load"):
            return 0 if value == "off" else 1
        match = _SAMPLE_PATTERN.fullmatch(value)
        if match is not None and int(match["every"]) > 0:
            return int(match["every"])
        problem = "there is no such mode"
    else:
        problem = f"this is {type_name(value)}, not a string"
    raise value_error(
        key,
        value,
        problem=problem,
        allowed='"off", "load" (every loaded slot) or "sample:N" (one in N, N from 1 to 999999999)',
        fix=f'write "{key}": "load", or leave the key out to compare nothing',
    )


def read_choice(settings: Mapping[str, object], key: str, choices: Sequence[str]) -> str:
    """Return one of a few words, the first where the key is missing."""
    value = settings.get(key, choices[0])
    if isinstance(value, str) and value in choices:
        return value
    raise value_error(
        key,
        value,
        problem="there is no such choice",
        allowed=", ".join(f'"{choice}"' for choice in choices),
        fix=f'write "{key}": "{choices[0]}", or leave it out',
    )


def read_switch(settings: Mapping[str, object], key: str) -> bool:
    """Return a boolean that is false where the key is missing."""
    value = settings.get(key, False)
    if isinstance(value, bool):
        return value
    raise value_error(
        key,
        value,
        problem=f"this is {type_name(value)}, not a boolean",
        allowed="true or false (True or False in Python), without quotes",
        fix=f'write "{key}": true or "{key}": false',
    )


def integer(key: str, value: object, *, allowed: str = SIZE_FORMS, example: str = '"64GiB"') -> int:
    """Return an integer, or a float without fraction, as the integer that it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__int__(value)
    fix = f'write "{key}": {example}'
    if not isinstance(value, float):
        problem = f"this is {type_name(value)}, not a number"
        if value is None:
            fix += ", or leave the key out for its default"
    elif not math.isfinite(value):
        problem = "this is not a finite number"
    elif float.is_integer(value):
        return int(value)
    else:
        problem = "it has a fraction"
        fix = f'write "{key}": {math.floor(value)}, or with a unit as in {example}'
    raise value_error(key, value, problem=problem, allowed=allowed, fix=fix)


def value_error(key: str, value: object, *, problem: str, allowed: str, fix: str) -> ConfigError:
    """Return the error for a known key with a value that cannot be used."""
    return ConfigError(
        f'kv_connector_extra_config["{key}"] = {shown(value)}: {problem}. '
        f"Allowed: {allowed}. Fix: {fix}."
    )


def type_name(value: object) -> str:
    """Return the name of a value's type as users of JSON and Python know it."""
    return "null (None)" if value is None else f"a value of type {type(value).__name__}"


def shown(value: object) -> str:
    """Return a short rendering of any value, also of one that cannot be rendered."""
    try:
        text = f'"{value}"' if isinstance(value, str) else repr(value)
    except Exception:
        # Whatever was passed may fail to render: Python refuses integers of 4301 digits.
        return f"<{type(value).__name__}>"
    if not text.isprintable():
        # A message is one line, and a terminal or a log file must be able to show it.
        text = text[: _SHOWN_LENGTH_MAX + 1].encode("unicode_escape").decode()
    return text if len(text) <= _SHOWN_LENGTH_MAX else f"{text[:_SHOWN_LENGTH_MAX]}..."
