"""The planner calls those hooks of its parts that they define."""

import re
from pathlib import Path
from typing import Any

from safe_offload.compose import Composition
from safe_offload.scheduler.part import Part, methods

HACKING = Path(__file__).parents[2] / "docs" / "hacking.md"


def test_the_part_that_the_docs_show_counts_what_is_asked_for(make_rig, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", HACKING.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    part = names["AskedByHour"](4)
    made = Composition.parts
    monkeypatch.setattr(Composition, "parts", lambda self, planner: [*made(self, planner), part])
    rig = make_rig(num_blocks=60, num_slots=64)
    rig.run_alone("a", rig.prompt(20, 1), max_tokens=1)
    rig.run_alone("b", rig.prompt(9, 2), max_tokens=1)
    assert rig.planner.gauges()["asked_blocks"] == 5 + 2


def test_a_hook_that_a_part_lacks_costs_no_call():
    class Quiet(Part):
        pass

    class Loud(Part):
        def preempted(self, state: Any) -> None: ...

    quiet, loud = Quiet(), Loud()
    assert methods([quiet, loud], "preempted") == (loud.preempted,)
    assert methods([quiet, loud], "ended") == ()
