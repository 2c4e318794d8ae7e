"""Scenes whose next step shows how the time of hooks grows with one dimension of what there is.

Each makes an engine, vLLM's real scheduler with the scheduler side of ours and stand-ins for the
workers, that is about to make the step in question. What a scene says of its size is what doubles.
tests/scheduler/test_growth.py counts their instructions.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from vllm.lora.request import LoRARequest

from safe_offload.node import pools
from safe_offload.node.pools import open_rank
from safe_offload.node.table import Table
from safe_offload.protocol import (
    HostFacts,
    MemoryFacts,
    MemoryKind,
    PoolFacts,
    Presence,
    StepReport,
)
from safe_offload.scheduler.cache.leases import LeaseKind
from safe_offload.scheduler.features.pins.pins import PinnedPrompts
from tests.node.engines import hash_of, pools_in, wanted
from tests.scheduler.features import feature_of, tiers_of
from tests.simulator.groups import BLOCK_TOKENS
from tests.simulator.peers import PeerEngine, peer_shape
from tests.simulator.vllm_setup import OURS

HANGS = 10_000
"""Steps of a copy that does not end in the scene."""
PLAIN, WINDOWED = ("full",), ("full", "window:10")

Closing = ExitStack
Make = Callable[[int, Closing], PeerEngine]


@dataclass(frozen=True, slots=True)
class Scene:
    """`counted`: the smallest size at which instructions are counted."""

    name: str
    make: Make
    counted: int


SCENES: list[Scene] = []


def scene(name: str, *, counted: int = 25) -> Callable[[Make], Make]:
    """Put a function into the list of scenes."""

    def add(make: Make) -> Make:
        SCENES.append(Scene(name, make, counted))
        return make

    return add


def word(request_id: str, position: int) -> int:
    return (hash(request_id) + position * 7919) % 1000


def make_engine(num_blocks: int, groups: tuple[str, ...] = PLAIN, **shape: Any) -> PeerEngine:
    """An engine whose copies end at once, and whose host has room for all."""
    sizes = {"num_blocks": num_blocks * len(groups), "num_slots": 2 * num_blocks * len(groups)}
    limits = {"max_model_len": num_blocks * BLOCK_TOKENS, "max_batched_tokens": 8192}
    extra = {"min_load_tokens": 0, "max_inflight_bytes": "1GiB", **shape.pop("extra", {})}
    connector = shape.pop("connector", OURS)
    fields = {"groups": groups, "max_seqs": 256, **sizes, **limits, **shape, "extra": extra}
    engine = PeerEngine(peer_shape(connector, **fields), 0, word)
    engine.send("first", [1, 2], 1)  # the workers tell how many slots there are
    engine.drain()
    engine.step()
    return engine


def take_steps(engine: PeerEngine, copy_steps: int) -> None:
    """A copy takes so many steps from now on."""
    vars(engine.worker)["_copy_steps"] = copy_steps


def own_prompt(number: int, num_blocks: int) -> list[int]:
    """Prompts of which no two share a block; a token more than those."""
    return [number % 1000, number // 1000, *[3] * (num_blocks * BLOCK_TOKENS - 1)]


def prompt_behind(num_shared: int, number: int) -> list[int]:
    """Prompts that share some blocks and then differ, within a block."""
    return [*[7] * (num_shared * BLOCK_TOKENS), number % 1000, number // 1000]


def send(engine: PeerEngine, name: str, prompts: list[list[int]], **how: Any) -> None:
    """Send requests of one token; `how`: options of vLLM's `Request`."""
    for number, prompt in enumerate(prompts):
        engine.send(f"{name}{number}", prompt, 1, **how)


def on_host_only(engine: PeerEngine, prompts: list[list[int]], copy_steps: int = HANGS) -> None:
    """Serve prompts, so that only the host has them; a copy takes so many steps from now on."""
    send(engine, "warm", prompts)
    engine.drain(100_000)
    assert engine.scheduler.reset_prefix_cache()
    if engine.connector is None:
        return
    take_steps(engine, copy_steps)


