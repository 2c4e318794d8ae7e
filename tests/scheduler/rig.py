"""vLLM's real Scheduler and our scheduler side, over memory whose every word is checked.

The model runner and the copies are stand-ins. Each word of GPU memory says which token of which
prefix it belongs to; the forward checks every word that its attention reads and writes its own.
Copies move block by block, at moments that the seed chooses between their issue and their end, so
that a missing fence becomes a torn copy. The tokens that a prompt leads to are a function of the
prompt, so that a wrong one shows.
"""

from __future__ import annotations

import copy
import functools
import random
import tempfile
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from safe_offload.bench.tiny_models import write_tiny_model
from safe_offload.plugin import register
from safe_offload.protocol import Capacity, FailureReason, Outcome, StepPlan, StepReport, Transfer

BLOCK = 4
"""Tokens of a block."""
VOCABULARY = 50


@functools.cache
def _base_config() -> VllmConfig:
    register()
    folder = write_tiny_model("llama", Path(tempfile.mkdtemp(prefix="safe-offload-rig-")))
    args = EngineArgs(
        model=str(folder),
        max_model_len=2048,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "SafeCPUOffloadConnector",
            "kv_load_failure_policy": "recompute",
        },
    )
    return args.create_engine_config()


def _spec(kind: str, *, half_precision: bool = False) -> Any:
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    if half_precision:
        shape |= {"head_size": 16, "dtype": torch.float16}
    if kind == "full":
        return FullAttentionSpec(**shape)
    name, size = kind.split(":")
    if name == "window":
        return SlidingWindowSpec(**shape, sliding_window=int(size))
    return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=int(size))


@dataclass
class Options:
    """What a rig is made of; `groups` holds "full", "window:<tokens>" or "chunk:<tokens>"."""

    groups: tuple[str, ...] = ("full",)
    num_blocks: int = 40
    num_slots: int = 60
    num_ranks: int = 1
    is_async: bool = False
    max_batched_tokens: int = 24
    max_seqs: int = 6
    seed: int = 0
    copy_steps: int = 0
    """Steps that a copy may take beyond the one it is issued in, unless it is fenced."""
    failure_rate: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
    ignore_fences: bool = False
    zeroes_early: bool = False
    """Zero new blocks ahead of all hooks, as Model Runner V2 does, where vLLM asks for zeroing."""


@dataclass(eq=False)
class Running:
    """A copy on one rank."""

    transfer: Transfer
    is_store: bool
    ticks_left: int
    pending: list[int]
    failure: FailureReason | None = None


class Oracle:
    """What a prompt leads to: its tokens, and the word of each position."""

    def __init__(self, prompt: list[int]) -> None:
        self.tokens = list(prompt)
        self._chain: list[int] = []

    def word(self, position: int) -> int:
        """Names the prefix that ends at a position."""
        while len(self._chain) <= position:
            at = len(self._chain)
            before = self._chain[-1] if self._chain else 17
            self._chain.append((before * 1_000_003 + self.token(at) + 1) % (1 << 61))
        return self._chain[position]

    def token(self, position: int) -> int:
        """The token at a position, sampled from the prefix before it where the prompt has ended."""
        while len(self.tokens) <= position:
            self.tokens.append(self.word(len(self.tokens) - 1) % VOCABULARY)
        return self.tokens[position]


class Rank:
    """One worker: memory, and the copies that it has been told to make."""

    def __init__(self, rank: int, options: Options, rng: random.Random) -> None:
        self.rank = rank
        self.options = options
        self.rng = rng
        self.gpu: list[list[Any]] = [[None] * BLOCK for _ in range(options.num_blocks)]
        self.host: list[list[Any]] = [[None] * BLOCK for _ in range(options.num_slots)]
        self.running: dict[int, Running] = {}
        self.outcomes: list[Outcome] = []
        self.capacities = [Capacity(rank, options.num_slots)]
        self.hold_copies = False

    def issue(self, transfer: Transfer, is_store: bool) -> None:
        """Queue a copy."""
        ticks = self.rng.randint(0, 3 * self.options.copy_steps)
        pending = list(range(len(transfer.block_ids)))
        self.rng.shuffle(pending)
        failure = None
        if self.rng.random() < self.options.failure_rate:
            failure = FailureReason.COPY_FAILED
        self.running[transfer.transfer_id] = Running(transfer, is_store, ticks, pending, failure)

    def fence(self, transfer_ids: tuple[int, ...]) -> None:
        """Finish the reads of these copies now."""
        for transfer_id in transfer_ids:
            if transfer_id in self.running and not self.options.ignore_fences:
                self._move(self.running[transfer_id], everything=True)

    def tick(self) -> None:
        """Time passes: some blocks of every copy are moved."""
        for running in list(self.running.values()):
            if self.hold_copies:
                continue
            running.ticks_left -= 1
            self._move(running, everything=running.ticks_left < 0)
            if not running.pending and running.ticks_left < 0:
                del self.running[running.transfer.transfer_id]
                self.outcomes.append(
                    Outcome(self.rank, running.transfer.transfer_id, running.failure)
                )

    def _move(self, running: Running, *, everything: bool) -> None:
        count = len(running.pending) if everything else self.rng.randint(0, len(running.pending))
        for index in running.pending[:count]:
            block = self.gpu[running.transfer.block_ids[index]]
            slot = self.host[running.transfer.slot_ids[index]]
            source, target = (block, slot) if running.is_store else (slot, block)
            target[:] = source
        del running.pending[:count]

    def report(self) -> StepReport | None:
        """What settled since the last call."""
        if not (self.outcomes or self.capacities):
            return None
        report = StepReport(tuple(self.outcomes), tuple(self.capacities))
        self.outcomes, self.capacities = [], []
        return report


