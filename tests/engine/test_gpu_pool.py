"""No block of the GPU's pool is ever held for the connector, also while its stores run (I2)."""

from dataclasses import replace

from tests.engine.conftest import GetModel
from tests.engine.engines import NUM_PROMPT_TOKENS, Job, connector, make_job, num_hit_tokens, run

NUM_HIT_TOKENS = num_hit_tokens(NUM_PROMPT_TOKENS)


def make_held_job(model: GetModel, until: str) -> Job:
    """An engine whose stores are held back: see children/held_stores.py."""
    job = make_job(
        model("llama"),
        kv_transfer_config=connector(
            copy_threads=64, self_test="off"
        ),  # a thread for each held store
    )
    return replace(job, options={"until": until})


def test_a_finished_request_leaves_every_block_free_while_its_stores_are_in_flight(
    model, plain_llama, tmp_path
):
    """Read from vLLM's block pool, right after the step that finished the request.

    No store can complete before that: each copy waits for the child's word. While the request runs
    no block has more references than the request's own one. The stores then still deliver the right
    bytes: B and C take the request's blocks, and it comes back from the host with the same tokens.
    """
    job = replace(make_held_job(model, "told"), turns=("A", "B", "C", "A"))
    (report,) = run(tmp_path, job, child="held_stores")
    held = report.data["held"]
    audit = held["audit"]
    assert audit["gauges"]["stores_in_flight"] > 0
    assert audit["gauges"]["leased_slots"] == NUM_HIT_TOKENS // 32
    assert audit["num_free_blocks"] == audit["num_blocks"] - 1
    assert audit["referenced_blocks"] == {}
    assert held["highest_ref_cnt"] == 1
    drained = report.data["drained"]
    assert drained["gauges"]["stores_in_flight"] == drained["gauges"]["leased_slots"] == 0
    assert report.answers[2].num_host == NUM_HIT_TOKENS
    assert [held["token_ids"], *report.tokens] == plain_llama.tokens[:4]
    report.check_well()


def test_a_store_that_runs_as_late_as_its_fence_allows_stores_the_right_bytes(
    model, plain_llama, tmp_path
):
    """Each copy starts when the engine fences it, that is when its source has been given away.

    Without the fence it would read what the next prompt wrote there (docs/guarantees.md: K3).
    """
    (report,) = run(tmp_path, make_held_job(model, "fenced"), child="held_stores")
    assert report.data["opened_by_fence"] == report.count("fenced_stores") > 0
    report.check_second_round_hits(NUM_HIT_TOKENS)
    assert report.tokens == plain_llama.tokens
    report.check_well()