# ---- loads -------------------------------------------------------------------------------------


def loading(count: int, groups: tuple[str, ...], copy_steps: int = HANGS) -> PeerEngine:
    engine = make_engine(4 * count + 100, groups)
    prompts = [own_prompt(number, 2) for number in range(count)]
    on_host_only(engine, prompts, copy_steps)
    send(engine, "r", prompts)
    return engine


@scene("waiting requests, each with a hit of its own")
def _own_hits(count: int, _: Closing) -> PeerEngine:
    return loading(count, PLAIN)


@scene("the same with windows")
def _own_hits_of_windows(count: int, _: Closing) -> PeerEngine:
    return loading(count, WINDOWED)


@scene("loads that land in one step")
def _landing(count: int, _: Closing) -> PeerEngine:
    engine = loading(count, PLAIN, copy_steps=1)
    engine.step()
    assert len(engine.connector.side.loads) == count
    return engine


def echo_failures(engine: PeerEngine) -> None:
    """From now on the workers report the requests whose loads failed, as real ones do."""
    step, failed = engine.worker.step, set[str]()

    def step_with(plan: Any) -> Any:
        failed.clear()
        failed.update(plan.failures)
        received, report = step(replace(plan, failures=()))
        return {*received, *failed}, report

    engine.worker.step = step_with  # type: ignore[method-assign]
    engine.mutate_output.append(lambda output: output.failed_recving.update(failed))


@scene("loads that a reset has failed, whose requests go on")
def _failed(count: int, _: Closing) -> PeerEngine:
    engine = loading(count, PLAIN, copy_steps=1)
    engine.scheduler.max_num_running_reqs = 1
    echo_failures(engine)
    engine.step()
    engine.connector.reset_cache()
    for _step in range(3):
        engine.step()
    engine.scheduler.max_num_running_reqs = count
    return engine


@scene("loads under way whose requests were aborted")
def _aborted(count: int, _: Closing) -> PeerEngine:
    from vllm.v1.request import RequestStatus

    engine = loading(count, PLAIN)
    engine.step()
    names = [f"r{number}" for number in range(count)]
    engine.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    return engine


def hash_once(engine: PeerEngine, prompt: list[int], num_blocks: int) -> None:
    """From now on no request hashes the first blocks again, which are those of this prompt."""
    shared, hash_blocks = engine.make_request(prompt).block_hashes[:num_blocks], engine._hasher

    def hash_rest(request: Any) -> list[Any]:
        if request.block_hashes or request.prompt_token_ids[:3] != prompt[:3]:
            return list(hash_blocks(request))
        request.block_hashes.extend(shared)
        found = hash_blocks(request)
        request.block_hashes.clear()
        return [*shared, *found]

    engine._hasher = hash_rest


def burst(
    count: int,
    groups: tuple[str, ...] = PLAIN,
    num_own: int = 0,
    copy_steps: int = HANGS,
    **shape: Any,
) -> PeerEngine:
    """As many requests as the prefix has blocks that they share, and only the host has."""
    engine = make_engine((4 + num_own) * count + 100, groups, **shape)
    tail = [3] * (num_own * BLOCK_TOKENS)
    hash_once(engine, prompt_behind(count, 0), count)
    prompts = [[*prompt_behind(count, number), *tail] for number in range(count)]
    on_host_only(engine, prompts if num_own else prompts[:1], copy_steps)
    send(engine, "r", prompts)
    return engine


@scene("waiting requests behind one prefix of as many blocks")
def _burst(count: int, _: Closing) -> PeerEngine:
    return burst(count, PLAIN)


@scene("the same, each with two blocks of its own on the host")
def _burst_with_own(count: int, _: Closing) -> PeerEngine:
    return burst(count, PLAIN, num_own=2)


