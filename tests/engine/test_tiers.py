"""Real engines with a tier: restarts, engines side by side, machines, a tier that dies."""

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.engines import (
    connector,
    make_prompts,
    num_hit_tokens,
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
