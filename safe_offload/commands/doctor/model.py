"""Checks that need a model: how much of it the pool holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from safe_offload.commands.doctor.vllm_facts import EngineConfigFacts, ModelFacts, VllmFacts
from safe_offload.config.options import OffloadConfig
from safe_offload.config.units import format_bytes
from safe_offload.findings import Finding, error, info, ok, warning


def check_model(vllm: VllmFacts, configs: Sequence[OffloadConfig]) -> Iterator[Finding]:
    """Report the tokens that the pools hold, and compare them with the longest request."""
    if not vllm.model_name:
        reason = "no MODEL was given" if vllm.engine else "vLLM did not get as far as MODEL"
        yield info("model.facts", f"{reason}: the capacity in tokens is unknown")
        return
    if vllm.model is None:
        yield warning(
            "model.facts",
            f"{vllm.model_name} cannot be examined: {vllm.model_problem or vllm.problem}",
            "a model whose config.json can be read here",
            "name a folder with its config.json, or a model in this machine's cache; the server "
            "logs the capacity in tokens when it starts",
        )
        return
    model = vllm.model
    groups = "" if model.num_groups == 1 else f" in {model.num_groups} KV cache groups"
    yield info(
        "model.facts",
        f"a token takes {model.token_bytes / 1024:.1f} KiB{groups}; a request of max_model_len "
        f"({model.max_model_len} tokens) takes "
        f"{format_bytes(model.num_request_blocks * model.block_bytes)} over all ranks",
    )
    for config in configs:
        yield _tokens(model, vllm.engine, config)


def _tokens(model: ModelFacts, engine: EngineConfigFacts | None, config: OffloadConfig) -> Finding:
    id = "model.tokens"
    pool_bytes = config.cpu_bytes_per_rank * config.world_size
    num_blocks = config.num_slots or pool_bytes // model.block_bytes
    num_requests = num_blocks / model.num_request_blocks
    num_tokens = int(num_requests * model.max_model_len)
    holds = f'"{config.capacity_key}" holds about {num_tokens} tokens'
    if num_requests >= 1:
        return ok(id, f"{holds}, or {num_requests:.1f} requests of max_model_len")
    value = config.value_for(model.num_request_blocks, model.block_bytes // config.world_size)
    fix = f'write "{config.capacity_key}": {value} or more'
    if not num_blocks:
        return error(
            id,
            f'"{config.capacity_key}" is less than one block ({format_bytes(model.block_bytes)} '
            "over all ranks), so vLLM would not start",
            "room for a request of max_model_len",
            fix,
        )
    return warning(
        id,
        f"{holds}, less than one request of max_model_len ({model.max_model_len}), which does not "
        "fit",
        "room for a request of max_model_len",
        f"{fix}, or a smaller --max-model-len",
    )
