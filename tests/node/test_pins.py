"""Pins in a shared pool: what one engine has pinned stays, whatever the others do."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.scheduler.rig import Rig
from tests.scheduler.test_pins import PIN, ask, flood, gauge
from tests.simulator.node import Node

NUM_TOKENS = 33
Start = Callable[[], Rig]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start engines on one pool."""
    node, rigs = Node(), list[Rig]()

    def start() -> Rig:
        extra = {"share": "node", "pin_share": 0.3}
        rigs.append(Rig(node=node, num_slots=80, num_blocks=60, extra=extra))
        rigs[-1].start()
        return rigs[-1]

    yield start
    for rig in rigs:
        rig.close()
    node.close()


def die(dead: Rig, *others: Rig) -> None:
    """An engine is killed, and others notice."""
    dead.die(0)
    for number in range(3):
        for other in others:
            other.clock.advance(100)
            other.run_alone(f"notice {number}", other.prompt(2, number), max_tokens=1)


def owner_floods(start: Start, owner: Rig) -> Rig:
    flood(owner, "owner", 3)
    return owner


def owner_is_reset(start: Start, owner: Rig) -> Rig:
    assert owner.scheduler.reset_prefix_cache(reset_connector=True)
    flood(owner, "owner", 3)
    return start()


def owner_dies(start: Start, owner: Rig) -> Rig:
    heir = start()
    die(owner, heir)
    flood(heir, "heir", 3)
    return heir


def owner_dies_and_its_heir_knows_nothing(start: Start, owner: Rig) -> Rig:
    """It was reset, so that what the lots of the dead hold is of another generation."""
    heir = start()
    assert heir.scheduler.reset_prefix_cache(reset_connector=True)
    die(owner, heir)
    flood(heir, "heir", 3)
    return start()


def owner_naps(start: Start, owner: Rig) -> Rig:
    """It has all lots, of which another takes its share."""
    other = start()
    assert not owner.planner.hits.slots.source.table.is_awake
    flood(other, "other", 3)
    flood(owner, "again", 3)
    return other


def both_store_it(start: Start, owner: Rig) -> Rig:
    """The lots of both change hands, once and again."""
    others = [start(), start()]
    for number in range(4):
        for place, each in enumerate((*others, owner)):
            flood(each, f"{place}/{number}/", 1)
    return others[0]


SCENES = (
    owner_floods,
    owner_is_reset,
    owner_dies,
    owner_dies_and_its_heir_knows_nothing,
    owner_naps,
    both_store_it,
)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: str(scene.__name__))
@pytest.mark.parametrize("owns", [False, True])
def test_what_an_engine_has_pinned_stays_for_it_and_for_the_others(
    start: Start, scene: Callable[[Start, Rig], Rig], owns: Any
) -> None:
    owner, guest = start(), start()
    prompt = guest.prompt(NUM_TOKENS, 1)
    flood(owner, "before", 1)  # it has all lots, and they are full
    if not owns:
        owner.run_alone("stored", prompt)
    told = ask(guest, "pinned", prompt, PIN)[1]
    assert told == {"pinned_tokens": 36, "unpinned_tokens": 0}
    other = scene(start, owner)
    guest.forget_gpu_cache()
    guest.run_alone("beside", guest.prompt(2, 7), max_tokens=1)
    assert gauge(guest, "pinned_slots") == told["pinned_tokens"] // 4
    assert ask(other, "elsewhere", prompt)[0] == 32, "a pin holds a prompt for all"
    assert ask(guest, "again", prompt)[0] == 32
    guest.clock.advance(700)
    guest.run_alone("later", guest.prompt(2, 8), max_tokens=1)
    assert gauge(guest, "pinned_slots") == 0
    guest.check_idle()