@scene("the same with windows, without those")
def _burst_of_windows(count: int, _: Closing) -> PeerEngine:
    return burst(count, WINDOWED)


@scene("the same, plain, with EAGLE drafts")
def _burst_of_drafts(count: int, _: Closing) -> PeerEngine:
    return burst(count, is_eagle=True)


@scene("the same with windows and EAGLE drafts")
def _burst_of_windows_and_drafts(count: int, _: Closing) -> PeerEngine:
    return burst(count, WINDOWED, is_eagle=True)


@scene("the step after that: all wait for one load")
def _waiting_for_one(count: int, _: Closing) -> PeerEngine:
    engine = burst(count, PLAIN)
    engine.step()
    return engine


@scene("blocks of one hit")
def _prefix(count: int, _: Closing) -> PeerEngine:
    engine = make_engine(2 * count + 100)
    on_host_only(engine, [own_prompt(0, count)])
    send(engine, "r", [own_prompt(0, count)])
    return engine


@scene("prompts that part from a longer one, which ends (hit ends)", counted=50)
def _hit_ends(count: int, _: Closing) -> PeerEngine:
    engine = make_engine(4 * count + 400, WINDOWED, retention_interval=0, max_seqs=4 * count)
    long = [number % 997 for number in range(count * BLOCK_TOKENS)]
    engine.send("long", long, 2)
    engine.step()
    for number in range(count):
        engine.send(f"r{number}", [*long[: number * BLOCK_TOKENS], 998, 998], 1)
    state = engine.connector.side.book.get("long")
    assert state.hit_ends
    engine.scheduler.max_num_scheduled_tokens = 1  # of all only the long one runs, and ends
    return engine


# ---- stores ------------------------------------------------------------------------------------


@scene("running requests that compute an answer")
def _running(count: int, _: Closing) -> PeerEngine:
    engine = make_engine(4 * count + 100, max_seqs=count, max_batched_tokens=64 * count)
    for number in range(count):
        engine.send(f"r{number}", own_prompt(number, 1), 20)
    engine.step()
    engine.step()
    return engine


def running(count: int, **shape: Any) -> PeerEngine:
    """So many requests that have filled a block of their answer."""
    limits: dict[str, Any] = {"max_seqs": count, "max_batched_tokens": 64 * count}
    engine = make_engine(8 * count + 100, **limits, **shape)
    for number in range(count):
        engine.send(f"r{number}", own_prompt(number, 1), 20)
    for _step in range(6):
        engine.step()
    return engine


class AbortsIn(PeerEngine):
    """An engine whose next step begins with the end of all requests."""

    def step(self) -> list[str]:
        from vllm.v1.request import RequestStatus

        names = list(self.scheduler.requests)
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        return super().step()


@scene("running requests that all end at once")
def _ending(count: int, _: Closing) -> PeerEngine:
    engine = running(count)
    engine.__class__ = AbortsIn
    return engine


@scene("the same after a reset")
def _ending_after_reset(count: int, _: Closing) -> PeerEngine:
    engine = running(count)
    engine.connector.reset_cache()
    engine.step()
    engine.__class__ = AbortsIn
    return engine


@scene("the same with KV events")
def _ending_with_events(count: int, _: Closing) -> PeerEngine:
    engine = running(count, has_events=True)
    engine.__class__ = AbortsIn
    return engine


@scene("requests that wait while one ends, with KV events")
def _queue_with_events(count: int, _: Closing) -> PeerEngine:
    engine = make_engine(8 * count + 100, max_seqs=1, has_events=True)
    engine.send("runs", own_prompt(0, 1), 6)
    for number in range(1, count):
        engine.send(f"r{number}", own_prompt(number, 4), 1)
    for _step in range(5):
        engine.step()
    return engine


