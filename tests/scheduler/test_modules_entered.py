"""How many modules a request enters, from vLLM's question to its hit, and in its whole life.

A reader who follows a request reads these. `pytest -s` prints them; docs/architecture.md has the
numbers, which may only fall.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import safe_offload
from tests.scheduler.rig import Rig
from tests.scheduler.tiers.tier_rig import TierRig
from tests.simulator.tenants import TENANTS_FILE

ROOT = Path(safe_offload.__file__).parent
ARCHITECTURE = ROOT.parent / "docs" / "architecture.md"
EVERYTHING = {
    "pin_share": 0.3,
    "kv_hints": True,
    "tenants": TENANTS_FILE,
    "min_load_tokens": "auto",
}
NOTHING = {"eviction_policy": "lru", "min_load_tokens": 0}
OF_THE_WORKER = ("worker/", "tiers/", "node/")


def make_rig(*, has_everything: bool) -> Rig:
    if has_everything:
        groups = ("window:8", "full")
        return TierRig(
            num_blocks=60, num_slots=200, groups=groups, has_events=True, extra=EVERYTHING
        )
    return Rig(num_blocks=60, num_slots=200, extra=NOTHING)


@contextmanager
def modules_entered() -> Iterator[set[str]]:
    """Collect the modules of the scheduler's process whose functions are called."""
    entered: set[str] = set()

    def see(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            entered.add(str(path.relative_to(ROOT)))

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        yield entered
    finally:
        sys.setprofile(before)
        entered.difference_update([m for m in entered if m.startswith(OF_THE_WORKER)])


@pytest.mark.parametrize(
    ("has_everything", "num_to_hit", "num_in_all"), [(False, 9, 19), (True, 20, 35)]
)
def test_modules_that_a_request_enters(has_everything, num_to_hit, num_in_all):
    rig = make_rig(has_everything=has_everything)
    to_hit: set[str] = set()
    ask = rig.connector.get_num_new_matched_tokens

    def ask_and_see(*args: Any) -> Any:
        with modules_entered() as entered:
            answer = ask(*args)
        to_hit.update(entered)
        return answer

    try:
        prompt = rig.warm()
        rig.run_alone("again", prompt)  # what comes once only
        rig.forget_gpu_cache()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rig.connector, "get_num_new_matched_tokens", ask_and_see)
            assert rig.run_alone("asked", prompt) == 40
        rig.forget_gpu_cache()
        with modules_entered() as in_all:
            assert rig.run_alone("traced", prompt) == 40
    finally:
        rig.close()
    print(f"\nto the hit, {len(to_hit)}: {', '.join(sorted(to_hit))}")
    print(f"in all, {len(in_all)}: {', '.join(sorted(in_all))}")
    assert (len(to_hit), len(in_all)) == (num_to_hit, num_in_all)
    said = (
        "windows, {} and {}"
        if has_everything
        else "{} modules from vLLM's question to its hit, and {} until"
    )
    assert said.format(num_to_hit, num_in_all) in ARCHITECTURE.read_text()
