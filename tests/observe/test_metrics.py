"""Counts on their way to vLLM's log line and to Prometheus."""

from __future__ import annotations

import functools
import pickle

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import VllmConfig
from vllm.v1.outputs import KVConnectorOutput

from safe_offload.connector import SafeCPUOffloadConnector
from safe_offload.observe.counters import Count, Counters
from safe_offload.observe.metrics import GAUGES, INFO, OffloadPromMetrics, OffloadStats
from safe_offload.protocol import HostFacts, MemoryFacts, MemoryKind, StepReport
from tests.simulator.vllm_setup import EngineShape, make_config

LABELS = ["model_name", "engine"]


# ---- counters ----------------------------------------------------------------------------------


def test_what_is_taken_is_not_taken_again():
    counters = Counters()
    counters[Count.HIT_TOKENS] += 5
    counters[Count.FAILED_LOADS] += 1
    counters[Count.HIT_TOKENS] += 2
    assert counters.take() == {"hit_tokens": 7, "failed_loads": 1}
    assert counters.take() == {}
    counters[Count.HIT_TOKENS] += 1
    assert counters.take() == {"hit_tokens": 1}


def test_seconds_are_counted_whole_and_none_is_lost():
    counters = Counters()
    for _ in range(8):
        counters.add_seconds(Count.EVICTED_AGE_SECONDS, 0.375)
    assert counters.take() == {"evicted_age_seconds": 3}
    counters.add_seconds(Count.EVICTED_AGE_SECONDS, 0.75)
    assert counters.take() == {}
    counters.add_seconds(Count.EVICTED_AGE_SECONDS, 0.25)
    assert counters.take() == {"evicted_age_seconds": 1}


def test_what_was_counted_as_zero_is_not_told():
    counters = Counters()
    counters[Count.STORED_BLOCKS] += 0
    assert counters[Count.FAILED_STORES] == 0
    assert counters.take() == {}


def test_what_is_taken_is_plain_so_that_every_process_can_read_it():
    counters = Counters()
    counters[Count.HIT_TOKENS] += 1
    taken = counters.take()
    assert type(taken) is dict
    assert [type(name) for name in taken] == [str]


@pytest.mark.parametrize("count", Count)
def test_a_count_has_a_metric_name_and_a_sentence(count):
    if count.label is None:
        assert str(count) == count.metric == count.name.lower()
    else:
        label, label_value = count.label
        assert str(count) == f'{count.metric}{{{label}="{label_value}"}}'
    assert Count(str(count)) is count
    assert count.doc[0].isupper()
    assert count.doc.endswith(".")


# ---- statistics --------------------------------------------------------------------------------


def stats(counts: dict[str, int], gauges: dict[str, int] | None = None) -> OffloadStats:
    return OffloadStats.of(counts, gauges or {})


def test_counts_of_later_intervals_are_added_and_their_state_taken_over():
    total = stats({"a": 1, "b": 2}, {"slots": 10, "leased_slots": 4})
    assert total.aggregate(stats({"b": 3, "c": 4}, {"leased_slots": 1})) is total
    assert total.data == {
        "counts": {"a": 1, "b": 5, "c": 4},
        "gauges": {"slots": 10, "leased_slots": 1},
    }


def test_statistics_of_an_interval_in_which_nothing_happened_can_be_added():
    empty = OffloadStats()
    assert empty.aggregate(stats({"a": 1})).reduce() == {"a": 1}
    assert stats({"a": 1}).aggregate(OffloadStats()).reduce() == {"a": 1}


def test_adding_leaves_what_was_added_as_it_was():
    added = stats({"a": 1}, {"slots": 3})
    total = OffloadStats().aggregate(added).aggregate(added)
    assert total.data["counts"] == {"a": 2}
    assert added.data == {"counts": {"a": 1}, "gauges": {"slots": 3}}


