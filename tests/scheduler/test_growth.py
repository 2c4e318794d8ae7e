"""Work of hooks in one step of vLLM's scheduler: it grows no faster than what the step brings.

Counted in bytecode instructions, so that no other process changes it. What runs in C counts as
nothing.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from safe_offload.scheduler import requests
from safe_offload.scheduler.cache.leases import LeaseKind
from safe_offload.scheduler.features.pins.pins import PinnedPrompts
from safe_offload.scheduler.loads.loads import Loads
from safe_offload.scheduler.node.lots import NodeLots
from safe_offload.scheduler.requests import HIT_ENDS_MAX, RequestState
from safe_offload.scheduler.tiers import promotions, spills
from tests.benchmarks.growth import EXPONENT_MAX, counted_exponent
from tests.benchmarks.growth_scenes import SCENES, WAITING, make_engine
from tests.scheduler.features import feature_of

SCENE_OF = {scene.name: scene for scene in SCENES}


@pytest.mark.parametrize("scene", SCENES, ids=[scene.name for scene in SCENES])
def test_hooks_grow_no_faster_than_what_there_is(scene, monkeypatch):
    monkeypatch.setattr(promotions, "LOOKED_AT_MAX", 1 << 11)  # as the scenes are small
    assert counted_exponent(scene) <= EXPONENT_MAX


def test_a_hook_that_searches_what_all_share_grows_faster(monkeypatch):
    monkeypatch.setattr(Loads, "_num_found", lambda *args: 0)
    scene = SCENE_OF["the same, each with two blocks of its own on the host"]
    assert counted_exponent(scene) > EXPONENT_MAX


def test_a_pool_is_looked_at_once_in_a_step_however_many_requests_ask(monkeypatch):
    calls = []
    with ExitStack() as closing:
        engine = SCENE_OF["requests beside a large pool that is full of news"].make(20, closing)
        monkeypatch.setattr(NodeLots, "sync", lambda _: calls.append(None))
        for num_steps in (1, 2):
            engine.step()
            assert len(calls) == num_steps


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_costs_no_step_anything(name, monkeypatch):
    monkeypatch.setattr(requests, "HELD_LOOKS", 10)
    assert counted_exponent(SCENE_OF[name]) <= 0.1


def test_of_a_large_host_a_few_slots_are_looked_at_before_they_are_evicted(monkeypatch):
    monkeypatch.setattr(spills, "AHEAD_MAX", 10)
    scene = SCENE_OF["slots that are looked at before they are evicted"]
    assert counted_exponent(scene) <= 0.1


def test_of_a_request_a_bounded_number_of_hit_ends_is_known():
    state = RequestState(cast(Any, SimpleNamespace()))
    for end in range(2 * HIT_ENDS_MAX):
        state.ends_hits_at(end)
    assert state.hit_ends == set(range(HIT_ENDS_MAX))


# ---- pins --------------------------------------------------------------------------------------


def test_pins_that_share_a_prefix_come_and_go_in_any_order():
    """What is leased is what the pins that are left need; compared with a list of each."""
    engine = make_engine(2000, extra={"pin_share": 0.9})
    chance, side = random.Random(0), engine.connector.side
    pins = feature_of(side, PinnedPrompts).pins
    paths = [tuple(range(100 * tree, 100 * tree + 30)) for tree in range(3)]
    for number in range(60):
        path = chance.choice(paths)
        place = chance.randrange(1, len(path))
        paths.append((*path[:place], *range(300 + 10 * number, 305 + 10 * number)))
    hashes = [b"%d" % slot for slot in range(1000)]
    slots = side.hits.slots.grant(1000)
    side.hits.directory.begin_store(slots, 0, hashes, {})
    side.hits.directory.publish(slots)
    pinned: dict[bytes, set[int]] = {}
    for _ in range(600):
        number = chance.randrange(len(paths))
        key = b"key %d" % (number % 50)  # some have the answers of several
        if chance.random() < 0.5:
            pins.remove([key])
            pinned.pop(key, None)
        else:
            path = [slots[place] for place in paths[number]]
            assert pins.add(key, path, 600)
            pinned.setdefault(key, set()).update(path)
        if chance.random() < 0.02:
            lost = chance.choice(slots)
            side.hits.slots.forget([lost])
            pins.set_time(0)
            for held in pinned.values():
                held.discard(lost)
            paths = [p for p in paths if lost not in [slots[place] for place in p]]
        expected = set().union(*pinned.values())
        assert pins._counts.keys() == expected
        leased = {s for lease in side.leases if lease.kind is LeaseKind.PIN for s in lease.slots}
        assert leased == expected
        pins.check_invariants()
    pins.remove([*pinned])
    assert not pins._stretches
    assert not pins._first
