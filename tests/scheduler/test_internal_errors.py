"""An error of our own anywhere on the scheduler side: vLLM goes on, and everything drains (I7, I8).

Each method of the planner's parts raises once, before it has done its work or after it, early in a
run or late. The run has hits, loads in flight, preemptions, an abort and two ranks.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored

from safe_offload.scheduler.cache.directory import Directory
from safe_offload.scheduler.cache.events import KvEvents
from safe_offload.scheduler.cache.leases import Lease, LeaseBook
from safe_offload.scheduler.cache.slots import SlotPool
from safe_offload.scheduler.loads.admission import Admission
from safe_offload.scheduler.loads.hits import HostHits
from safe_offload.scheduler.loads.loads import Loads
from safe_offload.scheduler.pending import Ledger
from safe_offload.scheduler.planner import Planner
from safe_offload.scheduler.requests import RequestBook, RequestState
from safe_offload.scheduler.stores.eager import EagerStores
from safe_offload.scheduler.stores.stores import Stores
from tests.scheduler.rig import MakeRig, Rig, see_events

PARTS: tuple[type[Any], ...] = (
    Admission,
    EagerStores,
    Directory,
    KvEvents,
    HostHits,
    Lease,
    LeaseBook,
    Ledger,
    Loads,
    Planner,
    RequestBook,
    RequestState,
    SlotPool,
    Stores,
)

STARTING = {"bind"}
ASSIGNING = {"sent", "planned"}
"""A few assignments that make a plan count."""
RECOVERING = {
    "disable",
    "give_up",
    "keep_only",
    "mend",
    "plan_nothing",
    "announce_failure",
    "name_unloaded",
    "all_keys",
    "withdraw",
}
"""What runs after an error."""
ANSWER_IS_PASSED_ON = {"build_connector_meta", "update_connector_output", "settle", "end_load"}
"""Behind these there is nothing that could raise before vLLM has what they answer."""
NOT_IN_SERVICE = {
    "check_invariants",
    "gauges",
    "reset",
    "reset_cache",
    "forget_all",
    "poison_all",
    "forget_unsent",
}


def methods() -> list[tuple[type[Any], str]]:
    left_out = STARTING | ASSIGNING | RECOVERING | NOT_IN_SERVICE
    return [
        (part, name)
        for part in PARTS
        for name, _ in inspect.getmembers(part, inspect.isfunction)
        if not name.startswith("__") and name not in left_out
    ]


def raise_at(
    monkeypatch: pytest.MonkeyPatch, part: type[Any], name: str, *, call: int, is_after: bool
) -> Callable[[], int]:
    """Let one call of a method raise; returns how many calls there were."""
    original = getattr(part, name)
    count = 0

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and not is_after:
            raise RuntimeError("injected")
        answer = original(*args, **kwargs)
        if count == call:
            raise RuntimeError("injected")
        return answer

    monkeypatch.setattr(part, name, counted)
    return lambda: count


def make_busy_rig(make_rig: MakeRig) -> Rig:
    """An engine that has prompts on the host, and none of them on the GPU."""
    rig = make_rig(
        num_blocks=22,
        num_slots=40,
        max_batched_tokens=24,
        tensor_ranks=2,
        copy_ticks_max=10,
        has_events=True,
        extra={"check_invariants": False, "load_in_step": True},  # as in production
    )
    for seed in (1, 2):
        rig.run_alone(f"first-{seed}", rig.prompt(33, seed))
    rig.forget_gpu_cache()
    return rig


def serve(rig: Rig) -> None:
    """Hits, preemptions, an abort while loading, and new prompts; checks every answer."""
    for seed in (1, 2, 3, 4):
        rig.add(f"again-{seed}", rig.prompt(33, seed), max_tokens=14)
    rig.step()
    rig.add("gone", [*rig.prompt(33, 2), 1, 2, 3], max_tokens=14)
    for _ in range(3):
        rig.step()
    rig.abort("gone")
    rig.drain()
    for seed in (1, 2, 3, 4):
        rig.check_tokens(f"again-{seed}", 14)


def told_as_stored(events: list[Any]) -> set[tuple[int, Any]]:
    """What a router thinks is on the host, of what was told since."""
    told: set[tuple[int, Any]] = set()
    for event in events:
        keys = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
        told = told | keys if isinstance(event, BlockStored) else told - keys
    return told


@pytest.mark.parametrize(
    ("part", "name"), methods(), ids=lambda what: getattr(what, "__name__", what)
)
@pytest.mark.parametrize(
    "moments",
    [
        pytest.param({False: (1,), True: (2,)}, id="some"),
        pytest.param({False: (2, 20), True: (1, 20)}, id="others", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.slow
def test_after_an_error_of_our_own_everything_drains(make_rig, monkeypatch, part, name, moments):
    """`moments`: which calls raise, by whether they have done their work."""
    for is_after in (False,) if name in ANSWER_IS_PASSED_ON else (False, True):
        for call in moments[is_after]:
            rig = make_busy_rig(make_rig)
            events = see_events(rig)
            with monkeypatch.context() as patch:
                num_calls = raise_at(patch, part, name, call=call, is_after=is_after)
                serve(rig)
            rig.run_alone("last", rig.prompt(33, 1))
            rig.check_idle()
            rig.planner.check_invariants()
            assert rig.counts["contained_errors"] == (num_calls() >= call)
            if num_calls() >= call:
                assert not told_as_stored(events), "which can no longer be hit"
            if num_calls() < call:
                break
