"""What a user says about tiers, as both processes know it.

`TierConfig` is the table of what may be written of one tier, as `OffloadConfig` is of all else.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from safe_offload.config.printing import NOT_SHOWN, shown, shown_key
from safe_offload.config.settings import (
    MAX_BYTES_PER_RANK,
    Kind,
    NestedKey,
    choice,
    count,
    duration,
    fix_of_unknown,
    refuse,
    seconds,
    setting,
    settings_of,
    size,
    switch,
    text,
)
from safe_offload.config.tier_url import (
    BUCKETS,
    FILE,
    KINDS,
    URL,
    URL_FORMS,
    URL_KEY,
    Location,
    problem_of_path,
    read_url,
)

MAX_TIERS: Final = 8
MAX_TIER_THREADS: Final = 64
MAX_TIER_WAIT_S: Final = 600
MAX_CAPACITY_BYTES: Final = 1024 * MAX_BYTES_PER_RANK
DEFAULT_WAIT_S: Final = 2
DEFAULT_TIER_TIMEOUT_S: Final = 5

ENDPOINT_MAX: Final = 255
MAX_CONNECTIONS: Final = 64
DEFAULT_CONNECTIONS: Final = 4
BUCKET_CONNECTIONS: Final = 16
"""To an object store, if nothing is written: each answer takes it tens of milliseconds."""
MAX_REPLICAS: Final = 16
MAX_TTL_S: Final = 366 * 86400
_EXAMPLE: Final = '[{"url": "file:///mnt/nvme/kv", "capacity": "1TiB"}]'

SHARED_HASH: Final = "sha256_cbor"
HASH_SEED_VARIABLE: Final = "PYTHONHASHSEED"


def file() -> Kind:
    """Return the kind of the path of a file; to open a pipe there would wait for its other end."""
    what = "the absolute path of a file"
    return _path(what, "/run/secrets/{key}", problem_of=_no_file)


def directory() -> Kind:
    """Return the kind of the path of a directory."""
    what = "the absolute path of a directory"
    return _path(what, "/mnt/nvme/kv", f"{what}, but not /")


def _no_file(path: str) -> str:
    is_other = os.path.exists(path) and not os.path.isfile(path)
    return "it is not a regular file" if is_other else ""


def _path(
    what: str, example: str, allowed: str = "", problem_of: Callable[[str], str] = lambda path: ""
) -> Kind:
    """Return the kind of a path; `{key}` in the example stands for the key."""

    def read(key: str, value: object) -> str:
        fix = f'write "{key}": "{example.format(key=key)}"'
        if not isinstance(value, str):
            refuse(key, value, "this is not a string", allowed or what, fix)
        if problem := problem_of_path(value) or problem_of(value):
            refuse(key, value, problem, allowed or what, fix)
        return os.path.normpath(value)

    return Kind(what, read)


def endpoint() -> Kind:
    """Return the kind of the address of an object store."""
    allowed = "http:// or https://, a host name and optionally a port"

    def read(key: str, value: object) -> str:
        fix = f'write "{key}": "https://minio.internal:9000", or omit it for the cloud\'s own'
        if not isinstance(value, str) or not value.isprintable() or len(value) > ENDPOINT_MAX:
            refuse(key, value, "this is not an address", allowed, fix)
        if any(mark in value for mark in "@?#"):
            problem = "credentials are not allowed here: use the environment or a role"
            refuse(key, value, problem, allowed, fix)
        scheme, separator, machine = value.partition("://")
        if scheme.lower() not in ("http", "https") or not separator or not machine.strip("/"):
            refuse(key, value, "this is not an address", allowed, fix)
        return value.rstrip("/")

    return Kind(allowed, read)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One tier; the order of tiers is that in which they are asked, the nearest first.

    The sentences of the fields are those of docs/configuration.md. None is no limit, or no file; of
    `ttl_s` never, of `ca_file` the system's certificates, of `endpoint` the cloud's own. A
    `model_version` and an `hmac_key_file` have all tiers or none; `store` is one for all.
    """

    location: Location
    capacity_bytes: int | None = setting(
        size(MAX_CAPACITY_BYTES),
        None,
        "Directory: bytes for all engines that share it; unlimited by default.",
        key="capacity",
    )
    namespace: str = setting(text(), "", "Separates engines that would otherwise share objects.")
    model_version: str = setting(
        text(),
        "",
        "Your version of the weights. While it is unchanged, objects stay valid after a reset and, "
        "with LoRA adapters, after a restart.",
    )
    store: str = setting(
        choice(["computed", "evicted", "hit"]),
        "computed",
        "Blocks to write: all that the host stores (`computed`, write-through), those about to be "
        "evicted (`evicted`), or those that were hit (`hit`).",
    )
    write_bytes_per_s: int | None = setting(
        size(MAX_BYTES_PER_RANK),
        None,
        "Write limit per engine, in bytes per second.",
        key="max_bytes_per_s",
    )
    wait_s: float = setting(
        seconds(MAX_TIER_WAIT_S), DEFAULT_WAIT_S, "Maximum total wait of a request for this tier."
    )
    timeout_s: float = setting(
        seconds(MAX_TIER_WAIT_S),
        DEFAULT_TIER_TIMEOUT_S,
        "Timeout of a probe, read or write.",
    )
    num_threads: int = setting(
        count(1, MAX_TIER_THREADS, example=4),
        4,
        "Directory: I/O threads per rank.",
        key="threads",
    )
    keep: bool = setting(switch(), False, "Copy hits from farther tiers to this one.")
    num_connections: int = setting(
        count(1, MAX_CONNECTIONS, example=4),
        DEFAULT_CONNECTIONS,
        "Server or bucket: connections per rank (bucket: 16 by default).",
        key="connections",
    )
    ttl_s: float | None = setting(
        duration(MAX_TTL_S),
        None,
        "Server: delete objects unused for this long. By default, the server evicts.",
        key="ttl",
    )
    password_file: str | None = setting(
        file(),
        None,
        "Server: file with its password, to keep it out of the url.",
        is_secret=True,
    )
    ca_file: str | None = setting(
        file(), None, "`rediss://`: CA certificates that replace the system's."
    )
    cert_file: str | None = setting(
        file(), None, "`rediss://`: client certificate, if the server requires one."
    )
    key_file: str | None = setting(file(), None, "`rediss://`: key of `cert_file`.", is_secret=True)
    endpoint: str | None = setting(
        endpoint(),
        None,
        "Bucket: address of the object store, if not the cloud's own. Mooncake: address of the "
        "master's pages, where not at its port 9003.",
    )
    protocol: str | None = setting(
        choice(["tcp", "rdma"]), None, "Mooncake: `tcp` (default) or `rdma`."
    )
    device_name: str = setting(
        text(), "", "Mooncake: RDMA devices, separated by commas; all by default."
    )
    metadata_server: str = setting(
        text(), "", "Mooncake: address of its metadata server; none by default (`P2PHANDSHAKE`)."
    )
    segment_bytes: int | None = setting(
        size(MAX_CAPACITY_BYTES),
        None,
        "Mooncake: memory that this engine gives to the store; by default it only uses the store.",
        key="segment",
    )
    replicas: int = setting(
        count(1, MAX_REPLICAS, example=2), 1, "Mooncake: machines that keep each object."
    )
    config_file: str | None = setting(
        file(),
        None,
        "Mooncake: the file of vLLM's `MOONCAKE_CONFIG_PATH`, for what is not written here.",
    )
    hmac_key_file: str | None = setting(
        file(),
        None,
        "File with a key that seals objects; objects without its seal are misses.",
        is_secret=True,
    )
    # Not a setting: the file of tenants, of which each has a share of a directory.
    tenants_path: str = dataclasses.field(default="", repr=False)

    @classmethod
    def at(cls, url: str, **values: Any) -> TierConfig:
        """Return the tier at a url, all else as for `TierConfig`."""
        location = read_url(URL_KEY, url)
        return cls(location, **(_defaults(location) | values))


