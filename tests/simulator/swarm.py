"""The profile `swarm`: another kind of run for each seed, drawn from all options there are.

As in swarm testing (Groce, Zhang, Eide, Chen and Regehr, "Swarm Testing", ISSTA 2012), each seed
switches features off at random. A run with everything on finds less: what fails early hides what
would have failed later, and full caches, deaths and resets keep one another from happening.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tests.simulator.chance import Chance, Item
from tests.simulator.device import CopyFault
from tests.simulator.events import FaultKind
from tests.simulator.groups import BLOCK_TOKENS
from tests.simulator.models import MODELS
from tests.simulator.profiles import (
    PROFILES,
    WAIT_S,
    FaultCounts,
    Profile,
    Workload,
    tier_settings,
)
from tests.simulator.recipes import draw as draw_recipe
from tests.simulator.tiers import TierFault, TierOptions
from tests.simulator.vllm_setup import (
    EngineShape,
    as_model_runner,
    hits_overwritten_states,
    make_config,
    make_kv_cache_config,
)

SWARM = "swarm"
NAMES = (*PROFILES, *MODELS, SWARM)
BY_PRIORITY = "priority:"
"""Before a name: the same, scheduled by priority."""
ABOUT = "a profile of its own for each seed, drawn from all options"

RANKS_MAX = 6
"""More only take longer."""
FAULTS_MAX: FaultCounts = {
    CopyFault.FAIL: 8,
    CopyFault.REFUSE: 4,
    CopyFault.STALL: 40,
    FaultKind.REPORT_TWICE: 6,
    FaultKind.REPORT_LATE: 4,
    FaultKind.FOREIGN_IDS: 40,
    FaultKind.FLIP: 30,
    FaultKind.SQUEEZE: 8,
    FaultKind.SPOIL: 12,
    TierFault.FAIL: 12,
    TierFault.LOSE: 12,
    TierFault.STALL: 12,
    TierFault.HANG: 3,
    TierFault.LIE: 12,
    TierFault.TEAR: 12,
    TierFault.SWAP: 12,
    TierFault.EVICT: 12,
    TierFault.CUT: 12,
}
FINAL_FAULTS_MAX: FaultCounts = {
    CopyFault.KILL: 1,
    FaultKind.LOOP_DIES: 1,
    FaultKind.BREAK: 1,
    FaultKind.LOADS_FAIL: 2,
    TierFault.DIE: 1,
}
"""After one of these little is stored or loaded, so few runs have any."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination that is left out."""

    what: str  # it is
    why: str  # which component refuses it, and how
    refuses: Callable[[Profile], bool]  # whether a profile has it


def _kinds(profile: Profile) -> list[str]:
    return [group.kind for group in profile.shape.parsed_groups]


def _block_sizes(profile: Profile) -> set[int]:
    return {group.block_tokens for group in profile.shape.parsed_groups}


# An option that means nothing without another is drawn with that one only: Model Runner V2 with a
# GPU, one copy for several ranks with MLA, two precisions with two groups, retention with windows
# or states, hits inside blocks with states, bits that flip with `verify` on every load (nothing
# else promises to notice them), deadlines that copies miss with faults, one process with one rank,
# and blocks that another connector spoils with one group of full attention, whose requests then
# fail: to compute them again while a step of theirs is in flight is more than vLLM can do.
RULES = (
    Rule(
        "asynchronous scheduling and pipeline stages with Model Runner V1",
        "vLLM refuses it (`_get_v1_model_runner_unsupported_features`)",
        lambda p: p.shape.is_async and p.shape.pipeline_ranks > 1 and not p.shape.is_v2,
    ),
    Rule(
        "chunked attention in groups with several block sizes",
        "vLLM dies of an assertion at the first hit (`ChunkedLocalAttentionManager`)",
        lambda p: "chunk" in _kinds(p) and len(_block_sizes(p)) > 1,
    ),
    Rule(
        "Mamba states in blocks of several sizes",
        "vLLM has one size for all of them (`mamba_block_size`)",
        lambda p: len({g.block_tokens for g in p.shape.parsed_groups if g.kind == "mamba"}) > 1,
    ),
    Rule(
        "Mamba states with draft tokens",
        "the simulator does not model Mamba's speculative blocks; with pipeline stages the "
        "connector does nothing",
        lambda p: "mamba" in _kinds(p) and p.shape.num_draft_tokens > 0,
    ),
)


