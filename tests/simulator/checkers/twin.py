"""I15: vLLM's own prefix cache has no less than without us, but for the blocks of one step.

While copies are late, it may lack the windows and states of one position more.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.simulator.checkers.taps import tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding
from tests.simulator.peers import PeerEngine
from tests.simulator.vllm_setup import NONE, EngineShape
from tests.simulator.words import VOCABULARY

Arrival = tuple[Sequence[int], int]
"""A prompt, and how many tokens are asked for."""
PROMPTS_KEPT, PROMPTS_SHARED = 3, 12
"""How many of a run are sent so that they share nothing, and so that they share what they do."""
LATE_STEPS = (1, 6, 40)
"""Steps that copies may take."""


def gpu_hits(shape: EngineShape, arrivals: Sequence[Arrival], copy_steps: int = 0) -> list[int]:
    """How many tokens of each prompt vLLM's own cache has; each comes when the last has ended."""
    engine = PeerEngine(shape, copy_steps, lambda _, place: place % VOCABULARY)
    found: dict[str, int] = {}

    def see(original: Callable[[Any], Any], request: Any) -> Any:
        hit = original(request)
        found.setdefault(request.request_id, hit[1])
        return hit

    tap(engine.scheduler.kv_cache_manager, "get_computed_blocks", see)
    for number, (prompt, max_tokens) in enumerate([((1,), 1), *arrivals]):
        engine.add(str(number), prompt, max_tokens)  # the first one has the host memory ready
        engine.drain()
    return [found[str(number + 1)] for number in range(len(arrivals))]


def without_loads(shape: EngineShape, **extra: Any) -> EngineShape:
    """The same engine, for which each hit in the host is too short to be loaded."""
    return replace(shape, extra={**extra, "min_load_tokens": 1 << 30})


def blocks_of_a_step(shape: EngineShape) -> int:
    """The most that a step takes, and so the most that it stores."""
    sizes = [group.block_tokens for group in shape.parsed_groups]
    return sum(-(-shape.max_batched_tokens // size) + 1 for size in sizes)


def blocks_of_a_position(shape: EngineShape) -> int:
    """What one position has stored of windows, which may begin inside a block, and of states."""
    return sum(
        1 if group.kind == "mamba" else -(-(group.size - 1) // group.block_tokens) + 1
        for group in shape.parsed_groups
        if group.kind in ("mamba", "window")
    )


class TwinChecker:
    """Sends prompts of the run one by one to vLLM's scheduler with us, and to one without.

    Nothing is loaded in either: a load takes the place of computing, so that from then on the two
    differ in what they compute. With us the pool is larger by what a step stores: prompts that
    share nothing are stored at once, one position in a step.
    """

    def __init__(self, core: EngineCore) -> None:
        self._alone = replace(core.shape, connector=NONE, extra={})
        self._ours = without_loads(core.shape, lazy_offload=core.config.lazy_offload)
        self._arrivals: list[Arrival] = []
        tap(core, "send", self._see)

    def _see(
        self,
        original: Callable[..., Any],
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        **options: Any,
    ) -> Any:
        self._arrivals.append((tuple(prompt), max_tokens))
        return original(request_id, prompt, max_tokens, **options)

    def check(self) -> None:
        """What must hold at the end."""
        kept = sorted(set(self._arrivals), key=lambda one: -len(one[0]))[:PROMPTS_KEPT]
        apart = [((VOCABULARY + number, *one[0]), one[1]) for number, one in enumerate(kept)]
        self._check_last([*apart, apart[0]])
        self._check_shared(self._arrivals[:PROMPTS_SHARED])

    def _check_last(self, arrivals: Sequence[Arrival]) -> None:
        """In the smallest pool in which vLLM alone has the last prompt, it has it with us."""
        longest = max(len(prompt) + count for prompt, count in arrivals)
        sizes = [group.block_tokens for group in self._alone.parsed_groups]
        least = sum(-(-longest // size) for size in sizes) + len(sizes)

        def last(shape: EngineShape, num_blocks: int, copy_steps: int = 0) -> int:
            return gpu_hits(replace(shape, num_blocks=num_blocks), arrivals, copy_steps)[-1]

        pools = range(least, least * len(arrivals))
        place = bisect_left(pools, True, key=lambda pool: last(self._alone, pool) > 0)
        if place < len(pools):
            pool, num_alone = pools[place], last(self._alone, pools[place])
            more = blocks_of_a_position(self._ours)
            late = LATE_STEPS[len(self._arrivals) % len(LATE_STEPS)]
            self._check(num_alone, last(self._ours, pool + more))
            self._check(num_alone, last(self._ours, pool + 2 * more, late))

    def _check_shared(self, arrivals: Sequence[Arrival]) -> None:
        """As vLLM alone has in this pool or in ours: it may have less of some in a larger one."""

        def tokens(shape: EngineShape, num_more: int) -> int:
            shape = replace(shape, num_blocks=shape.num_blocks + num_more)
            return sum(gpu_hits(shape, arrivals, len(self._arrivals) % 3))

        more = blocks_of_a_step(self._ours)
        num_ours, num_alone = tokens(self._ours, more), tokens(self._alone, 0)
        if num_ours < num_alone:
            self._check(min(num_alone, tokens(self._alone, more)), num_ours)

    def _check(self, num_alone: int, num_ours: int) -> None:
        if num_ours < num_alone:
            found = f"vLLM's own cache has {num_ours} tokens, and {num_alone} without us"
            raise Finding("I15", found)