def _defaults(location: Location) -> dict[str, Any]:
    """Return the values of fields that are not those of the table for a tier at this place."""
    return {"num_connections": BUCKET_CONNECTIONS} if location.scheme in BUCKETS else {}


TIER_SETTINGS: Final = settings_of(TierConfig)
TIER_KEYS: Final = (URL_KEY, *(row.key for row in TIER_SETTINGS.values()))
_MAXMEMORY: Final = "; set the server's maxmemory, with allkeys-lru"
_LIFECYCLE: Final = "; use a lifecycle rule of the bucket"
# Settings that only some schemes have (`KINDS`), and what stands in their place elsewhere.
_ONLY: Final = {
    "capacity": f"{_MAXMEMORY}, or{_LIFECYCLE[1:]}",
    "threads": '; use "connections"',
    "connections": '; use "threads"',
    "ttl": f', or write "capacity"; for a bucket,{_LIFECYCLE[1:]}',
    "password_file": "",
    "ca_file": ", or write rediss:// for TLS",
    "cert_file": ", or write rediss:// for TLS",
    "key_file": ", or write rediss:// for TLS",
    "endpoint": "",
    **dict.fromkeys(
        ("protocol", "device_name", "metadata_server", "segment", "replicas", "config_file"), ""
    ),
}
# What all tiers have, or none: a spill goes to each of them, under the same word of the namespace.
_FIELDS_ALIKE: Final[Mapping[str, type]] = {"store": str, "model_version": bool}
_ALIKE: Final = "all tiers with it, or all without"
MIXED_KEYS: Final = (
    "anyone who can write to the tier without a key could get forged blocks, and everything "
    "computed from them, sealed with yours"
)


