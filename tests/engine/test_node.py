"""Real engines that share one host cache: one after the other, side by side, killed."""

import contextlib
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_models import ModelKind
from safe_offload.node.pools import find_pools, remove_pool
from tests.engine.engines import (
    MLA,
    NUM_MLA_HIT_TOKENS,
    connector,
    make_job,
    make_prompts,
    num_hit_tokens,
    run,
    tier_at,
)
from tests.engine.http_server import HttpServer, make_body
from tests.engine.test_tiers import tier_processes
from tests.worker.waiting import wait_until

ABC = ("A", "B", "C")
HASHES = "sha256_cbor"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_two_ranks_find_what_the_last_two_stored(kind, model, tmp_path, pools):
    """Each has a file of its own; of MLA both have one, and each stores half of it."""
    mla = MLA if kind == "deepseek" else {}
    one = make_job(
        model(kind),
        connector(share="node", verify="load"),
        turns=(*ABC, *ABC) if mla else ABC,
        prefix_caching_hash_algo=HASHES,
        tensor_parallel_size=2,
        in_process=False,
        **mla,
    )
    first, second = (run(tmp_path / name, one)[0] for name in ("first", "second"))
    pools.of(first.log)
    assert set(pools.of(second.log)) == {"found"}
    (path,) = pools.paths
    ranks = sorted(found.name for found in path.glob("rank*"))
    assert ranks == (["rank0"] if mla else ["rank0", "rank1"])
    num_hit = NUM_MLA_HIT_TOKENS if mla else num_hit_tokens(2000)
    for report in (first, second):
        report.check_no_trouble()
    assert [answer.num_host for answer in first.answers[:3]] == [0, 0, 0]
    assert [answer.num_host for answer in second.answers[:3]] == [num_hit] * 3
    # vLLM's MLA kernels of the CPU round otherwise behind a hit, so hits are compared with hits.
    assert second.tokens[:3] == first.tokens[-3:]


@pytest.fixture
def serve(model, tmp_path):
    """Start servers of one model that share their host cache."""
    with contextlib.ExitStack() as stack:

        def start(
            name: str,
            *arguments: str,
            kind: ModelKind = "llama",
            num_slots: int = 200,
            **extra: Any,
        ) -> HttpServer:
            return stack.enter_context(
                HttpServer(
                    model(kind),
                    tmp_path / name,
                    num_blocks=120,
                    config=connector(num_slots, share="node", verify="load", **extra),
                    arguments=arguments,
                )
            )

        yield start


def pss_of(path: Path, process_ids: list[int]) -> int:
    """Bytes of a file that processes have mapped, those of several divided among them."""
    total = 0
    for number in process_ids:
        is_it = False
        for line in Path(f"/proc/{number}/smaps").read_text().splitlines():
            if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
                is_it = line.endswith(f"{path}/rank0")
            elif is_it and line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
    return total


def test_two_servers_share_what_either_has_computed_and_one_is_killed(serve, pools):
    prompts = make_prompts(641)
    num_hit = num_hit_tokens(641)
    one, other = (serve(name, kind="gemma3", num_slots=600) for name in ("one", "other"))
    for server in (one, other):
        server.wait_until_healthy()
    logs = [pools.of(server.log()) for server in (one, other)]
    assert sorted(logs) == [["created"], ["found"]]
    (path,) = pools.paths
    answers = {name: one.ask(prompt) for name, prompt in prompts.items()}
    one.settle()
    assert {name: other.ask(prompt) for name, prompt in prompts.items()} == answers
    assert other.count("loaded_tokens") == 3 * num_hit
    assert other.count("stored_blocks") == 0
    pool_bytes = (path / "rank0").stat().st_size
    assert 0 < pss_of(path, one.process_ids() + other.process_ids()) <= pool_bytes
    one.kill()
    one.start()
    one.wait_until_healthy()
    assert one.ask(prompts["B"]) == answers["B"]
    assert one.count("loaded_tokens") == num_hit
    for server in (one, other):
        assert server.count("checksum_mismatches") == server.count("contained_errors") == 0
        server.stop()
    # A killed process takes a while to end.
    wait_until(lambda: not any(pool.is_used for pool in find_pools() if pool.path == path))
    assert any(pool.num_filled for pool in find_pools() if pool.path == path)


def ask_engine(server: HttpServer, number: int, prompt: list[int], **params: Any) -> Any:
    """Send a prompt to one of two data-parallel engines; returns the answer."""
    body = make_body(prompt, 4) | {"kv_transfer_params": params}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-data-parallel-rank": str(number)},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def test_data_parallel_engines_share_what_either_has_computed_over_a_tier(serve, pools, tmp_path):
    """One pool over one directory, with pins and KV events; then both are started anew."""
    prompt, num_hit = make_prompts(641)["A"], num_hit_tokens(641)
    events = json.dumps({"enable_kv_cache_events": True, "publisher": "null"})
    server = serve(
        "server",
        *("--data-parallel-size", "2", "--kv-events-config", events),
        tiers=[tier_at(tmp_path / "disk")],
        pin_share=0.5,
        kv_hints=True,
    )
    server.wait_until_healthy()
    assert sorted(pools.of(server.log())) == ["created", "found"]
    first = ask_engine(server, 0, prompt, pin_s=600)
    answer = first["choices"][0]["token_ids"]
    assert first["kv_transfer_params"]["pinned_tokens"] == num_hit
    server.settle()
    assert ask_engine(server, 1, prompt)["choices"][0]["token_ids"] == answer
    server.wait_for(lambda: server.count("loaded_tokens") == num_hit, "the hit")
    assert server.count("borrowed_blocks") == server.count("loaded_blocks")
    assert server.count("pool_engines") == 2 * 2  # as each of them says
    assert 0 < server.count("own_slots") < server.count("slots")
    assert len(tier_processes(server)) == 2
    server.wait_for(lambda: server.count("spilled_blocks") == num_hit // 32, "the tier")
    server.stop()
    (path,) = pools.paths
    wait_until(lambda: remove_pool(path) == "")
    server.start()
    server.wait_until_healthy()
    assert ask_engine(server, 1, prompt)["choices"][0]["token_ids"] == answer
    server.wait_for(lambda: server.count("loaded_tokens") == num_hit, "the hit")
    assert server.count("fetched_blocks") == num_hit // 32