def test_adding_leaves_what_the_first_interval_was_made_of_as_it_was():
    """The connector compares its gauges with the last; vLLM adds to the statistics meanwhile."""
    counts, gauges = {"a": 1}, {"slots": 3}
    OffloadStats.of(counts, gauges).aggregate(stats({"a": 5}, {"slots": 9}))
    assert counts == {"a": 1}
    assert gauges == {"slots": 3}


def test_two_logs_of_the_same_interval_do_not_add_into_one_another():
    """vLLM hands the payload of one interval to several loggers, and each adds to its own."""
    payload = stats({"a": 1}, {"slots": 3}).to_dict()
    logs = [SafeCPUOffloadConnector.build_kv_connector_stats(payload) for _ in range(2)]
    for log in logs:
        log.aggregate(stats({"a": 10}))
    assert [log.reduce() for log in logs] == [{"a": 11, "slots": 3}] * 2
    assert payload == {"counts": {"a": 1}, "gauges": {"slots": 3}}


def test_what_is_logged_is_every_count_and_the_state():
    assert stats({"a": 1}, {"slots": 3}).reduce() == {"a": 1, "slots": 3}
    assert OffloadStats().reduce() == {}


def test_statistics_are_empty_if_there_is_nothing_to_tell():
    assert OffloadStats().is_empty()
    assert stats({}).is_empty()
    assert not stats({"a": 1}).is_empty()
    assert not stats({}, {"slots": 0}).is_empty()


def test_a_reset_forgets_everything():
    total = stats({"a": 1}, {"slots": 3})
    total.reset()
    assert total.is_empty()
    assert total.aggregate(stats({"a": 2})).reduce() == {"a": 2}


def test_statistics_survive_the_way_between_processes():
    sent = stats({"a": 1}, {"slots": 3})
    assert pickle.loads(pickle.dumps(sent)) == sent
    rebuilt = SafeCPUOffloadConnector.build_kv_connector_stats(sent.to_dict())
    assert isinstance(rebuilt, OffloadStats)
    assert rebuilt == sent
    assert SafeCPUOffloadConnector.build_kv_connector_stats().is_empty()


