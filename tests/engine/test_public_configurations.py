"""What the public writes for vLLM's own connectors starts a real engine with our name, and hits.

Changed are the sizes, which no test machine has, and the directories. Added is `min_load_tokens`,
since the prompts of tests are short.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.config.public_configurations import PUBLIC, Public
from tests.engine.engines import EVERY_HIT, RESET_GPU_CACHE, make_job, num_hit_tokens, run

NUM_PROMPT_TOKENS = 321
SIZES = {"cpu_bytes_to_use": 64 << 20, "cpu_bytes_to_use_per_rank": 64 << 20, "num_cpu_blocks": 64}

STARTED = (
    "dsv4_fp4_b200_vllm_mtp.sh",
    "dsv4_fp4_mi355x_vllm_mtp.sh",
    "agg-gb200-dep16",
    "pull request 52656",
    "native/cpu_plus_fs",
    "kserve/kserve, pkg",
)
"""Of each kind one: all other configurations have the same keys."""


def small(public: Public, folder: Path) -> Public:
    """The same configuration for a small machine; numbers stay numbers, and texts texts."""
    extra: dict[str, Any] = {
        key: type(value)(SIZES[key]) if key in SIZES else value
        for key, value in public.extra.items()
    }
    if tiers := extra.get("secondary_tiers"):
        roots = (folder / str(idx) for idx in range(len(tiers)))
        extra["secondary_tiers"] = [
            {**tier, "root_dir": str(root)} for tier, root in zip(tiers, roots, strict=True)
        ]
    size = public.offloading_size and 64 / 1024
    return dataclasses.replace(public, extra={**extra, **EVERY_HIT}, offloading_size=size)


@pytest.mark.parametrize(
    "places",
    [
        pytest.param(STARTED[:2], id="true as a text, and the flag"),
        pytest.param(STARTED[2:4], id="sizes", marks=pytest.mark.nightly),
        pytest.param(STARTED[4:], id="directories", marks=pytest.mark.nightly),
    ],
)
def test_an_engine_starts_and_hits(model, tmp_path, places):
    chosen = []
    for idx, place in enumerate(places):
        (public,) = (public for public in PUBLIC if place in public.place)
        chosen.append(small(public, tmp_path / f"tiers-{idx}"))
    jobs = [
        make_job(
            model("llama"),
            public.with_our_name,
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            turns=("A", "B", RESET_GPU_CACHE, "A"),
            **({"kv_offloading_size": public.offloading_size} if public.offloading_size else {}),
        )
        for public in chosen
    ]
    for public, report in zip(chosen, run(tmp_path / "runs", *jobs), strict=True):
        first, _, second = report.answers
        assert second.token_ids == first.token_ids
        assert second.num_host == num_hit_tokens(NUM_PROMPT_TOKENS), public
        (info,) = report.data["info"]
        slots = 64 if "num_cpu_blocks" in public.extra else (64 << 20) // (32 << 10)
        assert int(info["slots_per_rank"]) == slots
        assert info["eviction_policy"] == public.comes_to.get("eviction_policy", "returns")
        if warned := [key for key in public.warned if key != "eviction_policy"]:
            (line,) = (text for text in report.log.splitlines() if "without effect" in text)
            assert all(f'"{key}" (' in line for key in warned)
        tiers = public.comes_to.get("paths", ())
        assert report.log.count("Tier file://") >= len(tiers)
        report.check_well()
