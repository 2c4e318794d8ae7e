"""The planner calls those hooks of its features that they define."""

import re
from pathlib import Path
from typing import Any

from safe_offload.compose import Composition
from safe_offload.scheduler.feature import Feature, methods

HACKING = Path(__file__).parents[2] / "docs" / "hacking.md"


def test_the_feature_that_the_docs_show_counts_the_blocks_of_prompts(make_rig, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", HACKING.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    feature = names["PromptsByHour"](4)
    made = Composition.features
    monkeypatch.setattr(
        Composition, "features", lambda self, planner: [*made(self, planner), feature]
    )
    rig = make_rig(num_blocks=60, num_slots=64)
    rig.run_alone("a", rig.prompt(20, 1), max_tokens=1)
    rig.run_alone("b", rig.prompt(9, 2), max_tokens=1)
    assert rig.planner.gauges()["prompt_blocks"] == 5 + 2


def test_a_hook_that_a_feature_lacks_costs_no_call():
    class Quiet(Feature):
        pass

    class Loud(Feature):
        def preempted(self, state: Any) -> None: ...

    quiet, loud = Quiet(), Loud()
    assert methods([quiet, loud], "preempted") == (loud.preempted,)
    assert methods([quiet, loud], "ended") == ()
