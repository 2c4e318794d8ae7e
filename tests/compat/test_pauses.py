"""A step that has reported a load is followed by the next one at once; no other step is."""

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import core as vllm_core
from vllm.v1.engine.core import EngineCoreProc

from safe_offload.compat.engine_core import pauses
from safe_offload.compat.engine_core.pauses import METHOD, REPORTED, fits, skip_pauses, step

WRAPPED: Any = getattr(EngineCoreProc, METHOD)
VLLMS_OWN: Any = getattr(WRAPPED, "__wrapped__", WRAPPED)


class Core:
    """As much of an engine as a step of its loop touches; `seen`: what it did."""

    def __init__(self, monkeypatch: Any, *, has_load: bool, executes: bool, num_engines: int = 1):
        self.seen: list[Any] = []
        self.output_queue: SimpleQueue[Any] = SimpleQueue()
        self.post_step = lambda executed: self.seen.append(("post", executed))
        self.scheduler = SimpleNamespace(has_requests=lambda: True)
        parallel = SimpleNamespace(data_parallel_size=num_engines)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self._has_load, self._executes = has_load, executes
        pause = self.seen.append
        monkeypatch.setattr(pauses, "sleep", pause)
        monkeypatch.setattr(vllm_core, "time", SimpleNamespace(sleep=pause))

    def step_fn(self) -> tuple[dict[int, str], bool]:
        if self._has_load:
            REPORTED.append("r")
        self._has_load = False
        return {0: "output"}, self._executes


@pytest.mark.parametrize("executes", [False, True])
def test_without_a_load_a_step_is_vllms_own(monkeypatch, executes):
    seen = []
    for take in (VLLMS_OWN, lambda core: step(VLLMS_OWN, core)):
        core = Core(monkeypatch, has_load=False, executes=executes)
        assert take(core) is executes
        assert core.output_queue.get_nowait() == (0, "output")
        seen.append(core.seen)
    assert seen[0] == seen[1] == [("post", executes), *([] if executes else [0.001])]


def test_only_the_pause_after_a_load_is_left_out(monkeypatch):
    core = Core(monkeypatch, has_load=True, executes=False)
    step(VLLMS_OWN, core)
    assert core.seen == [("post", False)]
    step(VLLMS_OWN, core)
    assert core.seen[1:] == [("post", False), 0.001], "the loop does not spin"


def test_engines_that_step_together_pause_together(monkeypatch):
    core = Core(monkeypatch, has_load=True, executes=False, num_engines=2)
    step(VLLMS_OWN, core)
    assert core.seen == [("post", False), 0.001]


def test_the_loop_of_another_vllm_stays_as_it_is(monkeypatch):
    assert fits(VLLMS_OWN)

    def other(self: Any) -> bool:
        self.step_fn()
        return False

    assert not fits(other)
    assert not fits(print)
    monkeypatch.setattr(EngineCoreProc, METHOD, other)
    skip_pauses()
    assert getattr(EngineCoreProc, METHOD) is other


def test_a_load_that_lands_is_reported_to_the_loop(make_rig):
    rig = make_rig()
    prompt = rig.warm()
    REPORTED.clear()
    rig.add("again", prompt)
    rig.step_until(lambda: bool(REPORTED))
    assert rig.scheduler.finished_recving_kv_req_ids == set(REPORTED) == {"again"}
    rig.finish(again=4)
