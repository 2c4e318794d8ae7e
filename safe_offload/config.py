"""What a user can set, read from `kv_connector_extra_config` and checked before anything starts.

The keys of vLLM's SimpleCPUOffloadConnector keep their names and meanings, so that switching to
this connector is a change of one word. Unlike there, a key that is not known and a value that
cannot be meant are errors, because a setting that is silently ignored is found weeks later.

vLLM itself adds no key to this mapping for a connector of ours, so none has to be let through:
`VllmConfig._post_init_kv_transfer_config` writes `cpu_bytes_to_use`, but only after it has put one
of vLLM's own connectors in our place, and MultiConnector hands each child the child's own mapping.
Source: vLLM 0.32.0, vllm/config/vllm.py and kv_connector/v1/multi_connector.py.
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal

from safe_offload.errors import ConfigError
from safe_offload.settings import (
    SIZE_FORMS,
    integer,
    read_choice,
    read_count,
    read_count_or_auto,
    read_sampling,
    read_seconds,
    read_switch,
    shown,
    value_error,
)

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

# Source of the default: SimpleCPUOffloadConnector of vLLM 0.32.0.
DEFAULT_CPU_BYTES: Final = 8 * GIB
DEFAULT_MAX_INFLIGHT_BYTES: Final = 256 * MIB
DEFAULT_COPY_THREADS: Final = 1
DEFAULT_TRANSFER_TIMEOUT_S: Final = 30.0

# Less than one memory page is never a size: it is a number of GiB written without its unit.
MIN_SIZE_BYTES: Final = 4 * KIB
# Half of the 128 TiB that a process can address on x86-64 with four-level page tables.
# Source: Linux kernel, Documentation/arch/x86/x86_64/mm.rst.
MAX_BYTES_PER_RANK: Final = 64 * TIB
# The same for a server of 1024 ranks. It does not depend on the world size, so that settings can
# be checked before that is known.
MAX_BYTES_PER_SERVER: Final = 1024 * MAX_BYTES_PER_RANK
MAX_NUM_SLOTS: Final = (1 << 31) - 1
MAX_COPY_THREADS: Final = 64
MAX_TRANSFER_TIMEOUT_S: Final = 3600
MAX_MIN_LOAD_TOKENS: Final = (1 << 31) - 1

EVICTION_POLICIES: Final = ("lru", "slru")
COPY_PATHS: Final = ("auto", "batch", "kernel", "each")
SELF_TESTS: Final = ("on", "off")

CapacityKey = Literal["cpu_bytes_to_use", "cpu_bytes_to_use_per_rank", "num_cpu_blocks"]

VALID_KEYS: Final = (
    "cpu_bytes_to_use",
    "cpu_bytes_to_use_per_rank",
    "num_cpu_blocks",
    "lazy_offload",
    "eviction_policy",
    "kv_offload_backend",
    "max_inflight_bytes",
    "copy_threads",
    "copy_path",
    "self_test",
    "transfer_timeout_s",
    "min_load_tokens",
    "verify",
    "check_invariants",
)

# Keys of SimpleCPUOffloadConnector's disk tier, which does not exist here.
DISK_KEYS: Final = ("disk_path", "disk_capacity_bytes", "disk_buffer_slots", "use_page_cache")

# Fields of vLLM's KVTransferConfig, which users put one level too deep.
# Source: vLLM 0.32.0, vllm/config/kv_transfer.py.
OUTER_KEYS: Final = (
    "kv_connector",
    "kv_role",
    "kv_load_failure_policy",
    "kv_connector_module_path",
    "kv_buffer_device",
    "kv_port",
    "engine_id",
    "enable_permute_local_kv",
    "kv_connector_extra_config",
)

_UNIT_BYTES: Final[Mapping[str, int]] = {
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}i": 1 << 10 * power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
}
_SIZE_PATTERN: Final = re.compile(
    r"(?P<number>\d+(?:_\d+)*(?:\.\d+)?(?:e\+?\d{1,2})?)\s*(?P<unit>[a-z]*)",
    re.ASCII | re.IGNORECASE,
)
_SIZE_LENGTH_MAX: Final = 40


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """The settings of one engine, the same in the scheduler and in every worker.

    Attributes:
        cpu_bytes_per_rank: host memory of one worker in bytes; not used where `num_slots` is set.
        num_slots: exact number of host slots, or None for as many as the bytes hold.
        capacity_key: the key that decides the size of the pool, for messages with a fix.
        world_size: number of workers of this engine, which share `cpu_bytes_to_use`.
        ranks_per_copy: ranks that put their memory together, because all hold the same KV cache.
        lazy_offload: store only blocks that are about to be evicted, instead of every full block.
        eviction_policy: which slot goes first when a new one is needed; see scheduler/eviction.py.
        max_inflight_bytes: bytes of copies that one worker may have under way at a time.
        copy_threads: threads that copy, in the CPU backend.
        copy_path: how the GPU backend copies; "auto" chooses by the lengths of the ranges.
        self_test: prove that copies are right when vLLM has allocated its KV cache.
        transfer_timeout_s: a transfer that has not been started by then fails; one that was started
            and has not ended by then is overdue.
        min_load_tokens: hits of fewer tokens are computed instead; None for those of which that is
            expected to be faster.
        verify_every: one in so many loaded slots is compared with the checksum of what was stored
            in it; 0 for none, and then no checksums are computed.
        verify_invariants: check the connector's own state after every step; for tests.
    """

    cpu_bytes_per_rank: int
    num_slots: int | None = None
    capacity_key: CapacityKey = "cpu_bytes_to_use"
    world_size: int = 1
    ranks_per_copy: int = 1
    lazy_offload: bool = False
    eviction_policy: str = "lru"
    max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES
    copy_threads: int = DEFAULT_COPY_THREADS
    copy_path: str = "auto"
    self_test: bool = True
    transfer_timeout_s: float = DEFAULT_TRANSFER_TIMEOUT_S
    min_load_tokens: int | None = None
    verify_every: int = 0
    verify_invariants: bool = False

    def num_slots_of(self, slot_bytes: int) -> int:
        """Return how many host slots of this size each rank has; ranks with one copy the same.

        Raises:
            ConfigError: there is not room for one.
        """
        pool_bytes = self.cpu_bytes_per_rank * self.ranks_per_copy
        num_slots = self.num_slots or pool_bytes // slot_bytes
        if num_slots:
            return num_slots
        raise ConfigError(
            f'"{self.capacity_key}" gives each rank {format_bytes(self.cpu_bytes_per_rank)}; '
            f"expected at least one block, {format_bytes(slot_bytes)}. Fix: give more, or shorten "
            "the block size."
        )

    @classmethod
    def from_extra_config(
        cls, extra: Mapping[str, object] | None, *, world_size: int
    ) -> "OffloadConfig":
        """Read and check `kv_connector_extra_config`.

        Every key that is there is checked, also one that another key overrides.

        Args:
            extra: what the user wrote; None is an empty mapping, as in vLLM.
            world_size: number of workers of the engine, at least 1. Where it is not known yet, 1
                refuses nothing that any other number would accept.

        Raises:
            ConfigError: the first thing that cannot be used, with what is allowed and the fix.
        """
        if type(world_size) is not int or world_size < 1:
            raise ConfigError(f"world_size is {shown(world_size)}; expected an integer of 1 up.")
        settings = _require_mapping({} if extra is None else extra)
        # Before the keys: who asks for a disk tier has set its other keys as well.
        _require_cpu_backend(settings)
        _require_known_keys(settings)

        server_bytes = DEFAULT_CPU_BYTES
        if "cpu_bytes_to_use" in settings:
            server_bytes = _read_size(
                settings, "cpu_bytes_to_use", num_shares=world_size, maximum=MAX_BYTES_PER_SERVER
            )
        bytes_per_rank = server_bytes // world_size
        num_slots: int | None = None
        capacity_key: CapacityKey = "cpu_bytes_to_use"
        if "cpu_bytes_to_use_per_rank" in settings:
            capacity_key = "cpu_bytes_to_use_per_rank"
            bytes_per_rank = _read_size(settings, capacity_key)
        if "num_cpu_blocks" in settings:
            capacity_key = "num_cpu_blocks"
            num_slots = read_count(settings, capacity_key, maximum=MAX_NUM_SLOTS)

        return cls(
            cpu_bytes_per_rank=bytes_per_rank,
            num_slots=num_slots,
            capacity_key=capacity_key,
            world_size=world_size,
            lazy_offload=read_switch(settings, "lazy_offload"),
            eviction_policy=read_choice(settings, "eviction_policy", EVICTION_POLICIES),
            max_inflight_bytes=(
                _read_size(settings, "max_inflight_bytes")
                if "max_inflight_bytes" in settings
                else DEFAULT_MAX_INFLIGHT_BYTES
            ),
            copy_threads=(
                read_count(settings, "copy_threads", maximum=MAX_COPY_THREADS)
                if "copy_threads" in settings
                else DEFAULT_COPY_THREADS
            ),
            copy_path=read_choice(settings, "copy_path", COPY_PATHS),
            self_test=read_choice(settings, "self_test", SELF_TESTS) == "on",
            transfer_timeout_s=(
                read_seconds(settings, "transfer_timeout_s", maximum=MAX_TRANSFER_TIMEOUT_S)
                if "transfer_timeout_s" in settings
                else DEFAULT_TRANSFER_TIMEOUT_S
            ),
            min_load_tokens=read_count_or_auto(
                settings, "min_load_tokens", maximum=MAX_MIN_LOAD_TOKENS
            ),
            verify_every=read_sampling(settings, "verify"),
            verify_invariants=read_switch(settings, "check_invariants"),
        )


def format_bytes(size_bytes: int) -> str:
    """Return a size for people, with two decimals and a binary unit, such as `8.00 GiB`."""
    for unit_bytes, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.2f} {unit}"
    return f"{size_bytes} bytes"


def _require_mapping(extra: object) -> Mapping[str, object]:
    """Return `extra` if it is a mapping."""
    if isinstance(extra, Mapping):
        return extra
    raise ConfigError(
        f"kv_connector_extra_config is {shown(extra)}; expected a mapping of settings. "
        'Fix: write it as {"cpu_bytes_to_use": "64GiB"}, or leave it out.'
    )


def _require_known_keys(settings: Mapping[Any, object]) -> None:
    """Accept settings that have no key but ours."""
    for key, value in settings.items():
        if not isinstance(key, str) or key not in VALID_KEYS:
            raise _key_error(key, value)


def _key_error(key: object, value: object) -> ConfigError:
    """Return the error for a key that is not one of ours, with the likeliest fix."""
    valid = ", ".join(VALID_KEYS)
    problem = "is not a setting of SafeCPUOffloadConnector"
    if isinstance(key, str) and key in DISK_KEYS:
        problem = (
            "belongs to the disk tier of SimpleCPUOffloadConnector; there is no disk tier here"
        )
        fix = "remove it; the KV cache is kept in host memory only"
    elif isinstance(key, str) and key in OUTER_KEYS:
        problem = "is a field of --kv-transfer-config itself, not of its kv_connector_extra_config"
        fix = f'move "{key}" one level up, beside "kv_connector"'
    else:
        spelling = key.strip().lower().replace("-", "_") if isinstance(key, str) else ""
        nearest = difflib.get_close_matches(spelling, VALID_KEYS, n=1, cutoff=0.5)
        fix = f'write "{nearest[0]}" if that is meant, else remove it' if nearest else "remove it"
    return ConfigError(
        f"kv_connector_extra_config[{shown(key)}] = {shown(value)}: this {problem}. "
        f"Allowed keys: {valid}. Fix: {fix}."
    )


def _require_cpu_backend(settings: Mapping[str, object]) -> None:
    """Accept `kv_offload_backend` if it says "cpu", the only tier here."""
    backend = settings.get("kv_offload_backend", "cpu")
    if isinstance(backend, str) and backend == "cpu":
        return
    is_disk = isinstance(backend, str) and backend == "disk"
    raise value_error(
        "kv_offload_backend",
        backend,
        problem="there is no disk tier here" if is_disk else "there is no such backend",
        allowed='"cpu"',
        fix='set it to "cpu" or leave it out, and give host memory with "cpu_bytes_to_use"'
        + ("; for a disk tier use SimpleCPUOffloadConnector" if is_disk else ""),
    )


def _read_size(
    settings: Mapping[str, object],
    key: str,
    *,
    num_shares: int = 1,
    maximum: int = MAX_BYTES_PER_RANK,
) -> int:
    """Return a size in bytes: an integer, a float without fraction, or a string with a unit.

    Args:
        num_shares: number of ranks among which the size is divided; each must get enough.
        maximum: the largest size in bytes.
    """
    value = settings[key]
    size_bytes = _size_from_string(key, value) if isinstance(value, str) else integer(key, value)
    minimum = MIN_SIZE_BYTES * num_shares
    if minimum <= size_bytes <= maximum:
        return size_bytes
    among = f" for {num_shares} ranks" if num_shares > 1 else ""
    fix = f'write a size with its unit, such as "{key}": "64GiB"'
    if size_bytes < 0:
        problem = "it is negative"
    elif size_bytes == 0:
        problem = "it is zero"
        fix += ", or leave the connector out to run without one"
    elif size_bytes < minimum:
        problem = f"{size_bytes} bytes is too small{among}"
        if size_bytes < MIN_SIZE_BYTES and not isinstance(value, str):
            # Whoever writes 64 means GiB: the unit is missing.
            fix = (
                "a plain number is in bytes; write the unit that you mean, "
                f'such as "{size_bytes}GiB" or "{size_bytes}MiB"'
            )
    else:
        problem = "it is too large"
    bounds = f"{format_bytes(minimum)}{among} to {format_bytes(maximum)}"
    raise value_error(key, value, problem=problem, allowed=f"{SIZE_FORMS}, {bounds}", fix=fix)


def _size_from_string(key: str, value: str) -> int:
    """Return the bytes that a string such as "64GiB", "1.5 TB" or "8589934592" means.

    Units do not depend on case. A bare letter is refused, because it is 1000**n to some and
    1024**n to others: vLLM itself reads 64g and 64G in a command line as two different sizes.
    Source: vLLM 0.32.0, vllm/engine/arg_utils.py, human_readable_int.
    """
    text = value.strip() if len(value) <= _SIZE_LENGTH_MAX else ""
    match = _SIZE_PATTERN.fullmatch(text)
    if match is None:
        negative = text.startswith("-")
        raise value_error(
            key,
            value,
            problem="a size cannot be negative" if negative else "this is not a size",
            allowed=SIZE_FORMS,
            fix=f'write "{key}": "64GiB"',
        )
    number, unit = match["number"], match["unit"]
    unit_bytes = 1 if not unit else _UNIT_BYTES.get(unit.lower())
    if unit_bytes is None:
        letter = unit.upper() if unit.lower() in ("k", "m", "g", "t", "p") else ""
        raise value_error(
            key,
            value,
            problem=f"the unit {unit!r} is {'ambiguous' if letter else 'unknown'}",
            allowed=f"{SIZE_FORMS}; units are B, KiB to PiB and KB to PB",
            fix=f'write "{number}{letter or "G"}iB" or "{number}{letter or "G"}B"',
        )
    size = Fraction(number.replace("_", "")) * unit_bytes
    if unit_bytes == 1 and size.denominator != 1:
        raise value_error(
            key,
            value,
            problem="a number of bytes has no fraction",
            allowed=SIZE_FORMS,
            fix=f'write it with the unit that you mean, such as "{number}GiB"',
        )
    return math.floor(size)