def tiers() -> Kind:
    """Return the kind of a list of tiers, nearest first."""

    def read(key: str, value: object) -> tuple[TierConfig, ...]:
        allowed = f"a list of 0 to {MAX_TIERS} mappings, the nearest tier first"
        fix = f'write "{key}": {_EXAMPLE}, or leave it out'
        if not isinstance(value, list | tuple):
            refuse(key, NOT_SHOWN, "this is not a list", allowed, fix)
        if len(value) > MAX_TIERS:
            refuse(key, value, f"these are {len(value)} tiers", allowed, fix)
        found: list[TierConfig] = []
        for index, written in enumerate(value):
            place = f'["{key}"][{index}]'
            tier = _read_tier(key, place, written)
            for other, earlier in enumerate(found):
                if earlier.location == tier.location:
                    what = "directory" if tier.location.scheme == FILE else "url"
                    problem = f'tier {other + 1}, ["{key}"][{other}], has the same {what}'
                    url = written[URL_KEY]
                    fix = "remove one of the two"
                    refuse(NestedKey(URL_KEY, place), url, problem, URL_FORMS, fix)
            found.append(tier)
            _require_alike(found, value, place)
        return tuple(found)

    return Kind('a list of mappings, each with a "url"', read)


def _read_tier(key: str, place: str, written: object) -> TierConfig:
    """Return one tier of the list under `key`, or a ConfigError that says where it stands."""
    if not isinstance(written, Mapping):
        refuse(
            NestedKey(place, ""),
            NOT_SHOWN,
            "this is not a mapping",
            f"a mapping with the keys {', '.join(TIER_KEYS)}",
            f'write "{key}": {_EXAMPLE}',
        )
    for name in written:
        if name not in TIER_KEYS:
            refuse(
                NestedKey(f"{place}[{shown_key(name)}]", ""),
                NOT_SHOWN,
                "this is not a setting of a tier",
                f"the keys {', '.join(TIER_KEYS)}",
                fix_of_unknown(name, TIER_KEYS),
            )
    if URL_KEY not in written:
        allowed, fix = URL_FORMS, f'write "{URL_KEY}": "file:///mnt/nvme/kv" into it'
        refuse(NestedKey(place, ""), dict(written), f'"{URL_KEY}" is missing', allowed, fix)
    location = URL.kind.read(NestedKey(URL_KEY, place), written[URL_KEY])
    _require_fitting(location, place, written)
    values: dict[str, Any] = {
        field: row.kind.read(NestedKey(row.key, place), written[row.key])
        for field, row in TIER_SETTINGS.items()
        if row.key in written
    }
    return TierConfig(location, **(_defaults(location) | values))


