"""Nothing of a prompt is logged, at any level, whatever goes wrong."""

import logging
from unittest.mock import Mock

import pytest

from tests.simulator.run import run


@pytest.mark.parametrize("profile", ["all-faults", "failing"])
def test_a_storm_of_failures_logs_no_token(profile, package_log, monkeypatch):
    """Every prompt has a long run of tokens; none of the messages has six of them in a row."""
    from tests.simulator.engine_core import EngineCore

    prompts: list[list[int]] = []
    add = EngineCore.add

    def remember(self, request_id, prompt, *args, **kwargs):
        prompts.append(list(prompt))
        return add(self, request_id, prompt, *args, **kwargs)

    monkeypatch.setattr(EngineCore, "add", remember)
    lines: list[str] = []
    for seed in range(30):
        run(profile, seed)
        lines = [as_text(record) for record in package_log if ".sim." not in record.name]
        if seed > 0 and len(lines) > 10:
            break
    assert len(lines) > 10, "it was to be a storm"
    assert prompts
    for prompt in prompts:
        for start in range(len(prompt) - 5):
            tokens = ", ".join(map(str, prompt[start : start + 6]))
            assert not [line for line in lines if tokens in line]


def test_an_error_of_our_own_logs_no_token(make_rig, package_log, monkeypatch):
    rig = make_rig(num_blocks=30, extra={"check_invariants": False})
    prompt = rig.prompt(33, 1)
    for method in ("get_num_new_matched_tokens", "build_connector_meta", "update_connector_output"):
        with monkeypatch.context() as patch:
            patch.setattr(rig.planner, method, Mock(side_effect=RuntimeError("injected")))
            rig.add(f"a-{method}", prompt)
            rig.step()
    rig.drain()
    text = "\n".join(as_text(record) for record in package_log)
    assert text.count("the engine continues") >= 3
    assert ", ".join(map(str, prompt[:6])) not in text


def as_text(record: logging.LogRecord) -> str:
    """The message and its traceback, as a handler writes them."""
    return logging.Formatter("%(message)s").format(record)
