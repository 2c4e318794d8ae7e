"""Kinds of settings: pydantic checks a value; an error names the allowed values and the fix.

To add a kind, write a type for pydantic, what it allows in words, and the fix.
"""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    WrapValidator,
)

from safe_offload.config.printing import NOT_SHOWN, shown
from safe_offload.config.units import KIB, TIB, format_bytes
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
_TEXT_LENGTH_MAX: Final = 100
_ENDPOINT_LENGTH_MAX: Final = 255

_PROBLEMS: Final = {
    "bool_type": "this is {type}, not a boolean",
    "finite_number": "this is not a finite number",
    "float_type": "it is out of range",
    "greater_than": "it is not more than {gt:g}",
    "greater_than_equal": "it is too small",
    "int_from_float": "it has a fraction",
    "less_than_equal": "it is too large",
    "literal_error": "unknown value",
    "string_type": "this is not a string",
    "string_unicode": "it contains unprintable characters",
}
"""Our words for errors of pydantic, with their context and the type of the value."""


@dataclass
class WrongError(ValueError):
    """A problem of a value; the fix and the allowed values, if not those of its kind.

    A value that `is_hidden` may hold anything, and is not shown.
    """

    problem: str
    fix: str = ""
    allowed: str = ""
    is_hidden: bool = False


class Kind:
    """The values that a setting may have.

    Args:
        type: of the values, for pydantic.
        fix: a value to write instead; `{key}` stands for the key.
        short: `allowed` in a table, if that is shorter.
    """

    def __init__(self, type: Any, allowed: str, fix: str, short: str = "") -> None:
        self.allowed = short or allowed
        self._allowed = allowed
        self._fix = fix
        self._type: TypeAdapter[Any] = TypeAdapter(type)

    def read(self, key: str, value: object) -> Any:
        """Return the meaning of a value, or raise a ConfigError."""
        try:
            return self._type.validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
        context = first.get("ctx", {})
        wrong = context.get("error")
        if not isinstance(wrong, WrongError):
            problem = _PROBLEMS.get(first["type"], first["msg"])
            wrong = WrongError(problem.format(type=_type_name(value), **context))
        fix = (wrong.fix or self._fix).replace("{key}", key)
        found = NOT_SHOWN if wrong.is_hidden else value
        return refuse(key, found, wrong.problem, wrong.allowed or self._allowed, fix)


@dataclass(frozen=True, slots=True)
class Setting:
    """A key for users; `default` is as they would write it, None for no value.

    `elsewhere` is the fix for kinds of place without the setting.
    """

    key: str
    kind: Kind
    default: object
    help: str
    elsewhere: str = ""


class NestedKey(str):
    """A key inside another setting; `within` are the outer keys, as Python writes them.

    Without outer keys, it is itself such a sequence of keys.
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
    """Return the dataclass field of a setting; `key` if it differs from the field's name."""
    value = None if default is None else kind.read(key, default)
    metadata = {"setting": Setting(key, kind, default, help, elsewhere)}
    return dataclasses.field(default=value, repr=not is_secret, metadata=metadata)


def settings_of(config_class: Any) -> dict[str, Setting]:
    """Return the settings of a dataclass, by the names of their fields."""
    return {
        field.name: dataclasses.replace(row, key=row.key or field.name)
        for field in dataclasses.fields(config_class)
        for row in field.metadata.values()
    }


def read_settings(
    config_class: Any, written: Mapping[str, object], place: str = ""
) -> dict[str, Any]:
    """Return the written settings of a dataclass, by field; `place` are the outer keys."""
    return {
        name: row.kind.read(NestedKey(row.key, place) if place else row.key, written[row.key])
        for name, row in settings_of(config_class).items()
        if row.key in written
    }


def size(maximum: int, *, num_ranks: int = 1, unit_bytes: int = 1) -> Kind:
    """Return the kind of a number of bytes, for `num_ranks`; `unit_bytes` of one without a unit."""
    minimum = MIN_SIZE_BYTES * num_ranks
    among = f" for {num_ranks} ranks" if num_ranks > 1 else ""
    fix = 'write a size with its unit, such as "{key}": "64GiB"'

    def read(value: object) -> object:
        if isinstance(value, str):
            return _size_from_string(value)
        number = _number(value)
        is_in_units = unit_bytes > 1 and abs(number) <= maximum  # not if it is no number
        return int(number * unit_bytes) if is_in_units else number

    def check(size_bytes: int) -> int:
        if minimum <= size_bytes <= maximum:
            return size_bytes
        if size_bytes > maximum:
            raise WrongError("it is too large")
        if size_bytes < 0:
            raise WrongError("it is negative")
        if size_bytes == 0:
            raise WrongError("it is zero", f"{fix}, or remove the connector to run without one")
        # 64 means GiB: the unit is missing.
        units = f'"{size_bytes}GiB" or "{size_bytes}MiB"'
        unit = f"a plain number is in bytes; add a unit, such as {units}"
        problem = f"{size_bytes} bytes is too small{among}"
        raise WrongError(problem, unit if size_bytes < MIN_SIZE_BYTES else "")

    return Kind(
        Annotated[int, BeforeValidator(read), AfterValidator(check)],
        f"{_SIZE_FORMS}, {format_bytes(minimum)}{among} to {format_bytes(maximum)}",
        fix,
        f'a size, such as "64GiB"; at most {maximum // TIB} TiB',
    )