# ---- Prometheus --------------------------------------------------------------------------------


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> OffloadPromMetrics:
    config: VllmConfig = make_config(EngineShape())
    types = {
        kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    values: dict[int, list[object]] = {0: ["m", "0"], 3: ["m", "3"]}
    return SafeCPUOffloadConnector.build_prom_metrics(config, types, LABELS, values)


def value(
    registry: CollectorRegistry, name: str, engine: int = 0, **more_labels: str
) -> float | None:
    labels = {"model_name": "m", "engine": str(engine), **more_labels}
    return registry.get_sample_value(f"vllm:safe_offload_{name}", labels)


def test_every_metric_is_there_from_the_start_with_value_zero(metrics, registry):
    for engine in (0, 3):
        for count in Count:
            labels = dict([count.label] if count.label else [])
            assert value(registry, f"{count.metric}_total", engine, **labels) == 0.0
        for name in GAUGES:
            assert value(registry, name, engine) == 0.0


def test_every_metric_says_what_it_is(metrics, registry):
    text = generate_latest(registry).decode()
    for count in Count:
        assert f"# HELP vllm:safe_offload_{count.metric}_total {count.doc}" in text
    for name, doc in GAUGES.items():
        assert f"# HELP vllm:safe_offload_{name} {doc}" in text


def test_counts_add_up_and_gauges_stand_for_the_last(metrics, registry):
    metrics.observe({"counts": {"hit_tokens": 5}, "gauges": {"slots": 10, "leased_slots": 4}})
    metrics.observe({"counts": {"hit_tokens": 2}, "gauges": {"leased_slots": 0}})
    assert value(registry, "hit_tokens_total") == 7
    assert value(registry, "leased_slots") == 0
    assert value(registry, "slots") == 10


def test_a_label_tells_counts_of_one_metric_apart(metrics, registry):
    counts = {Count.EVICTED_BLOCKS_HIT: 2, Count.EVICTED_BLOCKS_UNHIT: 5}
    metrics.observe({"counts": {str(count): number for count, number in counts.items()}})
    metrics.observe({"counts": {'evicted_blocks{hit="true"}': 1}}, engine_idx=3)
    assert value(registry, "evicted_blocks_total", hit="true") == 2
    assert value(registry, "evicted_blocks_total", hit="false") == 5
    assert value(registry, "evicted_blocks_total", engine=3, hit="true") == 1


def test_how_the_connector_is_set_up_is_told_once_and_stands_in_labels(
    make_rig, metrics, registry, monkeypatch
):
    connector = make_rig(extra={"num_cpu_blocks": 60, "eviction_policy": "slru"}).connector
    first = connector.get_kv_connector_stats()
    assert "info" not in first.reduce()
    told = first.aggregate(stats({"hit_tokens": 1})).data["info"]
    assert set(told) == set(INFO)
    assert (told["slots_per_rank"], told["eviction_policy"]) == ("60", "slru")
    assert told["memory"] == "unknown", "the workers of the simulator tell nothing of theirs"
    monkeypatch.setattr(connector.side, "has_changed", True)
    later = connector.get_kv_connector_stats()
    assert later is None or "info" not in later.data
    metrics.observe({"info": told}, engine_idx=3)
    assert value(registry, "info", engine=3, **told) == 1
    assert value(registry, "info", engine=0, **told) is None


def facts_of(rank: int, kind: MemoryKind, paths: tuple[str, ...] = ("batch", "each")) -> HostFacts:
    return HostFacts(rank, MemoryFacts(kind, "99 %", (1,)), paths)


def report(connector: SafeCPUOffloadConnector, *facts: HostFacts) -> OffloadStats | None:
    """Let the workers report; returns the statistics of that step."""
    output = KVConnectorOutput(kv_connector_worker_meta=StepReport(host_facts=facts))
    connector.update_connector_output(output)
    return connector.get_kv_connector_stats()


def test_what_the_ranks_report_of_their_memory_stands_in_labels(make_rig, metrics, registry):
    connector = make_rig(tensor_ranks=2).connector
    connector.get_kv_connector_stats()
    assert report(connector, facts_of(0, MemoryKind.LOCKING)) is None, "one of two ranks"
    locking = report(connector, facts_of(1, MemoryKind.LOCKING)).data
    assert locking["info"]["memory"] == "being page-locked"
    locked = [facts_of(rank, MemoryKind.PAGE_LOCKED) for rank in range(2)]
    locked_stats = report(connector, *locked)
    assert report(connector, *locked) is None, "nothing has changed"
    metrics.observe(locking)
    assert value(registry, "info", **locking["info"]) == 1
    metrics.observe(OffloadStats().aggregate(locked_stats).data)
    now = locked_stats.data["info"]
    assert {name: now[name] for name in ("memory", "huge_pages", "numa_node", "copies_by")} == {
        "memory": "page-locked",
        "huge_pages": "99 %",
        "numa_node": "1",
        "copies_by": "batch, each",
    }
    assert value(registry, "info", **now) == 1
    assert value(registry, "info", **locking["info"]) == 0, "what was said before"


def test_each_engine_has_its_own(metrics, registry):
    metrics.observe({"counts": {"failed_loads": 2}}, engine_idx=3)
    assert value(registry, "failed_loads_total", 3) == 2
    assert value(registry, "failed_loads_total", 0) == 0


def test_names_of_another_version_are_left_out(metrics, registry):
    metrics.observe({"counts": {"no_such_count": 5, "hit_tokens": 1}, "gauges": {"no_such": 1}})
    assert value(registry, "hit_tokens_total") == 1
    assert "no_such" not in generate_latest(registry).decode()


def test_an_interval_in_which_nothing_happened_changes_nothing(metrics, registry):
    before = generate_latest(registry)
    metrics.observe({})
    assert generate_latest(registry) == before


def test_every_gauge_of_the_scheduler_side_has_a_metric(make_rig):
    assert set(make_rig().planner.gauges()) == set(GAUGES)
