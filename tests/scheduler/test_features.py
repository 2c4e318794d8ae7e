"""The planner calls those hooks of its features that they define."""

import re
from pathlib import Path
from typing import Any

from safe_offload.compose import Composition
from safe_offload.scheduler.feature import Feature, Hooks
from tests.hooks import SCHEDULER, hooks

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


def test_each_hook_is_called_once_and_defined_by_a_feature():
    """Once: what calls it is a name that a type checker follows, never a string."""
    table = hooks()
    assert len(table) <= 14
    for hook in table:
        assert hook.implementers, hook.name
        assert len(hook.callers) == 1, hook
    assert "getattr" not in (SCHEDULER / "feature.py").read_text()


def test_each_list_of_hooks_has_the_features_of_its_own_hook():
    class Every(Feature):
        def on_new_request(self, state: Any) -> None: ...
        def on_match(self, state: Any, num_computed_tokens: int, now_s: float) -> Any: ...
        def on_scheduled(self, state: Any, num_tokens: int) -> None: ...
        def on_request_finished(self, state: Any) -> None: ...
        def on_step(self, output: Any, now_s: float) -> None: ...
        def on_step_planned(self) -> None: ...
        def on_report(self, report: Any) -> None: ...
        def on_settled(self) -> None: ...
        def has_work(self) -> bool: ...
        def gauges(self) -> Any: ...
        def check_invariants(self) -> None: ...

    for name in vars(Hooks([])):
        one = type("One", (Feature,), {name: vars(Every)[name]})()
        lists = vars(Hooks([one]))
        assert [each for each, found in lists.items() if found] == [name]
