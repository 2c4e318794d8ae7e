"""The settings of `kv_connector_extra_config`, read and checked before anything starts.

`OffloadConfig` is the one table of settings: the table of docs/configuration.md and `safe-offload
config` come from it. The keys of vLLM's other offloading connectors keep their meanings, as far as
they have one here (other_connectors.py). Unlike there, unknown keys and impossible values are
errors.

vLLM adds no key of its own to this mapping. Source: vLLM 0.32.0, vllm/config/vllm.py,
`_post_init_kv_transfer_config`, and kv_connector/v1/multi_connector.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from safe_offload.config import other_connectors
from safe_offload.config.printing import NOT_SHOWN, shown, shown_key
from safe_offload.config.settings import (
    MAX_BYTES_PER_RANK,
    choice,
    count,
    directory,
    file,
    fix_of_unknown,
    read_settings,
    refuse,
    sampling,
    seconds,
    setting,
    settings_of,
    share,
    size,
    switch,
    text,
)
from safe_offload.config.tier_list import tiers
from safe_offload.config.tier_url import Location
from safe_offload.config.tiers import MAX_CAPACITY_BYTES, FileConfig, TierConfig
from safe_offload.config.units import format_bytes
from safe_offload.errors import ConfigError

# For more ranks than any server has: settings are checked before the world size is known.
MAX_BYTES_PER_SERVER: Final = 1024 * MAX_BYTES_PER_RANK
MAX_NUM_SLOTS: Final = (1 << 31) - 1
MAX_COPY_THREADS: Final = 64
STORES_FACTOR: Final = 4
MAX_TRANSFER_TIMEOUT_S: Final = 3600
MAX_MIN_LOAD_TOKENS: Final = (1 << 31) - 1
MAX_PIN_SHARE: Final = 0.9
DEFAULT_TRANSFER_TIMEOUT_S: Final = 30

# The first that is written takes precedence: bytes, as in vLLM.
CAPACITY_KEYS: Final = ("cpu_bytes_to_use_per_rank", "cpu_bytes_to_use", "num_cpu_blocks")

EVICTION_POLICIES: Final = ("returns", "lru")

# The fields of vLLM's KVTransferConfig, which users put one level too deep.
# Source: vLLM 0.32.0, vllm/config/kv_transfer.py.
OUTER_KEYS: Final = (
    *("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config"),
    *("kv_connector_module_path", "kv_buffer_device", "kv_port", "engine_id"),
    "enable_permute_local_kv",
)


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """The settings of one engine, the same in the scheduler and in every worker.

    A field made by `setting` is a key for users. To add a setting, add a field.
    """

    # Source of the default: SimpleCPUOffloadConnector of vLLM 0.32.0.
    cpu_bytes_to_use: int = setting(
        size(MAX_BYTES_PER_SERVER), "8GiB", "Host memory per engine, split equally among its ranks."
    )
    cpu_bytes_to_use_per_rank: int | None = setting(
        size(MAX_BYTES_PER_RANK), None, "Host memory per rank; overrides `cpu_bytes_to_use`."
    )
    num_slots: int | None = setting(
        count(1, MAX_NUM_SLOTS, example=4096),
        None,
        "Number of host blocks per rank, if neither size is set.",
        key="num_cpu_blocks",
    )
    lazy_offload: bool = setting(
        switch(),
        False,
        "Store a block when vLLM is about to evict it instead of as soon as it is full.",
    )
    eviction_policy: str = setting(
        choice(EVICTION_POLICIES, other_connectors.POLICIES),
        "returns",
        "Evict first what is least likely to be reused soon (`returns`) or least recently used "
        "(`lru`).",
    )
    pin_share: float = setting(
        share(MAX_PIN_SHARE), 0, "Fraction of host memory that requests may pin."
    )
    sharing: str | None = setting(
        choice(["node"]),
        None,
        "`node`: one host cache for all engines of this machine, user and model; it outlives them.",
        key="share",
    )
    kv_hints: bool = setting(switch(), False, "Honor request hints.")
    kv_offload_backend: str = setting(
        choice(["cpu", "disk"]),
        "cpu",
        "SimpleCPUOffloadConnector's key: `disk` adds the directory `disk_path` as the only tier.",
    )
    disk_path: str | None = setting(
        directory(), None, 'The directory of `"kv_offload_backend": "disk"`.'
    )
    disk_capacity_bytes: int = setting(
        size(MAX_BYTES_PER_RANK), "100GiB", "Capacity of `disk_path` per rank."
    )
    tiers: tuple[TierConfig, ...] = setting(
        tiers(), [], "Storage below host memory, nearest first."
    )
    max_inflight_bytes: int = setting(
        size(MAX_BYTES_PER_RANK),
        "256MiB",
        "Limit on bytes in flight, per rank and direction; one transfer may exceed it.",
    )
    copy_threads: int = setting(
        count(1, MAX_COPY_THREADS, example=2), 1, "Copy threads per rank; vLLM's CPU engine only."
    )
    copy_path: str = setting(
        choice(["auto", "batch", "kernel", "each"]),
        "auto",
        "How a GPU copies ranges: in one driver call (`batch`), in one kernel launch (`kernel`), "
        "one by one (`each`), or by the faster of the first two in the self-test (`auto`).",
    )
    enable_cross_layers_blocks: bool = setting(
        switch(),
        False,
        "Ask vLLM to keep all layers of a block contiguous, if the attention backend supports it.",
    )
    self_test: bool = setting(
        choice(["on", "off"], {"on": True, "off": False}),
        "on",
        "Test every copy path on the real KV cache memory before vLLM serves, and reject paths "
        "that corrupt a byte.",
    )
    transfer_timeout_s: float = setting(
        seconds(MAX_TRANSFER_TIMEOUT_S),
        DEFAULT_TRANSFER_TIMEOUT_S,
        "Deadline for a transfer to start; past it, the transfer fails and its tokens are "
        "recomputed.",
    )
    min_load_tokens: int | None = setting(
        count(0, MAX_MIN_LOAD_TOKENS, example=256, word="auto"),
        "auto",
        "Recompute hits of fewer tokens instead of loading them; `auto`: whenever that is expected "
        "to be faster.",
    )
    load_in_step: bool = setting(
        switch(),
        True,
        "Load a hit in the very step that computes the rest of its prompt, if no request runs or, "
        "on a GPU, if running ones wait less than it saves.",
    )
    verify_every: int = setting(
        sampling(),
        "off",
        "Verify checksums of loaded blocks: of all (`load`) or of one in N (`sample:N`).",
        key="verify",
    )
    tenants: str | None = setting(
        file(),
        None,
        "File with the quotas of tenants (`cache_salt`) in host memory and directories.",
        is_secret=True,
    )
    metrics_port: int | None = setting(
        count(1, 65535, example=9400),
        None,
        "Additional port for the metrics, for servers whose `/metrics` lacks them; data-parallel "
        "engines use consecutive ports.",
    )
    metrics_host: str = setting(text(), "127.0.0.1", "Address that `metrics_port` listens on.")
    verify_invariants: bool = setting(
        switch(),
        False,
        "Check internal state after every step; slow, for tests.",
        key="check_invariants",
    )
    # Not settings: the number of workers, and how many of them share one copy because all hold the
    # same KV cache.
    world_size: int = 1
    ranks_per_copy: int = 1

    @property
    def uses_blocks_of_others(self) -> bool:
        """Whether hits may be blocks of other engines, including earlier ones."""
        return bool(self.tiers) or self.sharing is not None

    @property
    def capacity_key(self) -> str:
        """Return the key that decides the size of the pool."""
        per_rank, total, blocks = CAPACITY_KEYS
        if self.num_slots is not None:
            return blocks
        return total if self.cpu_bytes_to_use_per_rank is None else per_rank

    @property
    def cpu_bytes_per_rank(self) -> int:
        """Return the host memory of one worker in bytes; unused if `num_slots` is set."""
        return self.cpu_bytes_to_use_per_rank or self.cpu_bytes_to_use // self.world_size

    @property
    def store_bytes_max(self) -> int:
        """Return the limit on bytes of stores not yet copied, unless one block is larger."""
        return STORES_FACTOR * self.max_inflight_bytes

    def value_for(self, num_blocks: int, block_bytes: int) -> str:
        """Return what to write for `capacity_key`, so that each rank has blocks of this size."""
        if self.num_slots is not None:
            return str(num_blocks)
        num_shares = self.world_size if self.capacity_key == "cpu_bytes_to_use" else 1
        size_mib = -(-num_blocks * block_bytes * num_shares // (self.ranks_per_copy << 20))
        return f'"{size_mib}MiB"'

    def num_slots_of(self, slot_bytes: int) -> int:
        """Return the host slots of this size per rank, or copy; ConfigError if none fits."""
        pool_bytes = self.cpu_bytes_per_rank * self.ranks_per_copy
        num_slots = self.num_slots or pool_bytes // slot_bytes
        if num_slots:
            return num_slots
        raise ConfigError(
            f'"{self.capacity_key}" gives each rank {format_bytes(self.cpu_bytes_per_rank)}; '
            f"expected at least one block, {format_bytes(slot_bytes)}. Fix: raise it, or lower "
            "--block-size."
        )

    def open_metrics(self, engine_index: int, open_at: Callable[[int, str], Any]) -> Any:
        """Return `open_at(port, host)` for an engine's metrics; raise ConfigError if that fails."""
        port = (self.metrics_port or 0) + engine_index
        try:
            return open_at(port, self.metrics_host)
        except (OSError, OverflowError) as error:
            problem = f"{self.metrics_host}:{port} cannot be opened ({error})"
            allowed = "a free port; engine N of a data-parallel server takes metrics_port + N"
            fix = 'write another "metrics_port", or stop the process that listens there'
            refuse("metrics_port", self.metrics_port, problem, allowed, fix)

    @classmethod
    def from_extra_config(
        cls, extra: Mapping[str, object] | None, *, world_size: int
    ) -> "OffloadConfig":
        """Read and check `kv_connector_extra_config`, also keys that another key overrides.

        Args:
            extra: the mapping as written; None is an empty mapping, as in vLLM.
            world_size: number of workers of the engine, at least 1. Where it is not known yet, 1
                refuses nothing that any other number would accept.

        Raises:
            ConfigError: the first invalid setting, with the allowed values and the fix.
        """
        if type(world_size) is not int or world_size < 1:
            raise ConfigError(f"world_size is {shown(world_size)}; expected at least 1.")
        written = _require_mapping({} if extra is None else extra)
        unread = other_connectors.unread(written)
        values = read_settings(cls, {k: v for k, v in written.items() if k not in unread})
        if "cpu_bytes_to_use" in values:
            shares = size(MAX_BYTES_PER_SERVER, num_ranks=world_size)
            shares.read("cpu_bytes_to_use", written["cpu_bytes_to_use"])
        if CAPACITY_KEYS[0] in values or CAPACITY_KEYS[1] in values:
            values.pop("num_slots", None)
        _require_known_keys(written)
        if disk := _disk_tier(written, values, world_size):
            values["tiers"] = (disk,)
        elif "tiers" not in written:
            found = other_connectors.directories(written)
            values["tiers"] = tuple(map(_directory_tier, found))
        if values.get("sharing") is not None and values.get("tenants"):
            problem = '"tenants" is also set, and a pool guarantees slots to engines, not to salts'
            refuse("share", "node", problem, "one of the two", 'remove "share", or "tenants"')
        return cls(**values, world_size=world_size)


