"""The settings of tiers: common ones, and those of each kind of place.

`KINDS` is the table of kinds. To add a setting, add a field to the class of its kind.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from safe_offload.config.printing import NOT_SHOWN
from safe_offload.config.settings import (
    MAX_BYTES_PER_RANK,
    Kind,
    NestedKey,
    Setting,
    WrongError,
    choice,
    count,
    duration,
    endpoint,
    file,
    refuse,
    seconds,
    setting,
    settings_of,
    size,
    switch,
    text,
)
from safe_offload.config.tier_url import (
    FILE,
    MOONCAKE,
    URL_FORMS,
    URL_KEY,
    Location,
    fix_with,
    read_bucket,
    read_file,
    read_master,
    read_server,
    read_socket,
)

MAX_TIERS: Final = 8
MAX_TIER_THREADS: Final = 64
MAX_TIER_WAIT_S: Final = 600
MAX_CAPACITY_BYTES: Final = 1024 * MAX_BYTES_PER_RANK
DEFAULT_WAIT_S: Final = 2
DEFAULT_TIER_TIMEOUT_S: Final = 5

MAX_CONNECTIONS: Final = 64
DEFAULT_CONNECTIONS: Final = 4
BUCKET_CONNECTIONS: Final = 16
"""More than to a server: each response of an object store takes tens of milliseconds."""
MAX_REPLICAS: Final = 16
MAX_TTL_S: Final = 366 * 86400

SHARED_HASH: Final = "sha256_cbor"


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The settings of every tier; each kind of place adds its own.

    None is no limit, or no file. All tiers have a `model_version` and a file of keys, or none does;
    `store` is one for all.
    """

    location: Location
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
        seconds(MAX_TIER_WAIT_S), DEFAULT_TIER_TIMEOUT_S, "Timeout of a probe, read or write."
    )
    keep: bool = setting(switch(), False, "Copy hits from farther tiers to this one.")
    hmac_key_file: str | None = setting(
        file(),
        None,
        "File with a key that seals objects; objects without its seal are misses.",
        is_secret=True,
    )
    encryption_key_file: str | None = setting(
        file(),
        None,
        "File with keys that encrypt and seal objects: the first key writes, all read.",
        is_secret=True,
    )

    @classmethod
    def at(cls, url: str, **values: Any) -> Any:
        """Return the tier at a url, a `TierConfig` of its kind, with values of its fields."""
        location = URL.kind.read(URL_KEY, url)
        return KINDS[location.scheme].config(location, **values)

    @classmethod
    def check(cls, location: Location, place: str, written: Mapping[str, object]) -> None:
        """Raise ConfigError if settings of this kind, at `place` of the list, contradict."""

    def of_rank(self, world_size: int, tenants_path: str) -> TierConfig:
        """Return the configuration of one of an engine's ranks."""
        return self

    @property
    def has_key(self) -> bool:
        """Return whether nobody without a key can write objects that are accepted."""
        return self.hmac_key_file is not None or self.encryption_key_file is not None

    @property
    def limit_bytes(self) -> int | None:
        """Return the capacity of the place; None if there is no limit, or another sets it."""
        return None

    @property
    def host_bytes(self) -> int:
        """Return the bytes of this machine's memory that the engine gives to the place."""
        return 0


@dataclass(frozen=True, slots=True)
class FileConfig(TierConfig):
    """A directory."""

    capacity_bytes: int | None = setting(
        size(MAX_CAPACITY_BYTES),
        None,
        "Bytes for all engines that share the directory; unlimited by default.",
        key="capacity",
        elsewhere="set the server's maxmemory, with allkeys-lru, or use a lifecycle rule of the "
        "bucket",
    )
    num_threads: int = setting(
        count(1, MAX_TIER_THREADS, example=4),
        4,
        "I/O threads per rank.",
        key="threads",
        elsewhere='use "connections"',
    )
    # Not a setting: the file of tenants, each of which has a share of the directory.
    tenants_path: str = dataclasses.field(default="", repr=False)

    def of_rank(self, world_size: int, tenants_path: str) -> FileConfig:
        return dataclasses.replace(self, tenants_path=tenants_path)

    @property
    def limit_bytes(self) -> int | None:
        return self.capacity_bytes


