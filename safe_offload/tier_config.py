"""What a user says about tiers, as both processes know it.

`TierConfig` is the table of what may be written of one tier, as `OffloadConfig` is of all else.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from safe_offload.settings import (
    MAX_BYTES_PER_RANK,
    Kind,
    Place,
    Setting,
    choice,
    count,
    refuse,
    seconds,
    setting,
    settings_of,
    shown,
    size,
    text,
)

MAX_TIERS: Final = 8
MAX_TIER_THREADS: Final = 64
MAX_TIER_WAIT_S: Final = 600
MAX_CAPACITY_BYTES: Final = 1024 * MAX_BYTES_PER_RANK
DEFAULT_WAIT_S: Final = 2
DEFAULT_TIER_TIMEOUT_S: Final = 5

URL_KEY: Final = "url"
_EXAMPLE: Final = '[{"url": "file:///mnt/nvme/kv", "capacity": "1TiB"}]'
_URL_FORMS: Final = "file:// and the absolute path of a directory"
_LATER_SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys", "unix", "s3", "gs", "az", "http")
_URL_PATTERN: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]{0,19})://(?P<rest>.*)", re.ASCII | re.IGNORECASE | re.DOTALL
)
PATH_LENGTH_SHOWN: Final = 100

SHARED_HASH: Final = "sha256_cbor"
HASH_SEED_VARIABLE: Final = "PYTHONHASHSEED"


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One tier; the order of tiers is that in which they are asked, the nearest first.

    Attributes:
        scheme: "file".
        path: of the directory, absolute.
        capacity_bytes: of all engines that share it together; None for no limit.
        namespace: a word of the operator's, which keeps apart what would otherwise be shared.
        model_version: of the operator: weights that carry it are the same after a reset. All tiers
            have one, or none.
        stores_evicted: only what the host is about to evict is written, not all that it stores; the
            same for all tiers.
        write_bytes_per_s: at most so much is written by one engine; None for no limit.
        wait_s: no request waits longer for it.
        timeout_s: an operation that takes longer counts as a failure of the tier.
        num_threads: that read and write in each rank, each one object at a time.
    """

    scheme: str
    path: str
    capacity_bytes: int | None = setting(
        size(MAX_CAPACITY_BYTES),
        None,
        "Bytes of all engines that share it together; without it, no limit.",
        key="capacity",
    )
    namespace: str = setting(text(), "", "A word that keeps apart what would otherwise be shared.")
    model_version: str = setting(
        text(),
        "",
        "Your name for these weights: what carries it may be used again after a reset, and with "
        "LoRA adapters after a restart.",
    )
    stores_evicted: bool = setting(
        choice({"computed": False, "evicted": True}),
        "computed",
        "What is written: all that the host stores (`computed`), or only what it is about to evict "
        "(`evicted`).",
        key="store",
    )
    write_bytes_per_s: int | None = setting(
        size(MAX_BYTES_PER_RANK),
        None,
        "At most so many bytes are written in a second by one engine.",
        key="max_bytes_per_s",
    )
    wait_s: float = setting(
        seconds(MAX_TIER_WAIT_S), DEFAULT_WAIT_S, "No request waits longer for it, in total."
    )
    timeout_s: float = setting(
        seconds(MAX_TIER_WAIT_S),
        DEFAULT_TIER_TIMEOUT_S,
        "A probe, read or write that takes longer is given up, and counts as a failure.",
    )
    num_threads: int = setting(
        count(1, MAX_TIER_THREADS, example=4),
        4,
        "Threads of each rank that read and write.",
        key="threads",
    )


TIER_SETTINGS: Final = settings_of(TierConfig)
TIER_KEYS: Final = (URL_KEY, *(row.key for row in TIER_SETTINGS.values()))
# What all tiers have, or none: a spill goes to each of them, under the same word of the namespace.
_FIELDS_ALIKE: Final = ("stores_evicted", "model_version")


def tiers() -> Kind:
    """Return the kind of a list of tiers, nearest first."""

    def read(key: str, value: object) -> tuple[TierConfig, ...]:
        allowed = f"a list of 0 to {MAX_TIERS} mappings, the nearest tier first"
        fix = f'write "{key}": {_EXAMPLE}, or leave it out'
        if not isinstance(value, list | tuple):
            refuse(key, value, "this is not a list", allowed, fix)
        if len(value) > MAX_TIERS:
            refuse(key, value, f"these are {len(value)} tiers", allowed, fix)
        found: list[TierConfig] = []
        for index, written in enumerate(value):
            place = f'["{key}"][{index}]'
            tier = _read_tier(key, place, written)
            for other, earlier in enumerate(found):
                if (earlier.scheme, earlier.path) == (tier.scheme, tier.path):
                    problem = f"tier {other} has the same directory"
                    fix = "remove one of the two"
                    refuse(Place(URL_KEY, place), written[URL_KEY], problem, _URL_FORMS, fix)
            found.append(tier)
            _require_alike(found, value, place)
        return tuple(found)

    return Kind('a list of mappings, each with a "url"', read)


def directory() -> Kind:
    """Return the kind of the path of a directory."""

    def read(key: str, value: object) -> str:
        allowed = "the absolute path of a directory, but not /"
        fix = f'write "{key}": "/mnt/nvme/kv"'
        if not isinstance(value, str):
            refuse(key, value, "this is not a string", allowed, fix)
        if problem := _problem_of_path(value):
            refuse(key, value, problem, allowed, fix)
        return os.path.normpath(value)

    return Kind("the absolute path of a directory", read)