SETTINGS: Final = settings_of(OffloadConfig)
VALID_KEYS: Final = tuple(row.key for row in SETTINGS.values())


def _directory_tier(written: other_connectors.Directory) -> TierConfig:
    location = Location("file", directory().read(written.path_key, written.path))
    if written.bound is None:
        return FileConfig(location)
    kind = size(MAX_CAPACITY_BYTES, unit_bytes=written.unit_bytes)
    return FileConfig(location, capacity_bytes=kind.read(written.bound_key, written.bound))


def _disk_tier(
    written: Mapping[str, object], values: Mapping[str, Any], world_size: int
) -> TierConfig | None:
    """Return the tier for SimpleCPUOffloadConnector's keys, if they are written.

    Its capacity is per rank (vLLM 0.32.0, v1/simple_kv_offload/worker.py).
    """
    path_key, capacity_key = other_connectors.DISK_KEYS
    if values.get("kv_offload_backend") != "disk":
        return None
    if "tiers" in written:
        allowed, fix = "one of the two", 'move the directory into "tiers", and remove this key'
        refuse("kv_offload_backend", "disk", '"tiers" is also set', allowed, fix)
    if path_key not in values:
        allowed, fix = 'it beside "disk_path"', 'add "disk_path": "/mnt/nvme/kv"'
        refuse("kv_offload_backend", "disk", "no directory is given", allowed, fix)
    row = SETTINGS[capacity_key]
    per_rank_bytes = values.get(capacity_key) or row.kind.read(row.key, row.default)
    location = Location("file", values[path_key])
    return FileConfig(location, capacity_bytes=per_rank_bytes * world_size)