def _connections(default: int) -> Any:
    return setting(
        count(1, MAX_CONNECTIONS, example=4),
        default,
        "Connections per rank.",
        key="connections",
        elsewhere='use "threads"',
    )


@dataclass(frozen=True, slots=True)
class ValkeyConfig(TierConfig):
    """A Valkey or Redis server. Without `ttl_s`, the server alone evicts."""

    num_connections: int = _connections(DEFAULT_CONNECTIONS)
    ttl_s: float | None = setting(
        duration(MAX_TTL_S),
        None,
        "Delete objects unused for this long. By default, the server evicts.",
        key="ttl",
        elsewhere='write "capacity"; for a bucket, use a lifecycle rule of the bucket',
    )
    password_file: str | None = setting(
        file(), None, "File with the server's password, to keep it out of the url.", is_secret=True
    )

    @classmethod
    def check(cls, location: Location, place: str, written: Mapping[str, object]) -> None:
        if location.password and "password_file" in written:
            problem, fix = "the url has a password too", "remove the password from the url"
            key = NestedKey("password_file", place)
            refuse(key, NOT_SHOWN, problem, "one of the two", fix)
        for has, lacks in (("cert_file", "key_file"), ("key_file", "cert_file")):
            if has in written and lacks not in written:
                problem, fix = f'"{lacks}" is missing', f'add "{lacks}"'
                refuse(NestedKey(has, place), written[has], problem, "both or none", fix)


_TLS: Final = "write rediss:// for TLS"


@dataclass(frozen=True, slots=True)
class ValkeyTlsConfig(ValkeyConfig):
    """A server behind TLS. Without `ca_file`, the system's certificates count."""

    ca_file: str | None = setting(
        file(), None, "CA certificates that replace the system's.", elsewhere=_TLS
    )
    cert_file: str | None = setting(
        file(), None, "Client certificate, if the server requires one.", elsewhere=_TLS
    )
    key_file: str | None = setting(
        file(), None, "Key of `cert_file`.", is_secret=True, elsewhere=_TLS
    )


@dataclass(frozen=True, slots=True)
class BucketConfig(TierConfig):
    """A bucket. Without `endpoint`, the cloud's own."""

    num_connections: int = _connections(BUCKET_CONNECTIONS)
    endpoint: str | None = setting(
        endpoint(), None, "Address of the object store, if not the cloud's own."
    )


@dataclass(frozen=True, slots=True)
class MooncakeConfig(TierConfig):
    """Mooncake Store."""

    endpoint: str | None = setting(
        endpoint(), None, "Address of the master's HTTP endpoint, if not on port 9003."
    )
    protocol: str | None = setting(choice(["tcp", "rdma"]), None, "`tcp` (default) or `rdma`.")
    device_name: str = setting(text(), "", "RDMA devices, separated by commas; all by default.")
    metadata_server: str = setting(
        text(), "", "Address of its metadata server; none by default (`P2PHANDSHAKE`)."
    )
    segment_bytes: int | None = setting(
        size(MAX_CAPACITY_BYTES),
        None,
        "Memory that this engine gives to the store; by default it only uses the store.",
        key="segment",
    )
    replicas: int = setting(count(1, MAX_REPLICAS, example=2), 1, "Machines that keep each object.")
    config_file: str | None = setting(
        file(), None, "The file of vLLM's `MOONCAKE_CONFIG_PATH`, for settings omitted here."
    )

    def of_rank(self, world_size: int, tenants_path: str) -> MooncakeConfig:
        segment_bytes = self.segment_bytes and self.segment_bytes // world_size
        return dataclasses.replace(self, segment_bytes=segment_bytes)

    @property
    def host_bytes(self) -> int:
        return self.segment_bytes or 0


