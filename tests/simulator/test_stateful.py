"""Hypothesis drives the simulated engine: requests, aborts, resets and faults in any order."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.simulator.checkers import Checkers
from tests.simulator.device import CopyFault
from tests.simulator.engine_core import EngineCore, random_prompt
from tests.simulator.vllm_setup import EngineShape

SHAPES = {
    "plain": EngineShape(num_blocks=24, num_slots=30),
    "gpu": EngineShape(num_blocks=24, num_slots=30, is_async=True, is_v2=True, has_streams=True),
    "hybrid": EngineShape(groups=("window:10", "full"), num_blocks=40, num_slots=40),
    "two ranks": EngineShape(num_blocks=24, num_slots=30, tensor_ranks=2, has_streams=True),
    "mamba": EngineShape(groups=("full", "mamba"), num_blocks=40, num_slots=40),
}


class AnyOrder(RuleBasedStateMachine):
    """An engine under checkers; whatever order of events hypothesis likes."""

    def __init__(self) -> None:
        super().__init__()
        self.core: Any = None
        self.num_sent = 0
        self.num_deaths = 0

    @initialize(
        shape=st.sampled_from(list(SHAPES)), seed=st.integers(0, 1000), late=st.integers(0, 40)
    )
    def start(self, shape: str, seed: int, late: int) -> None:
        self.core = EngineCore(SHAPES[shape], seed, copy_ticks_max=late)
        self.checkers = Checkers(self.core)

    @rule(
        stem=st.integers(0, 2),
        kept=st.integers(1, 40),
        tail=st.integers(0, 4),
        max_tokens=st.integers(1, 20),
    )
    def send(self, stem: int, kept: int, tail: int, max_tokens: int) -> None:
        prompt = random_prompt(40, stem)[:kept] + random_prompt(tail, 100)
        self.core.add(f"r{self.num_sent}", prompt, max_tokens)
        self.num_sent += 1

    @precondition(lambda self: self.core is not None and self.core.scheduler.requests)
    @rule(index=st.integers(0, 100), is_computing=st.booleans())
    def abort(self, index: int, is_computing: bool) -> None:
        requests = list(self.core.scheduler.requests)
        request_id = requests[index % len(requests)]
        if is_computing:
            self.core.abort_before_update(request_id)
        else:
            self.core.abort(request_id)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.core.has_work:
                self.core.step()
                self.checkers.after_step()

    @rule(connector=st.booleans())
    def reset(self, connector: bool) -> None:
        self.core.scheduler.reset_prefix_cache(reset_connector=connector)

    @rule(
        rank=st.integers(0, 1),
        ahead=st.integers(0, 3),
        fault=st.sampled_from([CopyFault.FAIL, CopyFault.REFUSE, CopyFault.STALL]),
    )
    def break_a_copy(self, rank: int, ahead: int, fault: CopyFault) -> None:
        device = self.core.workers[rank % len(self.core.workers)].device
        device.faults[device.num_copies + ahead] = fault

    @precondition(lambda self: self.num_deaths == 0)
    @rule(rank=st.integers(0, 1))
    def kill_a_loop(self, rank: int) -> None:
        self.num_deaths += 1
        self.core.workers[rank % len(self.core.workers)].loop.kill()

    @rule(count=st.integers(1, 20))
    def take_slots(self, count: int) -> None:
        self.checkers.slots.squeeze(count)

    @precondition(lambda self: self.core is not None and self.checkers.slots.squeezed)
    @rule()
    def give_slots_back(self) -> None:
        self.checkers.slots.give_back()

    @invariant()
    def nothing_is_found(self) -> None:
        if self.core is not None:
            self.core.findings.raise_first()

    def teardown(self) -> None:
        if self.core is None:
            return
        while self.checkers.slots.squeezed:
            self.checkers.slots.give_back()
        for _ in range(3000):
            if not self.core.has_work:
                break
            self.core.step()
            self.checkers.after_step()
        self.checkers.after_drain()
        for request_id, reason in self.core.finish_reasons.items():
            if reason.name == "LENGTH":
                answer = self.core.answers[request_id]
                assert answer == self.core.runner.sequels[request_id].answer(len(answer))
        self.core.close()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
