"""Is a request ever answered later because there is a tier? On virtual time, so always the same.

vLLM's scheduler and the scheduler side of our connector are real; steps, copies and tiers take the
time that they are told to take. Requests come one by one, and each is held against the same request
on an engine without a connector. The GPU's prefix cache is emptied before each, host memory never.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
    table,
)
from safe_offload.observe.counters import Count
from tests.benchmarks.slow_tier_engine import BLOCK_TOKENS, SLOT_BYTES, TierSpeed, TimedEngine
from tests.simulator.vllm_setup import NONE, OURS, EngineShape

TIERS: dict[str, TierSpeed] = {
    "2 GB/s": TierSpeed(2e9),
    "500 MB/s": TierSpeed(500e6),
    "50 MB/s": TierSpeed(50e6),
    "stalls from the start": TierSpeed(num_fetched_max=0),
    "stalls in a fetch": TierSpeed(num_fetched_max=333),
    "one piece in 20 does not come": TierSpeed(fails_every=20),
    "never answers": TierSpeed(probe_s=float("inf")),
    "answers after 1 s": TierSpeed(probe_s=1.0),
    "delivers nothing": TierSpeed(delivers=False),
    "dies and comes back": TierSpeed(dead_s=(60.0, 160.0)),
}
"""What is measured, by the name on the command line."""
LAYOUTS = {"plain": ("full@16",), "hybrid": ("full@16", "window:1024@16")}
TOKENS_PER_S = (1_000, 5_000, 20_000)
NUM_REQUESTS = 1_000
LENGTHS = (100, 16_000)
NUM_COLD = 10
"""Requests until when the engine is taken to be new."""
SHARED = 0.3
"""Of the requests: they begin as one before did."""
PAUSE_S = 0.2
"""Between an answer and the next request, in the mean."""
ANSWER_TOKENS = 3
STEP_TOKENS = 2048
NUM_SLOTS = 6_000
SEED = 1
ALLOWED_SHARE, ALLOWED_S = 1.1, 0.02


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request."""

    tokens: tuple[int, ...]
    tier_share: float  # of its blocks, from the first on, that another engine has written
    pause_s: float  # before it comes


