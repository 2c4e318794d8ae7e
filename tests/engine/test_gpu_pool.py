"""A store reads its blocks until its fence, not longer."""

from tests.engine.engines import NUM_PROMPT_TOKENS, connector, make_job, num_hit_tokens, run

NUM_HIT_TOKENS = num_hit_tokens(NUM_PROMPT_TOKENS)


def test_a_store_that_runs_as_late_as_its_fence_allows_stores_the_right_bytes(model, tmp_path):
    """Each copy starts when the engine fences it, that is when its source has been given away.

    Without the fence it would read what the next prompt wrote there (docs/guarantees.md: K3).
    """
    # A thread for each held store.
    config = connector(copy_threads=64, self_test="off")
    (report,) = run(tmp_path, make_job(model("llama"), config), child="held_stores")
    assert report.data["opened_by_fence"] == report.count("fenced_stores") > 0
    report.check_second_round_hits(NUM_HIT_TOKENS)
    report.check_well()
