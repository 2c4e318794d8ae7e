"""Checks that need a model: how much of it the pool holds, and when a hit pays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from safe_offload.commands.doctor.findings import Finding, error, info, ok, warning
from safe_offload.commands.doctor.vllm_facts import EngineConfigFacts, ModelFacts, VllmFacts
from safe_offload.config.options import OffloadConfig
from safe_offload.config.units import MIB, format_bytes
from safe_offload.scheduler.loads.cost import Costs, Offer, rate

TURNS_PER_LOAD: Final = 2
TURN_PAUSE_S: Final = 0.001
"""A load takes two turns of the engine, in each of which vLLM pauses for a millisecond
(docs/benchmarks.md)."""
LOAD_TOKENS: Final = (1, 64, 4096)
BREAK_EVEN_TOKENS_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class BreakEven:
    """From how many tokens on a hit is expected to be loaded faster than computed.

    Attributes:
        compute_tokens_per_s, load_tokens_per_s: of a long prompt.
    """

    num_tokens: int | None  # None if never
    compute_tokens_per_s: int
    load_tokens_per_s: int


def check_model(vllm: VllmFacts, configs: Sequence[OffloadConfig]) -> Iterator[Finding]:
    """Say how many tokens the pools hold, and compare them with the longest request."""
    if not vllm.model_name:
        reason = "no MODEL was given" if vllm.engine else "vLLM did not get as far as MODEL"
        yield info("model.facts", f"{reason}: how many tokens fit is not known")
        return
    if vllm.model is None:
        yield warning(
            "model.facts",
            f"{vllm.model_name} cannot be examined: {vllm.model_problem or vllm.problem}",
            "a model whose config.json can be read here",
            "give a folder that has its config.json, or a name that is in the cache of this "
            "machine; when the server starts, it logs how many tokens fit",
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
    if config.capacity_key == "num_cpu_blocks":
        value = str(model.num_request_blocks)
    else:
        shares = config.world_size if config.capacity_key == "cpu_bytes_to_use_per_rank" else 1
        needed_bytes = model.num_request_blocks * model.block_bytes // shares
        value = f'"{-(-needed_bytes // MIB)}MiB"'
    fix = f'write "{config.capacity_key}": {value} or more'
    if not num_blocks:
        return error(
            id,
            f'"{config.capacity_key}" has no room for one block ({format_bytes(model.block_bytes)} '
            "over all ranks), so vLLM would not start",
            "room for a request of max_model_len",
            fix,
        )
    return warning(
        id,
        f"{holds}, less than one request of max_model_len ({model.max_model_len}): it cannot come "
        "back as a whole",
        "room for a request of max_model_len",
        f"{fix}, or a smaller --max-model-len",
    )


def break_even(
    model: ModelFacts, num_ranks: int, gbps: float, weight_seconds: Mapping[int, float]
) -> BreakEven:
    """Estimate by the rule that the scheduler side goes by (`Costs`), from what was measured.

    Attention itself is left out, so that computing is not made slower than it is.

    Args:
        gbps: of loads, 10^9 bytes a second of one rank.
        weight_seconds: see `trial.weight_seconds`.
    """
    costs = Costs(None, model.num_step_tokens_max)
    step_s = {n: s * model.num_parameters / num_ranks for n, s in weight_seconds.items()}
    for num_tokens, seconds in step_s.items():
        costs.steps.add(num_tokens, TURN_PAUSE_S + seconds)
    latency_s = TURNS_PER_LOAD * (TURN_PAUSE_S + min(step_s.values()))
    token_s = model.token_bytes / num_ranks / (gbps * 1e9)
    for num_tokens in LOAD_TOKENS:
        costs.loads.add(num_tokens, latency_s + num_tokens * token_s)

    def pays(num_tokens: int) -> bool:
        offer = Offer(num_tokens, num_tokens_left=1)
        return costs.load_s(offer) <= costs.compute_s(offer)

    rates = rate(costs.steps.points), rate(costs.loads.points)
    low, high = 0, 1
    while not pays(high):
        low, high = high, high * 2
        if high > BREAK_EVEN_TOKENS_MAX:
            return BreakEven(None, *rates)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return BreakEven(high, *rates)


def check_break_even(found: BreakEven) -> Iterator[Finding]:
    """Say from which length on loading is expected to beat computing."""
    id = "model.break-even"
    rates = (
        f"(computing at most {found.compute_tokens_per_s} tokens a second, loading about "
        f"{found.load_tokens_per_s})"
    )
    if found.num_tokens is None:
        yield info(
            id,
            f"no hit is expected to be loaded faster than it is computed {rates}; `safe-offload "
            "bench engine` measures it with the model",
        )
        return
    yield info(
        id,
        f"a hit is expected to pay from about {found.num_tokens} tokens on {rates}; the server "
        "measures it and decides by that",
    )
