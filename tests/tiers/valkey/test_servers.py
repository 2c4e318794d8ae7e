"""How a server is greeted, which of several has what, and what a hostile one gets out of it."""

import logging
from typing import Any

import pytest

from safe_offload.tiers.base import Result
from safe_offload.tiers.sealed_tier import SealedTier
from safe_offload.tiers.valkey.servers import NODES_MAX
from tests.tiers.contract import fetch_one, filled, name_of, slot_of, spill_one
from tests.tiers.valkey.scripted_server import Peer, Script, ScriptedServer, reason_of
from tests.valkey_server import LOCALHOST, Certificates

SECRET = "correct-horse"


@pytest.fixture
def open_at(make):
    """Tiers on scripted servers."""

    def one_more(
        server: ScriptedServer, login: str = "", scheme: str = "redis", **values: Any
    ) -> SealedTier:
        return make(f"{scheme}://{login}127.0.0.1:{server.port}/1", **values)

    return one_more


def always(reply: bytes) -> Script:
    """Answer every command so."""

    def script(peer: Peer) -> None:
        while peer.command():
            peer.send(reply)

    return script


def text(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def slots(*ranges: tuple[int, int, bytes, int]) -> bytes:
    """The answer to CLUSTER SLOTS."""
    return b"*%d\r\n" % len(ranges) + b"".join(
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n%b:%d\r\n" % (first, last, text(host), port)
        for first, last, host, port in ranges
    )


# ---- the greeting -------------------------------------------------------------------------------


async def test_what_a_server_writes_about_a_login_is_never_shown(open_at, caplog):
    """Old servers repeat the arguments of a command that they do not know."""
    caplog.set_level(logging.DEBUG)
    echo = f"-ERR unknown command `AUTH`, with args beginning with: `kv`, `{SECRET}`,\r\n".encode()
    with ScriptedServer(always(echo), greeting={b"AUTH": echo}) as server:
        reason = await reason_of(open_at(server, f"kv:{SECRET}@"))
        assert "rejected the user or the password (ERR)" in reason
        tier = open_at(server)
        await spill_one(tier, name_of(1), filled((512,)))
        reason += await reason_of(tier)
    assert SECRET not in reason + caplog.text


async def test_a_server_that_takes_connections_only_does_not_hold_anybody_up(open_at):
    with ScriptedServer(lambda peer: None, greeting={b"CLIENT": b""}) as server:
        assert "does not answer" in await reason_of(open_at(server, timeout_s=0.1))


# ---- who is trusted -----------------------------------------------------------------------------


@pytest.fixture
def of_system(tmp_path, monkeypatch):
    """Those of a server whose authority the system trusts: OpenSSL asks this variable for it."""
    found = Certificates(tmp_path / "system", LOCALHOST)
    monkeypatch.setenv("SSL_CERT_FILE", str(found.ca))
    return found


@pytest.fixture
def ours(tmp_path):
    return Certificates(tmp_path / "ours", LOCALHOST)


async def test_a_ca_file_is_trusted_instead_of_the_authorities_of_the_system(
    open_at, of_system, ours
):
    is_right = {("system", None): True, ("ours", None): False}
    is_right |= {("system", "ours"): False, ("ours", "ours"): True}
    for (of, ca), right in is_right.items():
        certificates = of_system if of == "system" else ours
        values = {"ca_file": str(ours.ca)} if ca else {}
        with ScriptedServer(always(b":1\r\n"), tls=certificates) as server:
            tier = open_at(server, scheme="rediss", **values)
            if right:
                assert await tier.probe([name_of(1)]) == [True]
            else:
                assert "was rejected" in await reason_of(tier)


@pytest.mark.parametrize("other_is", ["plain", "tls"])
async def test_what_a_cluster_with_tls_names_gets_no_password_before_it_is_trusted(
    open_at, ours, of_system, other_is
):
    received: list[bytes] = []
    other_tls = None if other_is == "plain" else of_system
    with ScriptedServer(note(received), tls=other_tls, greets=()) as other:
        greeting = {b"CLUSTER": slots((0, 16383, b"127.0.0.1", other.port))}
        with ScriptedServer(always(b":1\r\n"), tls=ours, greeting=greeting) as server:
            tier = open_at(server, f"kv:{SECRET}@", "rediss", ca_file=str(ours.ca))
            assert str(other.port) in await reason_of(tier)
        assert other.num_connections > 0
    assert SECRET.encode() not in b"".join(received)


async def test_what_a_cluster_without_tls_names_gets_the_password(open_at):
    """As docs/guides/security.md says: nothing can be proved without TLS."""
    received: list[bytes] = []
    with ScriptedServer(note(received), greets=()) as other:
        greeting = {b"CLUSTER": slots((0, 16383, b"127.0.0.1", other.port))}
        with ScriptedServer(always(b":1\r\n"), greeting=greeting) as server:
            assert str(other.port) in await reason_of(open_at(server, f"kv:{SECRET}@"))
    assert SECRET.encode() in b"".join(received)


def note(received: list[bytes]) -> Script:
    """Keep what comes first, and hang up."""
    return lambda peer: received.append(peer.connection.recv(1 << 16))


# ---- which server has what ----------------------------------------------------------------------


@pytest.mark.parametrize("code", ["LOADING", "NOPERM", "READONLY", "MISCONF", "ODD", "MASTERDOWN"])
async def test_a_refusal_is_a_failure_that_is_explained(open_at, code, caplog):
    with ScriptedServer(always(f"-{code} {SECRET}\r\n".encode())) as server:
        tier = open_at(server)
        assert await fetch_one(tier, name_of(1), slot_of((512,))) is Result.FAILED
        written = await spill_one(tier, name_of(1), filled((512,)))
        assert written is (Result.REFUSED if code == "NOPERM" else Result.FAILED)
        assert await reason_of(tier) == f"the server answers {code}"
    assert caplog.text.count(f"answers {code}.") == 1, "it is said once"
    assert SECRET not in caplog.text


async def test_a_key_that_is_on_its_way_to_another_server_is_absent(open_at):
    with ScriptedServer(always(b"-ASK 1 127.0.0.1:1\r\n")) as server:
        tier = open_at(server)
        assert await fetch_one(tier, name_of(1), slot_of((512,))) is Result.ABSENT
        assert await tier.probe([name_of(1)]) == [False]


async def test_servers_that_send_round_in_a_circle_fail(open_at):
    num_asked = 0

    def script(peer: Peer) -> None:
        nonlocal num_asked
        while words := peer.command():
            if words[0] == b"CLUSTER":
                num_asked += 1
                peer.send(slots((0, 16383, b"", server.port)))
            else:
                peer.send(b"-MOVED 1 127.0.0.1:%d\r\n" % server.port)

    with ScriptedServer(script, greets=(b"CLIENT", b"SELECT")) as server:
        tier = open_at(server)
        assert await fetch_one(tier, name_of(1), slot_of((512,))) is Result.FAILED
        assert num_asked == 2
        assert await spill_one(tier, name_of(1), filled((512,))) is Result.FAILED
        assert await reason_of(tier) == "the server answers MOVED"
        assert num_asked == 4, "once more for each call"
        assert server.num_connections <= 4 + 1


BADLY = "does not describe its cluster"
MANY = [(at, at, b"10.1.%d.%d" % (at >> 8, at & 255), 1) for at in range(NODES_MAX + 1)]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (slots((0, 16384, b"", 1)), BADLY),
        (slots((5, 4, b"", 1)), BADLY),
        (slots((-1, 4, b"", 1)), BADLY),
        (slots((0, 16383, b"", 0)), BADLY),
        (slots((0, 16383, b"", 70000)), BADLY),
        (slots((0, 16383, b"a", 1), (0, 16383, b"a", 1)), BADLY),
        (b"*1\r\n*0\r\n", BADLY),
        (b"*1\r\n:1\r\n", BADLY),
        (b"*1\r\n*3\r\n:0\r\n:1\r\n*1\r\n$-1\r\n", BADLY),
        (slots(*MANY), f"more than {NODES_MAX} servers"),
        (b"*0\r\n", "no server of the cluster"),
    ],
)
async def test_a_cluster_that_is_described_badly_is_not_used(open_at, reply, why):
    """Ranges must not overlap, so that each slot is looked at once, however many there are."""
    with ScriptedServer(always(b":1\r\n"), greeting={b"CLUSTER": reply}) as server:
        tier = open_at(server)
        assert why in await reason_of(tier)
        assert await fetch_one(tier, name_of(1), slot_of((512,))) is Result.FAILED
