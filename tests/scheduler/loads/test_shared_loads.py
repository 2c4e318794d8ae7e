"""Requests that want the same blocks: one of them loads, the others wait for it, and not long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from safe_offload.observe.counters import Counters
from safe_offload.scheduler.loads import boundaries, shared_loads
from safe_offload.scheduler.loads.shared_loads import WAIT_MAX_S, SharedLoads, Wait
from safe_offload.scheduler.pending import Load
from tests.counts import num_failed
from tests.scheduler.rig import MakeRig, Rig, times_of_waiting
from tests.simulator.groups import BLOCK_TOKENS

NUM_BLOCKS_SHARED = 10
PREFIX_TOKENS = NUM_BLOCKS_SHARED * BLOCK_TOKENS
WIDE = {"max_seqs": 16, "max_batched_tokens": 512, "num_slots": 200}
HYBRID = ("window:10", "full")
NUM_OTHERS = 7


def make_shared(make_rig: MakeRig, **shape: Any) -> Rig:
    """An engine whose host, and whose GPU not, has the prefix that `ask` begins with."""
    rig = make_rig(**{"num_blocks": 60, **WIDE, **shape})
    rig.start()
    is_lazy = rig.planner.options.is_lazy
    rig.run_alone("warm", prompt(rig, 0), max_tokens=1)
    if is_lazy:
        rig.fill_gpu_cache("filler", seed=77)
    rig.forget_gpu_cache()
    rig.counts.clear()
    return rig


def prompt(rig: Rig, number: int) -> list[int]:
    """The shared prefix and a tail that no other has."""
    return [*rig.prompt(PREFIX_TOKENS, 1), *rig.prompt(3, 100 + number)]


def send(rig: Rig, count: int, max_tokens: int = 4, first: int = 1) -> list[str]:
    """Send requests that begin alike; returns their ids."""
    names = [f"r{number}" for number in range(first, first + count)]
    for number, name in enumerate(names, first):
        rig.add(name, prompt(rig, number), max_tokens)
    return names


def finish(rig: Rig, names: list[str], max_tokens: int = 4) -> None:
    """Let all end, and compare every answer."""
    rig.drain()
    for name in names:
        rig.check_tokens(name, max_tokens)
    rig.check_idle()


def status(rig: Rig, name: str) -> str:
    return str(rig.scheduler.requests[name].status.name)


# ---- one load for all --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tensor_ranks": 2, "is_async": True, "has_streams": True, "is_v2": True},
        {"pipeline_ranks": 2},
        {"extra": {"lazy_offload": True}, "max_batched_tokens": 64},
        {"num_draft_tokens": 2},
        {"groups": ("mla",)},
        {"is_priority": True},
    ],
    ids=str,
)
def test_a_prefix_that_eight_want_is_loaded_once(make_rig, shape):
    rig = make_shared(make_rig, **shape)
    names = send(rig, 1 + NUM_OTHERS)
    finish(rig, names)
    assert rig.counts["loaded_blocks"] == NUM_BLOCKS_SHARED
    assert rig.counts["shared_waits"] == NUM_OTHERS
    assert rig.counts["shared_waits_cut"] == 0


SPARSE = [HYBRID, ("full", "mamba"), ("window:10", "full", "mamba@8")]


def make_sparse(make_rig: MakeRig, groups: tuple[str, ...] = HYBRID, **shape: Any) -> Rig:
    """An engine that keeps of windows and states what vLLM keeps by default."""
    rig = make_rig(groups=groups, num_blocks=150, retention_interval=0, **{**WIDE, **shape})
    rig.start()
    return rig


def make_warm(make_rig: MakeRig, **shape: Any) -> Rig:
    """A sparse engine whose host, and whose GPU not, has the prefix of `parting`."""
    rig = make_sparse(make_rig, **shape)
    rig.run_alone("warm", rig.prompt(PREFIX_TOKENS + 1, 1), max_tokens=1)
    rig.forget_gpu_cache()
    rig.counts.clear()
    return rig


def parting(rig: Rig, number: int, num_blocks: int = NUM_BLOCKS_SHARED) -> list[int]:
    """A prompt that shares some blocks with all others, and has two more of its own."""
    shared = rig.prompt(num_blocks * BLOCK_TOKENS, 1)
    return [*shared, *rig.prompt(2 * BLOCK_TOKENS + 1, 100 + number)]


def serve_alone(rig: Rig, number: int, num_blocks: int = NUM_BLOCKS_SHARED) -> int:
    """Serve one of them, and let the GPU forget it; returns how many tokens the host brought."""
    num_tokens = rig.run_alone(f"alone{number}", parting(rig, number, num_blocks))
    rig.forget_gpu_cache()
    return num_tokens


def send_parting(rig: Rig, count: int) -> list[str]:
    names = [f"r{number}" for number in range(count)]
    for number, name in enumerate(names):
        rig.add(name, parting(rig, 10 + number))
    return names


def test_sparse_windows_are_not_waited_for_where_vllm_cannot_keep_them(make_rig, monkeypatch):
    monkeypatch.setattr(boundaries, "keep_boundary", lambda request, num_tokens: False)
    rig = make_warm(make_rig)
    finish(rig, send_parting(rig, 2))
    assert rig.counts["shared_waits"] == 0
    assert rig.counts["hit_tokens"] == 2 * PREFIX_TOKENS, "each has loaded its own"


# ---- where prompts part ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3], ids=["alone", "with others that wait"])
def test_prompts_that_part_again_behind_a_hit_share_both_parts(make_rig, count):
    rig = make_warm(make_rig)
    num_more = NUM_BLOCKS_SHARED + 5
    assert serve_alone(rig, 0, num_more) == PREFIX_TOKENS
    before = rig.counts["hit_tokens"]
    names = [f"r{number}" for number in range(count)]
    for number, name in enumerate(names):
        rig.add(name, parting(rig, 10 + number, num_more))
    finish(rig, names)
    rig.forget_gpu_cache()
    assert rig.counts["hit_tokens"] - before == PREFIX_TOKENS, "one has loaded, once"
    assert serve_alone(rig, 1, num_more) == num_more * BLOCK_TOKENS
    assert serve_alone(rig, 2) == PREFIX_TOKENS


@pytest.mark.parametrize("first", ["shorter", "longer"])
def test_a_longer_load_is_waited_for_and_what_is_left_of_one_is_loaded_afterwards(make_rig, first):
    rig = make_shared(make_rig)
    longer = [*rig.prompt(PREFIX_TOKENS, 1), *rig.prompt(3 * BLOCK_TOKENS + 1, 5)]
    rig.run_alone("warm-longer", longer, max_tokens=1)
    rig.forget_gpu_cache()
    rig.counts.clear()
    for name in ("longer", "shorter") if first == "longer" else ("shorter", "longer"):
        rig.add(name, longer if name == "longer" else prompt(rig, 1))
    finish(rig, ["shorter", "longer"])
    assert rig.counts["loaded_blocks"] == NUM_BLOCKS_SHARED + 3
    assert rig.counts["shared_waits"] == 1


@pytest.mark.parametrize(
    ("groups", "num_step_tokens", "positions"),
    [
        (HYBRID, 512, [144]),  # the window takes 3 blocks: a fourth of those of 48 tokens
        (HYBRID, 32, [48, 96, 144]),
        (HYBRID, 46, [48, 144]),  # at token 92 it is too late for the window of 96
        (("full", "window:10", "window:5"), 512, [128]),
        (("full", "mamba"), 32, [64, 128]),  # a step may be cut in two, every other time
        (("full", "mamba"), 512, []),
        (("full", "window:10", "mamba"), 32, [64, 128]),
    ],
    ids=str,
)
def test_while_nothing_is_known_positions_of_a_prompt_are_kept(
    make_rig, groups, num_step_tokens, positions
):
    """With the default retention; the second finds the last of them, and keeps where it parts."""
    num_blocks = 40
    for boundary in [*positions, 0]:
        rig = make_sparse(make_rig, groups, max_batched_tokens=num_step_tokens)
        rig.run_alone("first", parting(rig, 0, num_blocks))
        rig.forget_gpu_cache()
        # It parts a little behind this position, or at the end.
        num_shared = boundary // BLOCK_TOKENS + 3 if boundary else num_blocks
        assert rig.run_alone("second", parting(rig, 1, num_shared)) == (
            boundary or max(positions, default=0)
        )
        rig.check_idle()


@pytest.mark.parametrize(
    ("groups", "num_step_tokens"), [(HYBRID, 512), (("full", "mamba"), 24)], ids=str
)
@pytest.mark.parametrize("shape", [{}, {"is_async": True}, {"is_v2": True, "has_streams": True}])
def test_positions_of_an_answer_are_kept_too(make_rig, groups, num_step_tokens, shape):
    """vllm#50551: what follows an answer begins behind most of it."""
    rig = make_sparse(make_rig, groups, max_batched_tokens=num_step_tokens, **shape)
    first = rig.prompt(21, 1)
    rig.run_alone("first", first, max_tokens=100)
    rig.forget_gpu_cache()
    then = [*first, *rig.answers["first"], *rig.prompt(9, 2)]
    assert rig.run_alone("then", then) == 96
    rig.check_idle()