@scene("requests of one prefix of as many blocks of which one runs, with KV events")
def _burst_with_events(count: int, _: Closing) -> PeerEngine:
    engine = make_engine(8 * count + 100, max_seqs=1, has_events=True)
    hash_once(engine, prompt_behind(count, 0), count)
    send(engine, "r", [prompt_behind(count, number) for number in range(count)])
    return engine


@scene("running requests that are all preempted")
def _preempted(count: int, _: Closing) -> PeerEngine:
    engine = running(count)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    return engine


@scene("KV cache groups", counted=2)
def _groups(count: int, _: Closing) -> PeerEngine:
    windows = [f"window:{10 + number}" for number in range(count - 1)]
    return loading(64, ("full", *windows))


@scene("blocks computed in one step")
def _computed(count: int, _: Closing) -> PeerEngine:
    engine = make_engine(2 * count + 100, max_batched_tokens=count * BLOCK_TOKENS + 100)
    engine.send("r", own_prompt(0, count), 2)
    return engine


@scene("blocks of running requests for which the host has no room")
def _left_over(count: int, _: Closing) -> PeerEngine:
    num_tokens = count * BLOCK_TOKENS + 100
    engine = make_engine(2 * count + 100, max_batched_tokens=num_tokens, num_slots=20)
    engine.send("r", own_prompt(0, count), 20)
    for _step in range(3):
        engine.step()
    return engine


@scene("requests that wait for one that runs")
def _queue(count: int, _: Closing) -> PeerEngine:
    engine = make_engine(4 * count + 100, max_seqs=1, extra={"pin_share": 0.5})
    engine.send("runs", own_prompt(0, 1), 50)
    for number in range(1, count):
        params = {"pin_s": 60}
        engine.send(f"r{number}", own_prompt(number, 1), 1, kv_transfer_params=params)
    engine.step()
    engine.step()
    return engine


# ---- what waits ---------------------------------------------------------------------------------


def behind_one(count: int, engine: PeerEngine, **how: Any) -> PeerEngine:
    """So many requests wait while one takes the blocks of another, whose store is in flight."""
    engine.send("ended", own_prompt(0, 14), 1)
    take_steps(engine, HANGS)
    engine.step()
    engine.send("next", own_prompt(1, 14), 9)
    send(engine, "r", [own_prompt(number, 2) for number in range(2, count)], **how)
    return engine


@scene("requests that wait, one with parameters, while a store is fenced", counted=100)
def _queue_at_a_fence(count: int, _: Closing) -> PeerEngine:
    engine = make_engine(20, max_seqs=1)
    engine.send("asks", [1, 2, 3], 1, kv_transfer_params={"max_load_tokens": 9})
    engine.step()
    engine.step()
    return behind_one(count, engine)


@scene("requests that wait, all with parameters, while a store is fenced", counted=100)
def _parameters_at_a_fence(count: int, _: Closing) -> PeerEngine:
    engine = make_engine(20, max_seqs=1)
    return behind_one(count, engine, kv_transfer_params={"max_load_tokens": 9})


@scene("requests that wait and leave nothing, with lazy stores", counted=100)
def _queue_that_leaves_nothing(count: int, _: Closing) -> PeerEngine:
    engine = make_engine(20, max_seqs=1, extra={"lazy_offload": True})
    return behind_one(count, engine, kv_transfer_params={"store": "nothing"})


@scene("requests that wait with an adapter, with a tier", counted=100)
def _queue_with_an_adapter(count: int, closing: Closing) -> PeerEngine:
    engine = with_tier(20, closing, num_slots=40, max_seqs=1)
    behind_one(count, engine, lora_request=LoRARequest("a", 1, "/adapters/a"))
    engine.step()
    return engine


@scene("requests that have ended, and whose loads go on", counted=100)
def _ended_loads(count: int, _: Closing) -> PeerEngine:
    engine = loading(count, PLAIN)
    engine.step()
    engine.__class__ = AbortsIn
    engine.step()
    engine.__class__ = PeerEngine
    engine.step()
    assert len(engine.connector.side.book.finished) == count
    return engine


