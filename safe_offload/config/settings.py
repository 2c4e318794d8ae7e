"""Kinds of settings: each reads one value, or says what is allowed and what to write instead."""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, NoReturn

from safe_offload.config.printing import shown
from safe_offload.config.units import GIB, KIB, TIB, format_bytes
from safe_offload.errors import ConfigError

# Less than one memory page is never a size: it is a number of GiB written without its unit.
MIN_SIZE_BYTES: Final = 4 * KIB
# Half of the 128 TiB that a process can address on x86-64 with four-level page tables.
# Source: Linux kernel, Documentation/arch/x86/x86_64/mm.rst.
MAX_BYTES_PER_RANK: Final = 64 * TIB

_SIZE_FORMS: Final = (
    'an integer number of bytes, or a string with a unit such as "64GiB" (2**30) or "64GB" (10**9)'
)
_UNIT_BYTES: Final = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("i", 1024), ("b", 1000))
}
_SIZE_PATTERN: Final = re.compile(
    r"(?P<number>\d+(?:_\d+)*(?:\.\d+)?(?:e\+?\d{1,2})?)\s*(?P<unit>[a-z]*)",
    re.ASCII | re.IGNORECASE,
)
UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", re.ASCII)
_SIZE_LENGTH_MAX: Final = 40
TEXT_LENGTH_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Kind:
    """What the values of a setting have in common.

    Attributes:
        allowed: what may be written, in a few words.
        read: from a key and the value that was written to what it means, or to a ConfigError.
    """

    allowed: str
    read: Callable[[str, object], Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """A key that users may write; `default` as they would write it, None if it has no value.

    `elsewhere` is what to do instead where only other kinds of place have the setting.
    """

    key: str
    kind: Kind
    default: object
    help: str
    elsewhere: str


class NestedKey(str):
    """A key inside of another setting; `within` are the keys around it, as Python writes them.

    Without any, it is no key itself, but such keys.
    """

    within: str

    def __new__(cls, key: str, within: str) -> "NestedKey":
        place = super().__new__(cls, key)
        place.within = within
        return place


def setting(
    kind: Kind,
    default: object,
    help: str,
    *,
    key: str = "",
    is_secret: bool = False,
    elsewhere: str = "",
) -> Any:
    """Return the field of a dataclass that is a setting; `key` if it is not the field's name."""
    value = None if default is None else kind.read(key, default)
    metadata = {"setting": (key, kind, default, help, elsewhere)}
    return dataclasses.field(default=value, repr=not is_secret, metadata=metadata)


def settings_of(config_class: Any) -> dict[str, Setting]:
    """Return the settings of a dataclass, by the names of their fields."""
    fields = (field for field in dataclasses.fields(config_class) if field.metadata)
    rows = ((field.name, *field.metadata["setting"]) for field in fields)
    return {name: Setting(key or name, *rest) for name, key, *rest in rows}


def size(maximum: int, *, num_ranks: int = 1) -> Kind:
    """Return the kind of a number of bytes; `num_ranks` share it, and each must get enough."""
    minimum = MIN_SIZE_BYTES * num_ranks
    among = f" for {num_ranks} ranks" if num_ranks > 1 else ""
    allowed = f"{_SIZE_FORMS}, {format_bytes(minimum)}{among} to {format_bytes(maximum)}"

    def read(key: str, value: object) -> int:
        if isinstance(value, str):
            size_bytes = _size_from_string(key, value)
        else:
            size_bytes = _integer(key, value, _SIZE_FORMS, '"64GiB"')
        if minimum <= size_bytes <= maximum:
            return size_bytes
        fix = f"write a size with its unit, such as {_example(key)}"
        if size_bytes < 0:
            problem = "it is negative"
        elif size_bytes == 0:
            problem = "it is zero"
            fix += ", or remove the connector to run without one"
        elif size_bytes > maximum:
            problem = "it is too large"
        else:
            problem = f"{size_bytes} bytes is too small{among}"
            if size_bytes < MIN_SIZE_BYTES and not isinstance(value, str):
                # 64 means GiB: the unit is missing.
                units = f'"{size_bytes}GiB" or "{size_bytes}MiB"'
                fix = f"a plain number is in bytes; add a unit, such as {units}"
        refuse(key, value, problem, allowed, fix)

    return Kind(f'a size, such as "64GiB"; at most {maximum // TIB} TiB', read)


def scaled(kind: Kind, maximum: int, unit_bytes: int) -> Kind:
    """Return the kind of a size that may be a number of units, or a string as of `kind`."""
    unit = f"{unit_bytes:,} bytes" if unit_bytes > 1 else "bytes"
    ends = (round(end / unit_bytes, 6) for end in (MIN_SIZE_BYTES, maximum))
    allowed = "a number of {}, from {:g} to {:g}".format(unit, *ends)

    def read(key: str, value: Any) -> Any:
        if isinstance(value, str):
            return kind.read(key, value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and MIN_SIZE_BYTES <= value * unit_bytes <= maximum:
            return int(value * unit_bytes)
        fix = f'write "{key}": {100 * GIB // unit_bytes}, or omit it for no limit'
        refuse(key, value, "this is not such a size", allowed, fix)

    return Kind(allowed, read)


def count(minimum: int, maximum: int, *, example: int, word: str = "") -> Kind:
    """Return the kind of an integer; there may be a word that stands for None."""
    allowed = f"an integer from {minimum} to {maximum}"
    more = ""
    if word:
        allowed, more = f'"{word}", or {allowed}', f', or the word "{word}"'

    def read(key: str, value: object) -> int | None:
        if word and isinstance(value, str) and value == word:
            return None
        fix = f'write the number without quotes, such as "{key}": {example}{more}'
        if isinstance(value, str):
            refuse(key, value, "this is a string", allowed, fix)
        number = _integer(key, value, allowed, str(example))
        if minimum <= number <= maximum:
            return number
        problem = "it is too large" if number > maximum else "it is too small"
        refuse(key, value, problem, allowed, fix)

    return Kind(allowed, read)


def seconds(maximum: int) -> Kind:
    """Return the kind of a time of more than 0 seconds."""
    allowed = f"seconds, more than 0 and at most {maximum}"

    def read(key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            problem = f"this is {_type_name(value)}, not a number"
        elif 0 < value <= maximum:  # false too for what is not a number
            return float(value)
        else:
            problem = "it is too large" if value > maximum else "it is not more than 0"
        fix = f'write the number of seconds without quotes, such as "{key}": 30'
        refuse(key, value, problem, allowed, fix)

    return Kind(allowed, read)


def share(maximum: float) -> Kind:
    """Return the kind of a part of a whole, as a fraction."""
    allowed = f"a number from 0 to {maximum}"

    def read(key: str, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= maximum:
            return float(value)
        fix = f'write the number without quotes, such as "{key}": 0.3'
        refuse(key, value, "this is not a number in that range", allowed, fix)

    return Kind(allowed, read)


def read_duration(text: str) -> float | None:
    """Return how many seconds "90s", "15m", "12h" or "7d" are; None if a text is no such time."""
    match = _DURATION.fullmatch(text)
    return None if match is None else float(match[1]) * UNITS_S[match[2]]


def duration(maximum_s: int) -> Kind:
    """Return the kind of a time that may have a unit: 90, "90s", "15m", "12h" or "7d"."""
    allowed = f'seconds, or a string such as "15m", "12h" or "7d"; at most {maximum_s // 86400}d'

    def read(key: str, value: object) -> float:
        found_s: float = 0.0
        if isinstance(value, str):
            found_s = read_duration(value) or 0.0
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found_s = float(value) if 0 < value <= maximum_s else 0.0
        if 1 <= found_s <= maximum_s:
            return found_s
        problem = f"the duration must be at least 1 s and at most {maximum_s // 86400}d"
        refuse(key, value, problem, allowed, f'write "{key}": "7d" for a week')

    return Kind(allowed, read)


def sampling() -> Kind:
    """Return the kind of one in how many: 0 for "off", 1 for "load", N for "sample:N"."""
    allowed = '"off", "load" (every loaded slot) or "sample:N" (one in N, N from 1 to 999999999)'

    def read(key: str, value: object) -> int:
        problem = "unknown mode"
        if not isinstance(value, str):
            problem = f"this is {_type_name(value)}, not a string"
        elif value in ("off", "load"):
            return int(value == "load")
        elif re.fullmatch("sample:0*[1-9][0-9]*", value, re.ASCII) and len(value) <= 16:
            return int(value[7:])
        fix = f'write "{key}": "load", or omit the key to verify nothing'
        refuse(key, value, problem, allowed, fix)

    return Kind(allowed, read)


def choice(
    words: Sequence[str] | Mapping[str, object],
    *,
    aliases: Mapping[str, str] | None = None,
) -> Kind:
    """Return the kind of one of a few words, the default first; a mapping says what they mean.

    `aliases` are accepted too, by what they stand for; no message recommends them.
    """
    meanings = words if isinstance(words, Mapping) else dict(zip(words, words, strict=True))
    allowed = ", ".join(f'"{word}"' for word in words)

    def read(key: str, value: object) -> object:
        if isinstance(value, str):
            value = (aliases or {}).get(value, value)
            if value in meanings:
                return meanings[value]
        fix = f'write "{key}": "{next(iter(words))}", or omit it'
        refuse(key, value, "unknown value", allowed, fix)

    return Kind(allowed, read)


def switch() -> Kind:
    """Return the kind of a boolean, which may also be written as a word."""
    words = {"true": True, "false": False}

    def read(key: str, value: object) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        problem = f"this is {_type_name(value)}, not a boolean"
        allowed = "true or false (True or False in Python), without quotes"
        refuse(key, value, problem, allowed, f'write "{key}": true or "{key}": false')

    return Kind("true or false", read)


def text() -> Kind:
    """Return the kind of a short text."""
    allowed = f"a string of at most {TEXT_LENGTH_MAX} printable characters"

    def read(key: str, value: object) -> str:
        problem = f"this is {_type_name(value)}, not a string"
        if isinstance(value, str):
            if len(value) <= TEXT_LENGTH_MAX and value.isprintable():
                return value
            problem = "it is too long, or contains unprintable characters"
        refuse(key, value, problem, allowed, f'write "{key}": "prod", or omit it')

    return Kind("a string", read)


def refuse(key: str, value: object, problem: str, allowed: str, fix: str) -> NoReturn:
    """Raise a ConfigError: what is wrong with a value, what is allowed, what to write instead."""
    where = f'["{key}"]'
    if isinstance(key, NestedKey):
        where = f"{key.within}{where}" if key.within else str(key)
    if key.startswith("--"):
        raise ConfigError(
            f"the option {key} cannot be {shown(value)}: {problem}. Allowed: {allowed}. Fix: {fix}."
        )
    raise ConfigError(
        f"kv_connector_extra_config{where} = {shown(value, key)}: {problem}. "
        f"Allowed: {allowed}. Fix: {fix}."
    )


def fix_of_unknown(key: object, known: Sequence[str]) -> str:
    """Return what to do about a key that is not a known one: perhaps it was meant to be."""
    spelling = key.strip().lower().replace("-", "_") if isinstance(key, str) else ""
    nearest = difflib.get_close_matches(spelling, known, n=1, cutoff=0.5)
    return f'write "{nearest[0]}" if you mean that, else remove it' if nearest else "remove it"


def _example(key: str) -> str:
    return f"{key} 64GiB" if key.startswith("--") else f'"{key}": "64GiB"'


def _type_name(value: object) -> str:
    """Return the name of a value's type as users of JSON and Python know it."""
    return "null (None)" if value is None else f"a value of type {type(value).__name__}"


def _integer(key: str, value: object, allowed: str, example: str) -> int:
    """Return an integer, or a float without fraction, as the integer that it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__int__(value)
    if isinstance(value, float) and float.is_integer(value):
        return int(value)
    if not isinstance(value, float):
        problem = f"this is {_type_name(value)}, not a number"
    else:
        problem = "it has a fraction" if math.isfinite(value) else "this is not a finite number"
    fix = f'write "{key}": {example}, or omit the key for its default'
    refuse(key, value, problem, allowed, fix)


def _size_from_string(key: str, value: str) -> int:
    """Return the bytes that a string such as "64GiB", "1.5 TB" or "8589934592" means.

    Units do not depend on case. A bare letter is refused, because it is 1000**n to some and
    1024**n to others: vLLM itself reads 64g and 64G in a command line as two different sizes.
    Source: vLLM 0.32.0, vllm/engine/arg_utils.py, human_readable_int.
    """
    text = value.strip() if len(value) <= _SIZE_LENGTH_MAX else ""
    match = _SIZE_PATTERN.fullmatch(text)
    if match is None:
        problem = "a size cannot be negative" if text.startswith("-") else "this is not a size"
        refuse(key, value, problem, _SIZE_FORMS, f"write {_example(key)}")
    number, unit = match["number"], match["unit"]
    unit_bytes = _UNIT_BYTES.get(unit.lower())
    if unit_bytes is None:
        letter = unit.upper() if unit.lower() in ("k", "m", "g", "t", "p") else ""
        problem = f"the unit {unit!r} is {'ambiguous' if letter else 'unknown'}"
        allowed = f"{_SIZE_FORMS}; units are B, KiB to PiB and KB to PB"
        fix = f'write "{number}{letter or "G"}iB" or "{number}{letter or "G"}B"'
        refuse(key, value, problem, allowed, fix)
    exact: Fraction = Fraction(number.replace("_", "")) * unit_bytes
    if unit_bytes == 1 and exact.denominator != 1:
        fix = f'write it with the unit that you mean, such as "{number}GiB"'
        refuse(key, value, "a number of bytes has no fraction", _SIZE_FORMS, fix)
    return math.floor(exact)
