"""How the public configures vLLM's own offloading connectors: facts, each with its place.

Of each are kept the keys and values of `--kv-transfer-config`, or the arguments in its place, as
they are written there; sizes that a script computes are those of one of its machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safe_offload.config.transfer_config import CONNECTOR_NAME

GIB = 1 << 30


@dataclass(frozen=True)
class Public:
    """One configuration.

    Attributes:
        place: repository or site, file, and when it was read.
        extra: its `kv_connector_extra_config`.
        comes_to: settings of ours; `paths` are those of the tiers.
        warned: keys of which a warning says that they have no effect.
        outer: what stands beside these.
        offloading_size: of `--kv-offloading-size`, where that is written.
    """

    place: str
    extra: dict[str, Any]
    comes_to: dict[str, Any]
    warned: tuple[str, ...] = ()
    outer: tuple[tuple[str, Any], ...] = (("kv_role", "kv_both"),)
    offloading_size: float | None = None

    @property
    def with_our_name(self) -> dict[str, Any]:
        """The configuration, with the one word changed."""
        return {"kv_connector": CONNECTOR_NAME, **dict(self.outer)} | (
            {"kv_connector_extra_config": self.extra} if self.extra else {}
        )


_X = "SemiAnalysisAI/InferenceX, benchmarks"
_X_ONE, _X_MANY = f"{_X}/single_node/agentic", f"{_X}/multi_node/srt-slurm-recipes/vllm"
_RECIPES = "vllm-project/recipes, taxonomy.yaml, 2026-08"
_LLM_D = "llm-d/llm-d, guides/tiered-prefix-cache/modelserver"
_LLMD_FS = "llm-d/llm-d-kv-cache, kv_connectors/llmd_fs_backend"
_KSERVE = "kserve/kserve, pkg/controller/v1alpha2/llmisvc/config_merge.go (its kvCacheOffloading)"
_DOCS = "docs.vllm.ai, features/kv_offloading_usage, 0.26 to 0.32"


def _fs(root: str, **more: Any) -> dict[str, Any]:
    return {"type": "fs", "root_dir": root, **more}


_THREADS = tuple(f"secondary_tiers[0].n_{kind}_threads" for kind in ("read", "write"))

_LLMD_SPEC = {
    "spec_name": "SharedStorageOffloadingSpec",
    "spec_module_path": "llmd_fs_backend.spec",
    "block_size": 256,
    "threads_per_gpu": "64",
}
_LLMD_WARNED = ("block_size", "spec_module_path", "spec_name", "threads_per_gpu")
_OBJECT_STORE = {
    "backend": "OBJ",
    "bucket": "testing",
    "scheme": "https",
    "endpoint_override": "192.0.2.1:9000",
    "access_key": "user",
    "secret_key": "secret",
    "ca_bundle": "/root/tls.crt",
}

PUBLIC = (
    # ---- SimpleCPUOffloadConnector ---------------------------------------------------------------
    Public(
        f"{_X_ONE}/dsv4_fp4_b200_vllm_mtp.sh, 2026-08",
        {
            "cpu_bytes_to_use_per_rank": 356 * 10**9,
            "enable_cross_layers_blocks": "true",
            "lazy_offload": False,
        },
        {"cpu_bytes_per_rank": 356 * 10**9, "enable_cross_layers_blocks": True},
    ),
    Public(
        f"{_X_ONE}/dsv4_fp4_b300_vllm_mtp.sh, 2026-08",
        {
            "cpu_bytes_to_use": 356 * 10**9,
            "enable_cross_layers_blocks": "true",
            "lazy_offload": True,
        },
        {"cpu_bytes_to_use": 356 * 10**9, "lazy_offload": True},
    ),
    Public(
        f"{_X_MANY}/kimi-k3/agentic/agg-gb200-dep16-throughput-vllm-simple-offload-agentic.yaml, "
        "minimax-m3/gb200-fp4/agentic/agg-dep4- and agg-tp4-vllm-simple-agentic.yaml, 2026-08",
        {
            "cpu_bytes_to_use": 512 * GIB,
            "cpu_bytes_to_use_per_rank": 128 * GIB,
            "lazy_offload": False,
        },
        {"cpu_bytes_per_rank": 128 * GIB},
    ),
    Public(
        "vllm-project/vllm, pull request 52656",
        {"cpu_bytes_to_use": "8e9", "lazy_offload": "false"},
        {"cpu_bytes_to_use": 8 * 10**9, "lazy_offload": False},
    ),
    Public(
        "vllm-project/vllm, simple_cpu_offload_connector.py: keys of a disk that it ignores",
        {"kv_offload_backend": "cpu", "disk_path": None, "disk_capacity_bytes": 100 * GIB},
        {"paths": [], "kv_offload_backend": "cpu"},
        ("disk_capacity_bytes", "disk_path"),
    ),
    # ---- OffloadingConnector ---------------------------------------------------------------------
    Public(
        f"{_X_ONE}/dsv4_fp4_mi355x_vllm_mtp.sh, 2026-08: --kv_offloading_backend native",
        {},
        {"cpu_bytes_to_use": 2500 * GIB},
        outer=(),
        offloading_size=2500.0,
    ),
    Public(
        f"{_DOCS}, and features/disagg_prefill",
        {"block_size": 64, "cpu_bytes_to_use": 1000000000},
        {"cpu_bytes_to_use": 1000000000},
        ("block_size",),
    ),
    Public(
        f"{_DOCS}: TieringOffloadingSpec",
        {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 10 * GIB,
            "block_size": 16,
            "eviction_policy": "lru",
            "secondary_tiers": [_fs("/mnt/kv_cache", n_read_threads=32, n_write_threads=16)],
        },
        {"cpu_bytes_to_use": 10 * GIB, "paths": ["/mnt/kv_cache"]},
        ("block_size", "spec_name", *_THREADS),
    ),
    Public(
        "a launcher for one SSD: a bound inside the tier",
        {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 10 * GIB,
            "secondary_tiers": [
                _fs(
                    "/mnt/ssd/kv",
                    n_read_threads=16,
                    n_write_threads=16,
                    eviction_policy="fifo",
                    max_bytes=200 * GIB,
                    min_free_bytes=8 * GIB,
                    min_file_age_seconds=10,
                )
            ],
        },
        {"cpu_bytes_to_use": 10 * GIB, "paths": ["/mnt/ssd/kv"], "capacities": [200 * GIB]},
        (
            "secondary_tiers[0].eviction_policy",
            "secondary_tiers[0].min_file_age_seconds",
            "secondary_tiers[0].min_free_bytes",
            "spec_name",
            *_THREADS,
        ),
    ),
    Public(
        "local-inference-lab/vllm#254: gc_max_size_gb",
        {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 10 * GIB,
            "secondary_tiers": [_fs("/mnt/ssd/kv", gc_max_size_gb=0.5)],
        },
        {"paths": ["/mnt/ssd/kv"], "capacities": [500_000_000]},
        ("spec_name",),
    ),
    Public(
        f"{_DOCS}: the tier obj",
        {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 10 * GIB,
            "secondary_tiers": [{"type": "obj", "store_config": {"bucket": "kv"}}],
        },
        {"paths": []},
        ("secondary_tiers", "spec_name"),
    ),
    Public(
        f"{_RECIPES}: CPU DRAM only",
        {"cpu_bytes_to_use": 512 * GIB, "blocks_per_chunk": 4},
        {"cpu_bytes_to_use": 512 * GIB},
        ("blocks_per_chunk",),
    ),
    Public(
        f"{_LLM_D}/gpu/vllm/native/cpu_plus_fs/base/patch-vllm.yaml",
        {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 200 * GIB,
            "block_size": 256,
            "secondary_tiers": [{"type": "fs_python", "root_dir": "/mnt/files-storage"}],
        },
        {"paths": ["/mnt/files-storage"]},
        ("block_size", "spec_name"),
    ),
    Public(
        "llm-d/llm-d, guides on pulls between pods: the child of MultiConnector",
        {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 88 * GIB,
            "offload_prompt_only": False,
            "secondary_tiers": [{"type": "p2p", "host": "$(POD_IP)", "port": 7777}],
        },
        {"cpu_bytes_to_use": 88 * GIB, "paths": []},
        ("offload_prompt_only", "secondary_tiers", "spec_name"),
    ),
    Public(
        f"{_LLMD_FS}/README.md, and docs/deployment/vllm-storage.yaml",
        {**_LLMD_SPEC, "shared_storage_path": "/mnt/files-storage/kv-cache/"},
        {"paths": ["/mnt/files-storage/kv-cache"]},
        _LLMD_WARNED,
    ),
    Public(
        f"{_LLMD_FS}/docs/object_store.md",
        {**_LLMD_SPEC, "shared_storage_path": "/mnt/nvme/kv-cache/", **_OBJECT_STORE},
        {"paths": []},
        (*_LLMD_WARNED, *_OBJECT_STORE),
    ),
    Public(
        f"{_KSERVE}, 2026-08",
        {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 5 * GIB,
            "eviction_policy": "arc",
            "secondary_tiers": [_fs("/mnt/kv-cache-0"), _fs("/mnt/kv-cache-1")],
        },
        {"eviction_policy": "returns", "paths": ["/mnt/kv-cache-0", "/mnt/kv-cache-1"]},
        ("eviction_policy", "spec_name"),
    ),
    Public(
        "docs.vllm.ai/projects/ascend, user_guide/feature_guide/kv_cache_cpu_offload",
        {
            "num_cpu_blocks": 1000,
            "block_size": 128,
            "spec_name": "NPUOffloadingSpec",
            "spec_module_path": "vllm_ascend.kv_offload.npu",
        },
        {"num_slots": 1000},
        ("block_size", "spec_module_path", "spec_name"),
    ),
    Public(
        "gpustack/gpustack, gpustack/worker/backends/vllm.py (its extended KV cache), 2026-08",
        {},
        {"cpu_bytes_to_use": 8 * GIB, "paths": []},
    ),
)