def test_who_parts_before_is_not_left_behind_by_who_parts_behind(make_rig):
    """One loads, and would keep where it leaves the first; the others go on where the load ends."""
    rig = make_warm(make_rig)
    num_more = NUM_BLOCKS_SHARED + 5
    assert serve_alone(rig, 0, num_more) == PREFIX_TOKENS
    before = rig.counts["hit_tokens"]
    rig.add("far", parting(rig, 9, num_more))
    finish(rig, ["far", *send_parting(rig, 3)])
    assert rig.counts["hit_tokens"] - before == PREFIX_TOKENS, "one has loaded, once"


def begun_at(rig: Rig, *names: str) -> list[int]:
    """Let all end; return after how many tokens, of GPU or host, these began to compute."""
    begun = {}
    while rig.has_work:
        batch = rig.step()
        for new in batch.scheduled.scheduled_new_reqs if batch else ():
            begun[new.req_id] = new.num_computed_tokens
    finish(rig, list(names))
    return [begun[name] for name in names]


@pytest.mark.parametrize("groups", SPARSE, ids=str)
@pytest.mark.parametrize("num_step_tokens", [512, 32])
@pytest.mark.parametrize("num_blocks", [2, NUM_BLOCKS_SHARED])  # less than a window, and more
def test_of_prompts_that_come_together_the_first_computes_for_all(
    make_rig, groups, num_step_tokens, num_blocks
):
    rig = make_sparse(make_rig, groups, max_batched_tokens=num_step_tokens)
    names = ["r0", "r1", "r2", "r3"]
    for number, name in enumerate(names):
        rig.add(name, parting(rig, number, num_blocks))
    assert begun_at(rig, *names) == [0, *[num_blocks * BLOCK_TOKENS] * 3]
    assert not rig.planner.hits.boundaries.last


