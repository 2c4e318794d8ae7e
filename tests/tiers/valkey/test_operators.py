"""What operators ask a server: whose certificates are trusted, and what is said of a refusal.

Engines log in first: test_servers.py.
"""

import asyncio
from dataclasses import replace

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import PlaceError
from safe_offload.tiers.valkey.replies import ErrorReply
from safe_offload.tiers.valkey.server_log import refusal
from safe_offload.tiers.valkey.valkey_store import ValkeyStore
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


def ping(config: TierConfig, timeout_s: float = TIMEOUT_S) -> str:
    """Return what is wrong with a server, as it is said to people; empty if nothing is."""

    async def ask() -> None:
        store = ValkeyStore(replace(config, timeout_s=timeout_s))
        try:
            (found,) = await store.answers(await store.node_of("any"), (b"PING",))
        finally:
            await store.close()
        if isinstance(found, ErrorReply):
            raise refusal(found)

    try:
        asyncio.run(ask())
    except PlaceError as error:
        return error.line_for(config.location.label)
    return ""


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
            assert "the certificate of" in ping(config_of(server, ours))
        assert other.num_connections > 0
    assert not asked, "no password for a server that is not trusted"


ERRORS = {
    b"-NOPERM this user has no permissions": "denies this user required commands or keys. Fix: log",
    b"-NOPERM this user has no permissions to run the 'memory|usage' command": (
        "denies this user memory|usage. Fix: add +memory|usage to its ACL"
    ),
    b"-NOPERM User x has no permissions to run the 'flushall' command": "denies this user required",
    b"-ERR no permissions to run the 'memory|usage' command": "it answers with an error (ERR)",
    b"-LOADING it is": "is still loading its data. Fix: try again",
    b"-MOVED 1 127.0.0.1:1": "is a cluster that is changing (MOVED). Fix: try again",
    b"-MISCONF " + SECRET.encode(): "answers with an error (MISCONF). Fix: check the server's log",
    b"-" + SECRET.encode(): "answers with an error (ERR). Fix: check the server's log",
}


@pytest.mark.parametrize(("said", "meant"), ERRORS.items(), ids=ERRORS.values())
def test_what_a_server_refuses_is_said_with_the_fix(said, meant):
    def refuse(peer: Peer) -> None:
        while peer.command()[0] != b"PING":
            peer.send(b"+OK\r\n")
        peer.send(said + b"\r\n")

    with ScriptedServer(refuse) as server:
        found = ping(TierConfig.at(f"redis://{LOCALHOST}:{server.port}"))
    assert meant in found
    assert SECRET not in found


def test_a_part_without_a_server_and_a_connection_that_is_lost_say_so():
    for greeting, word in (
        ({b"CLUSTER": b"*0\r\n"}, "without assigned key slots"),
        ({}, "closed the connection"),
    ):
        with ScriptedServer(hang_up, greeting=greeting) as it:
            assert word in ping(TierConfig.at(f"redis://{LOCALHOST}:{it.port}"))


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        (b"", "does not answer"),
        (b"HTTP/1.1 400 Bad Request\r\n", "does not answer as a Valkey or Redis server"),
        (b"-NOAUTH Authentication required.\r\n", "rejected the user or the password (NOAUTH)"),
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
        assert word in ping(TierConfig.at(place), 0.5)


def hang_up(peer: Peer) -> None:
    peer.command()
