"""The client of `safe-offload cache` and of the doctor: whose certificates it trusts, what it says.

The tier's own connection logs in first: tests/tiers/valkey/test_servers.py.
"""

import pytest

from safe_offload.commands.cache.store import CacheError
from safe_offload.commands.cache.valkey_client import Client
from safe_offload.config.tiers import TierConfig
from tests.tiers.valkey.scripted_server import Peer, ScriptedServer
from tests.valkey_server import LOCALHOST, Certificates

TIMEOUT_S = 250.0
SECRET = "correct-horse"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Those of a server whose authority the system trusts, and those of ours."""
    return {
        whose: Certificates(tmp_path_factory.mktemp(whose), LOCALHOST)
        for whose in ("system", "ours")
    }


@pytest.fixture(autouse=True)
def _system(certificates, monkeypatch):
    """OpenSSL reads this variable each time that the system's authorities are asked for."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates["system"].ca))


def answer(peer: Peer) -> None:
    while words := peer.command():
        peer.send(b"+PONG\r\n" if words[0] == b"PING" else b"*0\r\n")


def ping(client: Client) -> None:
    client.answer(client.node_of(b"any"), b"PING")


def config_of(server: ScriptedServer, ca: Certificates | None) -> TierConfig:
    values = {} if ca is None else {"ca_file": str(ca.ca)}
    return TierConfig.at(f"rediss://:{SECRET}@{LOCALHOST}:{server.port}", **values)


def test_servers_of_a_cluster_are_trusted_as_the_first_one_is(certificates):
    asked: list[list[bytes]] = []

    def note(peer: Peer) -> None:
        while True:
            asked.append(peer.command())
            peer.send(b"*0\r\n")

    ours = certificates["ours"]
    with ScriptedServer(note, tls=certificates["system"], greets=()) as other:
        slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % other.port
        with ScriptedServer(answer, tls=ours, greeting={b"CLUSTER": slots}) as server:
            client = Client(config_of(server, ours), TIMEOUT_S)
            with pytest.raises(CacheError, match="the certificate of"):
                ping(client)
            client.close()
        assert other.num_connections > 0
    assert not asked, "no password for a server that is not trusted"


ERRORS = {
    b"-NOPERM this user has no permissions": "denies this user required commands. Fix: log in",
    b"-LOADING it is": "is still loading its data. Fix: try again",
    b"-MOVED 1 127.0.0.1:1": r"is a cluster that is changing \(MOVED\). Fix: try again",
    b"-MISCONF "
    + SECRET.encode(): r"answers with an error \(MISCONF\). Fix: check the server's log",
    b"-" + SECRET.encode(): r"answers with an error \(ERR\). Fix: check the server's log",
}


@pytest.mark.parametrize(("said", "meant"), ERRORS.items(), ids=ERRORS.values())
def test_what_a_server_refuses_is_said_with_the_fix(said, meant):
    def refuse(peer: Peer) -> None:
        while peer.command()[0] != b"PING":
            peer.send(b"+OK\r\n")
        peer.send(said + b"\r\n")

    with ScriptedServer(refuse) as server:
        client = Client(TierConfig.at(f"redis://{LOCALHOST}:{server.port}"), TIMEOUT_S)
        with pytest.raises(CacheError, match=meant) as caught:
            ping(client)
        client.close()
    assert SECRET not in str(caught.value)


def test_a_part_without_a_server_and_a_connection_that_is_lost_say_so():
    for greeting, word in (
        ({b"CLUSTER": b"*0\r\n"}, "without assigned key slots"),
        ({}, "closed the connection"),
    ):
        with ScriptedServer(hang_up, greeting=greeting) as it:
            client = Client(TierConfig.at(f"redis://{LOCALHOST}:{it.port}"), TIMEOUT_S)
            with pytest.raises(CacheError, match=word):
                ping(client)
            client.close()


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        (b"", "does not answer"),
        (b"HTTP/1.1 400 Bad Request\r\n", "does not answer as a Valkey or Redis server"),
        (b"-NOAUTH Authentication required.\r\n", r"rejected the user or the password \(NOAUTH\)"),
        (b"-LOADING it is\r\n", "is not ready: it answers LOADING"),
    ],
)
def test_a_server_that_does_not_say_which_servers_there_are_is_named(reply, word):
    def script(peer: Peer) -> None:
        peer.command()
        peer.send(reply)
        peer.read_to_the_end()

    with ScriptedServer(script, greets=(b"AUTH",)) as server:
        place = f"redis://:{SECRET}@{LOCALHOST}:{server.port}"
        with pytest.raises(CacheError, match=word):
            Client(TierConfig.at(place), 0.5)


def hang_up(peer: Peer) -> None:
    peer.command()
