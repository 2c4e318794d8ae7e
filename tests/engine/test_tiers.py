"""Real engines with a directory as their tier: restarts, engines side by side, a tier that dies."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safe_offload.bench.tiers_engine import wait_until_quiet
from safe_offload.bench.tiny_models import ModelKind
from tests.engine.conftest import GetModel
from tests.engine.engines import (
    ENVIRONMENT,
    EVERY_HIT,
    Job,
    connector,
    make_job,
    make_prompts,
    num_hit_tokens,
    num_pool_blocks,
    run,
)
from tests.engine.http_server import HttpServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

HASHES = "sha256_cbor"
NUM_TOKENS = 641
ABC = ("A", "B", "C")


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(prefix="safe-offload-test-", dir="/dev/shm") as name:
        yield Path(name)


def job(model: Path, kind: ModelKind, tier: Path, **extra: Any) -> Job:
    """A, B, C in a pool of 1.6 prompts, with a tier."""
    return make_job(
        model,
        num_blocks=num_pool_blocks(kind),
        kv_transfer_config=connector(tiers=[{"url": f"file://{tier}"}], **extra),
        turns=ABC,
        prefix_caching_hash_algo=HASHES,
        force_prefix_caching=kind == "deepseek",
    )


@pytest.mark.parametrize("kind", ["llama", "gemma3", "deepseek"])
def test_an_engine_finds_what_the_last_one_stored(
    kind: ModelKind, model: GetModel, tmp_path: Path
) -> None:
    """A, B, C are asked, the engine ends, a new one has the same directory."""
    tier = tmp_path / "tier"
    (first,) = run(tmp_path / "first", job(model(kind), kind, tier))
    (second,) = run(tmp_path / "second", job(model(kind), kind, tier))
    for report in (first, second):
        report.check_no_trouble()
        report.check_everything_is_free()
    assert [answer.num_host for answer in first.answers] == [0, 0, 0]
    num_hit = num_hit_tokens(2000)
    assert [answer.num_host for answer in second.answers] == [num_hit] * 3
    assert second.tokens == first.tokens


def test_a_prompt_that_the_host_has_lost_comes_from_the_tier(
    model: GetModel, tmp_path: Path
) -> None:
    """A host of 80 blocks holds one prompt of 63; the directory holds all three."""
    one = job(model("llama"), "llama", tmp_path / "tier", num_cpu_blocks=80)
    twice = Job(**{**vars(one), "turns": (*ABC, *ABC)})
    (report,) = run(tmp_path / "engine", twice)
    report.check_no_trouble()
    report.check_everything_is_free()
    assert report.tokens[3:] == report.tokens[:3]
    assert all(answer.num_host > 0 for answer in report.answers[3:]), report.answers


ARGUMENTS = (
    *("--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init"),
    *("--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "4"),
    *("--num-gpu-blocks-override", "100", "--prefix-caching-hash-algo", HASHES),
)
PROMPTS = make_prompts(NUM_TOKENS)


def make_server(model: Path, tier: Path, folder: Path) -> HttpServer:
    extra = {"num_cpu_blocks": 500, "check_invariants": True, **EVERY_HIT}
    config = {
        "kv_connector": "SafeCPUOffloadConnector",
        "kv_connector_extra_config": {**extra, "tiers": [{"url": f"file://{tier}"}]},
    }
    arguments = (*ARGUMENTS, "--kv-transfer-config", json.dumps(config))
    return HttpServer(model, arguments, folder, ENVIRONMENT)


def ask_all(server: HttpServer) -> dict[str, list[int]]:
    """The greedy tokens of A, B and C."""
    answers = {}
    for name, prompt in PROMPTS.items():
        body = {"model": "model", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        body |= {"ignore_eos": True, "detokenize": False, "return_token_ids": True}
        answers[name] = server.post("/v1/completions", body)["choices"][0]["token_ids"]
    return answers


def hit_tokens(server: HttpServer) -> float:
    return server.metrics().get("vllm:safe_offload_hit_tokens_total", 0.0)


def test_servers_share_a_directory_and_find_it_again_after_sigterm_and_sigkill(
    model: GetModel, tmp_path: Path, tmpfs: Path
) -> None:
    folder = model("llama")
    first = make_server(folder, tmpfs / "kv", tmp_path / "first")
    beside = make_server(folder, tmpfs / "kv", tmp_path / "beside")
    num_hit = 3 * num_hit_tokens(NUM_TOKENS)
    with first, beside:
        first.wait_until_healthy()
        beside.wait_until_healthy()
        expected = ask_all(first)
        assert hit_tokens(first) == 0
        wait_until_quiet(tmpfs / "kv")
        assert ask_all(beside) == expected
        assert hit_tokens(beside) == num_hit, "what the one computed, the other one answers"
        first.stop()  # SIGTERM
        with first:
            first.wait_until_healthy()
            assert ask_all(first) == expected
            assert hit_tokens(first) == num_hit, "after SIGTERM"
            beside.kill()  # SIGKILL
            with beside:
                beside.wait_until_healthy()
                assert ask_all(beside) == expected
                assert hit_tokens(beside) == num_hit, "after SIGKILL"


def test_a_directory_that_vanishes_is_a_miss(model: GetModel, tmp_path: Path, tmpfs: Path) -> None:
    """The mount is gone in the middle: everything is answered, and right."""
    server = make_server(model("llama"), tmpfs / "kv", tmp_path / "server")
    with server:
        server.wait_until_healthy()
        expected = ask_all(server)
        wait_until_quiet(tmpfs / "kv")
        shutil.rmtree(tmpfs / "kv")
        server.post("/reset_prefix_cache")
        assert ask_all(server) == expected
        assert server.metrics().get("vllm:safe_offload_contained_errors_total", 0) == 0
