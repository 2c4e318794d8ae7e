"""vLLM's scheduler, stepped with as little around it as possible.

There is no model: a token is a function of its request and position, so an answer can be part of
the next prompt and is the same with every connector. There are no workers either (see `peers`). One
step is in flight at a time.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from safe_offload.errors import SafeOffloadError
from tests.benchmarks import peers
from tests.benchmarks.scheduler_probe import Probe, wrap_hooks
from tests.benchmarks.scheduler_traces import (
    MAX_BATCHED_TOKENS,
    MAX_MODEL_LEN,
    VOCABULARY,
    Trace,
    User,
)

STEPS_MAX = 20_000
"""A trace that has not ended then never will."""
_TOKEN_STRIDE = 7919


@dataclass(frozen=True, slots=True)
class Contestant:
    """A connector and how it is set up."""

    connector: str
    extra: dict[str, Any] = field(default_factory=dict)


CONTESTANTS = {
    "none": Contestant(peers.NONE),
    "simple-eager": Contestant(peers.SIMPLE),
    "simple-lazy": Contestant(peers.SIMPLE, {"lazy_offload": True}),
    "offloading": Contestant(peers.OFFLOADING),
    "ours-eager": Contestant(peers.OURS),
    "ours-lazy": Contestant(peers.OURS, {"lazy_offload": True}),
}
"""What is compared, by the name on the command line."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large an engine is; see `EngineShape`."""

    groups: tuple[str, ...]
    num_blocks: int
    num_slots: int
    max_seqs: int = 8
    max_batched_tokens: int = MAX_BATCHED_TOKENS


class LightEngine:
    """vLLM's scheduler with one of the connectors. Enter it before it is used.

    Args:
        name: one of `CONTESTANTS`.
        sizes: of the engine.
        copy_steps: how many steps after the plan that names it a transfer is reported.

    Attributes:
        scheduler_ns: time inside vLLM's scheduler: add_request, has_requests, schedule,
            update_from_output.
        num_steps: so far.
        num_prompt_tokens: of all requests.
        num_computed: tokens that were scheduled.
        num_preemptions: so far.
        answers: tokens by request id, of those that are not finished too.
        last_plan: what the connector told the workers in the last step.
    """

    def __init__(self, name: str, sizes: Sizes, copy_steps: int) -> None:
        contestant = CONTESTANTS[name]
        self._shape = peers.peer_shape(
            contestant.connector,
            groups=sizes.groups,
            num_blocks=sizes.num_blocks,
            num_slots=sizes.num_slots,
            max_seqs=sizes.max_seqs,
            max_batched_tokens=sizes.max_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            extra=dict(contestant.extra),
        )
        self.worker = peers.make_worker(self._shape, copy_steps)
        self._running = contextlib.ExitStack()
        self.scheduler_ns = 0
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_computed = 0
        self.num_preemptions = 0
        self.answers: dict[str, list[int]] = {}
        self.last_plan: Any = None
        self._seeds: dict[str, int] = {}

    def __enter__(self) -> LightEngine:
        self._running.enter_context(peers.as_peer_runner(self._shape))
        self.scheduler, self._hasher = peers.make_peer_scheduler(self._shape)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    @property
    def connector(self) -> Any:
        """Return the scheduler side of the connector; None if there is none."""
        return self.scheduler.connector

    @property
    def has_work(self) -> bool:
        """Whether the engine would go on stepping."""
        start_ns = time.perf_counter_ns()
        has_requests = bool(self.scheduler.has_requests())
        self.scheduler_ns += time.perf_counter_ns() - start_ns
        return has_requests

    def add(self, request_id: str, prompt: Sequence[int], num_answer_tokens: int) -> Any:
        """Send a request; return vLLM's object. Hashing the prompt is not the scheduler's time."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=num_answer_tokens, ignore_eos=True)
        request = Request(request_id, list(prompt), params, None, block_hasher=self._hasher)
        self._seeds[request_id] = zlib.crc32(request_id.encode())
        self.answers[request_id] = []
        self.num_prompt_tokens += len(prompt)
        start_ns = time.perf_counter_ns()
        self.scheduler.add_request(request)
        self.scheduler_ns += time.perf_counter_ns() - start_ns
        return request

    def step(self) -> list[str]:
        """Run one step; return the ids of the requests that finished in it."""
        start_ns = time.perf_counter_ns()
        scheduled = self.scheduler.schedule()
        scheduled_ns = time.perf_counter_ns()
        output = self._run(scheduled)
        ran_ns = time.perf_counter_ns()
        by_client = self.scheduler.update_from_output(scheduled, output)
        self.scheduler_ns += time.perf_counter_ns() - ran_ns + scheduled_ns - start_ns
        self.num_steps += 1
        self.num_computed += scheduled.total_num_scheduled_tokens
        self.num_preemptions += len(scheduled.preempted_req_ids or ())
        finished = []
        for outputs in by_client.values():
            for item in outputs.outputs:
                self.answers[item.request_id] += item.new_token_ids
                if item.finish_reason is not None:
                    finished.append(item.request_id)
        return finished

    def _run(self, scheduled: Any) -> Any:
        """Return what the workers would: tokens, and what the connector's side of them reports."""
        from vllm.v1.outputs import KVConnectorOutput

        names = list(scheduled.num_scheduled_tokens)
        requests, seeds = self.scheduler.requests, self._seeds
        sampled: list[list[int]] = []
        for name in names:
            request = requests[name]
            is_token = not request.is_prefill_chunk
            place = request.num_tokens * _TOKEN_STRIDE
            sampled.append([(seeds[name] + place) % VOCABULARY] if is_token else [])
        self.last_plan = scheduled.kv_connector_metadata
        received, report = self.worker.step(self.last_plan)
        told = KVConnectorOutput(
            finished_recving=received, finished_sending=set(), kv_connector_worker_meta=report
        )
        return peers.runner_output(names, sampled, told)

    def drain(self) -> None:
        """Step until the engine would go idle."""
        while self.has_work:
            self.step()

    def num_kept_blocks(self) -> int:
        """Return how many GPU blocks are referenced that no request holds."""
        manager = self.scheduler.kv_cache_manager
        held = {
            block.block_id
            for single in manager.coordinator.single_type_managers
            for blocks in single.req_to_blocks.values()
            for block in blocks
        }
        pool = manager.block_pool
        null_id = pool.null_block.block_id
        num_used: int = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return num_used - len(held - {null_id})


