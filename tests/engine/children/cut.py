"""Answers prompts behind a hit that ends at a boundary of choice, and tells how likely tokens were.

Each prompt and boundary has a salt of its own. Its prefix up to the boundary is asked for first; a
connector's host has it then, and the GPU's own cache is emptied.
"""

from typing import Any

from tests.engine.children import engine

NUM_LIKELIEST = 5


def scenario(job: dict[str, Any]) -> dict[str, Any]:
    """Answer each prompt of `options["cuts"]` behind its boundary, alone."""
    if job["options"].get("swaps"):
        from tests.engine.faulty import break_copies

        break_copies({"swap": 1.0, "seed": 1})
    llm = engine.start(job)
    has_connector = "kv_transfer_config" in job["arguments"]
    report: dict[str, Any] = {"cuts": []}
    sampling = engine.sampling(job["num_answer_tokens"])
    sampling.logprobs = NUM_LIKELIEST
    for name, boundary in job["options"]["cuts"]:
        tokens, salt = job["prompts"][name], f"{name} {boundary}"
        if boundary:
            engine.ask(llm, {"tokens": tokens[: boundary + 1], "salt": salt}, 1)
        if has_connector:
            engine.drain(llm)
            assert llm.reset_prefix_cache(), "what is hit is to come from the host"
        prompt = engine.as_vllm_reads({"tokens": tokens, "salt": salt})
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        assert output.num_cached_tokens == boundary, (name, boundary, output.num_cached_tokens)
        (answer,) = output.outputs
        likeliest = [
            sorted((token, each.logprob) for token, each in at.items()) for at in answer.logprobs
        ]
        report["cuts"].append({"tokens": list(answer.token_ids), "likeliest": likeliest})
    report["metrics"] = engine.connector_metrics(llm)
    return report