def count(minimum: int, maximum: int, *, example: int, word: str = "") -> Kind:
    """Return the kind of an integer; `word`, if any, stands for None."""
    allowed = f"an integer from {minimum} to {maximum}"
    fix = f'write an integer without quotes, such as "{{key}}": {example}'
    number = Annotated[int, BeforeValidator(_integer), Field(ge=minimum, le=maximum)]
    if not word:
        return Kind(number, allowed, fix)
    read = WrapValidator(lambda value, read: None if value == word else read(value))
    allowed, fix = f'"{word}", or {allowed}', f'{fix}, or the word "{word}"'
    return Kind(Annotated[number, read], allowed, fix)


def seconds(maximum: int) -> Kind:
    """Return the kind of a time of more than 0 seconds."""
    allowed = f"seconds, more than 0 and at most {maximum}"
    fix = 'write the number of seconds without quotes, such as "{key}": 30'
    return Kind(Annotated[_Float, Field(gt=0, le=maximum)], allowed, fix)


def share(maximum: float) -> Kind:
    """Return the kind of a part of a whole, as a fraction."""
    fix = 'write the number without quotes, such as "{key}": 0.3'
    return Kind(Annotated[_Float, Field(ge=0, le=maximum)], f"a number from 0 to {maximum}", fix)


def read_duration(text: str) -> float | None:
    """Return "90s", "15m", "12h" or "7d" in seconds; None if a text is no such duration."""
    match = _DURATION.fullmatch(text)
    return None if match is None else float(match[1]) * UNITS_S[match[2]]


def duration(maximum_s: int) -> Kind:
    """Return the kind of a duration with or without a unit: 90, "90s", "15m", "12h" or "7d"."""

    def read(value: object) -> object:
        found_s = read_duration(value) if isinstance(value, str) else value
        if found_s is None:
            raise WrongError("this is not a duration")
        return found_s

    return Kind(
        Annotated[_Float, BeforeValidator(read), Field(ge=1, le=maximum_s)],
        f'seconds, or a string such as "15m", "12h" or "7d"; at most {maximum_s // 86400}d',
        'write "{key}": "7d" for a week',
    )


def sampling() -> Kind:
    """Return the kind of a sampling rate, one in N: 0 for "off", 1 for "load", N for "sample:N"."""

    def read(word: str) -> int:
        if word in ("off", "load"):
            return int(word == "load")
        if re.fullmatch("sample:0*[1-9][0-9]*", word, re.ASCII) and len(word) <= 16:
            return int(word[7:])
        raise WrongError("unknown mode")

    return Kind(
        Annotated[_Text, AfterValidator(read)],
        '"off", "load" (every loaded slot) or "sample:N" (one in N, N from 1 to 999999999)',
        'write "{key}": "load", or omit the key to verify nothing',
    )


def choice(words: Sequence[str], meanings: Mapping[str, object] = MappingProxyType({})) -> Kind:
    """Return the kind of one of a few words, the default first.

    `meanings` has those of words that do not mean themselves; other words in it are accepted too,
    but no message recommends them.
    """
    known: dict[str, object] = {**dict(zip(words, words, strict=True)), **meanings}
    word: Any = Literal[tuple(known)]
    return Kind(
        Annotated[word, AfterValidator(known.__getitem__)],
        ", ".join(f'"{word}"' for word in words),
        f'write "{{key}}": "{words[0]}", or omit it',
    )


def switch() -> Kind:
    """Return the kind of a boolean, which may also be written as a word."""

    def read(value: object) -> object:
        words = {"true": True, "false": False}
        return words.get(value.lower(), value) if isinstance(value, str) else value

    return Kind(
        Annotated[bool, Field(strict=True), BeforeValidator(read)],
        "true or false (True or False in Python), without quotes",
        'write "{key}": true or "{key}": false',
        "true or false",
    )


def text() -> Kind:
    """Return the kind of a short text."""

    def check(value: str) -> str:
        if len(value) <= _TEXT_LENGTH_MAX and value.isprintable():
            return value
        raise WrongError("it is too long, or contains unprintable characters")

    return Kind(
        Annotated[_Text, AfterValidator(check)],
        f"a string of at most {_TEXT_LENGTH_MAX} printable characters",
        'write "{key}": "prod", or omit it',
        "a string",
    )


