"""What a flood of one tenant costs those that chat, with quotas and without.

Three tenants have conversations that fit into what they are guaranteed. A fourth sends prompts that
never come back, ten times as many tokens as the host holds. vLLM's scheduler and the scheduler side
of our connector are real, and every word that attention reads is checked; the figures are the same
every time.
"""

import argparse
import json
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
    table,
)
from safe_offload.scheduler.eviction.policies import POLICIES
from tests.simulator.engine_core import EngineCore
from tests.simulator.groups import BLOCK_TOKENS
from tests.simulator.vllm_setup import EngineShape
from tests.simulator.words import VOCABULARY

CHATTING = ("ann", "bob", "cid")
FLOOD = "flood"
GUARANTEED = {"default": "10%", "guaranteed": {n: {"share": "25%", "prefix": n} for n in CHATTING}}
NUM_SLOTS, NUM_BLOCKS = 600, 90
FLOODS_OF = 10
"""Tokens of the flood, as a multiple of what the host holds."""
NUM_TURNS, NUM_CONVERSATIONS = 8, 2
TURN_TOKENS, ANSWER_TOKENS, FLOOD_TOKENS = 24, 6, 160
SEED = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What those that chat had: of their prompts' tokens, how many were not computed."""

    asked: int
    from_gpu: int
    from_host: int

    @property
    def hit_rate(self) -> float:
        return (self.from_gpu + self.from_host) / self.asked


def serve(extra: dict[str, Any], *, is_flooded: bool, seed: int = SEED) -> Outcome:
    """Serve all conversations, turn by turn, and the flood between the turns."""
    shape = EngineShape(
        num_blocks=NUM_BLOCKS,
        num_slots=NUM_SLOTS,
        max_batched_tokens=128,
        max_seqs=12,
        has_streams=True,
        extra=extra,
    )
    core, chance, found = EngineCore(shape, seed), random.Random(seed), Counter[str]()
    _count(core, found)
    conversations: dict[tuple[str, int], list[int]] = {
        (name, number): [] for number in range(NUM_CONVERSATIONS) for name in CHATTING
    }
    num_floods = FLOODS_OF * NUM_SLOTS * BLOCK_TOKENS // FLOOD_TOKENS
    num_between = -(-num_floods // (NUM_TURNS * len(conversations))) if is_flooded else 0
    try:
        for turn in range(NUM_TURNS):
            for (name, number), tokens in conversations.items():
                request_id = f"{name}-{number}-{turn}"
                for index in range(num_between):
                    flood = _tokens(chance, FLOOD_TOKENS)
                    core.add(f"{request_id}-{index}", flood, 1, cache_salt=FLOOD)
                tokens.extend(_tokens(random.Random(f"{seed}{request_id}"), TURN_TOKENS))
                core.add(request_id, list(tokens), ANSWER_TOKENS, cache_salt=name)
                core.drain()
                tokens.extend(core.answers[request_id])
    finally:
        core.close()
    return Outcome(found["asked"], found["gpu"], found["host"])


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCABULARY) for _ in range(count)]


def _count(core: EngineCore, found: Counter[str]) -> None:
    """Count what comes from where for those that chat, by what the scheduler hears."""
    begin, match = (
        core.connector.update_state_after_alloc,
        core.connector.get_num_new_matched_tokens,
    )
    computed: dict[str, int] = {}

    def see_match(request: Any, num_computed_tokens: int) -> Any:
        computed[request.request_id] = num_computed_tokens
        return match(request, num_computed_tokens)

    def see_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
        num_gpu = computed.pop(request.request_id, None)
        if num_gpu is not None and request.cache_salt != FLOOD:
            found["asked"] += request.num_tokens
            found["gpu"] += num_gpu
            found["host"] += num_external_tokens
        begin(request, blocks, num_external_tokens)

    core.connector.update_state_after_alloc = see_alloc
    core.connector.get_num_new_matched_tokens = see_match


def measure(extra: dict[str, Any], seed: int = SEED) -> dict[str, Outcome]:
    """Return what those that chat have alone, and beside the flood without and with quotas."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tenants.json")
        path.write_text(json.dumps(GUARANTEED))
        quotas = {**extra, "tenants": str(path)}
        return {
            "alone": serve(extra, is_flooded=False, seed=seed),
            "flooded, no quotas": serve(extra, is_flooded=True, seed=seed),
            "flooded, with quotas": serve(quotas, is_flooded=True, seed=seed),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=SEED, help="draws the prompts (%(default)s)")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks tenants`; return 1 if a flood costs more than 5 %."""
    logging.disable(logging.CRITICAL)
    cases: dict[str, dict[str, Any]] = {policy: {"eviction_policy": policy} for policy in POLICIES}
    cases["lru, lazy"] = {"eviction_policy": "lru", "lazy_offload": True}
    rows: list[Sequence[str]] = [("", "alone", "flooded", "with quotas", "of alone")]
    figures: dict[str, Any] = {}
    is_good = True
    for name, extra in cases.items():
        found = measure(extra, arguments.seed)
        alone, *rest = (outcome.hit_rate for outcome in found.values())
        share = rest[-1] / alone
        is_good &= share >= 0.95
        rows.append((name, *(f"{rate:.3f}" for rate in (alone, *rest)), f"{share:.3f}"))
        figures[name] = {what: asdict(outcome) for what, outcome in found.items()}
    method = (
        f"Share of prompt tokens that three chatting tenants do not compute; a fourth floods with "
        f"{FLOODS_OF} times the host. Guaranteed: 25 % to each of the three, 10 % to the rest."
    )
    publish(
        Report(method, [table(rows)], {"cases": figures}, vars(arguments), describe_machine()),
        arguments,
    )
    return 0 if is_good else 1
