"""The bad networks of the tests: are they as bad as they say?"""

import contextlib
import socket
import threading
import time

import pytest

from tests.network import FAIR, RETRANSMISSION_S, SEGMENT_BYTES, Machines, Proxy, Weather, inside

TIMEOUT_S = 250.0


class Echo:
    """A server that sends back what it gets."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self._start(self._serve)

    def _start(self, work, *args: socket.socket) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._start(self._echo, self.listener.accept()[0])

    def _echo(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)


@pytest.fixture
def echo():
    server = Echo()
    yield server
    server.listener.close()


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), TIMEOUT_S)


def round_trip(connection: socket.socket, data: bytes = b"x") -> float:
    """Seconds until it has come back."""
    begin_s = time.monotonic()
    threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
    found = b""
    while len(found) < len(data):
        found += (more := connection.recv(1 << 16))
        if not more:
            raise ConnectionResetError
    assert found == data
    return time.monotonic() - begin_s


def test_a_fair_network_brings_every_byte_and_the_end(echo):
    with Proxy(echo.address) as proxy, connect(proxy) as connection:
        round_trip(connection, bytes(range(256)) * 4096)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


def test_bandwidth_is_shared_and_latency_is_there_each_way(echo):
    size_bytes, weather = 256 << 10, Weather(bytes_per_s=2e6)
    with Proxy(echo.address, weather) as proxy, connect(proxy) as one, connect(proxy) as two:
        begin_s = time.monotonic()
        other = threading.Thread(target=round_trip, args=(two, bytes(size_bytes)))
        other.start()
        round_trip(one, bytes(size_bytes))
        other.join()
        assert time.monotonic() - begin_s >= 2 * size_bytes / 2e6
        proxy.become(Weather(latency_s=0.1))
        assert round_trip(one) >= 0.2


def test_what_is_lost_comes_later_and_in_order_and_too_often_resets_the_connection(echo):
    data = b"".join(bytes([number]) * SEGMENT_BYTES for number in range(8))
    with Proxy(echo.address, Weather(loss=0.3), seed=3) as proxy, connect(proxy) as connection:
        assert round_trip(connection, data) >= RETRANSMISSION_S
        proxy.become(Weather(loss=1.0, retransmission_s=0.01))
        with pytest.raises(ConnectionResetError):
            round_trip(connection)


def test_a_stall_ends_and_a_cut_does_not(echo):
    with Proxy(echo.address) as proxy, connect(proxy) as connection:
        round_trip(connection)
        proxy.become(Weather(is_stalled=True))
        connection.sendall(b"y")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(TIMEOUT_S)
        proxy.become(FAIR)
        assert connection.recv(1) == b"y"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_two_machines_reach_each_other_and_have_a_loopback_of_their_own():
    if problem := Machines.problem():
        pytest.skip(problem)
    with Machines(2) as machines:
        with inside(machines.names[1]):
            server, nearby = Echo(machines.addresses[1]), Echo("127.0.0.1")
        with inside(machines.names[0]):
            with socket.create_connection(server.address, TIMEOUT_S) as connection:
                round_trip(connection)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(nearby.address, TIMEOUT_S)
        with socket.create_connection(server.address, TIMEOUT_S) as connection:
            round_trip(connection)
        server.listener.close()
        nearby.listener.close()
