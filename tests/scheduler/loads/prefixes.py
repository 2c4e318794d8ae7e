"""Many requests at once with one prefix that only the host has: is it loaded once, or for each?

vLLM keeps of sliding windows and Mamba states what it keeps by default.

vLLM's real scheduler serves them with each connector's real scheduler side: no model, no copies.
"""

from dataclasses import dataclass
from typing import Any

from safe_offload.errors import SafeOffloadError
from tests.benchmarks.scheduler_engine import Sizes, make_engine
from tests.benchmarks.scheduler_traces import BLOCK_TOKENS, PLAIN, prompt_of
from tests.simulator.peers import PeerEngine

COPY_STEPS = 2
TAIL_TOKENS = 24
"""Of each prompt, behind the prefix."""
RETENTION_INTERVAL = 0
"""vLLM's default. Source: `CacheConfig.prefix_cache_retention_interval` (0.32.0)."""
SLOTS_PER_BLOCK = 8
STEPS_MAX = 5000
WINDOW, MAMBA = f"window:256@{BLOCK_TOKENS}", f"mamba@{BLOCK_TOKENS}"


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that come in one step."""

    num_requests: int  # with one prefix and a tail of their own
    num_blocks: int  # of the GPU, for each KV cache group
    prefix_blocks: int  # what they share
    num_answer_tokens: int  # of each


CASES = (Case(8, 200, 60, 60), Case(16, 300, 60, 40), Case(32, 400, 80, 40))
LAYOUTS = {
    "full attention": PLAIN,
    "full attention and a sliding window": (*PLAIN, WINDOW),
    "full and chunked attention": (*PLAIN, f"chunk:256@{BLOCK_TOKENS}"),
    "full attention and Mamba": (*PLAIN, MAMBA),
    "full attention, a sliding window and Mamba": (*PLAIN, WINDOW, MAMBA),
}


@dataclass(frozen=True, slots=True)
class Served:
    """What it took to answer all."""

    num_steps: int  # until the last was answered
    num_preemptions: int  # meanwhile
    loaded_prefixes: float  # tokens that were loaded, as a multiple of the prefix's


TURN_PREFIXES, TURN_TOKENS, TURN_PASSES = 4, 8000, 3
"""Long prefixes that come in turns, each time with another tail, and never two at once."""


def serve(
    name: str,
    groups: tuple[str, ...],
    case: Case,
    copy_steps: int,
    num_before: int = 0,
    num_own_blocks: int = 0,
    **sizes: int,
) -> Served:
    """Serve a case.

    Args:
        name: the connector's.
        num_before: prompts with tails of their own that came before, one after the other, without
            the GPU's cache; with 0 it was the prefix itself.
        num_own_blocks: behind the prefix, that the host has for the first request alone.
        sizes: see `Sizes`.
    """
    num_blocks = case.num_blocks * len(groups) + 1
    usual = {"max_seqs": 2 * case.num_requests, "retention_interval": RETENTION_INTERVAL}
    engine_sizes = Sizes(groups, num_blocks, num_blocks * SLOTS_PER_BLOCK, **usual, **sizes)
    prefix = prompt_of("prefix", case.prefix_blocks * BLOCK_TOKENS)
    engine = make_engine(name, engine_sizes, copy_steps)
    engine.add("start", prompt_of("start", 1), 1)  # until then no rank has told its capacity
    engine.drain()
    own = prompt_of("own", num_own_blocks * BLOCK_TOKENS)
    tails = [_tail(f"store{index}") for index in range(num_before)] or [()]
    for index, tail in enumerate([*tails, own] if own else tails):
        engine.add(f"store{index}", (*prefix, *tail), 1)
        engine.drain()
        _forget(engine, f"other{index}")
    before = engine.num_steps, engine.num_preemptions
    loaded_tokens = _see_loads(engine) if name != "none" else []
    for index in range(case.num_requests):
        prompt = (*prefix, *(() if index else own), *_tail(f"tail{index}"))
        engine.add(f"r{index}", prompt, case.num_answer_tokens)
    num_left = case.num_requests
    while num_left:
        num_left -= len(engine.step())
        if engine.num_steps > STEPS_MAX:
            raise SafeOffloadError(f"{name}: not answered after {STEPS_MAX} steps")
    return Served(
        engine.num_steps - before[0],
        engine.num_preemptions - before[1],
        sum(loaded_tokens) / len(prefix),
    )


def _tail(name: str) -> tuple[int, ...]:
    return prompt_of(name, TAIL_TOKENS)


def _forget(engine: PeerEngine, name: str) -> None:
    """Let vLLM forget its prefix cache, after the steps of another request.

    In these a lazy connector stores what might be evicted in the next ones.
    """
    engine.add(name, prompt_of(name, BLOCK_TOKENS), BLOCK_TOKENS)
    engine.drain()
    if not engine.scheduler.reset_prefix_cache():
        raise SafeOffloadError(f"{name}: expected vLLM to forget its prefix cache, it did not")


def _see_loads(engine: PeerEngine) -> list[int]:
    """The tokens of each load, filled from now on."""
    begin = engine.connector.update_state_after_alloc
    seen: list[int] = []

    def see(request: Any, blocks: Any, num_external_tokens: int) -> Any:
        seen.append(num_external_tokens)
        return begin(request, blocks, num_external_tokens)

    engine.connector.update_state_after_alloc = see
    return seen


def take_turns(name: str, groups: tuple[str, ...]) -> list[int]:
    """Return how many tokens of a prompt each pass computes; the GPU keeps one and a half."""
    num_blocks = 3 * len(groups) * TURN_TOKENS // BLOCK_TOKENS // 2
    num_slots = 2 * TURN_PREFIXES * num_blocks
    sizes = Sizes(groups, num_blocks, num_slots, retention_interval=RETENTION_INTERVAL)
    engine = make_engine(name, sizes, COPY_STEPS)
    engine.add("start", prompt_of("start", 1), 1)
    engine.drain()
    passes = []
    for number in range(TURN_PASSES):
        num_computed = 0
        for index in range(TURN_PREFIXES):
            prefix = prompt_of(f"turn{index}", TURN_TOKENS)
            before = engine.num_computed
            prompt = (*prefix, *_tail(f"turn{number}{index}"))
            engine.add(f"t{number}{index}", prompt, BLOCK_TOKENS)
            engine.drain()
            num_computed += engine.num_computed - before - (BLOCK_TOKENS - 1)
        passes.append(num_computed // TURN_PREFIXES)
    return passes
