"""Metrics that the engine serves itself: the rows that vLLM's own server has, on another port."""

from __future__ import annotations

import dataclasses
import functools
import socket
import threading
import urllib.request
from typing import Any

import prometheus_client.values
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.v1.outputs import KVConnectorOutput

from safe_offload.config.options import OffloadConfig
from safe_offload.errors import ConfigError
from safe_offload.observe.counters import (
    COUNTERS,
    HISTOGRAMS,
    LOAD_S,
    TIER_SERIES,
    Count,
    Counters,
)
from safe_offload.observe.metrics import (
    GAUGES,
    INFO,
    OffloadPromMetrics,
    OffloadStats,
    StatsReporter,
)
from safe_offload.observe.served import ServedStats
from safe_offload.protocol import StepReport
from safe_offload.sides import Side
from tests.benchmarks.scheduler_probe import HookCounter
from tests.engine.http_server import hold_port
from tests.simulator.vllm_setup import EngineShape, make_config

TIERS = {"tiers": [{"url": "file:///near"}, {"url": "redis://far"}]}
EVERYTHING = OffloadStats.of(
    {str(series): 3 for series in (*COUNTERS, *TIER_SERIES[1].counters)},
    dict.fromkeys(GAUGES, 7.0),
    {str(series): {0: (2, 0.00002), 3: (1, 0.0007)} for series in HISTOGRAMS.values()},
    dict.fromkeys(INFO, "x"),
)


def vllm_config(index: int = 0) -> Any:
    config = make_config(EngineShape())
    extra = {**config.kv_transfer_config.kv_connector_extra_config, **TIERS}
    config.kv_transfer_config = dataclasses.replace(
        config.kv_transfer_config, kv_connector_extra_config=extra
    )
    config.parallel_config.data_parallel_index = index
    return config


def options(port: int, **more: Any) -> OffloadConfig:
    return OffloadConfig.from_extra_config({"metrics_port": port, **more}, world_size=1)


@pytest.fixture
def port():
    holder, number = hold_port()
    yield number
    holder.close()


@pytest.fixture
def served(port):
    reporter = StatsReporter(Counters(), {})
    made = ServedStats(reporter, options(port), vllm_config())
    yield made
    made.close()


def scrape(port: int, host: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=600) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        text: str = response.read().decode()
    return text


