"""`safe-offload doctor` on servers of tiers: real ones, and settings that are made up."""

import dataclasses
import json
import re
import socket
import threading
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from safe_offload.commands.doctor import tiers
from safe_offload.commands.doctor.report import guarded, render
from safe_offload.commands.doctor.tiers import check_tier
from safe_offload.config.tiers import TierConfig
from safe_offload.config.units import GIB
from safe_offload.findings import Finding, Severity
from safe_offload.tiers.valkey.diagnosis import (
    TRIAL_TTL_S,
    Seen,
    access_of,
    eviction_of,
    memory_of,
    persistence_of,
)
from safe_offload.tiers.valkey.valkey_store import ValkeyStore
from tests.commands.doctor.test_doctor import wrong
from tests.engine.http_server import hold_port
from tests.valkey_server import (
    LOCALHOST,
    Cluster,
    Server,
    redis_binary,
    valkey_binary,
)

PASSWORD = "hunter2-secret"
SENT = "client|setname cluster|slots exists set del"
"""By every tier; what a tier sends with a time to live, and in which database, is added."""
EVERY = f"{SENT} get getex pexpire select".split()
NOT_NEEDED = {"getex", "del", "client|setname", "cluster|slots"}
SOUND = Seen(
    version="Valkey 9.1.2",
    maxmemory_bytes=100 * GIB,
    used_bytes=50 * GIB,
    num_evicted=7,
    policy="allkeys-lru",
    has_append_only_file=False,
)


