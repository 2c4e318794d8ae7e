"""Host pools smaller than a prompt, and prompts of whole blocks."""

from tests.engine.engines import (
    connector,
    make_job,
    run,
)


def test_a_hybrid_model_is_served_from_a_host_pool_smaller_than_a_prompt(model, plain, tmp_path):
    """Blocks of three groups compete for 40 slots; a prompt of them needs 94."""
    (ours,) = run(tmp_path, make_job(model("gemma3"), connector(40)))
    assert ours.tokens == plain("gemma3").tokens
    assert ours.count("stored_blocks") > 0
    assert ours.count("skipped_blocks") > 0
    ours.check_well()


def test_a_prompt_of_whole_blocks_comes_back_but_for_its_last_token(model, tmp_path):
    (ours,) = run(tmp_path, make_job(model("llama"), connector(), num_prompt_tokens=1024))
    assert ours.tokens[:3] == ours.tokens[3:]
    ours.check_second_round_hits(1023)
    ours.check_well()
