"""KV events: what each of them says, and that nothing is told which is not so.

That replaying them gives what the directory holds, whatever happens, is the simulator's to check
(I12). Here they are compared with those of vLLM's own connector, on vLLM's real scheduler.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from safe_offload.scheduler.cache.events import make_events
from safe_offload.scheduler.requests import RequestState
from tests.scheduler.rig import MakeRig, Rig, see_events
from tests.simulator.engine_core import random_prompt
from tests.simulator.peers import SIMPLE, PeerEngine, peer_shape
from tests.simulator.vllm_setup import OURS

Record = dict[str, Any]
Records = dict[tuple[type[Any], int | None, Any], Record]
"""What was told of a block: by the kind of event, the KV cache group and the hash."""

OF_SEVERAL_BLOCKS = {"block_hashes", "parent_block_hash", "token_ids", "extra_keys"}
"""Fields of an event that are different for each of its blocks."""


def by_block(events: Iterable[Any]) -> Records:
    """Every field of vLLM's events, for each block that they name."""
    told: Records = {}
    for event in events:
        fields = {f: getattr(event, f) for f in event.__struct_fields__}
        common = {f: value for f, value in fields.items() if f not in OF_SEVERAL_BLOCKS}
        parent = fields.get("parent_block_hash")
        for index, block_hash in enumerate(event.block_hashes):
            record = dict(common)
            if isinstance(event, BlockStored):
                size = event.block_size
                record["parent"] = parent
                record["tokens"] = event.token_ids[index * size : (index + 1) * size]
                record["extra_keys"] = event.extra_keys[index] if event.extra_keys else None
                parent = block_hash
            told[type(event), event.group_idx, block_hash] = record
    return told


def ways_to_ask() -> list[dict[str, Any]]:
    """Options of requests that vLLM keeps apart in its caches."""
    from vllm.lora.request import LoRARequest

    first, second = (LoRARequest(f"adapter-{n}", n, f"/adapters/{n}") for n in (1, 2))
    salt = {"cache_salt": "a secret"}
    return [{}, salt, {"lora_request": first}, {"lora_request": second, **salt}]


def told_by(connector: str, *, num_slots: int = 500, **shape: Any) -> Records:
    """What a connector tells of a few prompts: salted, of adapters, one twice, one that goes on."""
    engine = PeerEngine(
        peer_shape(connector, num_slots=num_slots, num_blocks=200, has_events=True, **shape),
        tokens=lambda name, position: len(name) + position,
    )
    seen = see_events(engine)
    prompt = random_prompt(70, 1)
    for index, how in enumerate(ways_to_ask()):
        for name, tokens in (
            (f"first-{index}", prompt),
            (f"again-{index}", prompt),
            (f"longer-{index}", [*prompt[:60], *random_prompt(30, index)]),
        ):
            engine.send(name, tokens, 6, **how)
            engine.drain()
    return by_block(seen)


# ---- compared with vLLM's own connector --------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="full attention"),
        pytest.param({"groups": ("full@16",)}, id="large blocks"),
        pytest.param({"groups": ("mla",)}, id="MLA"),
        pytest.param({"groups": ("full", "window:10")}, id="window"),
        pytest.param({"groups": ("full", "window:10@8")}, id="two sizes of blocks"),
        pytest.param({"groups": ("full", "chunk:16")}, id="chunks"),
    ],
)
def test_every_field_is_what_vllms_own_connector_tells(shape):
    """For each block that both of them have stored; of full attention these are all blocks."""
    ours, theirs = told_by(OURS, **shape), told_by(SIMPLE, **shape)
    both = ours.keys() & theirs.keys()
    assert {key: ours[key] for key in both} == {key: theirs[key] for key in both}
    for group_idx in range(len(shape.get("groups", ("full",)))):
        assert any(key[1] == group_idx for key in both)
    of_full_attention = {key for key in ours.keys() | theirs.keys() if key[1] == 0}
    assert of_full_attention <= both
    assert len({record["lora_name"] for record in ours.values()}) == 3
    assert any(record["extra_keys"] for record in ours.values())
    assert all(record["tokens"] for record in ours.values())


def test_what_is_evicted_is_told_as_vllms_own_connector_tells_it():
    ours, theirs = told_by(OURS, num_slots=30), told_by(SIMPLE, num_slots=30)
    gone, theirs_gone = (
        {key: record for key, record in told.items() if key[0] is BlockRemoved}
        for told in (ours, theirs)
    )
    both = gone.keys() & theirs_gone.keys()
    assert both
    assert {key: gone[key] for key in both} == {key: theirs_gone[key] for key in both}


