"""A tier in a process of its own: what comes and goes, and a process that ends, hangs or lies."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError
from safe_offload.mapped_files import address_of, find_file
from safe_offload.node.locks import Locks
from safe_offload.node.pools import open_rank
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.process import process_tier
from safe_offload.tiers.process.process_tier import ProcessTier, opener
from tests import stopping
from tests.node.engines import pools_in, wanted
from tests.tiers.process.slots import LENGTHS, NUM_SLOTS, Slots
from tests.valkey_server import Server
from tests.worker.waiting import PATIENCE_S


@pytest.fixture
def slots():
    return Slots()


@contextlib.asynccontextmanager
async def opened(slots: Slots, config: TierConfig):
    tier = slots.open(config)
    try:
        yield tier
    finally:
        await asyncio.wait_for(tier.close(), PATIENCE_S)


def names(count: int = NUM_SLOTS, space: bytes = bytes(16)) -> list[Name]:
    return [Name(space, 0, number.to_bytes(32)) for number in range(count)]


def directory(path: Path) -> TierConfig:
    return TierConfig.at(f"file://{path}")


async def wait_until(is_so, patience_s=PATIENCE_S) -> None:
    end_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)


async def test_slots_come_back_to_other_slots(slots, tmp_path):
    async with opened(slots, directory(tmp_path / "tier")) as tier:
        content = slots.fill(1)
        rows = {slot: slots.layout.ranges_of(slot) for slot in range(NUM_SLOTS)}
        assert await tier.probe(names()) == [False] * NUM_SLOTS
        assert await tier.spill(names(), range(NUM_SLOTS)) == [Result.DONE] * NUM_SLOTS
        assert await tier.spill(names(1), [3]) == [Result.PRESENT]
        assert await tier.probe(names(NUM_SLOTS + 1)) == [True] * NUM_SLOTS + [False]
        slots.memory[:] = bytes(len(slots.memory))
        others = list(range(NUM_SLOTS))[::-1]
        assert await tier.fetch(names(), others) == [Result.DONE] * NUM_SLOTS
        assert await tier.fetch([Name(bytes(16), 1, bytes(32))], [0]) == [Result.ABSENT]
        for slot, other in enumerate(others):
            for (at, length), (to, _) in zip(rows[slot], rows[other], strict=True):
                assert slots.memory[to : to + length] == content[at : at + length]


async def test_what_it_holds_and_what_it_says_are_told(slots, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with opened(slots, directory(tmp_path / "tier")) as tier:
        await tier.spill(names(), range(NUM_SLOTS))
        await wait_until(lambda: tier.used_bytes >= 0)
        assert "is open" in caplog.text
        assert {record.name for record in caplog.records} >= {
            "vllm.safe_offload.tiers.files.file_store"
        }


async def test_facts_that_were_learned_later_are_written_down(slots, tmp_path):
    facts = {"model": "a"}
    tier, namespace_of = opener(slots.file, slots.layout)(
        directory(tmp_path / "tier"), sum(LENGTHS), facts
    )
    facts["weights"] = "learned later"
    space = namespace_of("")
    await tier.spill(names(space=space), range(NUM_SLOTS))
    await tier.close()
    (description,) = (tmp_path / "tier").glob("*/*.json")
    assert "learned later" in description.read_text()


def test_what_a_store_refuses_is_an_error_at_the_start(slots, tmp_path):
    missing = tmp_path / "tenants.json"
    missing.write_text("{")
    config = dataclasses.replace(directory(tmp_path / "tier"), tenants_path=str(missing))
    with pytest.raises(ConfigError, match='"tenants"'):
        slots.open(config)
    config = dataclasses.replace(directory(tmp_path / "tier"), hmac_key_file=str(missing))
    with pytest.raises(ConfigError, match="hmac_key_file"):
        slots.open(config)


async def test_a_process_that_was_killed_is_started_again(slots, tmp_path, caplog):
    async with opened(slots, directory(tmp_path / "tier")) as tier:
        content = slots.fill(2)
        await tier.spill(names(), range(NUM_SLOTS))
        before = process_of(tier)
        os.kill(before, signal.SIGSTOP)
        asking = asyncio.ensure_future(tier.fetch(names(), range(NUM_SLOTS)))
        await asyncio.sleep(0.05)
        os.kill(before, signal.SIGKILL)
        with pytest.raises(OSError, match="its process has ended"):
            await asking
        assert "has ended" in caplog.text
        slots.memory[:] = bytes(len(slots.memory))
        assert await tier.fetch(names(), range(NUM_SLOTS)) == [Result.DONE] * NUM_SLOTS
        assert process_of(tier) != before
        assert all(
            slots.memory[at : at + length] == content[at : at + length]
            for slot in range(NUM_SLOTS)
            for at, length in slots.layout.ranges_of(slot)
        )


async def test_a_process_that_holds_on_to_slots_is_killed(slots, tmp_path, monkeypatch, caplog):
    """However long it was stopped, no byte of the call moves after its end."""
    monkeypatch.setattr(process_tier, "KILL_S", 0.2)
    async with opened(slots, directory(tmp_path / "tier")) as tier:
        await tier.spill(names(), range(NUM_SLOTS))
        process = process_of(tier)
        stopping.stop(process)
        asking = asyncio.ensure_future(tier.fetch(names(), range(NUM_SLOTS)))
        await asyncio.sleep(0.05)
        for _ in range(3):
            asking.cancel()
            await asyncio.sleep(0)
        assert not asking.done()
        try:
            await asyncio.wait({asking}, timeout=PATIENCE_S)
            assert asking.done()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with pytest.raises(OSError, match="its process has ended"):
            await asking
        assert "does not respond" in caplog.text
        assert await tier.fetch(names(), range(NUM_SLOTS)) == [Result.DONE] * NUM_SLOTS


async def test_a_process_that_answers_no_probe_is_killed(slots, tmp_path, monkeypatch, caplog):
    """What is asked at the same moment, while the kernel takes it down, goes to the next one."""
    monkeypatch.setattr(process_tier, "KILL_S", 0.2)
    async with opened(slots, directory(tmp_path / "tier")) as tier:
        await tier.probe(names())
        before = process_of(tier)
        stopping.stop(before)
        asking = asyncio.ensure_future(tier.probe(names()))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(process_tier.KILL_S)
        assert "does not respond" in caplog.text
        assert await tier.probe(names()) == [False] * NUM_SLOTS
        assert process_of(tier) != before


async def test_a_probe_that_is_cancelled_kills_nothing(slots, tmp_path, monkeypatch):
    monkeypatch.setattr(process_tier, "KILL_S", 0.2)
    with Server(tmp_path / "server") as server:
        async with opened(slots, TierConfig.at(f"redis://{server.host_port}")) as tier:
            before = process_of(tier)
            stopping.stop(server.pid)
            asking = asyncio.ensure_future(tier.probe(names()))
            await asyncio.sleep(0.1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.sleep(0.4)
            stopping.go_on(server.pid)
            assert await tier.probe(names()) == [False] * NUM_SLOTS
            assert process_of(tier) == before


async def test_a_call_that_is_cancelled_ends_and_the_process_goes_on(slots, tmp_path):
    with Server(tmp_path / "server") as server:
        async with opened(slots, TierConfig.at(f"redis://{server.host_port}")) as tier:
            await tier.spill(names(), range(NUM_SLOTS))
            process = process_of(tier)
            stopping.stop(server.pid)
            for call in (tier.fetch, tier.spill):
                asking = asyncio.ensure_future(call(names(), range(NUM_SLOTS)))
                await asyncio.sleep(0.1)
                asking.cancel()
                assert {*await asking} <= {Result.CANCELLED, Result.FAILED}
            stopping.go_on(server.pid)
            assert await tier.fetch(names(), range(NUM_SLOTS)) == [Result.DONE] * NUM_SLOTS
            assert process_of(tier) == process


async def test_a_closed_tier_has_no_process_and_does_nothing(slots, tmp_path):
    tier = slots.open(directory(tmp_path / "tier"))
    program = tier.process.program
    await tier.close()
    assert program.status is not None
    await tier.close()
    assert await tier.spill(names(), range(NUM_SLOTS)) == [Result.CANCELLED] * NUM_SLOTS
    with pytest.raises(OSError, match="closed"):
        await tier.probe(names())


ENGINE = """
import subprocess, sys, threading
from pathlib import Path
from tests.tiers.process.slots import Slots
from tests.tiers.process.test_process_tier import directory, process_of
tier = Slots().open(directory(Path(sys.argv[1])))
ours = [tier.process.socket.fileno()]
fork = subprocess.Popen(["sleep", "600"], pass_fds=ours)
print(process_of(tier), fork.pid, flush=True)
threading.Event().wait()
"""


def test_the_process_ends_with_its_engine_whoever_has_the_connection_too(tmp_path):
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "tier")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        pid, other = map(int, engine.stdout.readline().split())
        engine.kill()
    try:
        asyncio.run(wait_until(lambda: not stopping.is_running(pid)))
    finally:
        os.kill(other, signal.SIGKILL)


async def test_an_engine_of_a_pool_lives_as_long_as_the_process_of_its_tier(slots, tmp_path):
    """Others would take slots over that it still writes to."""
    with pools_in(tmp_path):
        pool = open_rank(wanted(NUM_SLOTS, size_of=lambda _: slots.layout.size_bytes))
    slots.file = find_file(address_of(memoryview(pool.mapping)))
    (table,) = tmp_path.glob("*/pool/table")
    with contextlib.closing(Locks(str(table))) as others:
        async with opened(slots, directory(tmp_path / "tier")):
            pool.locks.close()  # as the kernel does when the engine is killed
            assert others.is_taken(pool.token)
        assert not others.is_taken(pool.token)


def process_of(tier: ProcessTier) -> int:
    pid: int = tier.process.program.pid
    return pid