def file() -> Kind:
    """Return the kind of the path of a regular file; opening a pipe would block."""

    def check(path: str) -> str:
        if os.path.exists(path) and not os.path.isfile(path):
            raise WrongError("it is not a regular file")
        return path

    what = "the absolute path of a file"
    fix = 'write "{key}": "/run/secrets/{key}"'
    return Kind(Annotated[_Path, AfterValidator(check)], what, fix)


def directory() -> Kind:
    """Return the kind of the path of a directory."""
    what = "the absolute path of a directory"
    return Kind(_Path, f"{what}, but not /", 'write "{key}": "/mnt/nvme/kv"', what)


def endpoint() -> Kind:
    """Return the kind of the address of an object store."""

    def check(value: str) -> str:
        scheme, separator, machine = value.partition("://")
        is_url = scheme.lower() in ("http", "https") and separator and machine.strip("/")
        if any(mark in value for mark in "@?#"):
            raise WrongError("credentials are not allowed here: use the environment or a role")
        if not is_url or not value.isprintable() or len(value) > _ENDPOINT_LENGTH_MAX:
            raise WrongError("this is not an address")
        return value.rstrip("/")

    return Kind(
        Annotated[_Text, AfterValidator(check)],
        "http:// or https://, a host name and optionally a port",
        'write "{key}": "https://minio.internal:9000", or omit it for the cloud\'s own',
    )


def problem_of_path(path: str) -> str:
    """Return the problem of the path of a directory; empty if there is none."""
    if not path.startswith("/"):
        return "the path is not absolute"
    if not path.isprintable():
        return "the path contains unprintable characters"
    return "the root of a file system cannot be a tier" if not path.strip("/.") else ""


def refuse(key: str, value: object, problem: str, allowed: str, fix: str) -> NoReturn:
    """Raise a ConfigError with the problem of a value, the allowed values and the fix."""
    where = f'["{key}"]'
    if isinstance(key, NestedKey):
        where = f"{key.within}{where}" if key.within else str(key)
    if key.startswith("--"):
        fix = re.sub(rf'"{key}": "?([^" ]+)"?', rf"{key} \1", fix)
        raise ConfigError(
            f"the option {key} cannot be {shown(value)}: {problem}. Allowed: {allowed}. Fix: {fix}."
        )
    raise ConfigError(
        f"kv_connector_extra_config{where} = {shown(value, key)}: {problem}. "
        f"Allowed: {allowed}. Fix: {fix}."
    )


def fix_of_unknown(key: object, known: Sequence[str]) -> str:
    """Return the fix for an unknown key: the nearest known one, or to remove it."""
    spelling = key.strip().lower().replace("-", "_") if isinstance(key, str) else ""
    nearest = difflib.get_close_matches(spelling, known, n=1, cutoff=0.5)
    return f'write "{nearest[0]}" if you mean that, else remove it' if nearest else "remove it"


def _type_name(value: object) -> str:
    return "null (None)" if value is None else f"a value of type {type(value).__name__}"


def _number(value: object) -> int | float:
    """Return a value if it is a number; pydantic would also take booleans and strings."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_whole = isinstance(value, float) and value.is_integer()
        return int(value) if is_whole else value
    raise WrongError(f"this is {_type_name(value)}, not a number")


def _integer(value: object) -> int | float:
    if isinstance(value, str):
        raise WrongError("this is a string")
    return _number(value)


def _absolute(path: str) -> str:
    if problem := problem_of_path(path):
        raise WrongError(problem)
    return os.path.normpath(path)


_Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
_Text = Annotated[str, Field(strict=True)]
_Path = Annotated[_Text, AfterValidator(_absolute)]


def _size_from_string(value: str) -> int:
    """Return the bytes of a string such as "64GiB", "1.5 TB" or "8589934592", in any case.

    A bare letter is refused: it is 1000**n to some and 1024**n to others, and vLLM itself reads 64g
    and 64G as two sizes (vLLM 0.32.0, vllm/engine/arg_utils.py, human_readable_int).
    """
    text = value.strip() if len(value) <= _SIZE_LENGTH_MAX else ""
    match = _SIZE_PATTERN.fullmatch(text)
    if match is None:
        raise WrongError(
            "a size cannot be negative" if text.startswith("-") else "this is not a size"
        )
    number, unit = match["number"], match["unit"]
    unit_bytes = _UNIT_BYTES.get(unit.lower())
    if unit_bytes is None:
        letter = unit.upper() if unit.lower() in ("k", "m", "g", "t", "p") else ""
        raise WrongError(
            f"the unit {unit!r} is {'ambiguous' if letter else 'unknown'}",
            f'write "{number}{letter or "G"}iB" or "{number}{letter or "G"}B"',
            f"{_SIZE_FORMS}; units are B, KiB to PiB and KB to PB",
        )
    exact: Fraction = Fraction(number.replace("_", "")) * unit_bytes
    if unit_bytes == 1 and exact.denominator != 1:
        fix = f'write it with the unit that you mean, such as "{number}GiB"'
        raise WrongError("a number of bytes has no fraction", fix)
    return math.floor(exact)
