"""Settings of other offloading connectors, so that their configurations start with our name.

Settings with a counterpart are translated; the others are named in one warning.

Source: vLLM 0.31 to 0.33, kv_connector/v1/simple_cpu_offload_connector.py, v1/kv_offload/
(cpu/spec.py, tiering/spec.py, base.py) and kv_connector/v1/offloading/; llm-d-kv-cache,
llmd_fs_backend.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from safe_offload.config.printing import shown_key
from safe_offload.config.settings import NestedKey

_IN_BLOCKS: Final = "a slot is one block, and adjacent slots are copied together"
_ONE_WAY: Final = "there is one backend, with tiers below it"
_EVERY: Final = "every block is stored"
_NO_DISK: Final = 'it needs "kv_offload_backend": "disk"'
_TIERS: Final = 'only its directories are used; write "tiers"'

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "async_init": "memory is prepared in the background",
    "backpressure": _TIERS,
    "block_size": _IN_BLOCKS,
    "blocks_per_chunk": _IN_BLOCKS,
    "cache_policy_module_path": 'write "eviction_policy"',
    "canonical_layout": "objects do not depend on where layers lie in the KV cache",
    "disk_buffer_slots": "blocks go to the disk through host memory, which needs no buffers",
    "enable_offload": "naming the connector enables it",
    "enable_telemetry": "metrics are always on",
    "gpu_blocks_per_file": "an object is one block",
    "load_async": "loads are always asynchronous",
    "lookup_async": "lookups never block the scheduler",
    "max_tracker_size": _EVERY,
    "offload_prompt_only": "answers are also stored",
    "offloaded_block_size": _IN_BLOCKS,
    "self_describing_kv_events": "KV events always contain the tokens",
    "spec_module_path": _ONE_WAY,
    "spec_name": _ONE_WAY,
    "sync_load_budget_bytes": "loads never delay a step",
    "store_threshold": f'{_EVERY}; "eviction_policy": "returns" resists one-off prompts',
    "tier_poll_interval_s": "tiers report when they are done",
    "threads_per_gpu": 'write "num_threads" into the tier',
    "use_page_cache": "direct I/O is used wherever it works",
}
"""By key, the reason why it has no effect."""

SECONDARY_TIERS: Final = "secondary_tiers"
SHARED_STORAGE: Final = "shared_storage_path"
KNOWN: Final = (*WITHOUT_EFFECT, SECONDARY_TIERS, SHARED_STORAGE)
DISK_KEYS: Final = ("disk_path", "disk_capacity_bytes")
SPEC: Final = "spec_module_path"
_POLICY: Final = "eviction_policy"

POLICIES: Final[Mapping[str, str]] = {"arc": "returns"}
"""Eviction policies of others, with the one used instead."""

LMCACHE: Final = "LMCACHE_"
"""The prefix of LMCache's environment variables."""

_DIRECTORIES: Final = ("fs", "fs_python", "fs_worker")
_BOUNDS: Final[Mapping[str, int]] = {"gc_max_size_gb": 10**9, "max_bytes": 1}
"""The settings that limit a directory, each with its unit in bytes; the last one written counts."""

_THREADS: Final = 'write "threads" into a tier of "tiers"'
_IN_DIRECTORY: Final[Mapping[str, str]] = {
    "eviction_policy": "eviction is least recently used",
    "min_free_bytes": 'write a "capacity" into a tier of "tiers"',
    "n_read_threads": _THREADS,
    "n_write_threads": _THREADS,
}


def unread(written: Mapping[str, object]) -> set[str]:
    """Return the keys whose values are not read: empty, or names of another package."""
    keys = {key for key in DISK_KEYS if written.get(key, "") in (None, "")}
    return keys | ({_POLICY} if "cache_policy_module_path" in written else set())


class Directory(NamedTuple):
    """A directory for blocks: its path and limit as written (None for no limit), and their keys."""

    path_key: str
    path: object
    bound_key: str = ""
    bound: object = None
    unit_bytes: int = 1


def directories(written: Mapping[str, object]) -> list[Directory]:
    """Return the directories in which a configuration keeps blocks."""
    tiers = enumerate(_list(written.get(SECONDARY_TIERS)))
    found = [
        _directory(tier, f'["{SECONDARY_TIERS}"][{index}]')
        for index, tier in tiers
        if _is_directory(tier)
    ]
    if SHARED_STORAGE in written and written.get("backend") != "OBJ":  # which keeps it in a bucket
        found.insert(0, Directory(SHARED_STORAGE, written[SHARED_STORAGE]))
    return found


def _directory(tier: Mapping[str, Any], place: str) -> Directory:
    found = Directory(NestedKey("root_dir", place), tier["root_dir"])
    for key, unit_bytes in _BOUNDS.items():
        if (bound := tier.get(key)) is not None:
            found = Directory(*found[:2], NestedKey(key, place), bound, unit_bytes)
    return found


def without_effect(written: Mapping[str, object], ours: Collection[str]) -> dict[str, str]:
    """Return the keys without effect, each with the reason; `ours` are our settings."""
    found = {key: why for key, why in WITHOUT_EFFECT.items() if key in written}
    if SPEC in written:
        others = (key for key in written if key not in (*KNOWN, *ours))
        found |= {_shown(key): "it belongs to that spec" for key in others}
    if written.get("kv_offload_backend") != "disk":
        found |= {key: _NO_DISK for key in DISK_KEYS if key in written}
    tiers = written.get(SECONDARY_TIERS)
    if "tiers" in written or not all(map(_is_directory, _list(tiers))):
        found |= {key: _TIERS for key in (SECONDARY_TIERS, SHARED_STORAGE) if key in written}
    else:
        found |= _without_effect_in_directories(_list(tiers))
    policy = written.get(_POLICY)
    if policy is not None and _POLICY in unread(written):
        found[_POLICY] = '"lru" is used'
    elif isinstance(policy, str) and policy in POLICIES:
        found[_POLICY] = f'"{POLICIES[policy]}" is used instead'
    return found


def _without_effect_in_directories(tiers: list[Mapping[str, object]]) -> dict[str, str]:
    found = {}
    for index, tier in enumerate(tiers):
        for key in tier.keys() - {"type", "root_dir", *_BOUNDS}:
            name = f"{SECONDARY_TIERS}[{index}].{_shown(key)}"
            found[name] = _IN_DIRECTORY.get(key, "a directory has no such setting here")
    return dict(sorted(found.items()))


def _shown(key: object) -> str:
    return shown_key(key).strip('"')


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_directory(tier: Any) -> bool:
    kind = tier.get("type") if isinstance(tier, Mapping) else None
    return isinstance(kind, str) and kind in _DIRECTORIES and "root_dir" in tier
