"""Kinds of runs: an engine, a workload for it, and what may go wrong. See docs/simulator.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulator.device import CopyFault
from tests.simulator.events import FaultKind
from tests.simulator.tenants import TENANTS_FILE
from tests.simulator.tiers import TierFault, TierOptions
from tests.simulator.vllm_setup import EngineShape

AnyFault = FaultKind | CopyFault | TierFault
FaultCounts = dict[AnyFault, int]

COPY_FAULTS: FaultCounts = {CopyFault.FAIL: 4, CopyFault.REFUSE: 2, CopyFault.STALL: 2}
PEER_FAULTS: FaultCounts = {
    FaultKind.REPORT_TWICE: 3,
    FaultKind.REPORT_LATE: 2,
    FaultKind.FOREIGN_IDS: 4,
}
SQUEEZES: FaultCounts = {FaultKind.SQUEEZE: 4}
DEATHS: FaultCounts = {FaultKind.LOOP_DIES: 1, CopyFault.KILL: 1}
ALL_FAULTS: FaultCounts = {
    **COPY_FAULTS,
    **PEER_FAULTS,
    **SQUEEZES,
    **DEATHS,
    FaultKind.FLIP: 16,
    FaultKind.BREAK: 1,
}


@dataclass(frozen=True)
class Workload:
    """What clients do."""

    num_requests: int = 48  # in a run
    num_steps: int = 180  # over which they are sent
    num_stems: int = 4  # prefixes that they share
    num_tails: int = 6  # different ends of prompts
    stem_tokens: int = 60  # longest prefix
    tail_tokens: int = 12  # longest tail of a prompt
    whole_blocks: float = 0.25  # fraction of prompts that end with a block
    output_tokens: int = 24  # most tokens that one asks for
    num_aborts: int = 10  # most clients that go
    num_resets: int = 3  # most resets
    num_model_loads: int = 0  # most loads of weights that only the model is told of
    num_reused_ids: int = 4  # most request ids that are used again
    num_salts: int = 1  # cache salts; 1 for none
    has_wishes: bool = False  # clients ask for pins, give hints, and for nothing to be left


@dataclass(frozen=True)
class Profile:
    """A kind of run."""

    about: str  # one line for the documentation
    shape: EngineShape = field(default_factory=EngineShape)
    workload: Workload = field(default_factory=Workload)
    copy_ticks_max: int = 12  # how late copies may end; a step is about six ticks
    faults: FaultCounts = field(default_factory=dict)  # most faults of each kind in one run
    has_few_copies: bool = False  # copies and operations of tiers go wrong early, as there are few
    # Faults and aborts end with the last request, and all must settle within a bound.
    settles: bool = False
    tiers: tuple[TierOptions, ...] = ()  # nearest first; the shape's settings name as many
    num_lives: int = 1  # how often the engine is started, each time on the tiers that the last left
    num_engines: int = 1  # that are driven together and share what the tiers hold
    has_twin: bool = False  # what vLLM's own cache has is compared with a scheduler without us


TIER_FAULTS: FaultCounts = {
    TierFault.FAIL: 8,
    TierFault.LOSE: 8,
    TierFault.STALL: 6,
    TierFault.HANG: 2,
    TierFault.LIE: 8,
    TierFault.TEAR: 8,
    TierFault.SWAP: 6,
    TierFault.EVICT: 6,
}
NETWORK_FAULTS: FaultCounts = {**TIER_FAULTS, TierFault.CUT: 8}

WAIT_S = 30
"""How long a request may wait for tiers: steps in which nothing is computed take a second each."""


def tier_settings(count: int = 1, *, kept: Sequence[int] = (), **settings: Any) -> dict[str, Any]:
    """Settings that name tiers; what they hold is the simulator's.

    Args:
        count: how many.
        kept: indices of those with `keep`.
        settings: of each of them.
    """
    usual = {"wait_s": WAIT_S, "timeout_s": 10}
    keep = ({"keep": True} if index in kept else {} for index in range(count))
    urls = (f"file:///tier/{index}" for index in range(count))
    return {
        "tiers": [{"url": u, **usual, **settings, **k} for u, k in zip(urls, keep, strict=True)]
    }


_HYBRID = EngineShape(groups=("window:10", "full"), num_blocks=60, num_slots=90, has_events=True)
_STRICT = {"verify": "load", "transfer_timeout_s": 10}
_GPU = EngineShape(has_streams=True, is_v2=True, is_async=True, has_events=True)
_FEW_BLOCKS = EngineShape(tensor_ranks=2, num_blocks=26, is_async=True)
_FEW_REQUESTS = Workload(
    num_requests=16, num_steps=60, num_stems=2, num_reused_ids=8, num_aborts=24
)
_TOGETHER = Workload(
    num_requests=60,
    num_steps=60,
    num_stems=2,
    num_tails=12,
    stem_tokens=90,
    output_tokens=8,
    num_aborts=24,
    num_resets=6,
)
_MANY_IDS: FaultCounts = {FaultKind.FOREIGN_IDS: 60, CopyFault.FAIL: 6, CopyFault.STALL: 40}

_SALTED = Workload(num_requests=60, num_stems=3, num_salts=4, stem_tokens=40, num_aborts=6)
_LONG_STEMS = Workload(
    num_requests=32,
    num_stems=6,
    num_tails=1,
    stem_tokens=160,
    output_tokens=2,
    num_aborts=2,
    num_resets=1,
)
_RETUNED: FaultCounts = {FaultKind.TENANTS: 6}

_ALONE = EngineShape(num_blocks=40, num_slots=200, extra={"load_in_step": True})
_ONE_BY_ONE = Workload(num_requests=70, num_steps=900, num_stems=5, num_tails=4, output_tokens=3)
"""Requests of which few run beside another."""

PROFILES: dict[str, Profile] = {
    "plain": Profile("one rank, full attention, no faults", copy_ticks_max=0),
    "late-copies": Profile("copies complete many steps later", copy_ticks_max=40),
    "hybrid-gpu": Profile(
        "two windows and full attention on a GPU",
        replace(_GPU, groups=("full", "window:10", "window:5"), num_blocks=80, num_slots=120),
    ),
    "one-process": Profile(
        "one window, in the scheduler's process; copies fail and bits flip, with verify",
        replace(_HYBRID, has_streams=True, is_async=True, is_in_process=True, extra=_STRICT),
        faults={**COPY_FAULTS, FaultKind.FLIP: 40},
    ),
    "spoilt": Profile(
        "in the scheduler's process; another connector fails to load what requests begin with",
        EngineShape(
            num_blocks=36,
            num_slots=120,
            max_batched_tokens=64,
            has_streams=True,
            is_async=True,
            is_in_process=True,
            failure_policy="fail",
        ),
        Workload(num_requests=80, num_steps=120, num_stems=8, output_tokens=8),
        copy_ticks_max=2,
        faults={FaultKind.SPOIL: 30},
    ),
    "in-step": Profile(
        "hits load in the step that computes the rest, in the scheduler's process",
        replace(_ALONE, is_async=True, is_in_process=True),
        _ONE_BY_ONE,
        copy_ticks_max=20,
    ),
    "in-step-faults": Profile(
        "the same on two GPUs; copies and devices fail, before the step or half way",
        replace(_ALONE, is_async=True, is_v2=True, has_streams=True, tensor_ranks=2),
        _ONE_BY_ONE,
        copy_ticks_max=20,
        faults={**COPY_FAULTS, CopyFault.FAIL: 16, FaultKind.REPORT_LATE: 6, CopyFault.KILL: 1},
        has_few_copies=True,
    ),
    "in-step-fails": Profile(
        "the same in lazy mode with MLA; no load of some ranks succeeds any more",
        replace(
            _ALONE,
            groups=("mla",),
            is_async=True,
            has_streams=True,
            extra={"load_in_step": True, "lazy_offload": True},
        ),
        _ONE_BY_ONE,
        copy_ticks_max=20,
        faults={FaultKind.LOADS_FAIL: 1, CopyFault.FAIL: 10},
        has_few_copies=True,
    ),
    "in-step-busy": Profile(
        "hits load in the steps of others, on a GPU; copies fail, before the step or half way",
        replace(_ALONE, num_blocks=60, is_async=True, is_in_process=True, has_streams=True),
        Workload(num_requests=90, num_steps=500, num_stems=3, num_tails=4, num_aborts=24),
        copy_ticks_max=20,
        faults={**COPY_FAULTS, CopyFault.FAIL: 90},
    ),
    "mla-shared": Profile(
        "MLA on three ranks that share one copy",
        EngineShape(
            groups=("mla",),
            tensor_ranks=3,
            is_replicated=True,
            has_streams=True,
            is_async=True,
            has_events=True,
        ),
        faults=PEER_FAULTS,
    ),
    "mamba-gpu": Profile(
        "Mamba with larger blocks on a GPU: partial hits, copy-on-write",
        # Without KV events, whose checker would be the first to notice a wrong look-up.
        replace(_GPU, groups=("full", "mamba@8"), num_blocks=60, num_slots=90, has_events=False),
    ),
    "mamba-large-lazy": Profile(
        "Mamba and full attention in large blocks, hits inside both, lazy_offload",
        EngineShape(
            groups=("full@16", "mamba@16"),
            num_blocks=22,
            prefix_match_unit=4,
            has_streams=True,
            has_events=True,
            extra={"lazy_offload": True},
        ),
    ),
    "host-pressure": Profile(
        "a host pool under constant eviction, a small GPU pool",
        EngineShape(num_slots=26, num_blocks=26, has_events=True),
        Workload(num_stems=8),
        faults=SQUEEZES,
    ),
    "foreign-ids": Profile(
        "many foreign ids, few requests",
        _FEW_BLOCKS,
        _FEW_REQUESTS,
        copy_ticks_max=40,
        faults=_MANY_IDS,
    ),
    "repeats": Profile(
        "one prompt repeated in a pool that it fills",
        EngineShape(groups=("full", "full"), is_zeroed=True, num_blocks=9, has_streams=True),
        Workload(
            num_stems=1,
            num_tails=1,
            stem_tokens=12,
            tail_tokens=4,
            whole_blocks=1.0,
            output_tokens=1,
        ),
        copy_ticks_max=60,
    ),
    "hybrid-pressure": Profile(
        "window and full attention: preemptions without a free slot",
        replace(_HYBRID, num_blocks=39, num_slots=24),
        Workload(output_tokens=40),
    ),
    "lazy-pressure": Profile(
        "lazy_offload with a window: preemptions",
        replace(_HYBRID, num_blocks=39, extra={"lazy_offload": True}, has_streams=True),
        Workload(num_requests=32, num_stems=2, num_tails=2, output_tokens=40),
        copy_ticks_max=24,
    ),
    "lazy-priority": Profile(
        "lazy_offload, priorities: preempted in the step that fills a block",
        replace(
            _HYBRID,
            groups=("full", "window:10"),
            num_blocks=30,
            is_priority=True,
            extra={"lazy_offload": True},
        ),
        Workload(
            num_requests=32,
            num_stems=1,
            num_tails=1,
            stem_tokens=8,
            tail_tokens=2,
            output_tokens=60,
        ),
    ),
    "shared-stalls": Profile(
        "many requests wait for one load; copies stall",
        replace(_HYBRID, has_streams=True, max_seqs=12),
        _TOGETHER,
        copy_ticks_max=40,
        faults={CopyFault.STALL: 60},
    ),
    "shared-sparse": Profile(
        "diverging requests; vLLM's default retention of windows and states",
        replace(
            _GPU,
            groups=("full", "window:10", "mamba@8"),
            retention_interval=0,
            num_blocks=90,
            num_slots=160,
            max_seqs=12,
        ),
        _TOGETHER,
        copy_ticks_max=40,
        faults={CopyFault.STALL: 20, CopyFault.FAIL: 4},
        has_twin=True,
    ),
    "resets": Profile(
        "resets during running prompts with a shared prefix; stores wait for slots",
        EngineShape(
            num_blocks=100,
            num_slots=90,
            max_seqs=12,
            max_batched_tokens=64,
            extra={"max_inflight_bytes": 4096},
        ),
        Workload(
            num_requests=40,
            num_steps=30,
            num_stems=1,
            num_tails=40,
            stem_tokens=24,
            tail_tokens=60,
            output_tokens=4,
            num_aborts=4,
            num_resets=12,
        ),
    ),
    "failing": Profile(
        "copies fail, are rejected or stall, on three ranks",
        EngineShape(tensor_ranks=3, has_events=True),
        faults=COPY_FAULTS,
    ),
    "overdue": Profile(
        "copies miss the deadline, on vLLM's CPU engine",
        EngineShape(num_blocks=30, extra={"transfer_timeout_s": 2, "max_inflight_bytes": 12288}),
        copy_ticks_max=30,
        faults={CopyFault.STALL: 40, CopyFault.FAIL: 4},
    ),
    "flips": Profile(
        "bits flip in host memory, with verify",
        EngineShape(tensor_ranks=2, num_slots=40, extra={"verify": "load"}, has_events=True),
        faults={FaultKind.FLIP: 40},
    ),
    "loads-fail": Profile(
        "every load fails, in a small GPU pool",
        EngineShape(num_blocks=18, max_seqs=4, num_slots=100),
        Workload(num_requests=24, num_stems=2, stem_tokens=24, tail_tokens=4, output_tokens=36),
        copy_ticks_max=0,
        faults={FaultKind.LOADS_FAIL: 4},
    ),
    "all-faults": Profile(
        "all faults, on two ranks with hybrid groups",
        replace(_HYBRID, tensor_ranks=2, is_async=True, has_streams=True, extra=_STRICT),
        Workload(num_aborts=20, num_resets=6, num_reused_ids=8),
        copy_ticks_max=24,
        faults=ALL_FAULTS,
    ),
    "remote-first": Profile(
        "simulated NIXL comes first: prompts received and sent, on a GPU",
        EngineShape(
            groups=("full", "window:10"),
            num_blocks=70,
            num_slots=90,
            tensor_ranks=2,
            is_async=True,
            has_streams=True,
            has_events=True,
            remote="first",
            remote_failures=0.12,
        ),
        Workload(num_aborts=20, num_resets=4, num_reused_ids=8, output_tokens=30),
        copy_ticks_max=24,
    ),
    "remote-last": Profile(
        "simulated NIXL comes last; copies fail, are rejected or stall",
        EngineShape(
            num_blocks=50,
            num_slots=80,
            is_v2=True,
            has_streams=True,
            remote="last",
            remote_failures=0.1,
        ),
        Workload(num_aborts=20, num_resets=4, num_reused_ids=8, output_tokens=30),
        copy_ticks_max=24,
        faults={**COPY_FAULTS, FaultKind.REPORT_TWICE: 3, FaultKind.REPORT_LATE: 2},
        settles=True,
    ),
    "tenants": Profile(
        "four salts in an evicting host pool, with changing quotas",
        EngineShape(num_slots=48, num_blocks=30, has_events=True, extra={"tenants": TENANTS_FILE}),
        _SALTED,
        faults=_RETUNED,
    ),
    "tenants-lazy": Profile(
        "the same with lazy_offload, a window and preemptions on a GPU",
        replace(
            _HYBRID,
            num_blocks=40,
            is_async=True,
            has_streams=True,
            extra={"lazy_offload": True, "tenants": TENANTS_FILE, "eviction_policy": "lru"},
        ),
        replace(_SALTED, num_requests=32, output_tokens=40),
        copy_ticks_max=24,
        faults={**_RETUNED, **COPY_FAULTS},
    ),
    "tiers": Profile(
        "an evicting host pool, a tier without eviction: one engine after another",
        EngineShape(num_slots=60, num_blocks=26, has_events=True, extra=tier_settings()),
        Workload(num_requests=32, num_stems=8, num_steps=120),
        tiers=(TierOptions(),),
        num_lives=2,
    ),
    "twin-windows": Profile(
        "the GPU's own cache beside vLLM alone: windows and full attention",
        EngineShape(
            groups=("full", "window:10", "window:5"),
            num_blocks=200,
            num_slots=600,
            max_batched_tokens=16,
            retention_interval=0,
        ),
        _LONG_STEMS,
        has_twin=True,
    ),
    "twin-states": Profile(
        "the same with Mamba states and lazy_offload",
        EngineShape(
            groups=("full", "mamba", "window:10"),
            num_blocks=200,
            num_slots=600,
            max_batched_tokens=16,
            retention_interval=0,
            extra={"lazy_offload": True},
        ),
        _LONG_STEMS,
        has_twin=True,
    ),
    "tiers-tenants": Profile(
        "the same with four salts and changing quotas",
        EngineShape(
            num_slots=60, num_blocks=26, extra={**tier_settings(), "tenants": TENANTS_FILE}
        ),
        replace(_SALTED, num_requests=32, num_steps=120),
        faults={**_RETUNED, TierFault.LOSE: 8, TierFault.STALL: 6},
        tiers=(TierOptions(),),
        num_lives=2,
    ),
    "tiers-hybrid-lazy": Profile(
        "lazy_offload with a window, two ranks on a GPU, two tiers that evict",
        replace(
            _HYBRID,
            num_blocks=41,
            tensor_ranks=2,
            is_async=True,
            has_streams=True,
            extra={"lazy_offload": True, "verify": "load", **tier_settings(2)},
        ),
        Workload(num_requests=32, num_stems=6, num_steps=120),
        tiers=(TierOptions(ticks_max=6, num_objects_max=120), TierOptions(ticks_max=40)),
        num_lives=2,
    ),
    "tiers-faults": Profile(
        "tiers fail, lie, tear, stall and hang, with resets and aborts",
        EngineShape(
            num_blocks=26,
            num_slots=40,
            tensor_ranks=2,
            is_async=True,
            extra={**_STRICT, **tier_settings(wait_s=15)},
        ),
        Workload(num_requests=32, num_stems=6, num_aborts=20, num_resets=2, num_reused_ids=8),
        copy_ticks_max=24,
        faults={**TIER_FAULTS, **COPY_FAULTS, **PEER_FAULTS, **SQUEEZES},
        settles=True,
        tiers=(TierOptions(ticks_max=24),),
        num_lives=2,
    ),
    "tiers-shared": Profile(
        "two engines, one store that evicts between probe and fetch",
        EngineShape(
            num_slots=70,
            num_blocks=26,
            has_events=True,
            extra=tier_settings(wait_s=4 * WAIT_S, timeout_s=60),
        ),
        Workload(num_requests=40, num_stems=10, num_steps=90, output_tokens=12, num_resets=1),
        tiers=(TierOptions(ticks_max=24, num_objects_max=160, latency_ticks=10),),
        num_engines=2,
    ),
    "tiers-far": Profile(
        "two engines, each with a near tier and a far one with latency and lost connections",
        EngineShape(
            num_blocks=32,
            num_slots=90,
            tensor_ranks=2,
            is_async=True,
            extra={
                "verify": "load",
                "transfer_timeout_s": 30,
                **tier_settings(2, kept=(0,), wait_s=4 * WAIT_S, timeout_s=60),
            },
        ),
        Workload(
            num_requests=28,
            num_stems=10,
            num_steps=90,
            stem_tokens=90,
            output_tokens=8,
            num_resets=1,
            num_reused_ids=8,
        ),
        copy_ticks_max=24,
        faults={
            **NETWORK_FAULTS,
            **PEER_FAULTS,
            **SQUEEZES,
            **{kind: 5 * most for kind, most in COPY_FAULTS.items()},  # as there are few copies
        },
        settles=True,
        tiers=(
            TierOptions(ticks_max=12, num_objects_max=80, latency_ticks=10, is_local=True),
            TierOptions(ticks_max=24, latency_ticks=30),
        ),
        num_lives=2,
        num_engines=2,
    ),
    "pins": Profile(
        "pins, hints and no-store requests; a tier that stores hits only",
        EngineShape(
            num_slots=60,
            num_blocks=26,
            has_events=True,
            extra={"pin_share": 0.4, "kv_hints": True, **tier_settings(store="hit")},
        ),
        Workload(num_requests=28, num_stems=6, num_steps=60, num_resets=2, has_wishes=True),
        tiers=(TierOptions(),),
        num_lives=2,
    ),
    "node": Profile(
        "three engines share one host pool, and are killed at any step",
        EngineShape(num_slots=80, num_blocks=26, extra={"share": "node"}),
        Workload(num_requests=60, num_stems=8, num_steps=60, output_tokens=8, num_resets=0),
        faults={FaultKind.DIE: 6},
        num_engines=3,
    ),
    "node-hybrid": Profile(
        "the same with a window, two ranks on a GPU, resets, copies that fail, and verify",
        replace(
            _HYBRID,
            has_events=False,
            num_slots=120,
            num_blocks=40,
            tensor_ranks=2,
            is_async=True,
            has_streams=True,
            extra={"share": "node", "verify": "load", "eviction_policy": "lru"},
        ),
        Workload(num_requests=50, num_stems=6, num_steps=60, output_tokens=8, num_resets=1),
        copy_ticks_max=24,
        faults={FaultKind.DIE: 6, **COPY_FAULTS},
        has_few_copies=True,
        num_engines=3,
    ),
    "node-tiers": Profile(
        "three engines with one host pool and one store, and each is killed at any step",
        EngineShape(
            num_slots=80,
            num_blocks=26,
            has_events=True,
            extra={"share": "node", **tier_settings(wait_s=4 * WAIT_S, timeout_s=60)},
        ),
        Workload(num_requests=60, num_stems=10, num_steps=90, output_tokens=8, num_resets=1),
        faults={FaultKind.DIE: 6},
        tiers=(TierOptions(ticks_max=24, num_objects_max=160, latency_ticks=10),),
        num_engines=3,
    ),
    "node-pins": Profile(
        "three engines with one host pool; pins, hints and no-store requests",
        EngineShape(
            num_slots=80,
            num_blocks=26,
            has_events=True,
            extra={"share": "node", "pin_share": 0.3, "kv_hints": True},
        ),
        Workload(num_requests=60, num_stems=6, num_steps=60, num_resets=1, has_wishes=True),
        faults={FaultKind.DIE: 4},
        num_engines=3,
    ),
    "pins-lazy": Profile(
        "the same with lazy_offload, a window, two ranks on a GPU, copies that fail",
        replace(
            _HYBRID,
            num_blocks=41,
            tensor_ranks=2,
            is_async=True,
            has_streams=True,
            extra={"pin_share": 0.5, "kv_hints": True, "lazy_offload": True},
        ),
        Workload(num_requests=28, num_stems=6, num_steps=90, num_resets=2, has_wishes=True),
        faults={**COPY_FAULTS, **PEER_FAULTS, **SQUEEZES},
    ),
}
