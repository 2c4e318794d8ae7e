"""Answers prompts behind a hit that ends at a boundary of choice, and tells how likely tokens were.

Each prompt and boundary has a salt of its own. Its prefix up to the boundary is asked for first,
and a connector's host has it then, while the GPU's own cache is emptied. `only`: this engine does
no more, or an engine before it has done that. A lazy connector stores when a prompt `filler` takes
the whole pool. With `preempt_at`, a request is preempted after so many tokens and goes on behind a
hit of the same kind.
"""

import time
from typing import Any

from tests.engine.children import engine

NUM_LIKELIEST = 5
STORES, ANSWERS = "stores", "answers"


def scenario(job: dict[str, Any]) -> dict[str, Any]:
    """Answer each prompt of `options["cuts"]` behind its boundary, alone."""
    options = job["options"]
    only = options.get("only")
    if "faults" in options:
        from tests.engine.faulty import break_copies

        break_copies({"seed": 1, **options["faults"]})
    llm = engine.start(job)
    has_connector = "kv_transfer_config" in job["arguments"]
    report: dict[str, Any] = {"cuts": []}
    sampling = engine.sampling(job["num_answer_tokens"])
    sampling.logprobs = NUM_LIKELIEST
    for name, boundary in options["cuts"]:
        tokens, salt = job["prompts"][name], f"{name} {boundary}"
        if boundary and only != ANSWERS:
            engine.ask(llm, {"tokens": tokens[: boundary + 1], "salt": salt}, 1)
        if "filler" in job["prompts"]:
            engine.ask(llm, {"tokens": job["prompts"]["filler"], "salt": f"{salt} filler"}, 1)
        if has_connector:
            engine.drain(llm)
            assert llm.reset_prefix_cache(), "what is hit is to come from the host"
        if only == STORES:
            continue
        prompt = engine.as_vllm_reads({"tokens": tokens, "salt": salt})
        if "preempt_at" in options:
            output = answer_preempted(llm, prompt, sampling, options["preempt_at"])
        else:
            (output,) = llm.generate([prompt], sampling, use_tqdm=False)
            assert output.num_cached_tokens == boundary, (name, boundary, output.num_cached_tokens)
        (answer,) = output.outputs
        likeliest = [
            sorted((token, each.logprob) for token, each in at.items()) for at in answer.logprobs
        ]
        report["cuts"].append({"tokens": list(answer.token_ids), "likeliest": likeliest})
    report["metrics"] = engine.connector_metrics(llm)
    loads = [one for one in llm.get_metrics() if one.name == "vllm:safe_offload_loads"]
    report["loads"] = {one.labels["in_step"]: one.value for one in loads}
    return report


def answer_preempted(llm: Any, prompt: Any, sampling: Any, num_tokens: int) -> Any:
    """The output of a request that loses its blocks after so many tokens of its answer."""
    from vllm.v1.core.sched.interface import PauseState

    scheduler = engine.scheduler_of(llm)
    llm.llm_engine.add_request("preempted", prompt, sampling)
    output = None
    while output is None or len(output.outputs[0].token_ids) < num_tokens:
        (output,) = llm.llm_engine.step() or [output]
    scheduler.set_pause_state(PauseState.PAUSED_NEW)  # until its blocks are stored
    scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
    if scheduler.connector is not None:
        engine.drain(llm)
        assert scheduler.kv_cache_manager.reset_prefix_cache()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    while not output.finished:
        (output,) = llm.llm_engine.step() or [output]
    return output