WAITING = (
    "requests that wait while one ends, with KV events",
    *(scene.name for scene in SCENES[-5:]),
)
"""Scenes of which a step costs the same, whatever waits."""


# ---- pins and hints ----------------------------------------------------------------------------


def pinned(count: int, closing: Closing, **extra: Any) -> tuple[PeerEngine, mock.Mock]:
    """So many pins of prompts that begin with as many blocks; also the clock, which stands."""
    clock = closing.enter_context(mock.patch("safe_offload.connector.monotonic", return_value=0.0))
    engine = make_engine(8 * count + 100, extra={"pin_share": 0.9, **extra})
    prompts = [[*prompt_behind(count, number), 3, 4, 5] for number in range(count)]
    send(engine, "pin", prompts, kv_transfer_params={"pin_s": 600})
    engine.drain(100_000)
    pins = feature_of(engine.connector.side, PinnedPrompts).pins
    assert len(pins) == count
    assert count < pins.num_slots <= 3 * count
    return engine, clock


@scene("pins of one prefix of as many blocks that expire")
def _expiring(count: int, closing: Closing) -> PeerEngine:
    engine, clock = pinned(count, closing)
    clock.return_value = 700.0
    engine.send("next", [8, 9], 1)
    return engine


@scene("such pins, and a block is forgotten")
def _forgotten(count: int, closing: Closing) -> PeerEngine:
    engine, _ = pinned(count, closing)
    side = engine.connector.side
    leases = (lease for lease in side.leases if lease.kind is LeaseKind.PIN)
    side.hits.slots.forget(next(leases).slots[:1])
    engine.send("next", [8, 9], 1)
    return engine


@scene("such pins, and all is guaranteed to another tenant")
def _overpinned(count: int, closing: Closing) -> PeerEngine:
    engine, _ = pinned(count, closing, tenants=tenants_file(closing, [["other"]], "1%"))
    side = engine.connector.side
    closing.callback(side.shutdown)
    side.hits.slots.quotas.policy.guaranteed[1] = side.hits.slots.num_usable
    engine.send("next", [8, 9], 1)
    return engine


# ---- tenants -----------------------------------------------------------------------------------


def tenants_file(closing: Closing, prefixes: list[list[str]], share: str = "") -> str:
    """A file of tenants that have these prefixes of salts."""
    folder = closing.enter_context(tempfile.TemporaryDirectory())
    share = share or f"{90 // len(prefixes)}%"
    entries = {f"t{n}": {"share": share, "prefix": own} for n, own in enumerate(prefixes)}
    file = Path(folder) / "tenants.json"
    file.write_text(json.dumps({"default": "0%", "guaranteed": entries}))
    return str(file)


def of_tenants(count: int, salts: list[str], closing: Closing, file: str) -> PeerEngine:
    """So many requests, each with a salt, that fill a host that is full."""
    limits: dict[str, Any] = {"max_batched_tokens": 64 * count, "num_slots": 2 * count}
    engine = make_engine(8 * count + 100, PLAIN, extra={"tenants": file}, **limits)
    closing.callback(engine.connector.side.shutdown)
    for turn in range(3):
        for number in range(count):
            prompt = own_prompt(turn * count + number, 2)
            engine.send(f"r{turn}.{number}", prompt, 1, cache_salt=salts[number % len(salts)])
        if turn < 2:
            engine.drain()
    return engine


@scene("tenants of 128 requests", counted=4)
def _tenants(count: int, closing: Closing) -> PeerEngine:
    salts = [f"s{n:02}" for n in range(count)]
    return of_tenants(128, salts, closing, tenants_file(closing, [[s] for s in salts]))


@scene("salts, named one by one, and as many requests")
def _salts(count: int, closing: Closing) -> PeerEngine:
    salts = [f"salt{n:05}" for n in range(count)]
    return of_tenants(count, salts, closing, tenants_file(closing, [salts]))


