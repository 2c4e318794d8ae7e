"""What the public writes for other offloading connectors starts with our name."""

from __future__ import annotations

from typing import Any

import pytest

from safe_offload.config.options import OffloadConfig
from safe_offload.config.other_connectors import KNOWN, without_effect
from safe_offload.errors import ConfigError

GIB = 1 << 30

PUBLIC: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    # where: what is written, what it comes to, and the keys that are warned of
    "InferenceX, agentic recipes, vllm-simple": (
        {
            "cpu_bytes_to_use_per_rank": 137 * 10**9,
            "enable_cross_layers_blocks": "true",
            "lazy_offload": False,
        },
        {"cpu_bytes_per_rank": 137 * 10**9, "enable_cross_layers_blocks": True},
        (),
    ),
    "InferenceX, agentic recipes, B300": (
        {
            "cpu_bytes_to_use": 356 * 10**9,
            "enable_cross_layers_blocks": "true",
            "lazy_offload": True,
        },
        {"cpu_bytes_to_use": 356 * 10**9, "lazy_offload": True},
        (),
    ),
    "vllm#52656": (
        {"cpu_bytes_to_use": "8e9", "lazy_offload": "false"},
        {"cpu_bytes_to_use": 8 * 10**9, "lazy_offload": False},
        (),
    ),
    "vLLM, docs on OffloadingConnector": (
        {"block_size": 64, "cpu_bytes_to_use": 1000000000},
        {"cpu_bytes_to_use": 1000000000},
        ("block_size",),
    ),
    "vLLM, docs on TieringOffloadingSpec": (
        {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 10 * GIB,
            "block_size": 16,
            "eviction_policy": "lru",
            "secondary_tiers": [
                {
                    "type": "fs",
                    "root_dir": "/mnt/kv_cache",
                    "n_read_threads": 32,
                    "n_write_threads": 16,
                }
            ],
        },
        {"cpu_bytes_to_use": 10 * GIB, "paths": ["/mnt/kv_cache"]},
        ("block_size", "spec_name"),
    ),
    "vLLM, docs on the obj tier": (
        {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 10 * GIB,
            "secondary_tiers": [{"type": "obj", "store_config": {"bucket": "kv"}}],
        },
        {"paths": []},
        ("secondary_tiers", "spec_name"),
    ),
    "vLLM, tests of eviction policies": (
        {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 4 * GIB, "eviction_policy": "arc"},
        {"eviction_policy": "slru"},
        ("eviction_policy", "spec_name"),
    ),
    "llm-d-kv-cache, native offloading": ({"num_cpu_blocks": 10000}, {"num_slots": 10000}, ()),
    "llm-d-kv-cache, llmd_fs_backend": (
        {
            "spec_name": "SharedStorageOffloadingSpec",
            "spec_module_path": "llmd_fs_backend.spec",
            "shared_storage_path": "/mnt/nvme-storage/kv-cache/",
            "block_size": 256,
            "threads_per_gpu": "64",
        },
        {"paths": ["/mnt/nvme-storage/kv-cache"]},
        ("block_size", "spec_module_path", "spec_name", "threads_per_gpu"),
    ),
    "nothing but the name": ({}, {"cpu_bytes_to_use": 8 * GIB, "paths": []}, ()),
}


@pytest.mark.parametrize(("written", "expected", "warned"), PUBLIC.values(), ids=PUBLIC)
def test_what_the_public_writes_is_taken(
    written: dict[str, Any], expected: dict[str, Any], warned: tuple[str, ...]
) -> None:
    config = OffloadConfig.from_extra_config(written, world_size=1)
    paths = [tier.location.path for tier in config.tiers]
    found = {key: paths if key == "paths" else getattr(config, key) for key in expected}
    assert found == expected
    assert tuple(sorted(without_effect(written))) == warned


def test_tiers_that_are_written_count_alone() -> None:
    written = {
        "tiers": [{"url": "file:///mnt/ours"}],
        "secondary_tiers": [{"type": "fs", "root_dir": "/mnt/theirs"}],
    }
    config = OffloadConfig.from_extra_config(written, world_size=1)
    assert [tier.location.path for tier in config.tiers] == ["/mnt/ours"]
    assert list(without_effect(written)) == ["secondary_tiers"]


@pytest.mark.parametrize("path", [None, "kv", 7])
def test_a_directory_that_cannot_be_meant_is_refused(path: object) -> None:
    with pytest.raises(ConfigError, match="absolute path"):
        OffloadConfig.from_extra_config(
            {"secondary_tiers": [{"type": "fs", "root_dir": path}]}, world_size=1
        )


@pytest.mark.parametrize("value", [None, {}, [], "x", 3, [None], [[]], [{"type": []}]])
@pytest.mark.parametrize("key", [key for key in KNOWN if key != "shared_storage_path"])
def test_whatever_stands_in_their_keys_starts(key: str, value: object) -> None:
    assert OffloadConfig.from_extra_config({key: value}, world_size=1).tiers == ()
    without_effect({key: value})