def _require_mapping(extra: object) -> Mapping[str, object]:
    if isinstance(extra, Mapping):
        return extra
    found = shown(NOT_SHOWN if isinstance(extra, str) else extra)
    raise ConfigError(
        f"kv_connector_extra_config is {found}; expected a mapping of settings. "
        'Fix: write it as {"cpu_bytes_to_use": "64GiB"}, or leave it out.'
    )


def _require_known_keys(written: Mapping[Any, object]) -> None:
    known = (*VALID_KEYS, *other_connectors.KNOWN)
    if other_connectors.SPEC in written:
        known += tuple(key for key in written if isinstance(key, str))
    unknown = [key for key in written if not isinstance(key, str) or key not in known]
    for key in unknown[:1]:
        problem = "is not a setting of SafeCPUOffloadConnector"
        fix = fix_of_unknown(key, VALID_KEYS)
        if isinstance(key, str) and key in OUTER_KEYS:
            problem = "is a field of --kv-transfer-config, not of its kv_connector_extra_config"
            fix = f'move "{key}" one level up, beside "kv_connector"'
        others = ", ".join(map(shown_key, unknown[1:]))
        as_well = f" Unknown as well: {others}." if others else ""
        raise ConfigError(
            f"kv_connector_extra_config[{shown_key(key)}] = {shown(NOT_SHOWN)}: this {problem}. "
            f"Allowed keys: {', '.join(VALID_KEYS)}. Fix: {fix}."
            f"{as_well}"
        )
