"""Answers prompts in an engine whose memory is poisoned: what nobody wrote is nonsense.

Every block that vLLM's pool gives out is filled with it, in every layer, before vLLM zeroes what it
zeroes and before a load or a forward writes there; every host slot at the start, and again when a
store into it is submitted. So a block that a load leaves unwritten, and a block or a slot that is
read before anything wrote to it, turn an answer into nonsense, whatever lay there before.
"""

import dataclasses
import itertools
import math
import time
from typing import Any

from tests.engine.children import engine

FAILS, LEAVES_OUT, IS_CUT = "loads fail", "loads leave a block out", "hits are cut"
PREEMPTS, PREEMPT_EVERY = "requests are preempted", 12
"""What may happen in a round."""
BLOCK_TOKENS = 32


def scenario(job: dict[str, Any]) -> dict[str, Any]:
    """Answer all prompts in one go, for each of `options["rounds"]`."""
    options = job["options"]
    poison = Poison(options["poison"]) if options["poison"] is not None else None
    faults = Faults()
    llm = engine.start(job)
    report: dict[str, Any] = {"rounds": [], "are_finite": []}
    prompts = [engine.as_vllm_reads(prompt) for prompt in job["prompts"].values()]
    sampling = engine.sampling(job["num_answer_tokens"])
    sampling.logprobs = 0
    for faults.now in options["rounds"]:
        assert llm.reset_prefix_cache(), "what is hit is to come from the host"
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        report["rounds"].append([list(output.outputs[0].token_ids) for output in outputs])
        sums = [output.outputs[0].cumulative_logprob for output in outputs]
        report["are_finite"].append(all(map(math.isfinite, sums)))
    report["metrics"] = engine.connector_metrics(llm)
    report["counts"] = faults.counts | (poison.counts if poison else {})
    if engine.planner_of(engine.scheduler_of(llm).connector) is not None:
        engine.drain(llm)
        report["audit"] = engine.audit(llm)
    return report


class Poison:
    """Fills what vLLM's pool gives out, right before the step for which it was given out.

    Slots of the host are filled with 0xFF, which is not a number in any type.
    """

    def __init__(self, value: float) -> None:
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        self._value = value
        self.counts = {"poisoned": 0, "zeroed": 0}
        given_out: list[int] = []
        get_new_blocks, schedule = BlockPool.get_new_blocks, Scheduler.schedule
        update_states = CPUModelRunner._update_states

        def give_out(pool: Any, *arguments: Any, **more: Any) -> Any:
            blocks = get_new_blocks(pool, *arguments, **more)
            given_out.extend(block.block_id for block in blocks)
            return blocks

        def note(scheduler: Any, *arguments: Any, **more: Any) -> Any:
            output = schedule(scheduler, *arguments, **more)
            output.given_out = given_out.copy()
            given_out.clear()
            return output

        def fill(runner: Any, output: Any) -> Any:
            self._fill(runner, output.given_out)
            self.counts["poisoned"] += len(output.given_out)
            self.counts["zeroed"] += len(output.new_block_ids_to_zero or ())
            return update_states(runner, output)

        BlockPool.get_new_blocks = give_out
        Scheduler.schedule = note
        CPUModelRunner._update_states = fill
        self._spoil_slots()

    @staticmethod
    def _spoil_slots() -> None:
        from safe_offload.worker.copies.base import Direction
        from safe_offload.worker.copies.cpu import CpuBackend
        from safe_offload.worker.transfers import Transfers

        backends: list[tuple[Any, Any]] = []
        begin, submit = CpuBackend.__init__, Transfers.submit

        def spoil_all(self: Any, base_address: int, layout: Any, host: Any, threads: Any) -> None:
            begin(self, base_address, layout, host, threads)
            host.tensor.numpy()[:] = 0xFF
            backends[:] = [(host, layout)]

        def spoil(self: Any, direction: Direction, transfer: Any, mark: Any = None) -> None:
            if direction is Direction.STORE:
                ((host, layout),) = backends
                for offset, size in itertools.chain(*map(layout.ranges_of, transfer.slot_ids)):
                    host.tensor.numpy()[offset : offset + size] = 0xFF
            submit(self, direction, transfer, mark)

        CpuBackend.__init__ = spoil_all  # type: ignore[method-assign]
        Transfers.submit = spoil  # type: ignore[method-assign]

    def _fill(self, runner: Any, block_ids: list[int]) -> None:
        import torch

        for layer in runner.compilation_config.static_forward_context.values():
            found = getattr(layer, "kv_cache", ())
            for cache in [found] if isinstance(found, torch.Tensor) else found:
                if cache.dtype.itemsize == 1:
                    cache.view(torch.uint8)[block_ids] = 0xFF
                else:
                    cache[block_ids] = self._value


class Faults:
    """What happens to loads and hits in the round `now`."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        from safe_offload.connector import SafeCPUOffloadConnector
        from safe_offload.worker.copies.base import Direction
        from safe_offload.worker.copies.cpu import CpuBackend

        self.now = ""
        self.counts = {FAILS: 0, IS_CUT: 0, PREEMPTS: 0}
        self.num_steps = 0
        schedule = Scheduler.schedule
        numbers = itertools.count()
        run = CpuBackend._run
        match = SafeCPUOffloadConnector.get_num_new_matched_tokens

        def run_or_fail(backend: Any, copy: Any) -> None:
            if copy.direction is Direction.STORE or self.now not in (FAILS, LEAVES_OUT):
                run(backend, copy)
                return
            part = slice(None, -1) if self.now == LEAVES_OUT else slice(None, None, 2)
            ids = {"block_ids": copy.block_ids[part], "slot_ids": copy.slot_ids[part]}
            run(backend, dataclasses.replace(copy, **ids))
            if self.now == FAILS:
                self.counts[FAILS] += 1
                raise OSError("failed by the test")

        def match_or_cut(connector: Any, request: Any, num_computed: int) -> tuple[Any, bool]:
            num_tokens, is_async = match(connector, request, num_computed)
            if self.now != IS_CUT or not num_tokens:
                return num_tokens, is_async
            self.counts[IS_CUT] += 1
            num_kept = (0, num_tokens // 2, num_tokens - 1)[next(numbers) % 3]
            num_kept -= num_kept % BLOCK_TOKENS
            return num_kept, num_kept > 0

        def preempt(scheduler: Any, *arguments: Any, **more: Any) -> Any:
            if self.now == PREEMPTS and len(scheduler.running) > 1:
                self.num_steps += 1
                if self.num_steps % PREEMPT_EVERY == 0:
                    self.counts[PREEMPTS] += 1
                    scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
            return schedule(scheduler, *arguments, **more)

        Scheduler.schedule = preempt
        CpuBackend._run = run_or_fail  # type: ignore[assignment, method-assign]
        hook = "get_num_new_matched_tokens"
        setattr(SafeCPUOffloadConnector, hook, match_or_cut)
