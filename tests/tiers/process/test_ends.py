"""How the process of a tier ends: what is told, what ends with it, and how it starts again."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from safe_offload.errors import ConfigError
from safe_offload.tiers.base import Result
from safe_offload.tiers.process import child_process, process_tier
from tests import stopping
from tests.tiers.process.slots import NUM_SLOTS, Slots
from tests.tiers.process.test_process_tier import (
    PATIENCE_S,
    directory,
    names,
    opened,
    process_of,
    wait_until,
)

OTHER_MAPPER = """
import socket, subprocess, sys
s = socket.socket(fileno=int(sys.argv[2]))
s.recv(1 << 20)
more = {} if sys.argv[-1] == "here" else {"start_new_session": True}
other = subprocess.Popen(["sleep", "600"], pass_fds=tuple(map(int, sys.argv[3:])), **more)
open("pid", "w").write(str(other.pid))
m = b'["ready"]'
s.sendall(len(m).to_bytes(4, "big") + m)
s.recv(1 << 20)
other.wait()
"""
"""The process of a tier, with a process of its own that has what it takes to map the slots."""

DIES_WITHIN_S = 10.0
"""What has been killed with its group is gone long before that."""


@pytest.fixture
def slots():
    return Slots()


@pytest.fixture
def other_mapper(slots, tmp_path, monkeypatch):
    """Return a tier whose process has started another one, in a group of its own or not."""
    monkeypatch.chdir(tmp_path)

    def make(*, is_in_group):
        script = OTHER_MAPPER.replace('sys.argv[-1] == "here"', str(is_in_group))
        with monkeypatch.context() as patched:
            patched.setattr(process_tier, "_MAIN", script)
            tier = slots.open(directory(tmp_path))
        return tier, int(Path("pid").read_text())

    return make


async def test_a_call_ends_when_all_that_maps_its_slots_is_dead(other_mapper):
    """The kernel may take long to end one of them, which writes to the slots until then."""
    tier, other = other_mapper(is_in_group=False)
    asking = asyncio.ensure_future(tier.fetch(names(), range(NUM_SLOTS)))
    try:
        await wait_until(lambda: tier.process._answers)
        os.kill(process_of(tier), signal.SIGKILL)
        await wait_until(lambda: tier.process.program.status is not None)
        await asyncio.wait([asking], timeout=10 * process_tier.POLL_S)
        assert stopping.is_running(other)
        assert not asking.done()
    finally:
        os.kill(other, signal.SIGKILL)
    with pytest.raises(OSError, match="its process has ended"):
        await asyncio.wait_for(asking, PATIENCE_S)
    await tier.close()


@pytest.mark.parametrize("by_whom", ["by_the_kernel", "unseen_by_the_loop", "by_the_engine"])
async def test_what_a_process_has_started_ends_with_it(other_mapper, by_whom):
    tier, other = other_mapper(is_in_group=True)
    asking = asyncio.ensure_future(tier.fetch(names(), range(NUM_SLOTS)))
    await wait_until(lambda: tier.process._answers)
    if by_whom == "by_the_engine":
        tier.process.kill()
    else:
        os.kill(process_of(tier), signal.SIGKILL)
    if by_whom == "unseen_by_the_loop":  # which looks before the loop is told
        os.waitid(os.P_PID, process_of(tier), os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        assert tier.process.is_over()
    try:
        await wait_until(lambda: tier.process.program.status is not None)
        await wait_until(lambda: not stopping.is_running(other), DIES_WITHIN_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)
        await asyncio.wait([asking], timeout=PATIENCE_S)  # a call is not cancelled
    with pytest.raises(OSError, match="its process has ended"):
        asking.result()
    await tier.close()


async def test_a_call_that_begins_as_the_process_dies_fails_at_once(slots, tmp_path):
    async with opened(slots, directory(tmp_path / "tier")) as tier:
        await tier.spill(names(), range(NUM_SLOTS))
        process, is_over = tier.process, tier.process.is_over

        def looks_and_dies():
            process.is_over, found = is_over, is_over()
            os.kill(process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            return found

        for call in (tier.fetch, tier.spill):
            process.is_over = looks_and_dies
            with pytest.raises(OSError, match="its process has ended"):
                await asyncio.wait_for(call(names(), range(NUM_SLOTS)), PATIENCE_S)
            assert await tier.fetch(names(), range(NUM_SLOTS)) == [Result.DONE] * NUM_SLOTS
            process, is_over = tier.process, tier.process.is_over


async def test_a_call_to_a_process_that_is_being_reaped_fails_at_once(slots, tmp_path):
    async with opened(slots, directory(tmp_path / "tier")) as tier:
        await tier.probe(names())
        tier.process.kill()
        with pytest.raises(OSError, match="its process has ended"):
            tier.process.ask("probe", names())


async def test_a_process_that_dies_while_idle_is_told_of(slots, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with opened(slots, directory(tmp_path / "tier")) as tier:
        await tier.probe(names())
        pid = process_of(tier)
        os.kill(pid, signal.SIGSEGV)
        await wait_until(lambda: "has ended" in caplog.text)
        told = f"The process of tier {tier.label}, {pid}, has ended (SIGSEGV)."
        assert [each.message for each in caplog.records if each.levelname == "WARNING"] == [told]
        assert tier.num_restarts == 0
        assert await tier.probe(names()) == [False] * NUM_SLOTS
        assert tier.num_restarts == 1
        assert f"is open again, in process {process_of(tier)}" in caplog.text
        caplog.clear()
    assert "has ended" not in caplog.text, "nobody has to be told of one that was closed"


async def test_the_loop_goes_on_while_a_process_is_started_again(slots, tmp_path, monkeypatch):
    async with opened(slots, directory(tmp_path / "tier")) as tier:
        await tier.probe(names())
        tier.process.kill()
        has_gone_on, start = threading.Event(), tier._start

        def start_when_it_has():
            assert has_gone_on.wait(PATIENCE_S)
            return start()

        monkeypatch.setattr(tier, "_start", start_when_it_has)
        asking = asyncio.ensure_future(tier.probe(names()))
        await tier.process.ended()
        asyncio.get_running_loop().call_later(0.05, has_gone_on.set)
        assert await asking == [False] * NUM_SLOTS


async def test_a_tier_that_is_closed_while_its_process_starts_leaves_none(
    slots, tmp_path, monkeypatch
):
    tier = slots.open(directory(tmp_path / "tier"))
    await tier.probe(names())
    tier.process.kill()
    is_starting, may_start, start = threading.Event(), threading.Event(), tier._start

    def start_late():
        is_starting.set()
        may_start.wait(PATIENCE_S)
        return start()

    monkeypatch.setattr(tier, "_start", start_late)
    asking = asyncio.ensure_future(tier.probe(names()))
    await wait_until(is_starting.is_set)
    closing = asyncio.ensure_future(tier.close())
    await asyncio.sleep(0)
    may_start.set()
    await asyncio.wait([asking, closing])
    assert asking.exception() is not None
    assert tier.process.program.status is not None


async def test_ps_and_top_show_which_tier_a_process_is_of(slots, tmp_path):
    pytest.importorskip("setproctitle")
    async with opened(slots, directory(tmp_path / "tier")) as tier:
        assert title_of(process_of(tier)) == f"safe-offload tier {tier.label}"
        comm = Path(f"/proc/{process_of(tier)}/comm").read_text()  # noqa: ASYNC240
        assert comm == "safe-offload ti\n"


async def test_slots_are_neither_in_core_dumps_nor_in_children_of_the_process(slots, tmp_path):
    async with opened(slots, directory(tmp_path / "tier")) as tier:
        for pid in (os.getpid(), process_of(tier)):
            assert flags_of_slots(pid) >= {"dd", "dc"}


def title_of(pid: int) -> str:
    """What ps shows of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


