"""Many requests at once with one prefix that only the host has: is it loaded once, or for each?

vLLM keeps of sliding windows and Mamba states what it keeps by default.

vLLM's real scheduler serves them with each connector's real scheduler side: no model, no copies.
Figures are steps, preemptions and blocks, and are the same on every machine and every time.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
    table,
)
from safe_offload.errors import SafeOffloadError
from tests.benchmarks.scheduler_engine import CONTESTANTS, Sizes, make_engine
from tests.benchmarks.scheduler_traces import BLOCK_TOKENS, PLAIN, prompt_of
from tests.benchmarks.shared_engine import EngineSeconds, measure_engine
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

    def __str__(self) -> str:
        """A cell of the table."""
        return f"{self.num_steps} ({self.num_preemptions}), {self.loaded_prefixes:.2f}"


TURN_PREFIXES, TURN_TOKENS, TURN_PASSES = 4, 8000, 3
"""Long prefixes that come in turns, each time with another tail, and never two at once."""


ServedByLayout = dict[str, dict[Case, dict[str, Served]]]
"""By layout, case and connector."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--connectors", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS], metavar="NAME")
    add(
        "--copy-steps",
        type=int,
        default=COPY_STEPS,
        metavar="D",
        help="a copy is reported D steps after the one whose plan names it (%(default)s)",
    )
    add("--engine", action="store_true", help="time it in a real engine too")
    add("--rounds", type=int, default=7, help="in the real engine (%(default)s)")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks shared`."""
    machine = describe_machine()
    served = measure(arguments.connectors, CASES, arguments.copy_steps)
    in_engine = measure_engine(arguments.rounds) if arguments.engine else None
    turns = {
        layout: {name: take_turns(name, groups) for name in arguments.connectors}
        for layout, groups in LAYOUTS.items()
    }
    publish(make_report(served, arguments.copy_steps, machine, in_engine, turns), arguments)
    return 0


def measure(names: Sequence[str], cases: Sequence[Case], copy_steps: int) -> ServedByLayout:
    return {
        layout: {
            case: {name: serve(name, groups, case, copy_steps) for name in names} for case in cases
        }
        for layout, groups in LAYOUTS.items()
    }


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


def make_report(
    served: ServedByLayout,
    copy_steps: int,
    machine: dict[str, Any],
    in_engine: EngineSeconds | None = None,
    turns: dict[str, dict[str, list[int]]] | None = None,
) -> Report:
    rows = [
        {"layout": layout, **asdict(case), "connector": name, **asdict(found)}
        for layout, cases in served.items()
        for case, by_name in cases.items()
        for name, found in by_name.items()
    ]
    return Report(
        method=(
            "steps until all are answered (preemptions), loaded tokens as a multiple of the prefix"
            f"\ncopies are reported {copy_steps} steps later"
        ),
        sections=[
            *(f"{layout}\n{_layout_table(cases)}" for layout, cases in served.items()),
            _turns_table(turns) if turns else "",
            str(in_engine or ""),
        ],
        figures={
            "rows": rows,
            "turns": turns,
            "engine": in_engine.to_json() if in_engine else None,
        },
        options={"copy_steps": copy_steps, "tail_tokens": TAIL_TOKENS},
        machine=machine,
    )


def _turns_table(turns: dict[str, dict[str, list[int]]]) -> str:
    title = f"tokens computed of a prompt, in passes 1 to {TURN_PASSES}"
    rows = [[title, *next(iter(turns.values()))]]
    rows += [
        [layout, *(", ".join(map(str, passes)) for passes in by_name.values())]
        for layout, by_name in turns.items()
    ]
    return table(rows)


def _layout_table(cases: dict[Case, dict[str, Served]]) -> str:
    rows = [["requests, pool, prefix, answer", *next(iter(cases.values()))]]
    for case, by_name in cases.items():
        sizes = (case.num_requests, case.num_blocks, case.prefix_blocks, case.num_answer_tokens)
        rows.append([", ".join(map(str, sizes)), *map(str, by_name.values())])
    return table(rows)
