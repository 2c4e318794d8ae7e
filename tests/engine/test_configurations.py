"""Host pools smaller than a prompt."""

from tests.engine.engines import connector, make_job, run


def test_a_hybrid_model_is_served_from_a_host_pool_smaller_than_a_prompt(
    model, plain_gemma3, tmp_path
):
    """Blocks of three groups compete for 40 slots; a prompt of them needs 94."""
    (ours,) = run(tmp_path, make_job(model("gemma3"), connector(40)))
    assert ours.tokens == plain_gemma3.tokens
    assert ours.count("stored_blocks") > 0
    assert ours.count("skipped_blocks") > 0
    ours.check_well()
