"""Work of hooks in one step of vLLM's scheduler: it grows no faster than what the step brings.

Counted in bytecode instructions, so that no other process changes it. What runs in C counts as
nothing; so a table that is looked into there is replaced by one whose looks are Python.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from safe_offload.scheduler.cache.leases import LeaseKind
from tests.benchmarks.scheduler_probe import HookCounter, wrap_hooks
from tests.simulator.groups import BLOCK_TOKENS
from tests.simulator.peers import PeerEngine, peer_shape
from tests.simulator.vllm_setup import OURS

EXPONENT_MAX = 1.15
NUM_DOUBLINGS = 3
COPY_STEPS_MANY = 10_000


class Looks(dict[bytes, int]):
    """A table of the directory; each look is some instructions."""

    def get(self, block_hash: bytes, default: Any = None) -> Any:
        return super().get(block_hash, default)


def word(request_id: str, position: int) -> int:
    return (hash(request_id) + position * 7919) % 1000


def make_engine(num_blocks: int, groups: tuple[str, ...] = ("full",), **shape: Any) -> PeerEngine:
    """An engine whose copies end at once, and whose host has room for all."""
    sizes = {"num_blocks": num_blocks * len(groups), "num_slots": 2 * num_blocks * len(groups)}
    limits = {"max_model_len": num_blocks * BLOCK_TOKENS, "max_batched_tokens": 8192}
    extra = {"min_load_tokens": 0, "max_inflight_bytes": "1GiB", **shape.pop("extra", {})}
    made = peer_shape(OURS, groups=groups, max_seqs=256, extra=extra, **sizes, **limits, **shape)
    engine = PeerEngine(made, 0, word)
    engine.send("first", [1, 2], 1)  # the workers tell how many slots there are
    engine.drain()
    engine.step()
    return engine


def forget_gpu_cache(engine: PeerEngine, copy_steps: int = COPY_STEPS_MANY) -> None:
    """Only the host has the prompts; a load takes so many steps."""
    assert engine.scheduler.reset_prefix_cache()
    engine.worker._copy_steps = copy_steps
    directory = engine.connector.side.hits.directory
    directory.tables = tuple(map(Looks, directory.tables))


def count_step(engine: PeerEngine) -> int:
    """Return how many instructions the hooks of one step execute."""
    counter = HookCounter()
    wrapped = dict(vars(engine.connector))
    wrap_hooks(engine.connector, counter.wrap)
    try:
        engine.step()
    finally:
        vars(engine.connector).clear()
        vars(engine.connector).update(wrapped)
    return counter.total.instructions


def exponent(work: Callable[[int], int], first: int) -> float:
    """Return by which power of its size work grows, over three doublings."""
    work(first)  # caches that live as long as the process
    return math.log2(work(first << NUM_DOUBLINGS) / work(first)) / NUM_DOUBLINGS


def own_prompt(number: int, num_blocks: int) -> list[int]:
    """Prompts of which no two share a block."""
    return [number % 1000, number // 1000, *[3] * (num_blocks * BLOCK_TOKENS - 1)]


def prompt_behind(num_shared: int, number: int) -> list[int]:
    """Prompts that share some blocks and then differ, within a block."""
    return [*[7] * (num_shared * BLOCK_TOKENS), number % 1000, number // 1000]


# ---- loads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [("full",), ("full", "window:10")], ids=str)
def test_requests_that_load_their_own_do_not_look_through_each_others_loads(groups):
    def work(count: int) -> int:
        engine = make_engine(4 * count + 100, groups)
        for number in range(count):
            engine.send(f"warm{number}", own_prompt(number, 2), 1)
        engine.drain()
        forget_gpu_cache(engine)
        for number in range(count):
            engine.send(f"r{number}", own_prompt(number, 2), 1)
        instructions = count_step(engine)
        assert len(engine.connector.side.loads) == count
        return instructions

    assert exponent(work, 25) <= EXPONENT_MAX


@pytest.mark.parametrize(
    ("groups", "num_own"), [(("full",), 0), (("full",), 2), (("full", "window:10"), 0)], ids=str
)
def test_requests_that_wait_for_one_load_do_not_search_what_they_share(groups, num_own):
    """As many requests as their prefix has blocks, and some more of each on the host, too."""

    def work(count: int) -> int:
        engine = make_engine((4 + num_own) * count + 100, groups)
        prompts = [
            [*prompt_behind(count, number), *[3] * (num_own * BLOCK_TOKENS)]
            for number in range(count)
        ]
        for number, prompt in enumerate(prompts[: count if num_own else 1]):
            engine.send(f"warm{number}", prompt, 1)
        engine.drain()
        forget_gpu_cache(engine)
        for number, prompt in enumerate(prompts):
            engine.send(f"r{number}", prompt, 1)
        instructions = count_step(engine)
        assert engine.counts["shared_waits"] == count - 1
        return instructions

    assert exponent(work, 25) <= EXPONENT_MAX


# ---- pins --------------------------------------------------------------------------------------


def make_pinned(
    count: int, num_shared: int, monkeypatch: pytest.MonkeyPatch, now_s: Sequence[float] = (0.0,)
) -> PeerEngine:
    """An engine whose host has so many pins, of prompts that begin with the same blocks.

    `now_s`: what its clock shows.
    """
    monkeypatch.setattr("safe_offload.connector.monotonic", lambda: now_s[0])
    num_blocks = 4 * num_shared + 4 * count + 100
    engine = make_engine(num_blocks, extra={"pin_share": 0.9})
    for number in range(count):
        prompt = [*prompt_behind(num_shared, number), 3, 4, 5]
        engine.send(f"pin{number}", prompt, 1, kv_transfer_params={"pin_s": 600})
    engine.drain()
    pins = engine.connector.side.pins
    assert len(pins) == count
    assert num_shared + count <= pins.num_slots <= num_shared + 2 * count
    return engine


def test_pins_of_one_prefix_that_expire_together_touch_it_once(monkeypatch):
    def work(count: int) -> int:
        now_s = [0.0]
        engine = make_pinned(count, count, monkeypatch, now_s)
        now_s[0] = 700.0
        engine.send("next", [8, 9], 1)
        instructions = count_step(engine)
        assert engine.connector.side.pins.num_slots == 0
        return instructions

    assert exponent(work, 25) <= EXPONENT_MAX


def test_a_block_that_is_forgotten_is_not_looked_for_in_every_pin(monkeypatch):
    def work(count: int) -> int:
        engine = make_pinned(count, count, monkeypatch)
        side = engine.connector.side
        side.hits.slots.forget([next(iter(side.pins._counts))])
        engine.send("next", [8, 9], 1)
        num_slots = side.pins.num_slots
        instructions = count_step(engine)
        assert side.pins.num_slots == num_slots - 1
        return instructions

    assert exponent(work, 25) <= EXPONENT_MAX


def test_pins_of_one_prefix_hold_a_lease_of_it_together(monkeypatch):
    engine = make_pinned(40, 100, monkeypatch)
    leases = [lease for lease in engine.connector.side.leases if lease.kind.value == "pin"]
    assert sum(len(lease.slots) for lease in leases) == engine.connector.side.pins.num_slots


def test_pins_that_share_a_prefix_come_and_go_in_any_order(monkeypatch):
    """What is leased is what the pins that are left need; compared with a list of each."""
    engine = make_engine(2000, extra={"pin_share": 0.9})
    chance, side = random.Random(0), engine.connector.side
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
            side.pins.remove([key])
            pinned.pop(key, None)
        else:
            path = [slots[place] for place in paths[number]]
            assert side.pins.add(key, path, 600)
            pinned.setdefault(key, set()).update(path)
        if chance.random() < 0.02:
            lost = chance.choice(slots)
            side.hits.slots.forget([lost])
            side.pins.set_time(0)
            for held in pinned.values():
                held.discard(lost)
            paths = [p for p in paths if lost not in [slots[place] for place in p]]
        expected = set().union(*pinned.values())
        assert side.pins._counts.keys() == expected
        leased = {s for lease in side.leases if lease.kind is LeaseKind.PIN for s in lease.slots}
        assert leased == expected
        side.pins.check_invariants()
    side.pins.remove([*pinned])
    assert not side.pins._stretches
    assert not side.pins._first