@pytest.mark.parametrize(
    ("groups", "places"),
    [*((groups, [44, 108, 184]) for groups in SPARSE[:2]), (SPARSE[2], [48, 104, 184])],
)
def test_who_computes_keeps_windows_for_who_comes_meanwhile(make_rig, groups, places):
    """Where it leaves each of them, though positions lie between."""
    rig = make_sparse(make_rig, groups, max_batched_tokens=32)
    rig.add("first", parting(rig, 0, 46))
    rig.planned_step()
    names = ["near", "next", "far"]
    for number, (name, place) in enumerate(zip(names, places, strict=True), 1):
        rig.add(name, parting(rig, number, place // BLOCK_TOKENS))
    assert begun_at(rig, *names) == places


def test_who_comes_too_late_for_a_window_takes_no_position_away(make_rig):
    rig = make_sparse(make_rig, max_batched_tokens=32)
    rig.add("first", parting(rig, 0, 40))
    rig.planned_step()
    rig.add("late", parting(rig, 1))  # it leaves the first at 40: that window begins at 28
    assert begun_at(rig, "late") == [0]
    rig.forget_gpu_cache()
    assert rig.run_alone("third", parting(rig, 2, 12)) == 48


@pytest.mark.parametrize("is_loading", [False, True])
def test_who_loads_keeps_where_it_leaves_another_that_is_here(make_rig, is_loading):
    rig = make_warm(make_rig)
    rig.hold_copies(True)
    rig.add("loads", parting(rig, 0, 15))
    if is_loading:
        rig.planned_step()
    rig.add("waits", parting(rig, 1, 15))
    rig.step()
    rig.hold_copies(False)
    assert begun_at(rig, "loads", "waits") == [PREFIX_TOKENS, 15 * BLOCK_TOKENS]


def test_with_another_retention_vllm_keeps_what_it_keeps(make_rig):
    rig = make_rig(groups=HYBRID, retention_interval=16, num_blocks=150, **WIDE)
    assert rig.planner.hits.boundaries.every == 0


# ---- others are not held up --------------------------------------------------------------------


def test_who_waits_holds_no_block_and_no_slot(make_rig):
    rig = make_shared(make_rig)
    rig.hold_copies(True)
    send(rig, 1)
    rig.planned_step()
    before = rig.pool.get_num_free_blocks(), rig.planner.gauges()["leased_slots"]
    send(rig, NUM_OTHERS, first=2)
    rig.planned_step()
    assert (rig.pool.get_num_free_blocks(), rig.planner.gauges()["leased_slots"]) == before
    rig.hold_copies(False)
    rig.finish()


# ---- when the load does not bring it -----------------------------------------------------------


def test_a_load_that_fails_wakes_all_at_once(make_rig):
    rig = make_shared(make_rig)
    rig.fail_copies()
    names = send(rig, 1 + NUM_OTHERS)
    rig.step_until(lambda: bool(rig.plans and rig.plans[-1].failures))
    states = {status(rig, name) for name in names if name in rig.scheduler.requests}
    assert "WAITING" not in states, "each computes, or waits for its own"
    finish(rig, names)
    assert num_failed(rig.counts, "load") == 1, "nobody tried the same again"


def test_when_the_request_that_loads_is_aborted_another_loads_for_all(make_rig):
    rig = make_shared(make_rig)
    rig.hold_copies(True)
    names = send(rig, 1 + NUM_OTHERS)
    rig.planned_step()
    rig.abort("r1")
    assert rig.has_work, "an engine all of whose requests wait keeps stepping"
    plan = rig.planned_step()
    assert [len(load.block_ids) for load in plan.loads] == [NUM_BLOCKS_SHARED]
    rig.hold_copies(False)
    finish(rig, names[1:])
    assert rig.counts["loaded_blocks"] == 2 * NUM_BLOCKS_SHARED


@pytest.mark.parametrize("gives_up", [False, True], ids=["reset of the host", "gives up"])
def test_after_a_reset_or_when_the_connector_gives_up_nobody_waits(make_rig, gives_up):
    rig = make_shared(make_rig)
    rig.hold_copies(True)
    names = send(rig, 3)
    rig.planned_step()
    (rig.planner.disable if gives_up else rig.connector.reset_cache)()
    rig.planned_step()
    assert status(rig, "r2") == status(rig, "r3") == "RUNNING"
    rig.hold_copies(False)
    rig.drain()
    for name in names:
        rig.check_tokens(name, 4)
    if not gives_up:
        rig.check_idle()


# ---- loads that hold too many blocks -----------------------------------------------------------


def make_crowded(make_rig: MakeRig) -> Rig:
    """An engine of a window in which one prefix is being loaded; a second may be computed beside.

    Computed, a prompt takes 22 blocks; a load holds 13, and its request may need 13 more.
    """
    rig = make_rig(groups=HYBRID, num_blocks=37, **WIDE)
    rig.start()
    for seed in (1, 2):
        rig.run_alone(f"warm{seed}", rig.prompt(PREFIX_TOKENS + 1, seed), max_tokens=1)
        rig.forget_gpu_cache()
    rig.counts.clear()
    rig.hold_copies(True)
    for seed in (1, 2):
        rig.add(f"r{seed}", rig.prompt(PREFIX_TOKENS + 1, seed))
    rig.planned_step()
    return rig


def test_a_hit_for_which_loads_hold_too_many_blocks_waits_for_them(make_rig):
    """Else its request computes for all to see what the host has, as in vllm bench serve."""
    rig = make_crowded(make_rig)
    assert status(rig, "r1") == "WAITING_FOR_REMOTE_KVS"
    for _ in range(5):
        rig.planned_step()
        assert status(rig, "r2") == "WAITING"
    rig.hold_copies(False)
    finish(rig, ["r1", "r2"])
    assert rig.counts["hit_tokens"] == 2 * PREFIX_TOKENS
    assert rig.counts["postponed_hits"] > 5


def test_it_does_not_wait_for_them_without_end(make_rig):
    rig = make_crowded(make_rig)
    began_s = rig.clock.now_s
    rig.step_until(lambda: status(rig, "r2") == "RUNNING")
    waited_s = rig.planner.book.get("r2").load.wait.waited_s
    assert waited_s >= WAIT_MAX_S >= rig.clock.now_s - began_s - 2
    rig.hold_copies(False)
    finish(rig, ["r1", "r2"])
    assert rig.counts["hit_tokens"] == PREFIX_TOKENS


# ---- the bound ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("timeout_s", "bound_s"), [(30, WAIT_MAX_S), (3, 3)])
def test_copies_that_never_end_are_not_waited_for_without_end(make_rig, timeout_s, bound_s):
    rig = make_shared(make_rig, extra={"transfer_timeout_s": timeout_s})
    rig.hold_copies(True)
    send(rig, 2)
    began_s = rig.clock.now_s
    rig.step_until(lambda: status(rig, "r2") == "WAITING_FOR_REMOTE_KVS")
    assert bound_s <= rig.clock.now_s - began_s <= bound_s + 2
    assert rig.counts["shared_waits"] == 1
    assert rig.planner.book.get("r2").load.wait.waited_s >= bound_s
    rig.hold_copies(False)
    finish(rig, ["r1", "r2"])
    assert rig.counts["shared_waits_cut"] == 1


def test_the_bound_is_of_all_waits_of_a_request_together(make_rig):
    """Each request that loads is aborted: the wait for the next begins anew, not the time."""
    rig = make_shared(make_rig, num_blocks=150)
    rig.hold_copies(True)
    times = times_of_waiting(rig, "patient")
    began_s = rig.clock.now_s
    first = rig.add("keen", prompt(rig, 90))
    rig.step()
    rig.add("patient", prompt(rig, 91))
    number = 0
    while status(rig, "patient") == "WAITING":
        # Others slip in before it: each loads when the one before has gone.
        number += 1
        rig.step()
        rig.step()
        rig.abort(first.request_id)
        queue = rig.scheduler.waiting
        first = rig.add(f"n{number}", prompt(rig, number))
        queue.remove_requests([first])
        queue.prepend_request(first)
        assert rig.clock.now_s - began_s < 2 * WAIT_MAX_S
    assert number > 2
    assert times[-2] - times[0] < WAIT_MAX_S <= times[-1] - times[0]
    rig.hold_copies(False)
    rig.drain()
    rig.check_tokens("patient", 4)


def test_a_load_that_brought_nothing_is_the_last_that_is_waited_for(make_rig):
    """The GPU loses what has landed before the next look: it must not go on like this for ever."""
    rig = make_shared(make_rig)
    rig.hold_copies(True)
    names = send(rig, 4)
    rig.planned_step()
    rig.hold_copies(False)
    find = rig.scheduler.kv_cache_manager.get_computed_blocks

    def find_nothing(request: Any, *more: Any) -> Any:  # vLLM 0.33 gives a limit beside it
        blocks, num_tokens, boundary = find(request, *more)
        if num_tokens:
            return rig.scheduler.kv_cache_manager.empty_kv_cache_blocks, 0, 0
        return blocks, num_tokens, boundary

    rig.scheduler.kv_cache_manager.get_computed_blocks = find_nothing
    finish(rig, names)
    assert rig.counts["shared_waits"] == 3, "once each"
    assert rig.counts["loaded_blocks"] == 4 * NUM_BLOCKS_SHARED


# ---- who does not wait -------------------------------------------------------------------------


def test_a_request_that_may_load_nothing_or_has_another_salt_waits_for_nothing(make_rig):
    rig = make_shared(make_rig)
    rig.hold_copies(True)
    send(rig, 1)
    rig.planned_step()
    rig.add("r2", prompt(rig, 2), kv_transfer_params={"max_load_tokens": 0})
    rig.add("salted", prompt(rig, 3), cache_salt="s")
    rig.planned_step()
    assert status(rig, "r2") == status(rig, "salted") == "RUNNING"
    rig.hold_copies(False)
    finish(rig, ["r1", "r2", "salted"])


def test_preempted_requests_that_come_back_share_a_load_too(make_rig):
    rig = make_shared(make_rig)
    names = send(rig, 4, max_tokens=8)
    rig.step_until(lambda: all(status(rig, name) == "RUNNING" for name in names))
    rig.step()
    rig.counts.clear()
    rig.hold_copies(True)
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.planned_step()
    states = [status(rig, name) for name in names]
    assert states.count("WAITING_FOR_REMOTE_KVS") == 1
    assert states.count("PREEMPTED") == 3
    rig.hold_copies(False)
    finish(rig, names, max_tokens=8)
    assert rig.counts["shared_waits"] == 3


# ---- where a load is found ---------------------------------------------------------------------


def make_shared_loads() -> SharedLoads:
    """Of a geometry with one group of full attention, and blocks of one token."""
    geometry: Any = SimpleNamespace(
        hash_block_size=1, retention_interval=None, alignment_tokens=1, ends_inside_blocks=False
    )
    hits: Any = SimpleNamespace(geometry=geometry, boundaries=None)
    return SharedLoads(hits, WAIT_MAX_S, Counters())


def a_load(transfer_id: int, first: int, end: int) -> Any:
    """Of some blocks of a prompt whose hashes are their places."""
    owner = SimpleNamespace(request=None, finished=False)
    hashes = [b"%d" % place for place in range(end)]
    return Load(
        transfer_id=transfer_id,
        ranks_left={0},
        transfer=cast(Any, None),
        lease=cast(Any, None),
        owner=cast(Any, owner),
        num_tokens=end - first,
        hashes=hashes,
        first_hash=first,
        end_hash=end,
    )


def test_the_oldest_load_that_brings_a_block_is_found_from_any_block_of_it():
    shared = make_shared_loads()
    request: Any = SimpleNamespace(block_hashes=[b"%d" % place for place in range(60)])
    loads = [a_load(0, 40, 50), a_load(1, 3, 37), a_load(2, 16, 18), a_load(3, 20, 60)]
    for load in loads:
        shared.begin(load)
    for newest_id in range(-1, 4):
        for place in range(60):
            wait = Wait()
            wait.newest_id = newest_id
            found = [load for load in loads[newest_id + 1 :] if load.first_hash <= place]
            expected = next((load for load in found if place < load.end_hash), None)
            assert shared.find(wait, request, place) is expected, place
    for load in loads:
        shared.end(load)
    assert shared.find(Wait(), request, 20) is None


def test_a_load_that_has_ended_is_not_looked_at(make_rig):
    rig = make_shared(make_rig)
    finish(rig, send(rig, 1 + NUM_OTHERS))
    shared = rig.planner.loads._shared_loads
    assert not shared._loads
    assert not shared._marks


def test_of_many_loads_of_one_block_a_few_are_looked_at():
    shared = make_shared_loads()
    request: Any = SimpleNamespace(block_hashes=[b"0"])
    for transfer_id in range(shared_loads.LOOKS_MAX + 1):
        shared.begin(a_load(transfer_id, 0, 1))
    wait = Wait()
    wait.newest_id = shared_loads.LOOKS_MAX - 2
    assert shared.find(wait, request, 0) is not None
    wait.newest_id = shared_loads.LOOKS_MAX - 1
    assert shared.find(wait, request, 0) is None