def profile_of(name: str, seed: int) -> Profile:
    """The profile of a run; synchronous where vLLM's own hits are wrong if it is not.

    `name`: one of `NAMES`, or one behind `BY_PRIORITY`; `seed`: of the run.
    """
    if name.startswith(BY_PRIORITY):
        profile = profile_of(name.removeprefix(BY_PRIORITY), seed)
        return replace(profile, shape=replace(profile.shape, is_priority=True))
    if name in MODELS:
        return draw_recipe(name, seed)
    profile = draw(seed) if name == SWARM else PROFILES[name]
    if hits_overwritten_states(profile.shape):
        return replace(profile, shape=replace(profile.shape, is_async=False))
    return profile


def draw(seed: int | str) -> Profile:
    """The profile of a seed: the first that is drawn and no rule leaves out."""
    for attempt in itertools.count():
        profile = _Draw(Chance(f"swarm/{seed}/{attempt}")).profile()
        if not any(rule.refuses(profile) for rule in RULES):
            return profile
    raise AssertionError("not reached")


def described(name: str, seed: int) -> list[str]:
    """What was drawn for a seed, a line for each part; empty if nothing was."""
    if name in PROFILES:
        return []
    profile = profile_of(name, seed)
    return [
        "The profile that is drawn from the seed:",
        f"  engine: {_differing(profile.shape)}",
        f"  workload: {_differing(profile.workload)}, copies end up to {profile.copy_ticks_max} "
        "ticks late",
        f"  tiers: {', '.join(map(str, profile.tiers)) or 'none'}, {profile.num_engines} engines, "
        f"{profile.num_lives} lives",
        "  faults at most: "
        + (", ".join(f"{most} {kind.value}" for kind, most in profile.faults.items()) or "none"),
    ]


def _differing(part: EngineShape | Workload) -> str:
    """The options of a part that are not as they are by default."""
    given = {option.name: getattr(part, option.name) for option in fields(part)}
    usual = type(part)()
    return ", ".join(
        f"{name}={value!r}" for name, value in given.items() if value != getattr(usual, name)
    )


