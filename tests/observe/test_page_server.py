"""The server of the metrics' port, and strangers who hold it as long as they can."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from safe_offload.observe import page_server
from safe_offload.observe.page_server import CONNECTIONS_MAX, REQUEST_BYTES_MAX, PageServer

ASK = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"
WAIT_S = 600


@contextlib.contextmanager
def serving(make_pieces: Callable[[], Iterable[bytes]] = lambda: [b"page"]) -> Iterator[PageServer]:
    server = PageServer(0, "127.0.0.1", make_pieces)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def clients(server: PageServer, count: int) -> Iterator[list[socket.socket]]:
    address = ("127.0.0.1", server.port)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address, WAIT_S)) for _ in range(count)]


def read(client: socket.socket) -> bytes:
    """What a server sends until it closes the connection."""
    text = b""
    with contextlib.suppress(ConnectionError):  # it has not read all that it was sent
        while piece := client.recv(1 << 16):
            text += piece
    return text


def ask(server: PageServer, request: bytes = ASK) -> bytes:
    with clients(server, 1) as (client,):
        client.sendall(request)
        return read(client)


def test_a_get_is_answered_with_the_page():
    with serving(lambda: iter([b"a", b"b"])) as server:
        head, _, page = ask(server).partition(b"\r\n\r\n")
    assert page == b"ab"
    assert head.splitlines()[0] == b"HTTP/1.1 200 OK"
    assert b"Content-Length: 2" in head


@pytest.mark.parametrize("method", [b"POST", b"HEAD", b"", b"\xff"])
def test_another_method_is_not_allowed(method):
    with serving() as server:
        answer = ask(server, method + b" /metrics HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("request_text", [b"x" * 2 * REQUEST_BYTES_MAX, ASK[:-2]])
def test_what_is_no_request_is_not_answered_and_the_next_one_is(request_text):
    with serving() as server:
        with clients(server, 1) as (client,):
            client.sendall(request_text)
            client.shutdown(socket.SHUT_WR)
            assert read(client) == b""
        assert ask(server).endswith(b"page")


def test_a_page_that_cannot_be_made_ends_one_connection():
    left = [KeyError("first")]

    def make_pieces() -> Iterator[bytes]:
        if left:
            raise left.pop()
        yield b"page"

    with serving(make_pieces) as server:
        assert ask(server) == b""
        assert ask(server).endswith(b"page")


def test_of_a_hundred_idle_connections_few_are_open_and_no_thread_is_made():
    with serving() as server, clients(server, 1):
        num_threads = threading.active_count()
        with clients(server, 100) as idle:
            for client in idle:
                client.sendall(ASK[:9])
            for client in idle[: 100 - CONNECTIONS_MAX]:
                assert read(client) == b"", "the oldest are closed"
            assert threading.active_count() == num_threads
            assert ask(server).endswith(b"page"), "whoever asks is answered"


def test_an_idle_connection_has_a_deadline(monkeypatch):
    monkeypatch.setattr(page_server, "DEADLINE_S", 0.01)
    with serving() as server, clients(server, 5) as idle:
        assert [read(client) for client in idle] == [b""] * 5


def test_whoever_does_not_read_the_answer_has_a_deadline(monkeypatch):
    monkeypatch.setattr(page_server, "DEADLINE_S", 0.5)
    with serving(lambda: [bytes(1 << 26)]) as server, clients(server, 1) as (client,):
        client.sendall(ASK)
        gone = ask(server)  # reads, or not in time
        assert len(gone) <= 1 << 27
        assert len(read(client)) < 1 << 26


def test_more_than_there_is_room_for_wait_their_turn():
    with serving() as server, ThreadPoolExecutor(3 * CONNECTIONS_MAX) as threads:
        asking = [threads.submit(ask, server) for _ in range(3 * CONNECTIONS_MAX)]
        assert all(asked.result().endswith(b"page") for asked in asking)


def test_the_end_waits_for_no_connection():
    with serving() as server, clients(server, 3 * CONNECTIONS_MAX) as idle:
        server.close()
        assert [read(client) for client in idle] == [b""] * len(idle)


def test_between_pieces_that_take_their_time_the_thread_sleeps():
    """Other tasks of the loop run then, as other threads do."""
    order: list[str] = []

    def make_pieces() -> Iterator[bytes]:
        for number in range(5):
            order.append("piece")
            asyncio.get_running_loop().call_soon(order.append, "another")
            end_s = time.perf_counter() + page_server.SLICE_S
            while time.perf_counter() < end_s:
                pass
            yield b"%d" % number

    with serving(make_pieces) as server:
        assert ask(server).endswith(b"01234")
    assert order == ["piece", "another"] * 5


def test_pages_are_made_one_after_the_other():
    under_way: list[int] = []

    def make_pieces() -> Iterator[bytes]:
        assert not under_way
        under_way.append(1)
        for _ in range(3):
            end_s = time.perf_counter() + page_server.SLICE_S
            while time.perf_counter() < end_s:
                pass
            yield b"."
        under_way.clear()

    with serving(make_pieces) as server, clients(server, 8) as many:
        for client in many:
            client.sendall(ASK)
        assert all(read(client).endswith(b"...") for client in many)


WITHOUT_DESCRIPTORS = """
import asyncio, os, resource, sys, time
from safe_offload.observe.page_server import PageServer
tried_s, accept = [], asyncio.SelectorEventLoop.sock_accept

async def sock_accept(loop, listener):
    try:
        return await accept(loop, listener)
    except OSError as error:
        tried_s.append(time.monotonic())
        if len(tried_s) == 5:
            for descriptor in held:
                os.close(descriptor)
        raise

asyncio.SelectorEventLoop.sock_accept = sock_accept
server = PageServer(0, "127.0.0.1", lambda: [b"page"])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.dup(1))
except OSError as error:
    print(server.port, error.errno, flush=True)
sys.stdin.read()
print(len(tried_s), min(b - a for a, b in zip(tried_s, tried_s[1:])))
server.close()
"""


def test_a_process_without_descriptors_tries_now_and_then_until_it_has_some():
    child: Any = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with child:
        port = int(child.stdout.readline().split()[0])
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as client:
            client.sendall(ASK)
            assert read(client).endswith(b"page")
        child.stdin.close()
        num_tried, least_s = child.stdout.read().split()
    assert child.returncode == 0
    assert int(num_tried) == 5
    assert float(least_s) >= page_server.ACCEPT_PAUSE_S * 0.9