class Rig:
    """Schedules, runs and checks; see the module's docstring."""

    def __init__(self, options: Options | None = None, **changes: Any) -> None:
        self.options = options or Options(**changes)
        self.rng = random.Random(self.options.seed)
        self.oracles: dict[str, Oracle] = {}
        self.finished: dict[str, list[int]] = {}
        self.counts: Counter[str] = Counter()
        self.mutate_output: list[Any] = []
        self.plans: list[StepPlan] = []
        self.ranks = [Rank(rank, self.options, self.rng) for rank in range(self.options.num_ranks)]
        self._make_scheduler()
        self.aggregator = KVOutputAggregator(self.options.num_ranks)
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()

    def _make_scheduler(self) -> None:
        options = self.options
        config = copy.deepcopy(_base_config())
        config.cache_config.block_size = BLOCK
        config.cache_config.num_gpu_blocks = options.num_blocks
        config.scheduler_config.max_num_batched_tokens = options.max_batched_tokens
        config.scheduler_config.max_num_scheduled_tokens = None
        config.scheduler_config.max_num_seqs = options.max_seqs
        config.scheduler_config.async_scheduling = options.is_async
        config.parallel_config.world_size = options.num_ranks
        config.kv_transfer_config.kv_connector_extra_config = {
            "num_cpu_blocks": options.num_slots,
            "check_invariants": True,
            **options.extra,
        }
        groups = [
            KVCacheGroupSpec(
                [f"layer.{index}"],
                # vLLM zeroes new blocks where groups differ in precision.
                _spec(kind, half_precision=options.zeroes_early and index == 1),
            )
            for index, kind in enumerate(options.groups)
        ]
        page = groups[0].kv_cache_spec.page_size_bytes
        size = page * options.num_blocks
        kv_cache_config = KVCacheConfig(
            num_blocks=options.num_blocks,
            kv_cache_tensors=[
                KVCacheTensor(size=size, layers=g.layer_names, layer_stride=size, block_stride=page)
                for g in groups
            ],
            kv_cache_groups=groups,
        )
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
        scheduler_class = AsyncScheduler if options.is_async else Scheduler
        is_v2 = property(lambda _: options.zeroes_early)
        with mock.patch.object(VllmConfig, "use_v2_model_runner", is_v2):
            self.scheduler = scheduler_class(
                vllm_config=config,
                kv_cache_config=kv_cache_config,
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_size,
                hash_block_size=hash_block_size,
                log_stats=True,
            )
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(hash_block_size, hash_fn)

    # ---- what a test does ----------------------------------------------------------------------

    @property
    def connector(self) -> Any:
        """Our connector, scheduler side."""
        return self.scheduler.connector

    @property
    def planner(self) -> Any:
        """Its planner."""
        return self.connector._planner

    @property
    def pool(self) -> Any:
        """vLLM's GPU block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def prompt(self, num_tokens: int, seed: int) -> list[int]:
        """A random prompt that is its own for each seed."""
        rng = random.Random(seed)
        return [rng.randrange(VOCABULARY) for _ in range(num_tokens)]

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 4) -> Request:
        """Send a request."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(request_id, prompt, params, None, block_hasher=self._hasher)
        self.oracles[request_id] = Oracle(prompt)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """The client has gone."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> StepPlan:
        """One step of the engine; with asynchronous scheduling, output comes a step later."""
        scheduled = self.scheduler.schedule()
        plan = scheduled.kv_connector_metadata
        self.plans.append(plan)
        self._in_flight.append((scheduled, self._execute(scheduled, plan)))
        while len(self._in_flight) > (1 if self.options.is_async else 0):
            self._update()
        return plan

    def _update(self) -> None:
        scheduled, output = self._in_flight.popleft()
        for engine_outputs in self.scheduler.update_from_output(scheduled, output).values():
            stats = engine_outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self.counts.update(stats.kv_connector_stats["counts"])
            for item in engine_outputs.outputs:
                self.finished.setdefault(item.request_id, []).extend(item.new_token_ids)

    def drain(self, max_steps: int = 2000) -> int:
        """Step until the engine would go idle; returns the number of steps."""
        for count in range(max_steps):
            if not self.scheduler.has_requests() and not self._in_flight:
                return count
            if self.scheduler.has_requests():
                self.step()
            else:
                self._update()
        raise AssertionError(f"not idle after {max_steps} steps")

    def run_alone(self, request_id: str, prompt: list[int], max_tokens: int = 4) -> int:
        """Send a request and wait for it; returns how many tokens came from the host."""
        before = self.counts["hit_tokens"]
        self.add(request_id, prompt, max_tokens)
        self.drain()
        self.check_tokens(request_id, len(prompt), max_tokens)
        return self.counts["hit_tokens"] - before

    def check_tokens(self, request_id: str, num_prompt: int, max_tokens: int) -> None:
        """The answer is what the prompt leads to."""
        oracle = self.oracles[request_id]
        expected = [oracle.token(num_prompt + i) for i in range(max_tokens)]
        assert self.finished[request_id] == expected, request_id

    def check_idle(self) -> None:
        """No block, slot, lease or request is left."""
        assert self.pool.get_num_free_blocks() == self.options.num_blocks - 1
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        assert not self.scheduler.requests
        gauges = self.planner.gauges()
        assert gauges["leased_slots"] == 0, gauges
        assert gauges["stores_in_flight"] == gauges["loads_in_flight"] == 0, gauges
        assert not self.planner.has_work
        assert len(self.planner._leases) == 0

    # ---- the stand-in for the workers ----------------------------------------------------------

    def _execute(self, scheduled: Any, plan: StepPlan) -> ModelRunnerOutput:
        req_ids = list(scheduled.num_scheduled_tokens)
        sampled = []
        connector_outputs = []
        for rank in self.ranks:
            for block_id in scheduled.new_block_ids_to_zero or ():
                rank.gpu[block_id] = [0] * BLOCK
            for transfer in plan.stores_before_forward:
                rank.issue(transfer, True)
            rank.fence(plan.fences)
            rank.tick()
            sampled = [self._forward(rank, scheduled, request_id) for request_id in req_ids]
            for transfer in plan.loads:
                rank.issue(transfer, False)
            rank.tick()
            for transfer in plan.stores_after_forward:
                rank.issue(transfer, True)
            rank.tick()
            connector_outputs.append(
                KVConnectorOutput(
                    finished_sending=set(),
                    finished_recving=set(plan.failures),
                    failed_recving=set(plan.failures),
                    kv_connector_worker_meta=rank.report(),
                )
            )
        for mutate in self.mutate_output:
            mutate(connector_outputs)
        outputs = [
            ModelRunnerOutput(
                req_ids=req_ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(req_ids)},
                sampled_token_ids=sampled,
                kv_connector_output=connector_output,
            )
            for connector_output in connector_outputs
        ]
        output = self.aggregator.aggregate(outputs)
        assert output is not None
        return output

    def _forward(self, rank: Rank, scheduled: Any, request_id: str) -> list[int]:
        """Check what attention reads, write what the step computes, sample."""
        request = self.scheduler.requests[request_id]
        oracle = self.oracles[request_id]
        count = scheduled.num_scheduled_tokens[request_id]
        start = request.num_computed_tokens - count
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        for group_idx, kind in enumerate(self.options.groups):
            table = managers[group_idx].req_to_blocks[request_id]
            for position in range(self._first_attended(kind, start), start):
                block = table[position // BLOCK]
                assert not block.is_null
                found = rank.gpu[block.block_id][position % BLOCK]
                expected = (group_idx, oracle.word(position))
                assert found == expected, (
                    f"seed {self.options.seed}: rank {rank.rank} request {request_id} group "
                    f"{group_idx} position {position} of {start}: read {found}, not {expected}"
                )
            for position in range(start, start + count):
                block = table[position // BLOCK]
                if not block.is_null:
                    word = (group_idx, oracle.word(position))
                    rank.gpu[block.block_id][position % BLOCK] = word
        end = start + count
        return [] if request.is_prefill_chunk else [oracle.token(end)]

    @staticmethod
    def _first_attended(kind: str, start: int) -> int:
        if kind == "full":
            return 0
        name, size = kind.split(":")
        if name == "window":
            return max(0, start - int(size) + 1)
        return start // int(size) * int(size)
