"""The benchmark `scheduler`: every connector serves every trace, and what ours executes."""

import functools
from types import SimpleNamespace

import pytest

from tests.benchmarks import scheduler_cases
from tests.benchmarks.scheduler_engine import CONTESTANTS, Sizes, make_engine, serve
from tests.benchmarks.scheduler_measure import (
    Answers,
    Facts,
    count_hooks,
    observe,
)
from tests.benchmarks.scheduler_probe import (
    HOOKS,
    Counts,
    HookCounter,
    HookTimer,
    WrapperCost,
    wrap_hooks,
)
from tests.benchmarks.scheduler_traces import LAYOUTS, TRACES, make_trace
from tests.simulator.peers import SafeWorker

TINY_SHARE = 16
COPY_STEPS = 1
OURS = ("ours-eager", "ours-lazy")
WITH_HOOKS = [name for name in CONTESTANTS if name != "none"]

INSTRUCTIONS_MAX = {
    ("ours-eager", "simple-eager", "chats"): 0.34,
    ("ours-eager", "simple-eager", "turns"): 0.36,
    ("ours-eager", "simple-eager", "long"): 0.16,
    ("ours-eager", "simple-eager", "pressure"): 0.27,
    ("ours-eager", "simple-eager", "documents"): 0.28,
    ("ours-eager", "offloading", "chats"): 0.27,
    ("ours-eager", "offloading", "turns"): 0.26,
    ("ours-eager", "offloading", "long"): 0.12,
    ("ours-eager", "offloading", "pressure"): 0.32,
    ("ours-eager", "offloading", "documents"): 0.21,
    ("ours-lazy", "simple-lazy", "chats"): 0.36,
    ("ours-lazy", "simple-lazy", "turns"): 0.45,
    ("ours-lazy", "simple-lazy", "long"): 0.45,
    ("ours-lazy", "simple-lazy", "pressure"): 0.38,
    ("ours-lazy", "simple-lazy", "documents"): 0.44,
}
"""What ours may execute at most, as a multiple of what the other does: a tenth more than now."""


@functools.cache
def observed(trace: str, layout: str, name: str) -> tuple[Facts, Answers]:
    return observe(make_trace(trace, layout, share=TINY_SHARE), name, COPY_STEPS)


@functools.cache
def instructions_of(name: str, trace: str) -> int:
    observed(trace, "plain", name)  # fills caches that live as long as the process
    counts = count_hooks(make_trace(trace, "plain", share=TINY_SHARE), name, COPY_STEPS)
    return sum(counts.values(), Counts()).instructions


# ---- traces ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trace", TRACES)
def test_every_connector_answers_every_request_with_the_same_tokens(
    trace: str, layout: str
) -> None:
    _, expected = observed(trace, layout, "none")
    assert len(expected) == make_trace(trace, layout, share=TINY_SHARE).num_requests
    for name in WITH_HOOKS if layout == "plain" else OURS:  # a run compares them all
        assert observed(trace, layout, name)[1] == expected


@pytest.mark.parametrize("name", WITH_HOOKS)
def test_what_comes_back_is_hit_on_the_host(name: str) -> None:
    facts, _ = observed("long", "plain", name)
    alone, _ = observed("long", "plain", "none")
    assert facts.hit_rate > 0.3
    assert facts.num_loaded > 0
    assert facts.num_computed < 0.7 * alone.num_computed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("name", OURS)
def test_ours_keeps_no_block_from_the_pool(name: str, trace: str, layout: str) -> None:
    assert observed(trace, layout, name)[0].kept_max == 0


# ---- cases -------------------------------------------------------------------------------------


def test_the_second_long_request_waits_for_kept_blocks() -> None:
    assert scheduler_cases.wait_back_to_back("simple-eager", 5).num_steps == 5
    assert scheduler_cases.wait_back_to_back("ours-eager", 5).num_steps == 0


@pytest.mark.parametrize("name", ["simple-eager", "offloading", "ours-eager"])
def test_a_hit_is_measured_up_to_the_bytes_of_its_plan(name: str) -> None:
    hits = scheduler_cases.measure_hits(name, "plain", COPY_STEPS, WrapperCost(0, 0), 6400)
    hit = scheduler_cases.median_hit(hits)
    assert hit.num_blocks in (399, 400)  # the last token has to be computed
    assert min(hit.match_ns, hit.alloc_ns, hit.plan_ns, hit.pickle_ns) > 0
    assert hit.pickle_bytes > hit.num_blocks


@pytest.mark.parametrize("name", ["ours-eager", "simple-eager"])
def test_a_step_executes_no_more_when_ten_times_as_much_is_stored(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_cases, "STORED_FACTORS", (1, 10))
    little, much = (
        scheduler_cases.count_growth(name, scheduler_cases.GrowthCase(factor, 4), COPY_STEPS)
        for factor in (1, 10)
    )
    assert much.num_stored > 8 * little.num_stored
    assert much.functions == pytest.approx(little.functions, rel=0.01)


# ---- counting and timing -----------------------------------------------------------------------


@pytest.mark.parametrize(("mine", "other", "trace"), INSTRUCTIONS_MAX)
def test_ours_executes_at_most_a_fixed_share_of_what_the_other_does(
    mine: str, other: str, trace: str
) -> None:
    ratio = instructions_of(mine, trace) / instructions_of(other, trace)
    assert ratio <= INSTRUCTIONS_MAX[mine, other, trace]


def test_a_counter_sees_python_and_c_functions_and_not_itself() -> None:
    counter = HookCounter()
    counter.wrap("empty", lambda: None)()
    assert counter.counts["empty"].functions == 1
    counter.wrap("some", lambda: [len(str(number)) for number in (1, 2, 3)])()
    assert counter.counts["some"].functions > 1 + 3
    assert counter.counts["some"].instructions > counter.counts["empty"].instructions > 0
    assert counter.total.calls == 2


def test_a_hook_that_another_one_calls_is_not_counted_twice() -> None:
    names = ("request_finished", "request_finished_all_groups", "shutdown")
    connector = SimpleNamespace(**dict.fromkeys(names))
    wrap_hooks(connector, lambda name, hook: f"wrapped {name}")
    assert connector.request_finished is connector.shutdown is None, "the other may call it"
    assert connector.request_finished_all_groups == "wrapped request_finished_all_groups"


def test_the_timer_sees_every_hook_that_the_scheduler_calls() -> None:
    trace = make_trace("long", "plain", share=TINY_SHARE)
    timer = HookTimer(WrapperCost(0, 0))
    engine = make_engine("ours-eager", Sizes.of(trace), COPY_STEPS)
    serve(engine, trace, timer)
    assert set(timer.samples_ns) <= set(HOOKS)
    assert len(timer.samples_ns["on_new_request"]) == trace.num_requests
    assert len(timer.samples_ns["build_connector_meta"]) == len(timer.steps_ns) == engine.num_steps


def test_our_stand_in_settles_a_store_at_once_when_it_is_fenced() -> None:
    from safe_offload.protocol import Capacity, StepPlan, Transfer

    worker = SafeWorker(copy_steps=10, num_slots=5)
    _, report = worker.step(StepPlan(stores_after_forward=(Transfer(7, (1, 2), (3, 4)),)))
    assert report.capacities == (Capacity(0, 5),)
    assert not report.outcomes
    _, report = worker.step(StepPlan(fences=(7,)))
    assert [outcome.transfer_id for outcome in report.outcomes] == [7]
    assert worker.num_stored == 2