def _read_tier(key: str, place: str, written: object) -> TierConfig:
    """Return one tier of the list under `key`, or a ConfigError that says where it stands."""
    if not isinstance(written, Mapping):
        refuse(
            Place(place, ""),
            written,
            "this is not a mapping",
            f"a mapping with the keys {', '.join(TIER_KEYS)}",
            f'write "{key}": {_EXAMPLE}',
        )
    for name in written:
        if name not in TIER_KEYS:
            spelling = name.strip().lower().replace("-", "_") if isinstance(name, str) else ""
            nearest = difflib.get_close_matches(spelling, TIER_KEYS, n=1, cutoff=0.5)
            fix = f'write "{nearest[0]}" if that is meant, else remove it' if nearest else ""
            refuse(
                Place(f"{place}[{shown(name)}]", ""),
                written[name],
                "this is not a setting of a tier",
                f"the keys {', '.join(TIER_KEYS)}",
                fix or "remove it",
            )
    if URL_KEY not in written:
        allowed, fix = _URL_FORMS, f'write "{URL_KEY}": "file:///mnt/nvme/kv" into it'
        refuse(Place(place, ""), dict(written), f'it has no "{URL_KEY}"', allowed, fix)
    values: dict[str, Any] = {
        field: row.kind.read(Place(row.key, place), written[row.key])
        for field, row in TIER_SETTINGS.items()
        if row.key in written
    }
    scheme, path = URL.kind.read(Place(URL_KEY, place), written[URL_KEY])
    return TierConfig(scheme, path, **values)


def _require_alike(found: list[TierConfig], value: Sequence[Any], place: str) -> None:
    """Refuse the last tier if what all must have alike is not as in the first."""
    for field in _FIELDS_ALIKE:
        if bool(getattr(found[0], field)) == bool(getattr(found[-1], field)):
            continue
        row = TIER_SETTINGS[field]
        first, last = (value[i].get(row.key, row.default) for i in (0, len(found) - 1))
        more = shown(first if getattr(found[0], field) else last)
        refuse(
            Place(row.key, place),
            last,
            f"tier 0 has {shown(first)}, and what is written goes to all tiers",
            "all tiers with it, or all without",
            f'write "{row.key}": {more} into each tier, or into none',
        )


def _read_url(key: str, value: object) -> tuple[str, str]:
    """Return scheme and path of a url."""
    fix = f'write "{key}": "file:///mnt/nvme/kv"'
    if not isinstance(value, str):
        refuse(key, value, "this is not a string", _URL_FORMS, fix)
    match = _URL_PATTERN.match(value)
    if match is None:
        if not _problem_of_path(value) and len(value) <= PATH_LENGTH_SHOWN:
            fix = f'write "{key}": "file://{value}"'
        refuse(key, value, "this is not a url", _URL_FORMS, fix)
    scheme = match["scheme"].lower()
    if scheme != "file":
        problem = f'the scheme "{scheme}" is unknown'
        if scheme in _LATER_SCHEMES:
            problem = f'there is no tier for "{scheme}" yet'
        refuse(key, value, problem, _URL_FORMS, f"{fix}, or leave this tier out")
    machine, slash, rest = match["rest"].partition("/")
    path = unquote(slash + rest)
    problem = _problem_of_path(path)
    if machine not in ("", "localhost"):
        problem = f"{shown(machine)} stands where a machine is named; three slashes are needed"
        if not _problem_of_path(f"/{machine}{path}") and len(value) <= PATH_LENGTH_SHOWN:
            fix = f'write "{key}": "file:///{match["rest"]}"'
    elif "?" in rest or "#" in rest:
        problem = 'a path with "?" or "#" must be written with %3F or %23'
    if problem:
        refuse(key, value, problem, _URL_FORMS, fix)
    return scheme, os.path.normpath(path)


def _problem_of_path(path: str) -> str:
    """Return what is wrong with the path of a directory, or nothing."""
    if not path.startswith("/"):
        return "the path is not absolute"
    if not path.isprintable():
        return "the path has characters that cannot be printed"
    return "the whole file system is no tier" if not path.strip("/.") else ""


URL: Final = Setting(
    URL_KEY,
    Kind(_URL_FORMS, _read_url),
    None,
    "Where the tier is; it must be written.",
)


def hash_problem(algorithm: str, *, has_seed: bool) -> tuple[str, str] | None:
    """Return why another process would not find blocks by these hashes, and the fix.

    Args:
        algorithm: vLLM's `prefix_caching_hash_algo`.
        has_seed: hashes begin with a seed that all processes know.

    Returns:
        None if it would.

    Source: vLLM 0.32.0, vllm/utils/hashing.py and v1/core/kv_cache_utils.py, init_none_hash.
    """
    if not algorithm.endswith("_cbor"):
        problem = "hashes pickles, which can differ between processes for equal tokens"
        return problem, f"write --prefix-caching-hash-algo {SHARED_HASH}"
    if not has_seed:
        fix = f"set the variable {HASH_SEED_VARIABLE} to one number for all engines"
        if algorithm != SHARED_HASH:
            fix += f", or write --prefix-caching-hash-algo {SHARED_HASH}"
        return "begins with a seed that is another one in every process", fix
    return None
