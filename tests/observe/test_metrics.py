"""Counts on their way to vLLM's log line and to Prometheus."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.outputs import KVConnectorOutput

from safe_offload.connector import SafeCPUOffloadConnector
from safe_offload.observe.counters import (
    BYTES,
    COUNTERS,
    FAILED_LOADS,
    FAILED_STORES,
    HISTOGRAMS,
    LOAD_S,
    LOAD_WAIT_S,
    SECONDS,
    TIER_SERIES,
    TIERS_NOT_READY,
    Count,
    Counters,
)
from safe_offload.observe.metrics import (
    GAUGES,
    INFO,
    OffloadPromMetrics,
    OffloadStats,
)
from safe_offload.protocol import FailureReason, HostFacts, MemoryFacts, MemoryKind, StepReport
from tests.scheduler.tiers.tier_rig import TierRig
from tests.simulator.vllm_setup import EngineShape, make_config

LABELS = ["model_name", "engine"]


# ---- counters ----------------------------------------------------------------------------------


def test_what_is_taken_is_plain_and_not_taken_again():
    counters = Counters()
    counters[Count.HIT_TOKENS] += 5
    counters[Count.RESETS] += 1
    counters[Count.HIT_TOKENS] += 2
    counters[Count.STORED_BLOCKS] += 0
    taken = counters.take()
    assert taken == {"hit_tokens": 7, "resets": 1}, "and no zero"
    assert {type(taken), *map(type, taken)} == {dict, str}, "so that every process can read it"
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


def test_a_series_has_a_name_and_a_sentence():
    for series in (*COUNTERS, *HISTOGRAMS.values()):
        labels = ",".join(f'{name}="{value}"' for name, value in series.labels)
        assert str(series) == (f"{series.metric}{{{labels}}}" if labels else series.metric)
        assert series.doc[0].isupper()
        assert series.doc.endswith(".")
    for count in Count:
        assert Count(str(count)) is count
        assert count.labels or str(count) == count.metric == count.name.lower()


def test_a_failure_is_counted_by_direction_and_reason():
    assert set(FAILED_LOADS) == set(FAILED_STORES) == set(FailureReason)
    assert FAILED_LOADS[FailureReason.COPY_FAILED] == (
        'transfer_failures{direction="load",reason="copy_failed"}'
    )
    assert not set(FAILED_LOADS.values()) & set(FAILED_STORES.values())


def test_values_are_put_into_buckets_and_not_taken_again():
    counters = Counters()
    for seconds in (0.05, 0.06, 0.1, 99.0):
        counters.observe(LOAD_WAIT_S, seconds)
    tenth = SECONDS.index(0.1)
    assert counters.take_observed() == {
        "load_wait_seconds": {
            tenth - 1: (1, 0.05),
            tenth: (2, pytest.approx(0.16)),
            len(SECONDS): (1, 99.0),
        }
    }
    assert counters.take_observed() == {}


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


def test_adding_leaves_what_was_added_as_it_was():
    """The connector compares its gauges with the last; vLLM adds to the statistics meanwhile."""
    counts, gauges = {"a": 1}, {"slots": 3}
    added = OffloadStats.of(counts, gauges)
    total = OffloadStats().aggregate(added).aggregate(added)
    assert total.data["counts"] == {"a": 2}
    assert added.data == {"counts": {"a": 1}, "gauges": {"slots": 3}}
    added.aggregate(stats({"a": 5}, {"slots": 9}))
    assert (counts, gauges) == ({"a": 1}, {"slots": 3})


def test_two_logs_of_the_same_interval_do_not_add_into_one_another():
    """vLLM hands the payload of one interval to several loggers, and each adds to its own."""
    payload = stats({"a": 1}, {"slots": 3}).to_dict()
    logs = [SafeCPUOffloadConnector.build_kv_connector_stats(payload) for _ in range(2)]
    for log in logs:
        log.aggregate(stats({"a": 10}))
    assert [log.reduce() for log in logs] == [{"a": 11, "slots": 3}] * 2
    assert payload == {"counts": {"a": 1}, "gauges": {"slots": 3}}


def test_statistics_are_empty_if_there_is_nothing_to_tell():
    total = stats({"a": 1}, {"slots": 3})
    assert not total.is_empty()
    assert not stats({}, {"slots": 0}).is_empty()
    total.reset()
    for empty in (total, OffloadStats(), stats({})):
        assert empty.is_empty()
    assert total.aggregate(stats({"a": 2})).reduce() == {"a": 2}


OBSERVED = {"load_wait_seconds": {9: (2, 0.16)}}


def test_observed_values_of_later_intervals_are_added_and_none_is_changed():
    some = OffloadStats.of({}, {}, {"load_wait_seconds": {9: (2, 0.16), 1: (1, 0.0002)}})
    more = OffloadStats.of({}, {}, {"load_wait_seconds": {9: (1, 0.07)}, "b": {0: (1, 1.0)}})
    total = OffloadStats().aggregate(some).aggregate(more)
    assert total.data["observed"] == {
        "load_wait_seconds": {9: (3, pytest.approx(0.23)), 1: (1, 0.0002)},
        "b": {0: (1, 1.0)},
    }
    assert some.data["observed"]["load_wait_seconds"] == {9: (2, 0.16), 1: (1, 0.0002)}
    assert more.data["observed"]["load_wait_seconds"] == {9: (1, 0.07)}


def test_the_log_has_the_mean_of_each_time_and_no_sizes():
    seconds = {str(LOAD_S): {9: (2, 0.16)}, "hit_length_tokens": {3: (1, 40.0)}}
    assert OffloadStats.of({"load_bytes": 7}, {"slots": 3}, seconds).reduce() == {
        "load_bytes": 7,
        'mean_transfer_seconds{direction="load"}': 0.08,
        "slots": 3,
    }
    assert not OffloadStats.of({}, {}, seconds).is_empty()


def test_statistics_survive_the_way_between_processes():
    sent = stats({"a": 1}, {"slots": 3}).aggregate(OffloadStats.of({}, {}, OBSERVED))
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.to_dict()))
    assert OffloadStats(data=packed).aggregate(sent).data["observed"] == {
        "load_wait_seconds": {9: (4, 0.32)}
    }
    assert pickle.loads(pickle.dumps(sent)) == sent
    rebuilt = SafeCPUOffloadConnector.build_kv_connector_stats(sent.to_dict())
    assert isinstance(rebuilt, OffloadStats)
    assert rebuilt == sent
    assert SafeCPUOffloadConnector.build_kv_connector_stats().is_empty()


# ---- Prometheus --------------------------------------------------------------------------------


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def make_metrics(
    registry: CollectorRegistry,
    *engines: int,
    connector: Any = SafeCPUOffloadConnector,
    **fields: Any,
) -> Any:
    """The metrics of a connector, for engines of these numbers."""
    config: VllmConfig = make_config(EngineShape())
    config.kv_transfer_config = dataclasses.replace(config.kv_transfer_config, **fields)
    types = {
        kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    values: dict[int, list[object]] = {engine: ["m", str(engine)] for engine in engines}
    return connector.build_prom_metrics(config, types, LABELS, values)


@pytest.fixture
def metrics(registry: CollectorRegistry) -> OffloadPromMetrics:
    made: OffloadPromMetrics = make_metrics(registry, 0, 3)
    return made


def value(
    registry: CollectorRegistry, name: str, engine: int = 0, **more_labels: str
) -> float | None:
    labels = {"model_name": "m", "engine": str(engine), **more_labels}
    return registry.get_sample_value(f"vllm:safe_offload_{name}", labels)


def test_every_metric_is_there_from_the_start_with_value_zero_and_says_what_it_is(
    metrics, registry
):
    text = generate_latest(registry).decode()
    for count in COUNTERS:
        assert f"# HELP vllm:safe_offload_{count.metric}_total {count.doc}" in text
    for name, doc in GAUGES.items():
        assert f"# HELP vllm:safe_offload_{name} {doc}" in text
    for engine in (0, 3):
        for count in COUNTERS:
            assert value(registry, f"{count.metric}_total", engine, **dict(count.labels)) == 0.0
        for name in GAUGES:
            assert value(registry, name, engine) == 0.0
        for histogram in HISTOGRAMS.values():
            if histogram.buckets is not BYTES:
                labels = dict(histogram.labels)
                assert value(registry, f"{histogram.metric}_count", engine, **labels) == 0.0


def test_tiers_have_series_from_the_start_as_many_as_there_are(registry):
    tiers = [{"url": "file:///near"}, {"url": "file:///far"}]
    metrics = make_metrics(registry, 0, kv_connector_extra_config={"tiers": tiers})
    for number, expected in ((1, 0.0), (2, 0.0), (3, None)):
        tier = TIER_SERIES[number - 1]
        for count in tier.counters:
            assert value(registry, f"{count.metric}_total", **dict(count.labels)) == expected
        for gauge in tier.gauges:
            assert value(registry, gauge.metric, **dict(gauge.labels)) == expected
        for histogram in tier.seconds.values():
            labels = dict(histogram.labels)
            assert value(registry, f"{histogram.metric}_count", **labels) == expected
    misses = TIER_SERIES[1].misses["absent"]
    out = TIER_SERIES[1].is_out["read"]
    metrics.observe({"counts": {str(misses): 5}, "gauges": {str(out): 1.0}})
    assert value(registry, "tier_misses_total", tier="2", reason="absent") == 5
    assert value(registry, "tier_is_out", tier="2", operation="read") == 1


@pytest.mark.parametrize("url", ["redis://kv.internal", "s3://bucket/kv"])
def test_only_a_directory_has_a_series_of_what_it_holds(registry, url):
    """A server or bucket does not say: 0 would be wrong."""
    tiers = [{"url": url}, {"url": "file:///far"}]
    metrics = make_metrics(registry, 0, kv_connector_extra_config={"tiers": tiers})
    metrics.observe({"gauges": {str(tier.stored_bytes): 7.0 for tier in TIER_SERIES[:2]}})
    assert value(registry, "tier_stored_bytes", tier="1") is None
    assert value(registry, "tier_stored_bytes", tier="2") == 7
    assert value(registry, "tier_is_out", tier="1", operation="read") == 0


def test_counts_add_up_and_gauges_stand_for_the_last(metrics, registry):
    metrics.observe({"counts": {"hit_tokens": 5}, "gauges": {"slots": 10, "leased_slots": 4}})
    metrics.observe({"counts": {"hit_tokens": 2}, "gauges": {"leased_slots": 0}})
    metrics.observe({"counts": {"hit_tokens": 3}}, engine_idx=3)
    assert [value(registry, "hit_tokens_total", engine) for engine in (0, 3)] == [7, 3]
    assert value(registry, "leased_slots") == 0
    assert value(registry, "slots") == 10


def test_how_the_connector_is_set_up_is_told_once_and_stands_in_labels(
    make_rig, metrics, registry, monkeypatch
):
    connector = make_rig(extra={"num_cpu_blocks": 60, "eviction_policy": "lru"}).connector
    first = connector.get_kv_connector_stats()
    assert "info" not in first.reduce()
    told = first.aggregate(stats({"hit_tokens": 1})).data["info"]
    assert set(told) == set(INFO)
    assert (told["slots_per_rank"], told["eviction_policy"]) == ("60", "lru")
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


def test_names_of_another_version_are_left_out(metrics, registry):
    unknown = {"no_such_count": 5, "hit_tokens": 1}
    metrics.observe(
        {"counts": unknown, "gauges": {"no_such": 1}, "observed": {"no_such": {0: (1, 1.0)}}}
    )
    assert value(registry, "hit_tokens_total") == 1
    assert "no_such" not in generate_latest(registry).decode()


def test_every_gauge_of_the_scheduler_side_has_a_metric(make_rig):
    """And no metric is without a gauge: tiers and features bring their own."""
    rig = make_rig(extra={"pin_share": 0.1})
    rig.run_alone("a", rig.prompt(9, 1))
    tiers = TierRig()
    tiers.start()
    found = {*rig.planner.gauges(), *tiers.planner.gauges()}
    tiers.close()
    assert found | {"pool_engines", "own_slots", TIERS_NOT_READY} == set(GAUGES)


def test_a_histogram_has_the_values_in_their_buckets_and_their_sum(metrics, registry):
    counters = Counters()
    for seconds in (0.05, 0.06, 0.1, 99.0):
        counters.observe(LOAD_S, seconds)
    metrics.observe({"observed": counters.take_observed()}, engine_idx=3)

    def at(name: str, **more: str) -> float | None:
        return value(registry, f"transfer_seconds_{name}", 3, direction="load", **more)

    assert [at("bucket", le=le) for le in ("0.025", "0.05", "0.1", "25.0")] == [0, 1, 3, 3]
    assert (at("count"), at("sum")) == (4, pytest.approx(99.21))
    assert value(registry, "transfer_seconds_count", 3, direction="store") == 0


# ---- names of vLLM's own -----------------------------------------------------------------------


SIZES = {
    'transfer_bytes{direction="load"}': {0: (2, 1.5e6), 3: (1, 2e7)},
    'transfer_seconds{direction="load"}': {9: (3, 0.25)},
}


def vllms(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    labels = {"model_name": "m", "engine": "0", **labels}
    return registry.get_sample_value(f"vllm:kv_offload_{name}", labels)


def test_what_vllms_offloading_counts_too_has_its_name_as_well(metrics, registry):
    metrics.observe({"gauges": {"slots": 0}})
    assert vllms(registry, "load_bytes_total") == vllms(registry, "store_size_count") == 0
    metrics.observe({"observed": SIZES})
    assert vllms(registry, "load_bytes_total") == 2.15e7
    assert vllms(registry, "load_time_total") == 0.25
    assert vllms(registry, "load_size_count") == 3
    assert vllms(registry, "load_size_sum") == 2.15e7
    assert vllms(registry, "load_size_bucket", le="1e+06") == 2
    assert vllms(registry, "store_bytes_total") == 0


def test_vllms_names_and_buckets_are_as_in_vllm():
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics as theirs
    from vllm.v1.kv_offload.base import OffloadingHistogramMetadata

    definitions = theirs.get_connector_metric_definitions()
    for name in ("load_bytes", "load_time", "store_bytes", "store_time", "load_size", "store_size"):
        metadata = definitions[f"vllm:kv_offload_{name}"]
        assert isinstance(metadata, OffloadingHistogramMetadata) == name.endswith("size")
        if isinstance(metadata, OffloadingHistogramMetadata):
            assert metadata.buckets == BYTES


OURS = {"kv_connector": "SafeCPUOffloadConnector", "kv_role": "kv_both"}
THEIRS = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
}


@pytest.mark.parametrize("children", [[OURS, THEIRS], [THEIRS, OURS]])
def test_beside_vllms_offloading_its_names_are_left_to_it(children, registry):
    """MultiConnector makes the metrics of all its connectors, and none may be made twice."""
    multi = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": children},
    }
    both = make_metrics(registry, 0, connector=MultiConnector, **multi)
    both.observe({"SafeCPUOffloadConnector": {"counts": {"resets": 1}, "observed": SIZES}})
    assert value(registry, "resets_total") == 1
    assert value(registry, "transfer_seconds_count", direction="load") == 3
    assert not vllms(registry, "load_bytes_total"), "that is not of OffloadingConnector"