def flags_of_slots(pid: int) -> set[str]:
    """What holds of every mapping of host memory in a process, as the kernel abbreviates it."""
    found, is_ours = [], False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            is_ours = "memfd:safe-offload" in line
        elif first == "VmFlags:" and is_ours:
            found.append({*rest})
    assert found
    return set.intersection(*found)


# ---- starts ----------------------------------------------------------------------------------


FOREIGN = "open('it-ran', 'w')\nraise SystemExit(9)\n"


async def test_no_code_of_the_working_directory_runs(slots, tmp_path, monkeypatch):
    """Nor does anything in `sys.path` matter that an import of the engine would not look at."""
    for module in ("json", "pickle", "socket", "uvloop", "setproctitle", "usercustomize"):
        tmp_path.joinpath(f"{module}.py").write_text(FOREIGN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", Path("/nowhere"), b"/nowhere", None, *sys.path])
    monkeypatch.setenv("PYTHONPATH", f".:{os.environ.get('PYTHONPATH', '')}:")
    async with opened(slots, directory(tmp_path / "tier")) as tier:
        assert await tier.probe(names()) == [False] * NUM_SLOTS
    assert not tmp_path.joinpath("it-ran").exists()


@pytest.mark.parametrize(
    ("number", "fix"),
    [("EMFILE", "ulimit -n"), ("ENFILE", "ulimit -n"), ("EAGAIN", "ulimit -u")],
)
def test_the_fix_of_a_process_that_is_refused_fits(slots, tmp_path, monkeypatch, number, fix):
    error = getattr(process_tier.errno, number)

    def refuse(*_args, **_more):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(child_process.subprocess, "Popen", refuse)
    with pytest.raises(ConfigError, match=rf"refuses a process.*{fix}"):
        slots.open(directory(tmp_path))


@pytest.mark.parametrize("limit", [8, 12, 14])
def test_too_few_descriptors_are_told_if_the_process_lacks_them(
    slots, tmp_path, monkeypatch, limit
):
    """It lacks them for a module, for its loop or for its store."""
    few = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
    monkeypatch.setattr(process_tier, "_MAIN", few + process_tier._MAIN)
    with pytest.raises(ConfigError, match=r"does not start.*Too many open files.*ulimit -n"):
        slots.open(directory(tmp_path / "tier"))


@pytest.mark.parametrize("executable", [None, "a\0b"])
def test_whatever_a_start_lacks_is_a_config_error(slots, tmp_path, monkeypatch, executable):
    monkeypatch.setattr(process_tier.sys, "executable", executable)
    with pytest.raises(ConfigError, match="Fix: "):
        slots.open(directory(tmp_path))


async def test_a_set_up_that_is_not_read_stops_no_loop(slots, tmp_path, monkeypatch):
    """However large it is: the process that is started again may hang."""
    async with opened(slots, directory(tmp_path / "tier")) as tier:
        await tier.probe(names())
        tier.process.kill()
        monkeypatch.setattr(process_tier, "_MAIN", "import time; time.sleep(600)")
        monkeypatch.setattr(tier, "_setup", tier._setup + bytes(16 << 20))
        asking = asyncio.ensure_future(tier.probe(names()))
        await wait_until(lambda: tier.num_restarts and tier.process._answers)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        tier.process.kill()
