"""Several worker processes, each with its share of the layers or heads and of the host pool."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.engines import (
    ABC_TWICE,
    MLA,
    MLA_TURNS,
    connector,
    make_job,
    num_hit_tokens,
    run,
    tier_at,
)

NUM_TOKENS = 641
TENSOR_PARALLEL = {"tensor_parallel_size": 2}
PIPELINE_PARALLEL = {
    "pipeline_parallel_size": 2,
    # vLLM's CPU engine 0.32.0 asserts `intermediate_tensors is not None` in the second stage with
    # enforce_eager, also without any connector, because it then skips the run that makes them.
    # This compiles nothing either, but does that run.
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager", "cudagraph_mode": "NONE"},
}


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(TENSOR_PARALLEL, id="tensor"),
        pytest.param(PIPELINE_PARALLEL, id="pipeline", marks=pytest.mark.nightly),
    ],
)
def test_two_ranks_bring_prompts_back_from_the_host_with_the_same_tokens(parallel, model, tmp_path):
    """Scheduler and ranks in processes of their own, which all end with the engine.

    The next engine finds all of it in the tier: each rank has objects of its own, so that there
    are two of each block, and both are read again.
    """
    tier = tmp_path / "tier"
    job = make_job(
        model("llama"),
        connector(tiers=[tier_at(tier)]),
        num_prompt_tokens=NUM_TOKENS,
        max_num_batched_tokens=NUM_TOKENS,
        prefix_caching_hash_algo="sha256_cbor",
        in_process=False,
        **parallel,
    )
    (first,) = run(tmp_path / "first", job)
    objects_of_ranks = [count_objects(path.parent) for path in tier.glob("*/namespace.json")]
    (second,) = run(tmp_path / "second", replace(job, turns=ABC_TWICE[:3], in_process=True))
    num_hit = num_hit_tokens(NUM_TOKENS)
    first.check_second_round_hits(num_hit)
    (info,) = first.data["info"]
    assert (info["ranks"], info["memory"], info["numa_node"]) == ("2", "pageable", "unknown")
    assert info["huge_pages"] in ("requested", "refused")
    assert info["copies_by"].split(", ")[-1] == "each"
    assert first.log.count("Host memory is ready: ") == 1
    assert "slots per rank (2). It is pageable" in first.log
    assert first.data["left_processes"] == []
    num_blocks = 3 * num_hit // 32
    assert objects_of_ranks == [num_blocks] * 2
    assert [answer.num_host for answer in second.answers] == [num_hit] * 3
    assert second.tokens == first.tokens[:3]
    assert second.count("fetched_blocks") == num_blocks
    assert second.count("tier_read_objects") == 2 * num_blocks
    second.check_everything_is_free()
    for report in (first, second):
        report.check_no_trouble()


def count_objects(namespace: Path) -> int:
    return sum(path.is_file() and path.name != "namespace.json" for path in namespace.rglob("*"))


def test_mla_ranks_keep_one_copy_and_a_killed_one_leaves_nothing(model, tmp_path):
    settings = MLA | TENSOR_PARALLEL | {"in_process": False, "turns": MLA_TURNS}
    job = make_job(model("deepseek"), connector(verify="load"), **settings)
    (ours,) = run(tmp_path, replace(job, options={"kill_rank": True}))
    ours.check_hits_of_mla()
    ours.check_no_trouble()

    assert len(re.findall("one copy for 2 ranks", ours.log)) >= 2
    num_slots, slot_bytes = map(int, re.findall(r"(\d+) slots of (\d+) bytes", ours.log)[0])
    stored_bytes = ours.count("stored_blocks") * slot_bytes
    ((inode, by_rank),) = ours.data["shared"].items()
    assert len(by_rank) == 2
    # All slots are touched, as the pool is small. The checksums come on top.
    assert stored_bytes <= sum(by_rank) < 1.1 * num_slots * slot_bytes, "each slot is there once"
    assert ours.data["left_processes"] == []
    assert inode not in ours.data["left_shared"]
