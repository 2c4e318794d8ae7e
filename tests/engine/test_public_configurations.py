"""What the public writes for vLLM's own connectors starts a real engine with our name, and hits.

Changed are the sizes, which no test machine has. Added are `min_load_tokens`, since the prompts of
tests are short, and a deadline that no busy machine passes.
"""

from __future__ import annotations

import dataclasses

from tests.config.public_configurations import PUBLIC, Public
from tests.engine.engines import (
    EVERY_HIT,
    LONG_WAIT_S,
    RESET_GPU_CACHE,
    make_job,
    make_prompts,
    run,
)

NUM_PROMPT_TOKENS = 321
PROMPTS = make_prompts(NUM_PROMPT_TOKENS, "AB") | make_prompts(320, ["whole blocks"])
POOL_BYTES = 64 << 20
STARTED = ("dsv4_fp4_b200_vllm_mtp.sh", "dsv4_fp4_mi355x_vllm_mtp.sh")
"""A text for a boolean, and the flag: tests/config/test_other_connectors.py has all the others."""


def small(public: Public) -> Public:
    """The same configuration for a small machine."""
    extra = public.extra | EVERY_HIT | {"transfer_timeout_s": LONG_WAIT_S}
    if public.offloading_size:
        return dataclasses.replace(public, extra=extra, offloading_size=POOL_BYTES / (1 << 30))
    return dataclasses.replace(public, extra=extra | {"cpu_bytes_to_use_per_rank": POOL_BYTES})


def test_an_engine_starts_and_hits(model, tmp_path):
    chosen = [small(public) for place in STARTED for public in PUBLIC if place in public.place]
    assert len(chosen) == len(STARTED)
    jobs = [
        make_job(
            model("llama"),
            public.with_our_name,
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            turns=(*PROMPTS, RESET_GPU_CACHE, *PROMPTS),
            **({"kv_offloading_size": public.offloading_size} if public.offloading_size else {}),
        )
        for public in chosen
    ]
    jobs = [dataclasses.replace(job, prompts=PROMPTS) for job in jobs]
    for public, report in zip(chosen, run(tmp_path / "runs", *jobs), strict=True):
        assert report.tokens[3:] == report.tokens[:3]
        found = [answer.num_host for answer in report.answers[3:]]
        assert found == [320, 320, 319], (public, report.data["metrics"])  # one token is computed
        (info,) = report.data["info"]
        assert int(info["slots_per_rank"]) == POOL_BYTES // (32 << 10)
        assert info["eviction_policy"] == "returns"
        report.check_well()
