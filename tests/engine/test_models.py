"""Prompts of a model with multi-head latent attention come back from host memory."""

from tests.engine.engines import MLA, MLA_TURNS, connector, make_job, run


def test_prompts_come_back_from_the_host_with_the_same_tokens(model, tmp_path):
    """The tokens are those of a hit in the GPU's own cache.

    Bytes that went through host memory lead to exactly the same tokens as bytes that never left.
    Other kinds of attention: test_layouts.py, test_abort_storm.py, test_small_model.py.
    """
    (ours,) = run(tmp_path, make_job(model("deepseek"), connector(), turns=MLA_TURNS, **MLA))
    ours.check_hits_of_mla()
    ours.check_well()
