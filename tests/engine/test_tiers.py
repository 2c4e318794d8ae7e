"""Real engines with a tier: restarts, engines side by side, machines, a tier that dies."""

import os
import shutil
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.tiny_models import ModelKind
from tests.engine.engines import (
    MLA,
    NUM_MLA_HIT_TOKENS,
    Job,
    Report,
    connector,
    make_job,
    make_prompts,
    num_hit_tokens,
    run,
    tier_at,
)
from tests.engine.http_server import HttpServer

HASHES = "sha256_cbor"
NUM_TOKENS = 641
ABC = ("A", "B", "C")


@pytest.fixture
def tmpfs():
    """A folder in memory."""
    with tempfile.TemporaryDirectory(prefix="safe-offload-test-", dir="/dev/shm") as name:
        yield Path(name)


def job(model: Path, kind: ModelKind, *tiers: Path | dict[str, Any], **extra: Any) -> Job:
    """A, B, C in a pool of 1.6 prompts, with tiers: directories, or as a configuration has them."""
    written = [tier_at(tier) if isinstance(tier, Path) else tier for tier in tiers]
    return make_job(
        model,
        kv_transfer_config=connector(tiers=written, **extra),
        turns=ABC,
        prefix_caching_hash_algo=HASHES,
    )


def check_found_again(first: Report, second: Report, num_hit: int) -> None:
    """A, B, C were computed by the first engine, and came to the second from what that had kept."""
    for report in (first, second):
        report.check_well()
    assert [answer.num_host for answer in first.answers] == [0, 0, 0]
    assert [answer.num_host for answer in second.answers] == [num_hit] * 3
    assert second.tokens == first.tokens


@pytest.mark.nightly
def test_an_engine_that_has_computed_only_tails_makes_no_speed_and_no_savings_up(model, tmp_path):
    """It knows steps of 16 tokens, and nothing of those of 512 that its hits have spared it."""
    tier = tmp_path / "tier"
    auto = {"min_load_tokens": "auto"}
    (first,) = run(tmp_path / "first", job(model("llama"), "llama", tier, **auto))
    (second,) = run(tmp_path / "second", job(model("llama"), "llama", tier, **auto))
    check_found_again(first, second, num_hit_tokens(2000))
    assert first.count("compute_tokens_per_second") > 0
    assert second.count("compute_tokens_per_second") == 0, "that of a step of 16 tokens"
    assert second.count("saved_seconds") == 0


@pytest.mark.nightly
def test_an_engine_with_mla_finds_what_the_last_one_stored(model, tmp_path):
    """vLLM's MLA kernels of the CPU round otherwise behind a hit, so hits are compared with hits.

    The first engine is asked twice, and has the second answers from its own prefix cache.
    """
    config = connector(tiers=[tier_at(tmp_path / "tier")])
    small = make_job(model("deepseek"), config, turns=ABC, prefix_caching_hash_algo=HASHES, **MLA)
    num_blocks = 4 * small.arguments["num_gpu_blocks_override"]
    large = small.arguments | {"num_gpu_blocks_override": num_blocks}
    (first,) = run(tmp_path / "first", replace(small, arguments=large, turns=(*ABC, *ABC)))
    (second,) = run(tmp_path / "second", small)
    num_hit = NUM_MLA_HIT_TOKENS
    assert [answer.num_gpu for answer in first.answers] == [0, 0, 0, num_hit, num_hit, num_hit]
    assert [answer.num_host for answer in second.answers] == [num_hit] * 3
    assert second.tokens == first.tokens[3:]
    second.check_well()


PROMPTS = make_prompts(NUM_TOKENS, "ABCDE")


def make_server(
    model: Path, tier: Path, folder: Path, num_slots: int = 500, num_blocks: int = 50, **more: Any
) -> HttpServer:
    return HttpServer(
        model,
        folder,
        num_blocks=num_blocks,
        config=connector(num_slots, tiers=[tier_at(tier, **more)]),
        arguments=("--prefix-caching-hash-algo", HASHES),
    )


def ask(server: HttpServer, names: str = "ABC") -> dict[str, list[int]]:
    """The greedy tokens of some prompts."""
    return {name: server.ask(PROMPTS[name]) for name in names}


def wait_until_spilled(server: HttpServer) -> None:
    """Everything that the server has stored is in the tier."""

    def has_spilled() -> bool:
        names = ("stored_blocks", "spilled_blocks", "spills_in_flight", "stores_in_flight")
        stored, spilled, *in_flight = map(server.count, names)
        return spilled >= stored > 0 and not any(in_flight)

    server.wait_for(has_spilled, "all blocks to be in the tier")


def test_servers_share_a_directory_and_find_it_again_after_sigterm_and_sigkill(
    model, tmp_path, tmpfs
):
    """A, B, C are computed by one server, D by another one; then a directory that vanishes."""
    tier = tmpfs / "kv"
    first, beside = (
        make_server(model("gemma3"), tier, tmp_path / name, num_blocks=150)
        for name in ("first", "beside")
    )
    num_hit = num_hit_tokens(NUM_TOKENS)
    with first, beside:
        first.wait_until_healthy()
        beside.wait_until_healthy()
        expected = ask(first)
        assert first.count("hit_tokens") == 0
        wait_until_spilled(first)
        assert ask(beside) == expected
        assert beside.count("hit_tokens") == 3 * num_hit, "what the other one has computed"
        expected |= ask(beside, "D")
        wait_until_spilled(beside)
        first.stop()  # SIGTERM
        beside.kill()  # SIGKILL
    with first:
        first.wait_until_healthy()
        assert ask(first, "ABCD") == expected
        assert first.count("hit_tokens") == 4 * num_hit
        shutil.rmtree(tier)
        expected |= ask(first, "E")
        assert ask(first, "ABCDE") == expected
        assert first.is_healthy()
        for name in ("contained_errors", "transfer_failures", "checksum_mismatches"):
            assert first.count(name) == 0, name


def tier_processes(server: HttpServer) -> list[int]:
    """The processes of the server's tiers."""
    started = psutil.Process(server.group_id).children(recursive=True)
    each = {process.pid: Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in started}
    return [pid for pid, command in each.items() if command.startswith(b"safe-offload tier ")]


def test_a_tiers_process_that_is_killed_or_stopped_costs_hits_only(model, tmp_path):
    """Host memory has no room for A, B, C, so that they are read from the tier in turns."""
    waits = {"timeout_s": 1, "wait_s": 1}
    server = make_server(model("llama"), tmp_path / "kv", tmp_path / "server", 50, **waits)
    with server:
        server.wait_until_healthy()
        expected = ask(server)
        wait_until_spilled(server)
        for send in (signal.SIGKILL, signal.SIGSTOP):
            (pid,) = tier_processes(server)
            os.kill(pid, send)
            assert ask(server) == expected
            before = server.count("tier_read_objects")

            def reads_again(before: float = before) -> bool:
                assert ask(server) == expected
                return server.count("tier_read_objects") > before

            server.wait_for(reads_again, "reads from the tier")
            assert pid not in tier_processes(server) != []
        for name in ("contained_errors", "transfer_failures", "checksum_mismatches"):
            assert server.count(name) == 0, name
        assert server.is_healthy()