_SAME: Final = {"valkey": "redis", "valkeys": "rediss", "gcs": "gs", "azure": "az"}
_SCHEME: Final = re.compile(
    r"([a-z][a-z0-9+.-]{0,19})://(.*)", re.ASCII | re.IGNORECASE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A kind of place, by the scheme of its urls."""

    example: str
    store: str  # the module of its `Store`, and the class
    config: type[TierConfig] = TierConfig
    # From the scheme and the rest of a url to its place.
    read: Callable[[str, str], Location] = read_bucket


_FILES, _VALKEY, _BUCKET_STORE, _MOONCAKE = (
    "safe_offload.tiers.files.file_store:FileStore",
    "safe_offload.tiers.valkey.valkey_store:ValkeyStore",
    "safe_offload.tiers.objects.bucket_store:BucketStore",
    "safe_offload.tiers.mooncake.mooncake_store:MooncakeStore",
)

KINDS: Final = {
    FILE: Scheme("file:///mnt/nvme/kv", _FILES, FileConfig, read_file),
    "redis": Scheme("redis://valkey.internal:6379", _VALKEY, ValkeyConfig, read_server),
    "rediss": Scheme("rediss://valkey.internal:6379", _VALKEY, ValkeyTlsConfig, read_server),
    "unix": Scheme("unix:///run/valkey/valkey.sock", _VALKEY, ValkeyConfig, read_socket),
    "s3": Scheme("s3://bucket/kv", _BUCKET_STORE, BucketConfig),
    "gs": Scheme("gs://bucket/kv", _BUCKET_STORE, BucketConfig),
    "az": Scheme("az://container/kv", _BUCKET_STORE, BucketConfig),
    MOONCAKE: Scheme("mooncake://master.internal:50051", _MOONCAKE, MooncakeConfig, read_master),
}
"""All kinds of place. A new one is a line here and a class, and a class of its settings, if any."""


def _read_url(value: str) -> Location:
    match = _SCHEME.match(value)
    if match is None:
        is_hidden = not value.startswith("/")
        raise WrongError("this is not a url", fix_with(value), is_hidden=is_hidden)
    scheme = _meant_by(match[1].lower())
    kind = KINDS.get(scheme)
    if kind is None:
        nearest = difflib.get_close_matches(scheme, (*KINDS, *_SAME), n=1)
        example = KINDS[_meant_by(nearest[0]) if nearest else FILE].example
        fix = f'write "{URL_KEY}": "{example}", or remove this tier'
        raise WrongError(f'the scheme "{scheme}" is unknown', fix)
    fix = f'write "{URL_KEY}": "{kind.example}"'
    if not value.isprintable():
        raise WrongError("it contains unprintable characters", fix)
    try:
        return kind.read(scheme, match[2])
    except WrongError as error:
        raise WrongError(error.problem, error.fix or fix) from None
    except ValueError:  # a port that is no number, brackets that do not close
        raise WrongError("the host or port is invalid", fix) from None


def _meant_by(scheme: str) -> str:
    return _SAME.get(scheme, scheme)


URL: Final = Setting(
    URL_KEY,
    Kind(
        Annotated[str, Field(strict=True), AfterValidator(_read_url)],
        URL_FORMS,
        f'write "{URL_KEY}": "{KINDS[FILE].example}"',
    ),
    None,
    "Location of the tier; required.",
)

COMMON: Final = settings_of(TierConfig)
"""Settings of every tier, by the names of their fields."""
OWN: Final = {
    config: {
        name: row
        for name, row in settings_of(config).items()
        if name not in settings_of(config.__base__)
    }
    for config in dict.fromkeys(kind.config for kind in KINDS.values())
}
"""By the class of a kind, the settings that it adds."""
TIER_KEYS: Final = tuple(
    dict.fromkeys(row.key for rows in ({"": URL}, COMMON, *OWN.values()) for row in rows.values())
)


def schemes_with(*configs: type[TierConfig]) -> str:
    """Return the schemes of places that have the settings of one of these classes."""
    found = (scheme for scheme, kind in KINDS.items() if issubclass(kind.config, configs))
    return ", ".join(f"{scheme}://" for scheme in found)
