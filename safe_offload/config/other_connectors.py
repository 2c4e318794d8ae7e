"""Settings of other offloading connectors, so that their configurations start with our name.

What means something here is taken or translated; what does not is named in one warning.

Source: vLLM 0.32.0, kv_connector/v1/simple_cpu_offload_connector.py, v1/kv_offload/ (cpu/spec.py,
tiering/spec.py, base.py) and kv_connector/v1/offloading/config.py; llm-d-kv-cache, llmd_fs_backend.
"""

from collections.abc import Mapping
from typing import Any, Final

_IN_BLOCKS: Final = "blocks are kept one by one, and neighbours are copied together"
_ONE_WAY: Final = "there is one way to keep blocks, and tiers below it"
_EVERY: Final = "every block is stored"
_TIERS: Final = 'of what stands in it only directories are used; write "tiers"'

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "async_init": "memory is made ready in the background",
    "backpressure": _TIERS,
    "block_size": _IN_BLOCKS,
    "blocks_per_chunk": _IN_BLOCKS,
    "cache_policy_module_path": 'write "eviction_policy"',
    "canonical_layout": "objects do not depend on where layers lie in the KV cache",
    "disk_buffer_slots": "blocks go to the disk through host memory, which needs no buffers",
    "enable_telemetry": "metrics are always there",
    "gpu_blocks_per_file": "an object is one block",
    "load_async": "loads are always asynchronous",
    "lookup_async": "no look-up blocks the scheduler",
    "max_tracker_size": _EVERY,
    "offload_prompt_only": "answers are stored, too",
    "offloaded_block_size": _IN_BLOCKS,
    "self_describing_kv_events": "KV events always have the tokens",
    "spec_module_path": _ONE_WAY,
    "spec_name": _ONE_WAY,
    "store_threshold": f'{_EVERY}; against prompts that come once, "eviction_policy": "slru"',
    "threads_per_gpu": 'write "num_threads" into the tier',
    "use_page_cache": "files are read and written past the page cache wherever that works",
}
"""By key, why it has no effect here."""

SECONDARY_TIERS: Final = "secondary_tiers"
SHARED_STORAGE: Final = "shared_storage_path"
KNOWN: Final = (*WITHOUT_EFFECT, SECONDARY_TIERS, SHARED_STORAGE)

POLICIES: Final[Mapping[str, str]] = {"arc": "slru"}
"""Of eviction, by what is nearest to them here."""

_DIRECTORIES: Final = ("fs", "fs_python", "fs_worker")


def directories(written: Mapping[str, object]) -> list[object]:
    """Return the directories that a configuration keeps blocks in, as they are written."""
    tiers = written.get(SECONDARY_TIERS)
    found = [tier["root_dir"] for tier in _list(tiers) if _is_directory(tier)]
    return [*([written[SHARED_STORAGE]] if SHARED_STORAGE in written else []), *found]


def without_effect(written: Mapping[str, object]) -> dict[str, str]:
    """Return the keys that have no effect, each with the reason."""
    found = {key: why for key, why in WITHOUT_EFFECT.items() if key in written}
    tiers = written.get(SECONDARY_TIERS)
    if "tiers" in written or not all(map(_is_directory, _list(tiers))):
        found |= {key: _TIERS for key in (SECONDARY_TIERS, SHARED_STORAGE) if key in written}
    policy = written.get("eviction_policy")
    if isinstance(policy, str) and policy in POLICIES:
        found["eviction_policy"] = f'"{POLICIES[policy]}" is nearest to it'
    return found


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_directory(tier: Any) -> bool:
    is_one = isinstance(tier, Mapping) and tier.get("type") in _DIRECTORIES
    return is_one and "root_dir" in tier