@pytest.fixture
def server(server):
    with server.client() as client:
        client.config_set("maxmemory", "256mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("save", "")
    return server


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(tiers, "OBJECT_BYTES", 64 << 10)


def found_of(server: Server, user: str = "", **values: Any) -> dict[str, Finding]:
    config = TierConfig.at(f"redis://{user}{server.host_port}", **values)
    return {one.id: one for one in check_tier(config, 131072)}


def rights(*names: str) -> str:
    """An ACL's word for commands, and for nothing else."""
    return " ".join(f"+{name}" for name in names)


def set_user(server: Server, words: str) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", *words.split())


# ---- real servers -----------------------------------------------------------------------------


def test_a_server_is_tried_and_left_as_it_was(server):
    with server.client() as client:
        client.set("mine", "1")
        found = found_of(server, ttl_s=3600.0)
        assert client.keys() == [b"mine"]
    assert not wrong(list(found.values()))
    assert "Valkey 9." in found["tiers.server"].found
    assert "maxmemory of 256.00 MiB" in found["tiers.memory"].found
    assert set(found) == {
        *("tiers.server", "tiers.access", "tiers.memory", "tiers.eviction", "tiers.persistence"),
        "tiers.rate",
    }
    assert "tokens a second" in found["tiers.rate"].found


def test_a_server_as_it_is_installed(tmp_path):
    with Server(tmp_path, {"save": "3600 1"}) as server:
        problems = wrong(list(found_of(server).values()))
    assert set(problems) == {"tiers.memory", "tiers.eviction", "tiers.persistence"}
    assert "noeviction: once it is full" in problems["tiers.eviction"].found


def test_a_full_server_that_evicts_nothing(server):
    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        try:
            found = found_of(server)
        finally:
            client.config_set("maxmemory", "256mb")
            client.config_set("maxmemory-policy", "allkeys-lru")
    assert "SET (OOM)" in found["tiers.access"].found
    assert found["tiers.access"].severity is Severity.ERROR
    assert "maxmemory-policy allkeys-lru" in found["tiers.access"].fix
    assert "tiers.rate" not in found


@pytest.mark.parametrize("values", [{}, {"ttl_s": 3600.0}])
def test_the_users_of_the_security_page_pass(server, tmp_path, values):
    """The reader is told that it reads, and that nothing it computes is stored."""
    page = (Path(__file__).parents[3] / "docs/guides/security.md").read_text()
    users = re.findall(r"^user (vllm\S*) (on .*)$", page, re.MULTILINE)
    assert [name for name, _ in users] == ["vllm", "vllm-reader"]
    values["password_file"] = str(tmp_path / "secret")
    (tmp_path / "secret").write_text(PASSWORD)
    for name, words in users:
        set_user(server, f"{name} reset {words.replace('>PASSWORD', f'>{PASSWORD}')}")
    writer, reader = (found_of(server, f"{name}@", **values) for name, _ in users)
    assert not wrong([*writer.values(), *reader.values()])
    assert writer["tiers.access"].severity is Severity.OK
    assert reader["tiers.access"].severity is Severity.INFO
    assert "allows this user only to read" in reader["tiers.access"].found
    assert "tiers.rate" not in reader
    with server.client() as client:
        assert client.keys("safe-offload:*") == []


@pytest.mark.parametrize("binary", [valkey_binary(), redis_binary()])
def test_a_server_whose_maxmemory_was_lowered_below_what_it_holds(tmp_path, binary):
    options = {"maxmemory": "64mb", "maxmemory-policy": "noeviction"}
    with Server(tmp_path, options, binary=binary) as server:
        with server.client() as client:
            client.set("kept", b"x" * (20 << 20))
            client.config_set("maxmemory", "5mb")
        problem = found_of(server)["tiers.memory"]
    assert problem.severity is Severity.WARNING
    uses = r"uses 2\d\.\d\d MiB, more than its maxmemory of 5\.00 MiB: it evicts, or refuses"
    assert re.search(uses, problem.found)
    assert int(re.findall(r"to at least (\d+)mb", problem.fix)[0]) in range(20, 30)


def test_users_and_passwords(server, tmp_path):
    for name, allowed in (("tier", rights(*EVERY)), ("reader", rights("get", "exists"))):
        set_user(server, f"{name} reset on >{PASSWORD} ~safe-offload:* {allowed}")
    secret = tmp_path / "secret"
    secret.write_text(PASSWORD)
    found = found_of(server, "tier@", password_file=str(secret))
    assert not wrong(list(found.values()))
    assert "CONFIG GET save, INFO" in found["tiers.unseen"].found
    assert not {"tiers.memory", "tiers.eviction", "tiers.persistence"} & set(found)
    found = found_of(server, "reader@", password_file=str(secret))
    refused = "CLIENT|SETNAME (NOPERM), CLUSTER|SLOTS (NOPERM), SET (NOPERM), DEL (NOPERM)"
    assert found["tiers.access"].found.endswith(f"refuses {refused}")
    assert found["tiers.access"].fix.endswith("+client|setname +cluster|slots +set +del")
    found = found_of(server, f"tier:{PASSWORD}@")
    assert list(wrong(list(found.values()))) == ["tiers.password"]
    wrong_password = found_of(server, f"tier:{PASSWORD}x@")
    assert "rejected the user or the password" in wrong_password["tiers.server"].found
    assert wrong_password["tiers.server"].severity is Severity.ERROR
    every = [*found.values(), *wrong_password.values()]
    assert PASSWORD not in json.dumps([one.to_json() for one in every])


TRIALS = [
    (values, database, name)
    for values, database, also in (
        ({}, "", f"{SENT} get"),
        ({"ttl_s": 3600.0}, "", "getex pexpire"),
        ({}, "/1", "select"),
    )
    for name in also.split()
]


@pytest.mark.parametrize(
    ("values", "database", "name"), TRIALS, ids=[f"{v}{d} {name}" for v, d, name in TRIALS]
)
def test_the_command_that_is_not_allowed_is_named_and_no_other(server, values, database, name):
    config = TierConfig.at(f"redis://tier@{server.host_port}{database}", **values)
    allowed = rights(*(each for each in EVERY if each != name))
    set_user(server, f"tier reset on nopass ~safe-offload:* {allowed}")
    with server.client() as client:
        problems = wrong(list(check_tier(config)))
        assert client.execute_command("SELECT", database.strip("/") or "0")
        left = client.keys("safe-offload:*")
        assert bool(left) == (name == "del")
        assert all(0 < client.pttl(key) <= 1000 * TRIAL_TTL_S for key in left)
        client.flushall()
    (problem,) = problems.values()
    assert problem.severity is (Severity.WARNING if name in NOT_NEEDED else Severity.ERROR)
    assert set(re.findall(r"\+([\w|]+)", problem.fix)) == {name}
    if name != "select":
        assert problem.found.endswith(f" refuses {name.upper()} (NOPERM)")


def test_objects_of_a_trial_that_is_killed_expire(server, monkeypatch):
    monkeypatch.setattr(ValkeyStore, "delete", AsyncMock(return_value=[]))
    assert "read at" in found_of(server)["tiers.rate"].found
    with server.client() as client:
        left = client.keys("safe-offload:*")
        assert left
        assert all(0 < client.pttl(key) <= 1000 * TRIAL_TTL_S for key in left)


def test_a_cluster_and_one_whose_nodes_may_not_be_asked_for(tmp_path):
    with Cluster(tmp_path) as cluster:
        found = found_of(cluster.servers[0])
        for server in cluster.servers:
            with server.client() as client:
                assert client.dbsize() == 0
        set_user(
            cluster.servers[0], f"tier on nopass ~safe-offload:* {rights(*EVERY)} -cluster|slots"
        )
        refused = found_of(cluster.servers[0], "tier@")["tiers.access"]
    assert "a cluster of 3 nodes" in found["tiers.server"].found
    assert "no maxmemory" in found["tiers.memory"].found
    assert "read at" in found["tiers.rate"].found
    assert refused.severity is Severity.ERROR
    assert refused.found.endswith(" refuses CLUSTER|SLOTS (NOPERM)")


# ---- no server --------------------------------------------------------------------------------


def test_no_server():
    held, port = hold_port()
    with held:
        (problem,) = check_tier(TierConfig.at(f"redis://{LOCALHOST}:{port}"))
    assert (problem.id, problem.severity) == ("tiers.server", Severity.WARNING)
    assert "cannot connect" in problem.found
    assert "engines start without it" in problem.found
    assert problem.fix


def test_a_server_that_hangs(server, monkeypatch):
    monkeypatch.setattr(tiers, "ANSWER_S", 0.2)
    server.stop()
    try:
        (problem,) = found_of(server).values()
    finally:
        server.go_on()
    assert "does not answer" in problem.found
    assert problem.severity is Severity.WARNING


def test_a_server_that_drips(monkeypatch):
    """It always sends something before the time of one answer is over."""
    monkeypatch.setattr(tiers, "TRIAL_S", 0.5)
    is_over = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"+")
            while not is_over.wait(0.05):
                connection.sendall(b"x")

    with socket.create_server((LOCALHOST, 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,), daemon=True)
        thread.start()
        config = TierConfig.at(f"redis://{LOCALHOST}:{listener.getsockname()[1]}")
        (problem,) = check_tier(config)
        is_over.set()
        thread.join()
    assert problem.severity is Severity.WARNING
    assert "hangs; engines start without it" in problem.found


