"""Dashboard, alerts and the page on metrics: a real Prometheus scrapes a real server.

The server has every part that brings metrics; at the end it is sent hints.
"""

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from tests.engine.engines import connector, make_prompts, tier_at
from tests.engine.http_server import HttpServer, hold_port
from tests.engine.prometheus import (
    EXAMPLES,
    as_asked,
    dashboard_queries,
    prometheus,
    without_comparisons,
)
from tests.engine.test_hints import BODIES, GUIDED, NUM_HIT, kinds, send
from tests.engine.test_hints import PROMPTS as HINTED
from tests.engine.test_metrics_port import samples
from tests.observe.reference_page import rows
from tests.programs import find_program

needs_programs = pytest.mark.skipif(
    None in (find_program("prometheus"), find_program("promtool")),
    reason="no prometheus or promtool: `make servers`, or put them on the PATH",
)

NAMES = "ABCDEFGH"
PROMPTS = make_prompts(321, NAMES)
NUM_SLOTS = 90
"""The prompts have 80 blocks, their answers some more, and other prompts follow."""
SERVER: dict[str, Any] = {
    "arguments": ("--prefix-caching-hash-algo", "sha256_cbor"),
    "environment": {"VLLM_SERVER_DEV_MODE": "1"},
}
PREFIX = "vllm:safe_offload_"


@pytest.fixture(scope="module")
def port():
    """Of our own rows."""
    holder, number = hold_port()
    yield number
    holder.close()


@pytest.fixture(scope="module")
def server(model, tmp_path_factory, port):
    folder = tmp_path_factory.mktemp("server")
    tiers = [tier_at(folder / "tier", capacity="1GiB", model_version="1")]  # resets keep it
    tenants = folder / "tenants.json"
    tenants.write_text('{"guaranteed": {"chat": {"share": "5%", "prefix": "chat-"}}}')
    config = connector(NUM_SLOTS, tiers=tiers, tenants=str(tenants), metrics_port=port, **GUIDED)
    with HttpServer(model("llama"), folder, config=config, **SERVER) as made:
        made.wait_until_healthy()
        yield made


@pytest.fixture(scope="module")
def scraped(server, tmp_path_factory):
    """A Prometheus that has seen the server before, during and after its load."""
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus(server.url.removeprefix("http://"), folder) as found:
        found.wait_for(lambda: bool(found.query(f"{PREFIX}slots")), "the first scrape")
        serve_load(server)
        total = f"{PREFIX}resets_total"
        found.wait_for(lambda: found.query(total) == [1.0], "a scrape after the load")
        recorded = "safe_offload:evicted_age_seconds:mean1h"
        found.wait_for(lambda: bool(found.query(recorded)), "an evaluation after the scrape")
        yield found


def serve_load(server: HttpServer) -> None:
    """Prompts, the same from the host, others that evict them, the same from the tier, a reset."""
    others = make_prompts(321, "IJKLMNOP").values()
    with ThreadPoolExecutor(2) as clients:
        for prompts in (PROMPTS.values(), PROMPTS.values(), others, PROMPTS.values()):
            list(clients.map(lambda prompt: server.ask(prompt, 8), prompts))
            server.post("/reset_prefix_cache")
    server.post("/reset_prefix_cache?reset_external=true")
    server.ask(PROMPTS["A"], 8)


@needs_programs
def test_every_query_of_the_dashboard_returns_something(scraped):
    queries = list(dashboard_queries())
    assert len(queries) > 40
    silent = [(title, q) for title, q in queries if not scraped.query(as_asked(q))]
    assert silent == []


@needs_programs
def test_every_rule_would_fire_if_its_limits_were_passed(scraped):
    (group,) = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"]
    rules = {rule.get("alert", rule.get("record")): rule["expr"] for rule in group["rules"]}

    def silent() -> list[str]:
        return [name for name, e in rules.items() if not scraped.query(without_comparisons(e))]

    # A rule that is about what another one records is evaluated later.
    scraped.wait_for(lambda: not silent(), "every rule to return something", silent)
    states = {rule["name"]: rule["health"] for rule in scraped.get("rules")["groups"][0]["rules"]}
    assert states == dict.fromkeys(rules, "ok")