class _Draw:
    """Draws each option under its name."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    def profile(self) -> Profile:
        workload = self._workload()
        extra = self._extra()
        tiers = self._tiers(extra) if self._is_on("tiers", 0.3) else ()
        faults = self._faults(extra) if self._is_on("faults", 0.625) else {}
        if faults and self._is_on("timeout", 0.25):  # which makes transfers fail
            extra["transfer_timeout_s"] = self._one_of((2, 10), "timeout s")
        elif not faults and "max_inflight_bytes" in extra:
            # Steps of an idle engine take a second, and copies wait for one another.
            extra["transfer_timeout_s"] = 600
        shape = self._shape(workload, extra)
        if FaultKind.SPOIL in faults:
            if shape.groups[1:] or shape.parsed_groups[0].kind not in ("full", "mla"):
                del faults[FaultKind.SPOIL]
            else:
                shape = replace(shape, failure_policy="fail")
        return Profile(
            ABOUT,
            shape,
            workload,
            copy_ticks_max=self._one_of((0, 4, 12, 24, 40, 60), "copy ticks"),
            faults=faults,
            has_few_copies=True,
            settles=True,
            tiers=tiers,
            num_lives=self._one_of((1, 2), "lives") if tiers else 1,
            num_engines=self._one_of((1, 1, 2), "engines") if tiers else 1,
        )

    # ---- what clients do -----------------------------------------------------------------------

    def _workload(self) -> Workload:
        between = self._chance.between
        return Workload(
            num_requests=between(8, 48, "requests"),
            num_steps=between(40, 200, "steps"),
            num_stems=between(1, 8, "stems"),
            num_tails=between(1, 12, "tails"),
            stem_tokens=self._one_of((12, 24, 60, 110), "stem tokens"),
            tail_tokens=self._one_of((2, 4, 12, 30), "tail tokens"),
            whole_blocks=self._one_of((0.0, 0.25, 1.0), "whole blocks"),
            output_tokens=self._one_of((1, 8, 24, 40, 60), "output tokens"),
            num_aborts=between(1, 48, "aborts") if self._is_on("aborts") else 0,
            num_resets=between(1, 12, "resets") if self._is_on("resets") else 0,
            num_model_loads=between(1, 6, "model loads") if self._is_on("model loads") else 0,
            num_reused_ids=between(1, 16, "reused ids") if self._is_on("reused ids") else 0,
            num_salts=between(2, 3, "salts") if self._is_on("salts", 0.25) else 1,
        )

    # ---- the engine ----------------------------------------------------------------------------

    def _shape(self, workload: Workload, extra: dict[str, Any]) -> EngineShape:
        groups = self._groups()
        is_mla = all(group.startswith("mla") for group in groups)
        tensor_ranks = self._one_of((1, 1, 2, 3), "tensor ranks")
        pipeline_ranks = self._one_of((1, 1, 1, 2, 3, 4), "pipeline ranks")
        if tensor_ranks * pipeline_ranks > RANKS_MAX:
            pipeline_ranks = 1
        has_streams = self._is_on("streams")
        shape = EngineShape(
            groups=groups,
            num_slots=1,
            tensor_ranks=tensor_ranks,
            pipeline_ranks=pipeline_ranks,
            is_replicated=is_mla and tensor_ranks > 1 and self._is_on("replicated"),
            is_async=self._is_on("async"),
            is_in_process=tensor_ranks * pipeline_ranks == 1 and self._is_on("in process", 0.75),
            is_v2=has_streams and self._is_on("v2"),
            has_streams=has_streams,
            is_zeroed=len(groups) > 1 and self._is_on("zeroed", 0.25),
            num_draft_tokens=self._chance.between(1, 3, "drafts") if self._is_on("drafts") else 0,
            is_priority=self._is_on("priority"),
            max_batched_tokens=self._one_of((16, 24, 32, 64), "batched tokens"),
            max_seqs=self._one_of((2, 4, 6, 12), "seqs"),
            failure_policy="fail" if self._is_on("fail", 0.125) else "recompute",
            has_events=self._is_on("events"),
            extra=extra,
        )
        shape = replace(shape, **self._sparse(shape))
        longest = workload.stem_tokens + workload.tail_tokens + workload.output_tokens
        shape = replace(shape, max_model_len=longest + shape.num_draft_tokens)
        return self._with_pools(shape)

    def _groups(self) -> tuple[str, ...]:
        count = self._one_of((1, 1, 1, 2, 2, 2, 3), "groups")
        size = self._one_of(("", "", "", "@8", "@16"), "block size")
        is_mixed = self._is_on("block sizes", 0.25)
        return tuple(
            self._kind(index)
            + (self._one_of(("", "@8", "@16"), "block size", index) if is_mixed else size)
            for index in range(count)
        )

    def _kind(self, index: int) -> str:
        kind = self._one_of(("full", "full", "mla", "window", "chunk", "mamba"), "kind", index)
        if kind == "window":
            return f"window:{self._chance.between(3, 24, 'window', index)}"
        if kind == "chunk":
            return f"chunk:{self._one_of((8, 16, 32), 'chunk', index)}"
        return kind

    def _extra(self) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self._is_on("lazy"):
            extra["lazy_offload"] = True
        if self._is_on("lru"):
            extra["eviction_policy"] = "lru"
        if self._is_on("verify", 0.375):
            extra["verify"] = self._one_of(("load", "sample:2"), "verify how")
        if self._is_on("least hit", 0.375):
            extra["min_load_tokens"] = self._one_of(("auto", 12, 32), "least hit tokens")
        if self._is_on("in step"):
            extra["load_in_step"] = True
        if self._is_on("flight", 0.25):
            extra["max_inflight_bytes"] = self._one_of((4096, 6144, 12288), "flight bytes")
        if self._is_on("internal checks", 0.25):
            extra["check_invariants"] = True
        return extra

    def _tiers(self, extra: dict[str, Any]) -> tuple[TierOptions, ...]:
        count = self._one_of((1, 1, 2), "tiers")
        settings: dict[str, Any] = {
            "wait_s": self._one_of((0.05, 2, WAIT_S, WAIT_S), "tier wait"),
            "timeout_s": self._one_of((1, 10), "tier timeout"),
        }
        if self._is_on("tier evicted"):
            settings["store"] = "evicted"
        if self._is_on("model version", 0.125):
            settings["model_version"] = "1"
        kept = [index for index in range(count) if self._is_on(f"tier {index} keeps")]
        extra.update(tier_settings(count, kept=kept, **settings))
        return tuple(
            TierOptions(
                ticks_max=self._one_of((0, 6, 12, 40, 400), "tier ticks", index),
                num_objects_max=self._one_of((0, 0, 20, 60), "tier objects", index),
                latency_ticks=self._one_of((0, 0, 10, 60, 200), "tier latency", index),
                is_local=index < count - 1 and self._is_on("local tier"),
                fails_one_in=self._one_of((0, 0, 0, 3, 30), "tier fails", index),
            )
            for index in range(count)
        )

    def _sparse(self, shape: EngineShape) -> dict[str, Any]:
        """What only some groups know: what is kept of windows and states, where hits end."""
        sparse: dict[str, Any] = {}
        kinds = {group.kind for group in shape.parsed_groups}
        largest = shape.block_words  # a multiple of all block sizes
        if kinds & {"window", "mamba"} and self._is_on("retention"):
            sparse["retention_interval"] = self._one_of((0, 1, 4), "retention blocks") * largest
        sizes = {group.block_tokens for group in shape.parsed_groups}
        if "mamba" in kinds and len(shape.groups) > 1 and min(sizes) > BLOCK_TOKENS:
            sparse["prefix_match_unit"] = self._one_of((0, BLOCK_TOKENS), "match unit")
        return sparse

    def _with_pools(self, shape: EngineShape) -> EngineShape:
        """Both pools: of the GPU, no fewer blocks than vLLM must have to start."""
        least = blocks_of_longest_request(shape) + 1  # and the null block
        more = self._one_of((0.0, 0.1, 0.3, 1.0, 3.0), "more blocks")
        num_blocks = least + round(least * more) + self._chance.below(4, "blocks")
        num_slots = max(2, round(num_blocks * self._one_of((0.2, 0.5, 1.0, 2.0, 4.0), "slots")))
        is_uneven = shape.num_ranks > 1 and not shape.is_replicated and self._is_on("uneven")
        missing_max = (num_slots - 1) // max(shape.num_ranks - 1, 1)
        return replace(
            shape,
            num_blocks=num_blocks,
            num_slots=num_slots,
            num_missing_slots=self._chance.below(missing_max + 1, "missing") if is_uneven else 0,
            ticks_per_slot=self._one_of((1, 5, 20), "warming") if self._is_on("warms", 0.25) else 0,
        )

    # ---- what goes wrong -----------------------------------------------------------------------

    def _faults(self, extra: dict[str, Any]) -> FaultCounts:
        kinds = {kind: most for kind, most in FAULTS_MAX.items() if self._is_on(kind.value)}
        if extra.get("verify") != "load":  # nothing else promises to notice a bit that flips
            kinds.pop(FaultKind.FLIP, None)
        final = {k: most for k, most in FINAL_FAULTS_MAX.items() if self._is_on(k.value, 0.25)}
        if "tiers" not in extra:
            kinds = {k: most for k, most in kinds.items() if not isinstance(k, TierFault)}
            final = {k: most for k, most in final.items() if not isinstance(k, TierFault)}
        return {
            kind: self._chance.between(1, most, "most", kind.value)
            for kind, most in {**kinds, **final}.items()
        }

    def _is_on(self, feature: str, probability: float = 0.5) -> bool:
        return self._chance.happens(probability, "is on", feature)

    def _one_of(self, items: Sequence[Item], *name: object) -> Item:
        return self._chance.choose(items, *name)


def blocks_of_longest_request(shape: EngineShape) -> int:
    """GPU blocks without which vLLM does not start: those of one request of `max_model_len`."""
    with as_model_runner(shape):
        config, kv_cache_config = make_config(shape), make_kv_cache_config(shape)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        return sum(-(-s.max_memory_usage_bytes(config) // s.page_size_bytes) for s in specs)
