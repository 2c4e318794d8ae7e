"""The scheduler side on vLLM's real Scheduler."""

from __future__ import annotations

from tests.scheduler.rig import Rig


def test_a_prompt_comes_back_from_the_host() -> None:
    rig = Rig(num_blocks=13)
    a, b = rig.prompt(41, 1), rig.prompt(41, 2)
    assert rig.run_alone("a", a) == 0
    assert rig.run_alone("b", b) == 0
    assert rig.run_alone("a2", a) == 36
    rig.check_idle()
