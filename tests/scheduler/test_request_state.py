"""What the scheduler side knows of a request is in its `RequestState`, and nowhere else."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

import pytest
from vllm.v1.request import Request

from safe_offload.scheduler.requests import RequestQueue, RequestState
from tests.simulator.engine_core import EngineCore
from tests.simulator.profiles import PROFILES
from tests.simulator.run import Fleet, make_stores
from tests.simulator.workload import make_events

MAY_BE_KEYED = {"RequestBook"}
"""Classes of which a container may be keyed by request: the book, which tells requests apart."""
OF_VLLM = {"BlockTable.tables", "Costs.scheduled"}
"""Containers that vLLM keeps, or has made for a step."""
PROFILES_WITH_ALL = (
    *("hybrid-pressure", "lazy-pressure", "resets", "mamba-gpu"),
    *("tenants-lazy", "pins", "tiers-tenants", "node-pins"),
)
"""Profiles which together have every part of the scheduler side."""
LOOK_EVERY = 3


def keyed_by_request(root: object, ids: set[str]) -> Iterator[str]:
    """Yield the class and field of containers below an object that are keyed by request."""
    seen: set[int] = set()
    reached: list[tuple[str, object]] = [("", root)]
    while reached:
        name, found = reached.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, RequestQueue):
            continue  # it is walked, and answers nothing about a request
        if isinstance(found, Mapping | Set):
            if any(isinstance(key, Request | RequestState) or key in ids for key in found):
                yield name
            reached += [(name, key) for key in found]
            reached += [(name, v) for v in found.values()] if isinstance(found, Mapping) else []
        elif isinstance(found, list | tuple | deque):
            reached += [(name, item) for item in found]
        elif type(found).__module__.startswith("safe_offload."):
            kind = type(found).__name__
            fields = {*getattr(found, "__dict__", ())}.union(
                *(getattr(base, "__slots__", ()) for base in type(found).__mro__)
            )
            for field in fields if kind not in MAY_BE_KEYED else ():
                if f"{kind}.{field}" not in OF_VLLM:
                    reached.append((f"{kind}.{field}", getattr(found, field, None)))


@pytest.mark.parametrize("name", PROFILES_WITH_ALL)
def test_no_container_is_keyed_by_request(name, monkeypatch):
    found: set[str] = set()
    ids: set[str] = set()
    looks: list[int] = []
    step = EngineCore.step

    def step_and_look(core: EngineCore) -> Any:
        batch = step(core)
        if core.num_steps % LOOK_EVERY == 0:
            side: Any = core.connector.side
            ids.update(core.scheduler.requests)
            found.update(keyed_by_request(side, ids))
            looks.append(len(list(side.book)))
        return batch

    monkeypatch.setattr(EngineCore, "step", step_and_look)
    profile = PROFILES[name]
    fleet = Fleet(profile, 0, make_events(profile, 0), make_stores(profile))
    try:
        fleet.go()
    finally:
        fleet.close()
    assert sum(looks) > 20, "there were requests to know something of"
    assert found == set()
