"""The simulator's engine (`tests.simulator.engine_core`), with what a test asks of it by hand.

vLLM's scheduler, both halves of our connector and the transfers are real. Memory, copies and
the model runner are the simulator's: every word that attention reads is checked.
"""

from collections.abc import Callable
from typing import Any

from safe_offload.protocol import StepPlan
from tests.simulator.device import CopyFault
from tests.simulator.engine_core import EngineCore, random_prompt
from tests.simulator.groups import BLOCK_TOKENS
from tests.simulator.model_runner import Batch
from tests.simulator.node import Node
from tests.simulator.vllm_setup import EngineShape

MakeRig = Callable[..., "Rig"]
"""The fixture `make_rig`: arguments as of `Rig`; the engine is closed when the test has ended."""


class Rig(EngineCore):
    """An engine that is stepped by hand, and whose invariants are checked after each step.

    `seed`, `copy_ticks_max`, `node`: see `EngineCore`; a step has about six ticks; `shape`: fields
    of `EngineShape`.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        copy_ticks_max: int = 0,
        node: Node | None = None,
        **shape: Any,
    ) -> None:
        shape["extra"] = {"check_invariants": True, **shape.get("extra", {})}
        super().__init__(EngineShape(**shape), seed, copy_ticks_max=copy_ticks_max, node=node)
        self.plans: list[StepPlan] = []
        self.devices = [worker.device for worker in self.workers]
        self.prompt = random_prompt

    @property
    def planner(self) -> Any:
        """Of our connector, scheduler side."""
        return self.connector.side

    def hold_copies(self, is_held: bool) -> None:
        """From now on no copy of any rank moves by itself, or all do again."""
        for device in self.devices:
            device.hold_copies = is_held

    def fail_copies(self) -> None:
        """From now on every copy of every rank fails, until `Device.faults` is cleared."""
        for device in self.devices:
            device.faults = dict.fromkeys(range(10_000), CopyFault.FAIL)

    def close(self) -> None:
        """See `EngineCore.close`."""
        self.hold_copies(False)
        super().close()

    def step(self) -> Batch | None:
        """See `EngineCore.step`."""
        batch = super().step()
        if batch is not None:
            self.plans.append(batch.scheduled.kv_connector_metadata)
        return batch

    def planned_step(self) -> StepPlan:
        """A step that has something to schedule; returns what the workers are to do in it."""
        assert self.step() is not None
        return self.plans[-1]

    def step_until(self, condition: Callable[[], bool], max_steps: int = 200) -> None:
        """Step until something is so."""
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"not so after {max_steps} steps")

    def start(self) -> None:
        """Let the workers tell their capacity, in the steps of a request that fills no block."""
        self.run_alone("first", self.prompt(2, 10_000), max_tokens=1)

    def run_alone(
        self, request_id: str, prompt: list[int], max_tokens: int = 4, **options: Any
    ) -> int:
        """Send a request and wait for it; returns how many tokens came from the host.

        `options`: of `EngineCore.add`.
        """
        before = self.counts["hit_tokens"]
        self.add(request_id, prompt, max_tokens, **options)
        self.drain()
        self.check_tokens(request_id, max_tokens)
        return self.counts["hit_tokens"] - before

    def warm(self, num_tokens: int = 41, seed: int = 1) -> list[int]:
        """Serve a prompt, so that the host has it, and the GPU no more; return it."""
        prompt = self.prompt(num_tokens, seed)
        self.run_alone("warm", prompt)
        self.forget_gpu_cache()
        return prompt

    def finish(self, **num_tokens: int) -> None:
        """Let all end, check these answers, and that nothing is left."""
        self.drain()
        for request_id, count in num_tokens.items():
            self.check_tokens(request_id, count)
        self.check_idle()

    def run_until_finished(self, request_id: str) -> None:
        """Step until vLLM has forgotten a request."""
        self.step_until(lambda: request_id not in self.scheduler.requests)

    def fill_gpu_cache(self, request_id: str, seed: int) -> None:
        """Evict everything else from the GPU's prefix cache by one prompt that fills it."""
        num_tokens = (self.shape.num_blocks - 2) * BLOCK_TOKENS
        self.run_alone(request_id, self.prompt(num_tokens, seed), max_tokens=1)

    def forget_gpu_cache(self) -> None:
        """vLLM forgets its own prefix cache, the host does not."""
        assert self.scheduler.reset_prefix_cache()

    def check_tokens(self, request_id: str, max_tokens: int) -> None:
        """The answer is what the prompt leads to."""
        expected = self.runner.sequels[request_id].answer(max_tokens)
        assert self.answers[request_id] == expected, request_id

    def check_idle(self) -> None:
        """No block, slot, lease or request is left."""
        self.check_no_block_is_held()
        gauges = self.planner.gauges()
        for name in ("leased_slots", "stores_in_flight", "loads_in_flight"):
            assert gauges[name] == 0, gauges
        assert not self.scheduler.requests
        assert not self.planner.has_pending_push_work()
        assert len(self.planner.leases) == 0

    def check_no_block_is_held(self) -> None:
        """Every GPU block is free."""
        assert self.pool.get_num_free_blocks() == self.shape.num_blocks - 1
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)


def see_events(engine: Any) -> list[Any]:
    """The events of an engine that say something of host memory, as they are published."""
    seen: list[Any] = []
    publish = engine.scheduler.kv_event_publisher.publish

    def see(batch: Any) -> None:
        publish(batch)
        seen.extend(e for e in batch.events if getattr(e, "medium", None) == "CPU")

    engine.scheduler.kv_event_publisher.publish = see
    return seen


def times_of_waiting(rig: Rig, name: str) -> list[float]:
    """When vLLM asks about a request that waits, up to when it goes on; filled from now on."""
    match = rig.connector.get_num_new_matched_tokens
    times: list[float] = []
    is_over = False

    def watch(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = match(request, num_computed_tokens)
        nonlocal is_over
        if request.request_id == name and not is_over and (answer[0] is None or times):
            times.append(rig.clock.now_s)
            is_over = answer[0] is not None
        return answer

    rig.connector.get_num_new_matched_tokens = watch
    return times