# ---- tiers -------------------------------------------------------------------------------------


def with_tier(
    num_blocks: int, closing: Closing, num_slots: int, max_seqs: int = 256, **options: Any
) -> PeerEngine:
    """An engine with a tier that takes all and never answers what it has."""
    folder = closing.enter_context(tempfile.TemporaryDirectory())
    tier = {"url": f"file://{folder}", "wait_s": 1e-6, **options}
    extra = {"tiers": [tier]}
    engine = make_engine(num_blocks, extra=extra, num_slots=num_slots, max_seqs=max_seqs)
    closing.callback(engine.connector.side.shutdown)
    return engine


@scene("blocks that wait to be spilled")
def _spills(count: int, closing: Closing) -> PeerEngine:
    engine = with_tier(2 * count + 100, closing, num_slots=count + 100)
    engine.send("r", own_prompt(0, count), 200)
    side = engine.connector.side
    queue, held = tiers_of(side).spills._queue, side.hits.directory
    while held.num_held < count:
        engine.step()
    engine.step()
    assert len(queue) > count // 4
    return engine


@scene("slots that are looked at before they are evicted", counted=100)
def _evicted(count: int, closing: Closing) -> PeerEngine:
    engine = with_tier(count, closing, num_slots=count, store="evicted")
    for number in range(2):
        engine.send(f"r{number}", own_prompt(number, 9 * count // 10), 1)
        engine.drain(100_000)
    engine.send("next", own_prompt(9, 2), 2)
    engine.step()
    return engine


@scene("requests that wait for a tier")
def _lookups(count: int, closing: Closing) -> PeerEngine:
    engine = with_tier(4 * count + 100, closing, num_slots=8 * count, wait_s=600)
    send(engine, "r", [own_prompt(number, 2) for number in range(count)])
    engine.step()
    return engine


def tier_that_has_all(engine: PeerEngine) -> None:
    """From now on tiers answer that they have what they are asked for; what they bring is late."""
    step = engine.worker.step

    def step_with(plan: Any) -> Any:
        received, report = step(plan)
        found = (Presence(0, probe.probe_id, b"\1" * len(probe.keys)) for probe in plan.probes)
        return received, replace(report or StepReport(()), presences=tuple(found))

    engine.worker.step = step_with  # type: ignore[method-assign]


def from_tier(count: int, closing: Closing, prompts: list[list[int]]) -> PeerEngine:
    engine = with_tier(8 * count + 100, closing, num_slots=32 * count, wait_s=600)
    hash_once(engine, prompts[0], len(prompts[0]) // BLOCK_TOKENS)
    tier_that_has_all(engine)
    send(engine, "r", prompts)
    engine.step()
    return engine


@scene("waiting requests of which a tier has told what it has")
def _from_tier(count: int, closing: Closing) -> PeerEngine:
    return from_tier(count, closing, [own_prompt(number, 2) for number in range(count)])


@scene("the same behind one prefix of as many blocks, in a tier", counted=50)
def _burst_from_tier(count: int, closing: Closing) -> PeerEngine:
    prompts = [prompt_behind(count, number) for number in range(count)]
    return from_tier(count, closing, prompts)


@scene("the step after that: all wait for what a tier brings")
def _waiting_for_tier(count: int, closing: Closing) -> PeerEngine:
    engine = _burst_from_tier(count, closing)
    while tiers_of(engine.connector.side).lookups.wanting:
        engine.step()
    return engine


@scene("blocks of prompts that each go on with the one before, and a tier answers", counted=50)
def _nested_from_tier(count: int, closing: Closing) -> PeerEngine:
    engine = with_tier(8 * count + 100, closing, num_slots=32 * count, wait_s=600)
    tier_that_has_all(engine)
    last = math.isqrt(2 * count)
    send(engine, "r", [prompt_behind(number, 0) for number in range(1, last + 1)])
    return engine


# ---- resets ------------------------------------------------------------------------------------


class ResetsIn(PeerEngine):
    """An engine whose next step begins with a reset."""

    def step(self) -> list[str]:
        self.connector.reset_cache()
        return super().step()


@scene("blocks and running requests at a reset")
def _reset(count: int, _: Closing) -> PeerEngine:
    engine = make_engine(12 * count + 100, max_seqs=count, max_batched_tokens=128 * count)
    on_host_only(engine, [own_prompt(number, 4) for number in range(count)], 0)
    for number in range(count):
        engine.send(f"r{number}", own_prompt(number, 4), 20)
    for _step in range(3):
        engine.step()
    engine.__class__ = ResetsIn
    return engine


# ---- a pool that several engines share ---------------------------------------------------------


@contextmanager
def neighbours(num_slots: int, num_engines: int) -> Iterator[tuple[Table, PoolFacts]]:
    """A pool with other engines; the first has all free lots. Also where one more would join."""
    with tempfile.TemporaryDirectory() as folder, pools_in(Path(folder)), ExitStack() as closing:
        tables = []
        for _engine in range(num_engines):
            file = open_rank(wanted(num_slots))
            closing.callback(file.locks.close)
            table = Table(str(pools.user_folder() / "pool" / pools.TABLE))
            closing.callback(table.close)
            table.join([file.token])
            tables.append(table)
        for lot in tables[0].free_lots(num_slots):
            tables[0].claim(lot)
        file = open_rank(wanted(num_slots))
        closing.callback(file.locks.close)
        place = str(pools.user_folder() / "pool"), file.pool_id
        yield tables[0], PoolFacts(place, file.token)


def in_pool(
    num_slots: int,
    num_engines: int,
    num_blocks: int,
    closing: Closing,
    prompt: Sequence[int] = (),
) -> PeerEngine:
    """An engine that has joined a pool, where its neighbour publishes all slots just now.

    `prompt`: what those hold begins with.
    """
    table, pool = closing.enter_context(neighbours(num_slots, num_engines))
    shape = {"num_slots": num_slots, "extra": {"share": "node", "min_load_tokens": 0}}
    limits = {"max_model_len": 4 * num_blocks, "max_batched_tokens": 8192, "max_seqs": 256}
    made = peer_shape(OURS, num_blocks=num_blocks, **limits, **shape)
    engine = PeerEngine(made, 0, word)
    closing.callback(engine.connector.shutdown)
    facts = HostFacts(0, MemoryFacts(MemoryKind.PAGEABLE, ""), ("x",), pool=pool)
    step = engine.worker.step

    def step_with(plan: Any) -> Any:
        received, report = step(plan)
        if report is not None and report.capacities:
            report = StepReport(report.outcomes, report.capacities, host_facts=(facts,))
        return received, report

    engine.worker.step = step_with  # type: ignore[method-assign]
    engine.send("first", [1, 2], 1)
    engine.drain()
    assert engine.connector.side.hits.slots.source is not None
    slots = np.flatnonzero(np.repeat(table.owners == 1, table.lot_slots)[:num_slots])
    first = engine.make_request(prompt).block_hashes
    hashes = [*first, *(hash_of(1, place) for place in range(len(slots) - len(first)))]
    table.publish(slots, [0] * len(slots), hashes, [0] * len(slots))
    return engine


def pool_asked(num_slots: int, num_engines: int, count: int, closing: Closing) -> PeerEngine:
    engine = in_pool(num_slots, num_engines, 4 * count + 500, closing)
    send(engine, "r", [own_prompt(number, 2) for number in range(count)])
    return engine


@scene("requests beside a large pool that is full of news")
def _backlog(count: int, closing: Closing) -> PeerEngine:
    return pool_asked(40 * count, 1, count, closing)


@scene("engines of a pool", counted=3)
def _engines(count: int, closing: Closing) -> PeerEngine:
    return pool_asked(4096, count, 32, closing)