def samples(families: Any) -> dict[tuple[str, frozenset[Any]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.parametrize("observed", [[], [EVERYTHING.data], [EVERYTHING.data] * 3])
def test_the_rows_are_those_of_vllms_server(port, served, observed):
    config, registry = vllm_config(), CollectorRegistry()
    types: Any = {
        kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    name = config.model_config.served_model_name
    theirs = OffloadPromMetrics(config, types, ["model_name", "engine"], {0: [name, "0"]})
    for data in observed:
        theirs.observe(data)
        served.of_workers(OffloadStats(data=data))
    text = scrape(port)
    found = samples(text_string_to_metric_families(text))
    assert found == samples(registry.collect())
    assert len(found) > 300
    described = [line for line in text.splitlines() if line.startswith("# HELP")]
    assert len(described) == len(set(described)) > 70


def test_engines_of_one_server_take_one_port_after_the_other(port):
    """Engine 1 is not at `metrics_port`, and says which it is in the label."""
    made = ServedStats(StatsReporter(Counters(), {}), options(port - 1), vllm_config(1))
    try:
        assert 'vllm:safe_offload_slots{engine="1"' in scrape(port)
    finally:
        made.close()


def test_a_port_is_free_again_after_the_end(port):
    for _ in range(2):
        made = ServedStats(StatsReporter(Counters(), {}), options(port), vllm_config())
        scrape(port)
        made.close()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


@pytest.mark.parametrize(
    ("change", "index", "problem"),
    [({}, 0, "in use"), ({"metrics_host": "192.0.2.1"}, 0, "assign"), ({}, 65535, "65535")],
)
def test_a_port_that_cannot_be_opened_is_refused(port, served, change, index, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        ServedStats(StatsReporter(Counters(), {}), options(port, **change), vllm_config(index))
    assert f'kv_connector_extra_config["metrics_port"] = {port}' in str(caught.value)
    assert 'Fix: write another "metrics_port"' in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", "::1"])
def test_the_address_can_be_chosen(port, host):
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    made = ServedStats(
        StatsReporter(Counters(), {}), options(port, metrics_host=host), vllm_config()
    )
    try:
        assert scrape(port, {"0.0.0.0": "127.0.0.1", "::1": "[::1]"}.get(host, host))
    finally:
        made.close()


def test_nothing_is_written_for_other_processes(port, monkeypatch):
    """With several API servers prometheus_client's own metrics go into files that these share."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a value of prometheus_client")

    monkeypatch.setattr(prometheus_client.values, "ValueClass", refuse)
    with pytest.raises(AssertionError):
        Counter("name", "doc", registry=None)
    made = ServedStats(StatsReporter(Counters(), {}), options(port), vllm_config())
    made.of_workers(EVERYTHING)
    assert scrape(port)
    made.close()


def test_what_the_scheduler_counts_is_handed_on_and_served(port):
    counters = Counters()
    made = ServedStats(StatsReporter(counters, {}), options(port), vllm_config())
    side = Side()
    try:
        assert made.take(side) is None
        counters[Count.HIT_TOKENS] += 5
        taken = made.take(side)
        assert taken is not None
        assert taken.data["counts"] == {"hit_tokens": 5}
        assert "vllm:safe_offload_hit_tokens_total{" in scrape(port)
        assert value(port, "vllm:safe_offload_hit_tokens_total") == 5
    finally:
        made.close()


def value(port: int, name: str, **labels: str) -> float:
    found = samples(text_string_to_metric_families(scrape(port)))
    (one,) = [
        number
        for (found_name, found_labels), number in found.items()
        if found_name == name and labels.items() <= dict(found_labels).items()
    ]
    return one


def test_of_several_connectors_ours_is_served(port, served):
    ours = OffloadStats.of({"load_bytes": 9}, {})
    other = OffloadStats.of({"load_bytes": 100}, {})
    served.of_workers(
        MultiKVConnectorStats(data={"SafeCPUOffloadConnector": ours, "OtherConnector": other})
    )
    for nothing in (None, MultiKVConnectorStats(data={"OtherConnector": other})):
        served.of_workers(nothing)
    assert value(port, "vllm:safe_offload_load_bytes_total") == 9


def test_pieces_of_the_page_are_small(port, served):
    """The scheduler's thread waits for the GIL while one is made."""
    for _ in range(3):
        served.of_workers(EVERYTHING)
    pieces, costs = served.pieces(), []
    while True:
        counter = HookCounter()
        piece = counter.wrap("piece", lambda: next(pieces, b""))()
        if not piece:
            break
        costs.append((counter.total.instructions, len(piece)))
    assert len(costs) > 200
    assert max(instructions for instructions, _ in costs) < 20_000, "half a millisecond"
    assert max(num_bytes for _, num_bytes in costs) < 4096


def test_a_scrape_and_a_hook_do_not_meet(port, served):
    """A histogram that is read while it is written is never less than it was."""
    name, rounds = "vllm:safe_offload_transfer_seconds_count", 3000
    stop, seen = threading.Event(), [0.0]

    def read() -> None:
        while not stop.is_set():
            seen.append(value(port, name, direction="load"))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(rounds):
        data = {"observed": {str(LOAD_S): {number % 9: (1, 0.001)}}}
        info = {"info": dict.fromkeys(INFO, str(number))} if number % 100 == 0 else {}
        served.of_workers(OffloadStats(data={**data, **info}))
    stop.set()
    reader.join()
    assert seen == sorted(seen)
    assert value(port, name, direction="load") == rounds


def test_a_connector_serves_what_its_workers_report(make_rig, port):
    rig = make_rig(extra={"num_cpu_blocks": 60, "metrics_port": port})
    output = KVConnectorOutput(
        kv_connector_worker_meta=StepReport(),
        kv_connector_stats=OffloadStats.of({"store_bytes": 11}, {}),
    )
    rig.connector.update_connector_output(output)
    rig.connector.get_kv_connector_stats()
    try:
        assert value(port, "vllm:safe_offload_store_bytes_total") == 11
        assert value(port, "vllm:safe_offload_configured_slots") == 60
    finally:
        rig.connector.shutdown()