def test_extra_keys_of_images_are_those_of_vllms_own_events(make_rig):
    """What vLLM's block pool publishes when it caches the same blocks of the same request."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.core.block_pool import BlockPool

    rig = make_rig(has_events=True)
    features = [
        MultiModalFeatureSpec(None, "image", f"image-{offset}", PlaceholderRange(offset, 6))
        for offset in (3, 17)
    ]
    rig.scheduler.add_request = lambda request: None
    request = rig.send("a", rig.prompt(28, 1), 1, mm_features=features, cache_salt="salt")
    pool = BlockPool(8, True, hash_block_size=4, enable_kv_cache_events=True)
    pool.cache_full_blocks(request, pool.get_new_blocks(7), 0, 7, 4, 0)
    (theirs,) = pool.take_events()

    events, directory = rig.planner.hits.directory.events, rig.planner.hits.directory
    state = RequestState(request)
    events.seen(state)
    events.learn(state)
    directory.begin_store(list(range(7)), 0, request.block_hashes, {})
    directory.publish(list(range(7)))
    (ours,) = rig.connector.take_events()
    for name in ("block_hashes", "parent_block_hash", "token_ids", "block_size", "extra_keys"):
        assert getattr(ours, name) == getattr(theirs, name), name


# ---- when -------------------------------------------------------------------------------------


def hashes(events: Sequence[Any], kind: type[Any]) -> list[Any]:
    return [h for event in events if isinstance(event, kind) for h in event.block_hashes]


def filled(make_rig: MakeRig, **shape: Any) -> tuple[Rig, list[Any]]:
    """An engine that has told of the five blocks of a prompt, and what it tells from then on."""
    rig = make_rig(has_events=True, **shape)
    rig.start()
    seen = see_events(rig)
    rig.run_alone("first", rig.prompt(20, 1), max_tokens=1)
    assert len(hashes(seen, BlockStored)) == 5
    assert not hashes(seen, BlockRemoved)
    return rig, seen


def test_an_idle_engine_tells_of_a_reset_at_once_and_only_of_the_host(make_rig):
    """vLLM takes events in a step, so it has to make one."""
    rig, seen = filled(make_rig)
    assert not rig.has_work
    told: list[Any] = []
    publish = rig.scheduler.kv_event_publisher.publish
    rig.scheduler.kv_event_publisher.publish = lambda batch: (publish(batch), told.append(batch))
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert rig.has_work
    rig.drain()
    (batch,) = told
    assert set(hashes(batch.events, BlockRemoved)) == set(hashes(seen, BlockStored))
    # The one of vLLM's own pool of GPU blocks, ahead of ours.
    assert [type(event) for event in batch.events] == [AllBlocksCleared, BlockRemoved]


def test_vllms_own_events_have_the_tokens_of_what_is_to_leave_nothing(make_rig):
    """What the pages say. If vLLM learns to leave them out: use that, and change the pages."""
    rig = make_rig(has_events=True)
    told: list[Any] = []
    publish = rig.scheduler.kv_event_publisher.publish
    rig.scheduler.kv_event_publisher.publish = lambda batch: (
        publish(batch),
        told.extend(batch.events),
    )
    secret = rig.prompt(20, 1)
    rig.run_alone("secret", secret, max_tokens=1, kv_transfer_params={"store": "nothing"})
    stored = [event for event in told if isinstance(event, BlockStored)]
    assert {event.medium for event in stored} == {"GPU"}
    assert [token for event in stored for token in event.token_ids] == secret


@pytest.mark.parametrize(("publisher", "is_told"), [("zmq", True), ("null", False)])
def test_that_vllms_own_events_have_all_tokens_is_said_at_the_start(
    make_rig, caplog, publisher, is_told
):
    scheduler = make_rig(has_events=True).scheduler
    config = scheduler.vllm_config
    config.kv_events_config = replace(
        config.kv_events_config, publisher=publisher, endpoint="tcp://*:7557"
    )
    caplog.clear()
    make_events(config, scheduler.kv_cache_config, is_lazy=False)
    assert ('"store": "nothing"' in caplog.text) == is_told
    assert ("tcp://*:7557" in caplog.text) == is_told


def test_without_kv_events_nothing_is_made(make_rig):
    rig = make_rig()
    rig.run_alone("first", rig.prompt(20, 1), max_tokens=1)
    assert rig.planner.hits.directory.events is None
    assert rig.connector.take_events() == ()