def serve(engine: LightEngine, trace: Trace, probe: Probe) -> None:
    """Serve a trace to its end, the probe on every hook.

    Raises:
        SafeOffloadError: it does not end, or a request has another number of tokens than asked.
    """
    wrap_hooks(engine.connector, probe.wrap)
    arrivals: dict[int, list[tuple[User, int, tuple[int, ...]]]] = {}
    sent: dict[str, tuple[User, int, tuple[int, ...]]] = {}
    for user in trace.users:
        arrivals.setdefault(user.arrival_step, []).append((user, 0, ()))
    step = 0
    while step < STEPS_MAX:
        for user, index, before in arrivals.pop(step, ()):
            turn = user.turns[index]
            prompt = (*before, *turn.token_ids) if turn.continues else turn.token_ids
            request_id = f"{user.name}-{index}"
            sent[request_id] = (user, index, prompt)
            engine.add(request_id, prompt, turn.num_answer_tokens)
        if engine.has_work:
            for request_id in engine.step():
                user, index, prompt = sent.pop(request_id)
                answer = engine.answers[request_id]
                if len(answer) != user.turns[index].num_answer_tokens:
                    raise SafeOffloadError(f"{request_id}: answered in {len(answer)} tokens")
                if index + 1 < len(user.turns):
                    follower = (user, index + 1, (*prompt, *answer))
                    arrivals.setdefault(step + 1 + user.pause_steps, []).append(follower)
            probe.end_step(engine)
            step += 1
        elif arrivals:
            step = min(arrivals)
        elif sent:
            raise SafeOffloadError(f"{trace.name}: went idle before {sorted(sent)} was answered")
        else:
            return
    raise SafeOffloadError(f"{trace.name}: not ended after {STEPS_MAX} steps")


@contextlib.contextmanager
def engine_for(name: str, trace: Trace, copy_steps: int) -> Iterator[LightEngine]:
    """An engine of the size that a trace asks for."""
    sizes = Sizes(
        trace.groups, trace.num_blocks, trace.num_slots, trace.max_seqs, trace.max_batched_tokens
    )
    with LightEngine(name, sizes, copy_steps) as engine:
        yield engine
