"""`metrics_port` of real servers whose own /metrics lacks our rows."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.engines import connector, make_prompts
from tests.engine.http_server import BLOCK_SIZE, PREFIX, HttpServer, hold_port
from tests.programs import find_program

NUM_TOKENS, NUM_HIT_TOKENS = 321, 320
pytestmark = pytest.mark.nightly

PROMPTS = make_prompts(NUM_TOKENS, "ABCDEFGH")
NUM_BLOCKS = 40
"""Fewer than the prompts have: the second round comes from the host."""
SOURCES = "vllm:prompt_tokens_cached_by_source_total"
Rows = dict[tuple[str, frozenset[Any]], float]


@pytest.fixture
def port():
    holder, number = hold_port()
    yield number
    holder.close()


def samples(url: str, prefixes: tuple[str, ...] = (PREFIX, "vllm:kv_offload_")) -> Rows:
    with urllib.request.urlopen(f"{url}/metrics", timeout=600) as response:
        families = text_string_to_metric_families(response.read().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(prefixes) and not sample.name.endswith("_created")
    }


def total(found: Rows, name: str) -> float:
    return sum(value for (of, _), value in found.items() if of == f"{PREFIX}{name}")


def serve(server: HttpServer, served: str) -> None:
    """Two rounds of all prompts, the second from the host; and nothing is left in flight."""
    bodies = [
        {"model": "model", "prompt": p, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        for p in PROMPTS.values()
    ]
    rounds = [
        [server.post("/v1/completions", body)["choices"][0]["text"] for body in bodies]
        for _ in range(2)
    ]
    assert rounds[0] == rounds[1]
    names = ("stores_in_flight", "loads_in_flight")
    server.wait_for(
        lambda: not any(total(samples(served), name) for name in names), "the end of all transfers"
    )


def check_counts(found: Rows) -> None:
    num_blocks = len(PROMPTS) * NUM_HIT_TOKENS // BLOCK_SIZE
    assert total(found, "loaded_tokens_total") == len(PROMPTS) * NUM_HIT_TOKENS
    assert total(found, "loaded_blocks_total") == num_blocks
    slot_bytes = total(found, "capacity_bytes") / total(found, "slots")
    assert total(found, "load_bytes_total") == num_blocks * slot_bytes, "what the worker reports"
    assert total(found, "transfer_seconds_count") > 0
    assert total(found, "used_slots") == total(found, "stored_blocks_total") > num_blocks - 1
    assert total(found, "leased_slots") == 0
    assert len(found) > 300


def make_server(model: Path, folder: Path, port: int, **options: Any) -> HttpServer:
    return HttpServer(
        model, folder, num_blocks=NUM_BLOCKS, config=connector(500, metrics_port=port), **options
    )


@pytest.mark.skipif(
    find_program("vllm-rs") is None,
    reason="no vllm-rs: `make servers RUST=1`, or put the one of vLLM's own wheel on the PATH",
)
def test_with_the_rust_frontend_our_rows_are_there(model, tmp_path, port):
    rust = find_program("vllm-rs")
    with make_server(model("llama"), tmp_path, port, rust=rust) as server:
        server.wait_until_healthy()
        served = f"http://127.0.0.1:{port}"
        serve(server, served)
        assert samples(server.url) == {}, (
            "vLLM carries them now: say so, and see what is left to do"
        )
        check_counts(samples(served))
        found = samples(server.url, (SOURCES,))
        by_source = {dict(labels)["source"]: value for (_, labels), value in found.items()}
        assert by_source["host"] == len(PROMPTS) * NUM_HIT_TOKENS
        assert sum(by_source.values()) == by_source["host"] + by_source["device"]


def test_without_log_statistics_our_rows_are_there(model, tmp_path, port):
    arguments = ("--disable-log-stats",)
    with make_server(model("llama"), tmp_path, port, arguments=arguments) as server:
        server.wait_until_healthy()
        served = f"http://127.0.0.1:{port}"
        prompts = list(PROMPTS.values())
        for prompt in (*prompts, *prompts):
            server.ask(prompt)
        names = ("stores_in_flight", "loads_in_flight")
        server.wait_for(
            lambda: not any(total(samples(served), name) for name in names), "the end of transfers"
        )
        assert not any(value for (_, _), value in samples(server.url).items())
        check_counts(samples(served))
