"""Settings under which the connector does less, and the engine as much as ever."""

from tests.engine.engines import (
    connector,
    make_job,
    run,
)


def test_without_prefix_caching_the_engine_serves_and_says_so_once(model, plain_llama, tmp_path):
    """There are no block hashes to key a cache by: nothing is stored, found or counted."""
    job = make_job(model("llama"), kv_transfer_config=connector(), enable_prefix_caching=False)
    (report,) = run(tmp_path, job)
    assert report.tokens == plain_llama.tokens
    assert [answer.num_cached for answer in report.answers] == [0] * 6
    assert not any(report.data["metrics"].values())
    assert report.data["audit"]["num_free_blocks"] == job.arguments["num_gpu_blocks_override"] - 1
    assert report.log.count("Prefix caching is off") == 1


def test_a_hybrid_model_is_served_from_a_host_pool_smaller_than_a_prompt(model, plain, tmp_path):
    """Blocks of three groups compete for 40 slots; a prompt of them needs 94."""
    (ours,) = run(tmp_path, make_job(model("gemma3"), connector(40)))
    assert ours.tokens == plain("gemma3").tokens
    assert ours.count("stored_blocks") > 0
    assert ours.count("skipped_blocks") > 0
    ours.check_well()


def test_a_prompt_of_whole_blocks_comes_back_but_for_its_last_token(model, tmp_path):
    how = {"num_prompt_tokens": 1024}
    jobs = make_job(model("llama"), **how), make_job(model("llama"), connector(), **how)
    plain, ours = run(tmp_path, *jobs)
    assert ours.tokens == plain.tokens
    ours.check_second_round_hits(1023)
    ours.check_well()