def _require_fitting(location: Location, place: str, written: Mapping[str, object]) -> None:
    """Refuse settings that mean nothing for a tier at this place."""
    for key, instead in _ONLY.items():
        if key in written and key not in KINDS[location.scheme].settings:
            which = f"{location.scheme}:// has no such setting"
            schemes = (scheme for scheme, kind in KINDS.items() if key in kind.settings)
            allowed = "it beside " + ", ".join(f"{each}://" for each in schemes)
            refuse(NestedKey(key, place), written[key], which, allowed, f"remove it{instead}")
    if location.password and "password_file" in written:
        problem, fix = "the url has a password too", "remove the password from the url"
        refuse(NestedKey("password_file", place), NOT_SHOWN, problem, "one of the two", fix)
    if ("cert_file" in written) != ("key_file" in written):
        has, lacks = ("cert_file", "key_file")[:: 1 if "cert_file" in written else -1]
        fix = f'add "{lacks}"'
        refuse(NestedKey(has, place), written[has], f'"{lacks}" is missing', "both or none", fix)


def _require_alike(found: list[TierConfig], value: Sequence[Any], place: str) -> None:
    """Refuse the last tier if what all must have alike is not as in the first."""
    for field, as_type in _FIELDS_ALIKE.items():
        if as_type(getattr(found[0], field)) == as_type(getattr(found[-1], field)):
            continue
        row = TIER_SETTINGS[field]
        first, last = (value[i].get(row.key, row.default) for i in (0, len(found) - 1))
        more = shown(last if first == row.default else first)
        refuse(
            NestedKey(row.key, place),
            last,
            f"the first tier has {shown(first)}, and all tiers get the same writes",
            _ALIKE,
            f'write "{row.key}": {more} into each tier, or into none',
        )
    has_key = [each.hmac_key_file is not None for each in (found[0], found[-1])]
    if has_key[0] != has_key[1]:
        refuse(
            NestedKey("hmac_key_file", place),
            NOT_SHOWN if has_key[1] else None,
            f"the first tier has {'one' if has_key[0] else 'none'}: {MIXED_KEYS}",
            _ALIKE,
            'write "hmac_key_file" into each tier, directories too (one file does for all), or '
            "into none",
        )


def hash_problem(algorithm: str, *, has_seed: bool) -> tuple[str, str] | None:
    """Return why another process would not find blocks by these hashes, and the fix, or None.

    `has_seed`: they begin with a seed that all processes know.
    Source: vLLM 0.32.0, vllm/utils/hashing.py and v1/core/kv_cache_utils.py, init_none_hash.
    """
    if not algorithm.endswith("_cbor"):
        problem = "hashes pickles, which can differ between processes for equal tokens"
        return problem, f"write --prefix-caching-hash-algo {SHARED_HASH}"
    if not has_seed:
        fix = f"set {HASH_SEED_VARIABLE} to the same number for all engines"
        if algorithm != SHARED_HASH:
            fix += f", or write --prefix-caching-hash-algo {SHARED_HASH}"
        return "uses a seed that differs between processes", fix
    return None
