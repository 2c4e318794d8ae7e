"""Kinds of runs: an engine, a workload for it, and what may go wrong. See docs/simulator.md."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.simulator.device import CopyFault
from tests.simulator.events import FaultKind
from tests.simulator.vllm_setup import EngineShape

FaultCounts = dict[FaultKind | CopyFault, int]

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
    """What clients do.

    Attributes:
        num_requests: in a run.
        num_steps: over which they are sent.
        num_stems: prefixes that they share.
        num_tails: different ends of prompts.
        stem_tokens: longest prefix.
        tail_tokens: longest tail of a prompt.
        whole_blocks: fraction of prompts that end with a block.
        output_tokens: most tokens that one asks for.
        num_aborts: most clients that go.
        num_resets: most resets.
        num_reused_ids: most request ids that are used again.
        num_salts: cache salts; 1 for none.
    """

    num_requests: int = 48
    num_steps: int = 180
    num_stems: int = 4
    num_tails: int = 6
    stem_tokens: int = 60
    tail_tokens: int = 12
    whole_blocks: float = 0.25
    output_tokens: int = 24
    num_aborts: int = 10
    num_resets: int = 3
    num_reused_ids: int = 4
    num_salts: int = 1


@dataclass(frozen=True)
class Profile:
    """A kind of run.

    Attributes:
        about: one line for the documentation.
        copy_ticks_max: how late copies may end; a step is about six ticks.
        faults: most faults of each kind in one run.
        settles: faults and aborts end with the last request, and all must settle within a bound.
    """

    about: str
    shape: EngineShape = field(default_factory=EngineShape)
    workload: Workload = field(default_factory=Workload)
    copy_ticks_max: int = 12
    faults: FaultCounts = field(default_factory=dict)
    settles: bool = False


_HYBRID = EngineShape(groups=("window:10", "full"), num_blocks=60, num_slots=90)
_STRICT = {"verify": "load", "transfer_timeout_s": 10}
_GPU = EngineShape(has_streams=True, is_v2=True, is_async=True)
_LARGE = EngineShape(groups=("full@16", "mamba@16"), prefix_match_unit=4, has_streams=True)
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

PROFILES: dict[str, Profile] = {
    "plain": Profile("one rank, full attention, no faults, copies in time", copy_ticks_max=0),
    "late-copies": Profile("copies that end many steps after their issue", copy_ticks_max=40),
    "async": Profile("asynchronous scheduling: two steps in flight", EngineShape(is_async=True)),
    "streams": Profile(
        "a GPU: the forward runs behind the hooks, on a compute stream",
        EngineShape(has_streams=True),
    ),
    "gpu": Profile("a GPU with asynchronous scheduling and Model Runner V2", _GPU),
    "zeroed": Profile(
        "groups of two precisions, whose new blocks vLLM zeroes",
        EngineShape(groups=("full", "full"), is_zeroed=True, num_blocks=60, has_streams=True),
    ),
    "zeroed-early": Profile(
        "the same with Model Runner V2, which zeroes ahead of the connector's hooks",
        replace(_GPU, groups=("full", "full"), is_zeroed=True, num_blocks=60),
    ),
    "hybrid": Profile("sliding window, not a multiple of the block, and full attention", _HYBRID),
    "hybrid-gpu": Profile(
        "two windows and full attention on a GPU",
        replace(_GPU, groups=("full", "window:10", "window:5"), num_blocks=80, num_slots=120),
    ),
    "sparse-windows": Profile(
        "windows that vLLM hashes at the end of a prompt only, its default; preemptions",
        replace(_HYBRID, retention_interval=0, num_blocks=44, has_streams=True, is_async=True),
        Workload(num_requests=32, output_tokens=40),
    ),
    "sparse-windows-lazy": Profile(
        "the same with lazy_offload",
        replace(
            _HYBRID, retention_interval=0, num_blocks=44, extra={"lazy_offload": True}, max_seqs=5
        ),
        Workload(num_requests=32, output_tokens=40),
    ),
    "chunked": Profile(
        "chunked local and full attention",
        EngineShape(groups=("chunk:16", "full"), num_blocks=60, num_slots=90),
    ),
    "mla": Profile("MLA", EngineShape(groups=("mla",), has_streams=True)),
    "mla-shared": Profile(
        "MLA on three ranks that keep one copy and store a share of it each",
        EngineShape(
            groups=("mla",), tensor_ranks=3, is_replicated=True, has_streams=True, is_async=True
        ),
        faults=PEER_FAULTS,
    ),
    "mla-shared-failing": Profile(
        "the same in two stages of two ranks, with copies that fail, bits that flip, verify on",
        EngineShape(
            groups=("mla",),
            tensor_ranks=2,
            pipeline_ranks=2,
            is_replicated=True,
            num_slots=40,
            extra={"verify": "load"},
        ),
        Workload(num_requests=32),
        faults={**COPY_FAULTS, FaultKind.FLIP: 20},
    ),
    "block-sizes": Profile(
        "groups with different block sizes",
        EngineShape(groups=("full", "window:12@8"), num_blocks=60, num_slots=90),
    ),
    "mamba": Profile(
        "Mamba states and full attention",
        EngineShape(groups=("full", "mamba"), num_blocks=60, num_slots=90),
    ),
    "mamba-gpu": Profile(
        "Mamba with larger blocks on a GPU: partial hits, copy-on-write",
        replace(_GPU, groups=("full", "mamba@8"), num_blocks=60, num_slots=90),
    ),
    "mamba-v2": Profile(
        "Mamba with Model Runner V2, which moves states ahead of the connector's hooks",
        replace(_GPU, groups=("full", "mamba"), num_blocks=60, num_slots=90, is_async=False),
    ),
    "mamba-large": Profile(
        "Mamba and full attention in large blocks on a GPU: hits inside both kinds of blocks",
        replace(_LARGE, is_v2=True, is_async=True, num_blocks=40),
    ),
    "mamba-large-lazy": Profile(
        "the same with lazy_offload and Model Runner V1, a small GPU pool: preemptions",
        replace(_LARGE, num_blocks=22, extra={"lazy_offload": True}),
    ),
    "drafts": Profile(
        "speculative decoding: rejected tokens, deferred finalize",
        EngineShape(num_draft_tokens=2),
    ),
    "drafts-gpu": Profile(
        "speculative decoding, asynchronous, on a GPU",
        EngineShape(num_draft_tokens=3, is_async=True, has_streams=True),
    ),
    "tensor-parallel": Profile(
        "two ranks that copy at their own pace",
        EngineShape(tensor_ranks=2, has_streams=True),
        faults=PEER_FAULTS,
    ),
    "pipeline": Profile(
        "two pipeline stages of two ranks, two steps in flight",
        EngineShape(tensor_ranks=2, pipeline_ranks=2, has_streams=True),
        Workload(num_requests=32),
        faults=PEER_FAULTS,
    ),
    "four-stages": Profile(
        "four pipeline stages, four steps in flight",
        EngineShape(pipeline_ranks=4, num_blocks=60),
        Workload(num_requests=32),
        faults=PEER_FAULTS,
    ),
    "pipeline-drafts": Profile(
        "pipeline stages with speculative decoding: the first starts its stores a step later",
        EngineShape(pipeline_ranks=2, num_draft_tokens=2, num_blocks=30, has_streams=True),
        Workload(num_requests=32),
        copy_ticks_max=24,
    ),
    "pipeline-drafts-failing": Profile(
        "three such stages on vLLM's CPU engine, copies that fail, are refused, stand still",
        EngineShape(pipeline_ranks=3, num_draft_tokens=2),
        Workload(num_requests=32),
        faults=COPY_FAULTS,
    ),
    "priority": Profile(
        "scheduling by priority, a small pool: many preemptions",
        EngineShape(is_priority=True, num_blocks=26),
    ),
    "preemption": Profile(
        "long answers in a small pool: preemption storms",
        EngineShape(num_blocks=24, has_streams=True, is_async=True),
        Workload(num_requests=32, stem_tokens=24, output_tokens=40),
        copy_ticks_max=24,
    ),
    "back-to-back": Profile(
        "long prompts one after the other, each most of the pool",
        EngineShape(num_blocks=40, num_slots=120, max_batched_tokens=64, has_streams=True),
        Workload(num_requests=24, stem_tokens=110, tail_tokens=30, num_stems=3, output_tokens=4),
        copy_ticks_max=60,
    ),
    "tiny-host": Profile(
        "a host pool smaller than a prompt",
        EngineShape(num_slots=9),
        faults=SQUEEZES,
    ),
    "host-pressure": Profile(
        "a host pool that must evict all the time, a GPU pool that makes matched requests wait",
        EngineShape(num_slots=26, num_blocks=26),
        Workload(num_stems=8),
        faults=SQUEEZES,
    ),
    "uneven": Profile(
        "ranks with different amounts of host memory",
        EngineShape(tensor_ranks=2, num_slots=30, num_missing_slots=6),
    ),
    "warming": Profile(
        "host memory that is made ready slot by slot, ranks with different amounts of it",
        EngineShape(tensor_ranks=2, num_slots=40, num_missing_slots=6, ticks_per_slot=5),
    ),
    "foreign-ids": Profile(
        "many ids where they do not belong, few requests",
        _FEW_BLOCKS,
        _FEW_REQUESTS,
        copy_ticks_max=40,
        faults=_MANY_IDS,
    ),
    "foreign-ids-queue": Profile(
        "the same with two seats: requests wait on when their load has landed",
        replace(_FEW_BLOCKS, max_seqs=2),
        _FEW_REQUESTS,
        copy_ticks_max=40,
        faults=_MANY_IDS,
    ),
    "repeats": Profile(
        "one prompt again and again, in a pool that it fills, zeroed before it is written",
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
        "a window and full attention, both pools small: preemptions without a free slot",
        replace(_HYBRID, num_blocks=36, num_slots=24),
        Workload(output_tokens=40),
    ),
    "tight-flight": Profile(
        "few bytes in flight: transfers wait for their turn",
        EngineShape(extra={"max_inflight_bytes": 6144}, has_streams=True),
        copy_ticks_max=30,
    ),
    "lazy": Profile("lazy_offload", EngineShape(extra={"lazy_offload": True}, has_streams=True)),
    "lazy-pressure": Profile(
        "lazy_offload with a window and full attention, a small GPU pool: preemptions",
        replace(_HYBRID, num_blocks=36, extra={"lazy_offload": True}, has_streams=True),
        Workload(num_requests=32, num_stems=2, num_tails=2, output_tokens=40),
        copy_ticks_max=24,
    ),
    "lazy-priority": Profile(
        "lazy_offload, scheduling by priority: preempted in the step that was to fill a block",
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
    "aborts": Profile(
        "clients that go at every moment",
        EngineShape(num_blocks=30, is_async=True),
        Workload(num_requests=60, num_aborts=48, num_reused_ids=16),
        copy_ticks_max=20,
        faults=PEER_FAULTS,
    ),
    "resets": Profile(
        "resets of both caches, with running requests and without",
        EngineShape(is_async=True, has_streams=True),
        Workload(num_resets=12),
        copy_ticks_max=20,
    ),
    "shared": Profile(
        "many requests at once with one prefix, two ranks: they wait for one load",
        EngineShape(tensor_ranks=2, num_blocks=36, is_async=True, max_seqs=12),
        _TOGETHER,
        copy_ticks_max=40,
        faults={**PEER_FAULTS, CopyFault.FAIL: 2},
    ),
    "shared-stalls": Profile(
        "the same with a window and full attention, and copies that stand still",
        replace(_HYBRID, has_streams=True, max_seqs=12),
        _TOGETHER,
        copy_ticks_max=40,
        faults={CopyFault.STALL: 60},
    ),
    "costs": Profile(
        "the same, and hits are offered only if loading is expected to be faster",
        EngineShape(has_streams=True, extra={"min_load_tokens": "auto"}),
        _TOGETHER,
        copy_ticks_max=10,
    ),
    "salts": Profile("cache salts: equal tokens, different keys", workload=Workload(num_salts=3)),
    "failing": Profile(
        "copies that fail, are refused, stand still, on three ranks",
        EngineShape(tensor_ranks=3),
        faults=COPY_FAULTS,
    ),
    "dying": Profile(
        "an event loop that dies",
        EngineShape(tensor_ranks=2, has_streams=True),
        faults=DEATHS,
    ),
    "overdue": Profile(
        "copies that stand still for longer than the deadline, on vLLM's CPU engine",
        EngineShape(num_blocks=30, extra={"transfer_timeout_s": 2, "max_inflight_bytes": 12288}),
        copy_ticks_max=30,
        faults={CopyFault.STALL: 40, CopyFault.FAIL: 4},
    ),
    "overdue-gpu": Profile(
        "copies that stand still for longer than the deadline, on a GPU",
        replace(_GPU, tensor_ranks=2, num_blocks=30, extra={"transfer_timeout_s": 2}),
        copy_ticks_max=30,
        faults={CopyFault.STALL: 40, CopyFault.FAIL: 4},
    ),
    "flips": Profile(
        "bits that flip in host memory, with verify on",
        EngineShape(tensor_ranks=2, num_slots=40, extra={"verify": "load"}),
        faults={FaultKind.FLIP: 40},
    ),
    "loads-fail": Profile(
        "every load fails, in a pool so small that requests are preempted again and again",
        EngineShape(num_blocks=18, max_seqs=4, num_slots=100),
        Workload(num_requests=24, num_stems=2, stem_tokens=24, tail_tokens=4, output_tokens=36),
        copy_ticks_max=0,
        faults={FaultKind.LOADS_FAIL: 4},
    ),
    "broken": Profile(
        "a device of which every call raises",
        EngineShape(tensor_ranks=2, has_streams=True),
        faults={FaultKind.BREAK: 2, CopyFault.FAIL: 4},
    ),
    "all-faults": Profile(
        "everything goes wrong on two ranks with hybrid groups",
        replace(_HYBRID, tensor_ranks=2, is_async=True, has_streams=True, extra=_STRICT),
        Workload(num_aborts=20, num_resets=6, num_reused_ids=8),
        copy_ticks_max=24,
        faults=ALL_FAULTS,
    ),
    "all-faults-plain": Profile(
        "everything goes wrong on vLLM's CPU engine",
        EngineShape(num_blocks=30, extra=_STRICT),
        Workload(num_aborts=20, num_resets=6, num_reused_ids=8),
        faults=ALL_FAULTS,
    ),
}
