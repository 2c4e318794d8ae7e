"""Asks two prompts, one of which is to leave nothing, and looks for the bytes of both.

What is looked for is what the model has computed: the first bytes of each full block of a prompt,
taken out of vLLM's own KV cache while they are there.
"""

from typing import Any

from tests.engine.children import engine

NEEDLE_BYTES = 256


def scenario(job: dict[str, Any]) -> dict[str, Any]:
    """What each prompt has computed, and where it is found in the end."""
    llm = engine.start(job)
    connector = engine.scheduler_of(llm).connector
    told: list[int] = []
    tables: list[Any] = []
    finish, take = connector.request_finished_all_groups, connector.take_events

    def see_finish(request: Any, block_ids: Any) -> Any:
        tables.append(block_ids[0])
        return finish(request, block_ids)

    def see_events() -> Any:
        events = list(take())
        told.extend(token for e in events for token in getattr(e, "token_ids", ()))
        return events

    connector.request_finished_all_groups, connector.take_events = see_finish, see_events
    needles, answers = {}, []
    for name in job["turns"]:
        prompt = job["prompts"][name]
        params = job["options"]["params"] if name == "secret" else None
        answers.append(ask(llm, prompt, params))
        num_blocks = (len(prompt) - 1) // job["arguments"]["block_size"]
        needles[name] = [needle.hex() for needle in read_blocks(llm, tables[-1][:num_blocks])]
    engine.drain(llm)
    found = {name: count(needles[name]) for name in job["turns"]}
    tokens = {name: sum(t in told for t in set(job["prompts"][name])) for name in job["turns"]}
    return {
        "needles": needles,
        "in_memory": found,
        "in_events": tokens,
        "tokens": answers,
        "audit": engine.audit(llm),
        "metrics": engine.connector_metrics(llm),
    }


def ask(llm: Any, prompt: list[int], params: Any) -> list[int]:
    """The answer to a prompt, with these `kv_transfer_params`."""
    sampling = engine.sampling(4)
    sampling.extra_args = {"kv_transfer_params": params} if params else None
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def read_blocks(llm: Any, block_ids: list[int]) -> list[bytes]:
    """What the first layer keeps of some blocks."""

    # Without a call of EngineCore's, after which the weights might be others.
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    layer = executor.driver_worker.worker.model_runner.kv_caches[0]
    needles = [layer[i].contiguous().numpy().tobytes()[:NEEDLE_BYTES] for i in block_ids]
    assert len(set(needles)) == len(needles)
    return needles


def count(needles: list[str]) -> int:
    """How many of these are in host memory."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side: Any = get_kv_transfer_group().side  # type: ignore[attr-defined]
    memory = side.opened.backend.host.tensor.numpy().tobytes()
    return sum(bytes.fromhex(needle) in memory for needle in needles)