def test_what_a_server_says_of_itself_is_printed_escaped():
    said = "\x1b]0;owned\x07" * 100

    numbers = dict.fromkeys(("maxmemory", "used_memory", "evicted_keys", "aof_enabled"), 1)
    facts = numbers | {"valkey_version": said, "maxmemory_policy": said}
    info = "".join(f"{name}:{value}\r\n" for name, value in facts.items())

    seen = Seen.read(info.encode())
    assert seen is not None
    text = render([*eviction_of(seen.version, [seen], has_ttl=False)])
    assert all(line.isprintable() for line in text.splitlines())
    assert r"\x1b" in text
    assert text.count("owned") < 10


def test_the_text_of_an_error_is_not_printed():
    def check() -> list[Finding]:
        raise ValueError("what the server sent: hunter2\x1b[2J")

    (found,) = guarded("tiers", check)
    assert "hunter2" not in found.found
    assert "ValueError in report.py:" in found.found
    assert "test_servers.py:" in found.found


# ---- settings that are made up ----------------------------------------------------------------


def only(id: str, found: list[Finding], fix: str = "") -> Finding:
    (one,) = found
    assert one.id == id
    assert list(wrong(found)) == [id] * bool(fix)
    assert fix in one.fix
    return one


@pytest.mark.parametrize(
    ("changes", "said", "fix"),
    [
        ({}, "50.00 GiB of a maxmemory of 100.00 GiB", ""),
        ({"maxmemory_bytes": 0}, "has no maxmemory, and uses 50.00 GiB", "nine tenths"),
        ({"maxmemory_bytes": 8 * GIB, "used_bytes": 9 * GIB}, "uses 9.00 GiB", "at least 9216mb"),
    ],
)
def test_the_memory_of_a_server(changes, said, fix):
    seen = dataclasses.replace(SOUND, **changes)
    assert said in only("tiers.memory", [*memory_of("kv", [seen])], fix).found
    if changes:
        said = "a node of kv uses" if fix.startswith("at") else "has no maxmemory"
        assert said in only("tiers.memory", [*memory_of("kv", [SOUND, seen])], fix).found


@pytest.mark.parametrize(
    ("policy", "ttl", "said", "fix"),
    [
        ("allkeys-lru", False, "14 keys evicted so far", ""),
        ("noeviction", False, "rejects writes", "allkeys-lru"),
        ("volatile-lru", False, "only keys with a time to live", '"ttl"'),
        ("volatile-lru", True, "14 keys evicted so far", ""),
        ("allkeys-random", False, "hot keys", "allkeys-lru"),
    ],
)
def test_the_policy_of_a_server(policy, ttl, said, fix):
    seen = dataclasses.replace(SOUND, policy=policy)
    found = [*eviction_of("kv", [seen, seen], has_ttl=ttl)]
    assert said in only("tiers.eviction", found, fix).found


@pytest.mark.parametrize(
    ("denied", "fix"),
    [({}, ""), ({"set": "READONLY"}, "the primary"), ({"del": "NOPERM"}, "+del")],
)
def test_what_a_server_refuses(denied, fix):
    only("tiers.access", [access_of("kv", denied)], fix)


def test_what_a_server_writes_to_disk_and_hides():
    only("tiers.persistence", [*persistence_of("kv", {"snapshots"}, set())], 'save ""')
    only("tiers.persistence", [*persistence_of("kv", set(), set())])
    assert "+info" in only("tiers.unseen", [*persistence_of("kv", set(), {"INFO"})]).found
    assert Seen.read(b"redis_version:7\r\n") is None


def test_buffers_that_do_not_make_a_server_evict_are_not_counted():
    """Those of a replica that lags, and of the append-only file."""
    info = "redis_version:7.4\r\nmaxmemory:16\r\nused_memory:24\r\nmem_not_counted_for_evict:9\r\n"
    seen = Seen.read(f"{info}evicted_keys:7\r\nmaxmemory_policy:x\r\naof_enabled:1\r\n".encode())
    assert seen == Seen("Redis 7.4", 16, 15, 7, "x", has_append_only_file=True)
