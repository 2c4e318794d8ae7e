"""Processes that are no ranks, where ranks meet: they get nothing, and the ranks go on."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from safe_offload.errors import SharingError
from tests.worker.memory.test_shared_memory import (
    PATIENCE_S,
    SIZE_BYTES,
    Ranks,
    badge_of,
    make_ranks,
    new_socket,
)
from tests.worker.waiting import wait_until

__all__ = ["make_ranks"]  # a fixture

NOBODY = 65534
OTHER_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
HAS_NAMESPACES = not subprocess.run([*OTHER_NAMESPACE, "true"], capture_output=True).returncode

of_other_namespace = pytest.param(
    OTHER_NAMESPACE,
    [],
    id="another PID namespace",
    marks=pytest.mark.skipif(not HAS_NAMESPACES, reason="no PID namespaces: this takes root"),
)
of_other_user = pytest.param(
    [],
    [str(NOBODY)],
    id="another user",
    marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user"),
)
of_other_parent = pytest.param(["sh", "-c", '"$@"; true', "sh"], [], id="another parent")


@contextlib.contextmanager
def stranger(within: list[str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A stranger that is ready."""
    script = str(Path(__file__).with_name("stranger.py"))
    process = subprocess.Popen(
        [*within, sys.executable, script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait(PATIENCE_S)
        process.stdout.close()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def is_listening(name: str) -> bool:
    """Source: Linux, proc_pid_net(5): the flags of a socket, 10000 if it accepts connections."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return any(line[-1] == f"@{name}" and line[3] == "00010000" for line in lines)


def read_by(posing: subprocess.Popen[str]) -> str:
    """The largest byte that any process wrote to the memory of a stranger."""
    assert posing.stdin is not None
    posing.stdin.write("\n")
    posing.stdin.flush()
    return line_of(posing)


# ---- who poses as the first rank -----------------------------------------------------------------


@pytest.mark.parametrize(("within", "arguments"), [of_other_namespace, of_other_parent])
def test_who_knows_where_ranks_meet_is_not_taken_for_the_first(
    make_ranks, caplog, within, arguments
):
    ranks: Ranks = make_ranks(2)
    with stranger(within, "pose", str(SIZE_BYTES), ranks.address) as posing:
        assert line_of(posing) == "ready"
        futures = [ranks.start(index) for index in range(2)]
        wait_until(lambda: "Rejected a process" in caplog.text)
        ranks.pass_deadline(futures)
        for future in futures:
            if future.exception() is None:
                future.result().tensor.fill_(7)
        assert read_by(posing) == "0"
        assert [type(future.exception()) for future in futures] == [SharingError] * 2


def test_a_process_without_the_secret_is_not_taken_for_the_first(make_ranks):
    """One that the kernel would let pass, a child of the same process: here this one itself."""
    ranks: Ranks = make_ranks(2)
    with new_socket() as listener:
        listener.bind(f"\0{ranks.address}")
        listener.listen()
        joining = ranks.start(1)
        with listener.accept()[0] as peer:
            seen = peer.recv(256)
            memory = os.memfd_create("stranger")
            os.ftruncate(memory, SIZE_BYTES)
            socket.send_fds(peer, [seen], [memory])
            os.close(memory)
            assert isinstance(joining.exception(PATIENCE_S), SharingError)


# ---- who comes to the first rank -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("within", "arguments"), [of_other_namespace, of_other_user, of_other_parent]
)
def test_a_stranger_that_connects_is_turned_away_and_the_ranks_go_on(
    make_ranks, caplog, within, arguments
):
    ranks: Ranks = make_ranks(2)
    first = ranks.start(0)
    wait_until(lambda: is_listening(ranks.address))
    with stranger(within, "knock", ranks.address, *arguments) as knocking:
        assert line_of(knocking) == "ready"
        memories = [ranks.start(1).result(PATIENCE_S), first.result(PATIENCE_S)]
        memories[0].tensor[0] = 7
        assert int(memories[1].tensor[0]) == 7
        for memory in memories:
            memory.close()
    assert "Rejected a process" in caplog.text


@pytest.mark.parametrize(
    "shown",
    [{"secret": b"of another engine"}, {"ticks": 1}],
    ids=["another secret", "seen on a process that has ended"],
)
def test_what_another_process_would_show_is_no_ticket(make_ranks, caplog, shown):
    ranks: Ranks = make_ranks(2)
    first = ranks.start(0)
    wait_until(lambda: is_listening(ranks.address))
    with new_socket() as peer:
        peer.connect(f"\0{ranks.address}")
        peer.send(badge_of(ranks, 1, **shown))
        assert peer.recv(256) == b"", "turned away"
    for memory in [ranks.start(1).result(PATIENCE_S), first.result(PATIENCE_S)]:
        memory.close()
    assert "Rejected a process" in caplog.text