@dataclass(frozen=True, slots=True)
class Sample:
    """A request, and what became of it."""

    num_tokens: int  # of its prompt
    tier_share: float  # see `Prompt`
    first_s: float  # until its first token
    computed_s: float  # the same without a connector
    num_fetched: int  # blocks that were fetched for it
    is_cut: bool  # it waited for the tier as long as it may

    def beside(self, other: Sample) -> Sample:
        """Return it with what the same request takes on an engine without a connector."""
        return replace(self, computed_s=other.first_s)

    @property
    def ratio(self) -> float:
        """Return its time, in terms of what it may take."""
        return self.first_s / (ALLOWED_SHARE * self.computed_s + ALLOWED_S)

    @property
    def late_s(self) -> float:
        """Return how much later it is than computed."""
        return self.first_s - self.computed_s


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: a tier, or no connector, beside a model."""

    tier: str | None
    tokens_per_s: int
    layout: str

    def __str__(self) -> str:
        return f"{self.layout}, {self.tokens_per_s} tokens/s, {self.tier or 'no connector'}"


RunAll = Callable[[Callable[[Case], list[Sample]], Sequence[Case]], Iterable[list[Sample]]]


def make_prompts(number: int, seed: int) -> list[Prompt]:
    chance = random.Random(seed)
    shortest, longest = LENGTHS
    prompts: list[Prompt] = []
    for _ in range(number):
        num_tokens = round(shortest * (longest / shortest) ** chance.random())
        shared: tuple[int, ...] = ()
        if prompts and chance.random() < SHARED:
            other = chance.choice(prompts[-40:]).tokens
            shared = other[: min(num_tokens - 1, chance.randrange(len(other)))]
        own = (chance.randrange(1_000) for _ in range(num_tokens - len(shared)))
        tier_share = chance.choice((0.0, chance.random(), 1.0, 1.0))
        pause_s = chance.expovariate(1 / PAUSE_S)
        prompts.append(Prompt((*shared, *own), tier_share, pause_s))
    return prompts


def make_engine(case: Case, connector: str = OURS) -> TimedEngine:
    speed = TIERS[case.tier] if case.tier is not None else None
    extra: dict[str, object] = {"min_load_tokens": "auto"}
    if speed is not None:
        extra["tiers"] = [{"url": "file:///nowhere"}]
    groups = LAYOUTS[case.layout]
    shape = EngineShape(
        groups=groups,
        num_blocks=2 * len(groups) * LENGTHS[1] // BLOCK_TOKENS,
        num_slots=NUM_SLOTS * len(groups),
        max_batched_tokens=STEP_TOKENS,
        max_seqs=16,
        max_model_len=LENGTHS[1] + BLOCK_TOKENS,
        extra=extra,
        connector=connector,
        page_bytes=SLOT_BYTES,
    )
    return TimedEngine(shape, case.tokens_per_s, speed)


def serve(engine: TimedEngine, prompts: Sequence[Prompt]) -> list[Sample]:
    samples = []
    for number, prompt in enumerate(prompts):
        engine.idle_until(engine.clock.now_s + prompt.pause_s)
        engine.forget_gpu_cache()
        name = str(number)
        num_cut, num_planned = engine.counts[Count.TIER_WAITS_CUT], engine.worker.num_planned
        begin_s = engine.clock.now_s
        request = engine.send(name, prompt.tokens, ANSWER_TOKENS)
        hashes = request.block_hashes
        engine.worker.objects.update(hashes[: int(prompt.tier_share * len(hashes))])
        while name in engine.scheduler.requests:
            engine.step()
        samples.append(
            Sample(
                len(prompt.tokens),
                prompt.tier_share,
                engine.first_token_s[name] - begin_s,
                0.0,
                engine.worker.num_planned - num_planned,
                engine.counts[Count.TIER_WAITS_CUT] > num_cut,
            )
        )
    return samples


def measure(case: Case, number: int, seed: int) -> list[Sample]:
    engine = make_engine(case, NONE if case.tier is None else OURS)
    return serve(engine, make_prompts(number, seed))


def compare(
    cases: Sequence[Case], number: int, seed: int, run_all: RunAll = map
) -> dict[Case, list[Sample]]:
    """Measure cases, and hold each request against the same without a connector."""
    alone = dict.fromkeys(replace(case, tier=None) for case in cases)
    everything = (*alone, *cases)
    found = run_all(partial(measure, number=number, seed=seed), everything)
    samples = {}
    for case, some in zip(everything, found, strict=True):
        print(f"{case}: done", flush=True)
        samples[case] = some
    return {
        case: [
            one.beside(other)
            for one, other in zip(samples[case], samples[replace(case, tier=None)], strict=True)
        ]
        for case in cases
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tiers", nargs="+", choices=list(TIERS), default=[*TIERS], metavar="NAME", help="(all)")
    add("--tokens-per-s", type=int, nargs="+", default=[*TOKENS_PER_S], metavar="N")
    add("--layouts", nargs="+", choices=list(LAYOUTS), default=["plain"], help="(plain)")
    add("--requests", type=int, default=NUM_REQUESTS, help="of each tier and speed (%(default)s)")
    add("--seed", type=int, default=SEED, help="draws the requests (%(default)s)")
    add("--processes", type=int, default=1, help="(%(default)s)")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks slow_tier`; return 1 if a request is later than allowed."""
    machine = describe_machine()
    cases = [
        Case(tier, tokens_per_s, layout)
        for layout in arguments.layouts
        for tokens_per_s in arguments.tokens_per_s
        for tier in arguments.tiers
    ]
    silence = partial(logging.disable, logging.CRITICAL)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, context, silence) as pool:
        found = compare(cases, arguments.requests, arguments.seed, pool.map)
    publish(make_report(found, machine), arguments)
    return int(any(one.ratio > 1 for samples in found.values() for one in samples[NUM_COLD:]))


def make_report(found: dict[Case, list[Sample]], machine: dict[str, object]) -> Report:
    cold, warm = slice(NUM_COLD), slice(NUM_COLD, None)
    return Report(
        method=(
            f"{len(next(iter(found.values())))} requests of {LENGTHS[0]} to {LENGTHS[1]} tokens, "
            "one by one, on virtual time; each is held against computing\n"
            f"it without a connector. Allowed: {ALLOWED_SHARE} times that and "
            f"{1000 * ALLOWED_S:.0f} ms. {SLOT_BYTES // BLOCK_TOKENS >> 10} KiB for each token."
        ),
        sections=[
            f"Once {NUM_COLD} requests have been served:\n\n" + _lateness(found, warm),
            f"The first {NUM_COLD} requests of a new engine:\n\n" + _lateness(found, cold),
        ],
        figures={
            "cases": [
                {"case": asdict(case), "samples": [asdict(one) for one in samples]}
                for case, samples in found.items()
            ]
        },
        options={},
        machine=machine,
    )


def _lateness(found: dict[Case, list[Sample]], chosen: slice) -> str:
    heads = ["tokens/s", "tier", "requests", "fetched", "not fetched", "cut"]
    rows = [[*heads, "over", "last over", "worst of allowed", "latest, ms", "median speed-up"]]
    for case, everything in found.items():
        samples = everything[chosen]
        over = [number for number, one in enumerate(samples, 1) if one.ratio > 1]
        num_fetched = sum(one.num_fetched > 0 for one in samples)
        rows.append(
            [
                f"{case.tokens_per_s:,}",
                f"{case.tier} ({case.layout})",
                str(len(samples)),
                str(num_fetched),
                str(len(samples) - num_fetched),
                str(sum(one.is_cut for one in samples)),
                str(len(over)),
                str(over[-1]) if over else "-",
                f"{max(one.ratio for one in samples):.2f}",
                f"{1000 * max(one.late_s for one in samples):.0f}",
                f"{statistics.median(one.computed_s / one.first_s for one in samples):.2f}",
            ]
        )
    return table(rows, num_left=2)
