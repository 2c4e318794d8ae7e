"""Whose certificates the client of `safe-offload cache` and of the doctor trusts."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis import SSLConnection

from safe_offload.commands.cache.store import CacheError
from safe_offload.commands.cache.valkey_client import Server
from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError
from tests.tiers.valkey.scripted_server import Peer, ScriptedServer
from tests.valkey_server import LOCALHOST, Certificates

TIMEOUT_S = 5.0
SECRET = "correct-horse"


@pytest.fixture(scope="module")
def of_system(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Those of a server whose authority the system trusts."""
    return Certificates(tmp_path_factory.mktemp("system"), LOCALHOST)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("ours"), LOCALHOST)


@pytest.fixture(autouse=True)
def _system(of_system: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSL reads this variable each time that the system's authorities are asked for."""
    monkeypatch.setenv("SSL_CERT_FILE", str(of_system.ca))


def answer(peer: Peer) -> None:
    while words := peer.command():
        peer.send(b"+PONG\r\n" if words[0] == b"PING" else b"*0\r\n")


def config_of(server: ScriptedServer, ca: Path | None) -> TierConfig:
    values = {} if ca is None else {"ca_file": str(ca)}
    return TierConfig.at(f"rediss://:{SECRET}@{LOCALHOST}:{server.port}", **values)


def test_the_authorities_of_the_system_are_trusted_without_a_ca_file(
    of_system: Certificates, ours: Certificates
) -> None:
    with ScriptedServer(answer, tls=of_system) as server:
        Server(config_of(server, None), TIMEOUT_S).close()
    with (
        ScriptedServer(answer, tls=ours) as server,
        pytest.raises(CacheError, match="certificate that does not fit"),
    ):
        Server(config_of(server, None), TIMEOUT_S)


def test_a_ca_file_is_trusted_instead_of_the_authorities_of_the_system(
    of_system: Certificates, ours: Certificates
) -> None:
    with ScriptedServer(answer, tls=ours) as server:
        Server(config_of(server, ours.ca), TIMEOUT_S).close()
    with (
        ScriptedServer(answer, tls=of_system) as server,
        pytest.raises(CacheError, match="certificate that does not fit"),
    ):
        Server(config_of(server, ours.ca), TIMEOUT_S)


def test_servers_of_a_cluster_are_trusted_as_the_first_one_is(
    of_system: Certificates, ours: Certificates
) -> None:
    asked: list[list[bytes]] = []

    def note(peer: Peer) -> None:
        while True:
            asked.append(peer.command())
            peer.send(b"*0\r\n")

    with (
        ScriptedServer(note, tls=of_system, greets=()) as other,
        ScriptedServer(answer, tls=ours, greeting={b"CLUSTER": slots_of(other.port)}) as server,
    ):
        with pytest.raises(CacheError, match="certificate that does not fit"):
            Server(config_of(server, ours.ca), TIMEOUT_S)
        assert other.num_connections > 0
    assert not asked, "no password for a server that is not trusted"


def slots_of(port: int) -> bytes:
    """The answer to CLUSTER SLOTS of a cluster of one server."""
    return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % port


def test_a_redis_py_whose_connections_are_not_known_is_refused(
    of_system: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SSLConnection, "_wrap_socket_with_ssl")
    with (
        ScriptedServer(answer, tls=of_system) as server,
        pytest.raises(ConfigError, match=r"redis-py .* is not known. Fix: pip install"),
    ):
        Server(config_of(server, None), TIMEOUT_S)