@needs_programs
def test_the_page_has_every_metric_that_is_scraped_and_no_other(scraped):
    expected = {f"{name}_total" for name in rows("counter")} | rows("gauge")
    for histogram in rows("histogram"):
        expected |= {f"{histogram}_{part}" for part in ("bucket", "count", "sum")}
    found = {name.removeprefix(PREFIX) for name in scraped.names() if name.startswith(PREFIX)}
    assert {name for name in found if not name.endswith("_created")} == expected


@needs_programs
def test_metrics_port_has_the_rows_of_vllms_server(server, scraped, port):
    def is_same() -> bool:
        found = samples(f"http://127.0.0.1:{port}")
        return len(found) > 300 and found == samples(server.url)

    server.wait_for(is_same, "both to say the same")
    assert "/metrics lacks" not in server.log()


@needs_programs
def test_vllms_names_have_what_ours_have(scraped):
    for ours, theirs in (
        (f"{PREFIX}load_bytes_total", "vllm:kv_offload_load_bytes_total"),
        (f"{PREFIX}store_bytes_total", "vllm:kv_offload_store_size_sum"),
        (f'{PREFIX}transfer_seconds_sum{{direction="store"}}', "vllm:kv_offload_store_time_total"),
    ):
        (value,) = scraped.query(theirs)
        assert value > 0
        assert scraped.query(ours) == [pytest.approx(value)]


@needs_programs
def test_what_was_counted_adds_up(server, scraped):
    now = {name.removeprefix(PREFIX): n for name, n in server.metrics().items()}
    assert 0 < now["loaded_tokens_total"] <= now["hit_tokens_total"]
    assert now["hit_length_tokens_sum"] == now["hit_tokens_total"]
    slot_bytes = now["capacity_bytes"] / NUM_SLOTS
    assert now["load_bytes_total"] == now["loaded_blocks_total"] * slot_bytes
    assert now["load_wait_seconds_count"] <= now["hit_length_tokens_count"]
    assert now["transfer_seconds_count"] == now["transfer_wait_seconds_count"] > 0
    assert 0 < now["used_slots"] <= now["slots"] == NUM_SLOTS
    assert now["evicted_blocks_total"] > 0
    assert now["transfer_failures_total"] == now["dropped_ids_total"] == 0
    assert 0 < now["tier_read_bytes_total"] <= now["fetched_blocks_total"] * slot_bytes
    assert now["tier_written_bytes_total"] > 0
    assert now["tier_stored_bytes"] < now["tier_capacity_bytes"] == 1 << 30
    assert now["tier_is_out"] == 0


@needs_programs
def test_promtool_finds_nothing_but_the_colon_of_vllm(server):
    program = find_program("promtool")
    assert program is not None
    lines = server.metrics_text().splitlines(keepends=True)
    ours = [line for line in lines if re.search(rf"^(# \w+ )?{PREFIX}", line)]
    assert len(ours) > 200
    result = subprocess.run(
        [program, "check", "metrics"], input="".join(ours), capture_output=True, text=True
    )
    found = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    assert found, "not even the colon"
    other = [line for line in found if not line.endswith("metric names should not contain ':'")]
    assert other == []


def test_the_hints_of_the_page_do_what_it_says(server):
    """They pin, and bring a prompt back from the tier; a version that nobody knows is counted."""
    server.settle()
    written, fetched = (server.count(name) for name in ("tier_written_objects", "fetched_blocks"))
    num_blocks = NUM_HIT // 32
    send(server, "kv.retain")
    server.wait_for(lambda: server.count("pins") == 1, "the pin")
    all_written = written + num_blocks
    server.wait_for(lambda: server.count("tier_written_objects") >= all_written, "the tier")
    server.post("/reset_prefix_cache?reset_external=true")
    send(server, "kv.fetch")
    server.settle()
    assert server.count("fetched_blocks") == fetched + num_blocks
    every = {"retain": 1, "fetch": 1}
    server.wait_for(lambda: kinds(server.metrics_text()) == every, "all actions to be counted")
    assert "Invalid hints" not in server.log()

    body = json.loads(json.dumps(BODIES["kv.fetch"]).replace('"1.0"', '"2.0"'))
    server.ask(HINTED["hint 2"], 1, kv_transfer_params=body["kv_transfer_params"])
    every["unknown"] = 1
    server.wait_for(lambda: kinds(server.metrics_text()) == every, "another version")
    assert "Invalid hints in 1 requests" in server.log()
