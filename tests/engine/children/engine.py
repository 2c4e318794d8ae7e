"""One vLLM engine in this process: start it, ask it, look into it."""

import shutil
from typing import Any

RESET_GPU_CACHE = "reset the GPU's prefix cache"
EMPTY_FOLDER = "empty a folder"
MAX_IDLE_STEPS = 1_000_000


def prepare(job: dict[str, Any]) -> None:
    """Change in vLLM what the job needs to be changed."""
    if job["force_prefix_caching"]:
        force_prefix_caching()
    if layouts := job["options"].get("layouts"):
        declare_layouts(layouts)


def force_prefix_caching() -> None:
    """Undo what vLLM does to an MLA model on a CPU without AMX: switch prefix caching off.

    Its kernels for such a CPU answer well with it; they only round differently behind a hit.
    Source: vLLM 0.32.0, vllm/platforms/cpu.py, CpuPlatform.check_and_update_config.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def declare_layouts(layouts: list[str]) -> None:
    """Let vLLM's attention on a CPU say that it reads these layouts of the KV cache."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    read = tuple(KVCacheLayout[layout] for layout in layouts)
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda _: read)


def start(job: dict[str, Any]) -> Any:
    """The engine."""
    from vllm import LLM

    return LLM(**job["arguments"])


def take_turns(llm: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Do the turns of the job; one answer for each prompt."""
    answers = []
    for turn in job["turns"]:
        if turn == RESET_GPU_CACHE:
            assert llm.reset_prefix_cache(), "the GPU's prefix cache could not be reset"
        elif turn == EMPTY_FOLDER:
            shutil.rmtree(job["options"]["folder"])
        else:
            answers.append(ask(llm, job["prompts"][turn], job["num_answer_tokens"]))
    return answers


def ask(llm: Any, prompt: Any, num_answer_tokens: int, **more: Any) -> dict[str, Any]:
    """One request, alone."""
    before = count_prompt_tokens(llm)
    (output,) = llm.generate(
        [as_vllm_reads(prompt)], sampling(num_answer_tokens), use_tqdm=False, **more
    )
    after = count_prompt_tokens(llm)
    return {
        "token_ids": list(output.outputs[0].token_ids),
        "num_cached": output.num_cached_tokens,
        "num_gpu": after["local_cache_hit"] - before["local_cache_hit"],
        "num_host": after["external_kv_transfer"] - before["external_kv_transfer"],
        "num_computed": after["local_compute"] - before["local_compute"],
    }


def as_vllm_reads(prompt: Any) -> dict[str, Any]:
    """A prompt: its tokens, or a mapping with a salt, or an image's seed, None for no image."""
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    if "salt" in prompt:
        return {"prompt_token_ids": prompt["tokens"], "cache_salt": prompt["salt"]}
    from tests.tiny_vision import make_image

    image = None if prompt["image"] is None else make_image(prompt["image"])
    written = {"prompt_token_ids": prompt["tokens"], "multi_modal_data": {"image": [image]}}
    if "uuid" in prompt:
        written["multi_modal_uuids"] = {"image": [prompt["uuid"]]}
    if "kwargs" in prompt:
        written["mm_processor_kwargs"] = prompt["kwargs"]
    return written


def sampling(num_answer_tokens: int) -> Any:
    """Greedy, of a fixed length."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=num_answer_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )


def count_prompt_tokens(llm: Any) -> dict[str, int]:
    """Prompt tokens so far, by where they came from (vLLM 0.32.0, v1/metrics/stats.py)."""
    return {
        metric.labels["source"]: int(metric.value)
        for metric in llm.get_metrics()
        if metric.name == "vllm:prompt_tokens_by_source"
    }


def connector_metrics(llm: Any) -> dict[str, float]:
    """Counters and gauges of the connector, each the sum over its labels."""
    totals: dict[str, float] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:safe_offload_") and hasattr(metric, "value"):
            totals[metric.name] = totals.get(metric.name, 0.0) + metric.value
    return totals


def connector_info(llm: Any) -> list[dict[str, str]]:
    """Labels of the connector's metric `info`: how it is set up now."""
    return [
        metric.labels
        for metric in llm.get_metrics()
        if metric.name == "vllm:safe_offload_info" and metric.value
    ]


def scheduler_of(llm: Any) -> Any:
    """vLLM's Scheduler, of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def drain(llm: Any) -> None:
    """Step an engine in this process until nothing of the connector is in flight."""
    connector = scheduler_of(llm).connector
    for _ in range(MAX_IDLE_STEPS):
        if not connector.has_pending_push_work():
            return
        llm.llm_engine.step()
    raise AssertionError("transfers do not settle")


def audit(llm: Any) -> dict[str, Any]:
    """What is held: GPU blocks, as their pool counts them, and host slots."""
    scheduler = scheduler_of(llm)
    pool = scheduler.kv_cache_manager.block_pool
    found: dict[str, Any] = {
        "num_blocks": pool.num_gpu_blocks,
        "num_free_blocks": pool.get_num_free_blocks(),
        "referenced_blocks": {
            block.block_id: block.ref_cnt
            for block in pool.blocks
            if block.ref_cnt and not block.is_null
        },
    }
    planner = planner_of(scheduler.connector)
    if planner is not None:
        found["gauges"] = planner.gauges()
        found["num_leases"] = planner.statistics().leases
    return found


def planner_of(connector: Any) -> Any:
    """Our scheduler side; None if there is none, or if it is switched off."""
    from safe_offload.scheduler.planner import Planner

    for child in getattr(connector, "sub_connectors", [connector]):
        if isinstance(getattr(child, "side", None), Planner):
            return child.side
    return None
