"""What host memory holds of one prompt, and how much of it attention and states will read.

vLLM makes the KV cache of each model from its public configuration (tests/simulator/models.py), and
vLLM's real scheduler serves one prompt with our real scheduler side: no weights, no copies. Figures
are of one rank, and the same on every machine and every time.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm.v1 import kv_cache_interface as kv

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
    table,
)
from safe_offload.compat import specs
from safe_offload.config.units import MIB
from tests.simulator.models import Recipe
from tests.simulator.peers import PeerEngine
from tests.simulator.vllm_setup import EngineShape, cache_of, make_kv_cache_config

PROMPT_TOKENS = 32_768
RETENTION_INTERVAL = 0
"""vLLM's default. Source: `CacheConfig.prefix_cache_retention_interval` (0.32.0)."""
STEP_TOKENS = 8192
ANSWER_TOKENS = 3
"""A step stores so many bytes at most, and the next one the rest."""
NUM_SLOTS = 1 << 20
MODELS = {
    "Llama-3.1-8B": Recipe("llama-3.1", tensor_ranks=1),
    "Gemma-3-27B": Recipe("gemma-3", tensor_ranks=1),
    "Gemma-4-12B": Recipe("gemma-4", tensor_ranks=1),
    "gpt-oss-120b": Recipe("gpt-oss", tensor_ranks=1),
    "Qwen3-Next-80B": Recipe("qwen3-next", tensor_ranks=4),
    "Qwen3.5-397B": Recipe("qwen3.5"),
    "DeepSeek-V3.2": Recipe("deepseek-v3.2", is_fp8=True),
    "DeepSeek-V4-Flash": Recipe("deepseek-v4", is_fp8=True),
    "DeepSeek-V4.1-Flash": Recipe("deepseek-v4.1", is_fp8=True),
    "Kimi-Linear-48B": Recipe("kimi-linear", tensor_ranks=4),
    "Kimi-K3": Recipe("kimi-k3"),
    "MiniMax-M3": Recipe("minimax-m3"),
    "GLM-5.2": Recipe("glm-5", is_fp8=True),
    "GLM-5.3-Flash": Recipe("glm-5.3-flash"),
}
"""How each is served: over so many ranks, with a KV cache of 8 or 16 bits."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one rank."""

    read: int  # what attention and states read of the prompt
    host: int  # what the host holds of it
    short: int  # of this what stays when memory is short
    num_slots: tuple[int, int]  # of both
    unshared: int  # of slots, beyond the pages of the group whose block they hold
    padding: int  # of pages

    @property
    def ratio(self) -> float:
        """What the host holds over what is read."""
        return self.host / self.read

    @property
    def kept(self) -> int:
        """Of blocks that a hit at the end of the prompt does not need, or not all of."""
        return self.host - self.read - self.unshared - self.padding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="NAME")
    parser.add_argument("--tokens", type=int, default=PROMPT_TOKENS, help="of the prompt")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks held`."""
    machine = describe_machine()
    held = {name: measure(MODELS[name], arguments.tokens) for name in arguments.models}
    publish(make_report(held, arguments.tokens, machine), arguments)
    return 0


def measure(recipe: Recipe, num_tokens: int) -> Held:
    """Serve one prompt and look at what the host has of it."""
    recipe = replace(recipe, is_small=False)
    shape = shape_of(recipe, num_tokens)
    config = cache_of(recipe).worker_config
    slot_bytes = specs.block_bytes(config)
    engine, (request,) = serve(shape, num_tokens)
    kept = engine.connector.side.hits.directory.kept()
    slots = Counter(key.group_idx for key in kept.values())
    needed = set(whole_hit(engine, request).slots())
    for slot, key in kept.items():
        spec = make_kv_cache_config(shape).kv_cache_groups[key.group_idx].kv_cache_spec
        if isinstance(spec, kv.FullAttentionSpec):
            needed.add(slot)
    layers = [list(_layers(group)) for group in config.kv_cache_groups]
    pages = [sum(spec.page_size_bytes for spec in group) for group in layers]
    contents = [sum(map(_content_bytes, group)) for group in layers]
    return Held(
        read=sum(_read_bytes(spec, num_tokens) for group in layers for spec in group),
        host=len(kept) * slot_bytes,
        short=len(needed) * slot_bytes,
        num_slots=(len(kept), len(needed)),
        unshared=sum(count * (slot_bytes - pages[g]) for g, count in slots.items()),
        padding=sum(count * (pages[g] - contents[g]) for g, count in slots.items()),
    )


def shape_of(recipe: Recipe, num_tokens: int, num_slots: int = NUM_SLOTS) -> EngineShape:
    small = EngineShape(recipe=recipe, num_blocks=2)
    return EngineShape(
        recipe=recipe,
        num_blocks=3 + 2 * sum(-(-num_tokens // g.block_tokens) for g in small.parsed_groups),
        num_slots=num_slots,
        max_batched_tokens=STEP_TOKENS,
        max_model_len=2 * num_tokens,
        retention_interval=RETENTION_INTERVAL,
    )


def serve(
    shape: EngineShape, num_tokens: int, num_prompts: int = 1
) -> tuple[PeerEngine, list[Any]]:
    """Serve prompts that share nothing, one after the other."""
    engine = PeerEngine(shape, tokens=lambda request_id, position: position % 97)
    engine.add("start", [1], 1)  # until then no rank has told its capacity
    engine.drain()
    requests = []
    for number in range(num_prompts):
        prompt = [number + 2, *(token % 251 for token in range(1, num_tokens))]
        requests.append(engine.add(str(number), prompt, ANSWER_TOKENS))
        engine.drain()
    return engine, requests


def whole_hit(engine: PeerEngine, request: Any) -> Any:
    """Return what the host hits when the prompt comes again."""
    hits = engine.connector.side.hits
    return hits.find_hit(request.block_hashes, 0, request.num_prompt_tokens - 1)


def _layers(group: Any) -> Iterator[Any]:
    spec = group.kv_cache_spec
    for layer in group.layer_names:
        yield getattr(spec, "kv_cache_specs", {}).get(layer, spec)


def _content_bytes(spec: Any) -> int:
    """Bytes of a block of one layer that mean something."""
    return int(spec.num_heads * spec.num_states * spec.state_content_size_bytes)


def _read_bytes(spec: Any, num_tokens: int) -> int:
    """Bytes of one layer that the token behind a prompt reads."""
    if not spec.prefix_cacheable:
        return 0
    if isinstance(spec, kv.MambaSpec):
        return _content_bytes(spec)
    if isinstance(spec, kv.SlidingWindowSpec):
        num_tokens = min(num_tokens, spec.sliding_window - 1)
    if isinstance(spec, kv.ChunkedLocalAttentionSpec):
        num_tokens %= spec.attention_chunk_size
    num_states = math.ceil(num_tokens / spec.tokens_per_state)
    return int(spec.num_heads * num_states * spec.state_content_size_bytes)


def make_report(held: dict[str, Held], num_tokens: int, machine: dict[str, Any]) -> Report:
    heads = ("read, MiB", "held, MiB", "held/read", "slots", "pages", "kept", "when short/read")
    rows = [["model", *heads]]
    for name, one in held.items():
        parts = (part / one.read for part in (one.unshared, one.padding, one.kept))
        sizes = f"{one.read / MIB:.1f}", f"{one.host / MIB:.1f}", f"{one.ratio:.2f}"
        short = f"{one.short / one.read:.2f}"
        rows.append([name, *sizes, *(f"{part:+.2f}" for part in parts), short])
    return Report(
        method=(
            f"of a prompt of {num_tokens} tokens on one rank: what a hit at its end reads, what "
            "the host holds;\nand the rest over the first: of slots beyond the pages of their "
            "group, padding of pages, what other\nhits would need, which goes first when memory is "
            "short; then it holds the last column over the first"
        ),
        sections=[table(rows)],
        figures={name: asdict(one) | {"kept": one.kept} for name, one in held.items()},
        options={"prompt_tokens": num_tokens},
        machine=machine,
    )
