"""What a Valkey or Redis server can do to its tier: refuse, fill up, hang, die, move keys."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safe_offload.tiers import naming
from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.guarded_tier import GuardedTier
from safe_offload.tiers.naming import description_key, key_of
from safe_offload.tiers.sealed_tier import SealedTier
from safe_offload.tiers.valkey.servers import STALL_S
from safe_offload.tiers.valkey.servers import slot_of as cluster_slot_of
from tests.engine.http_server import hold_port
from tests.tiers.contract import (
    FACTS,
    SPACE,
    bytes_of,
    fetch_one,
    filled,
    name_of,
    slot_of,
    spill_one,
    tier_at,
)
from tests.tiers.valkey.scripted_server import PATIENCE_S, reason_of, until
from tests.valkey_server import Certificates, Cluster, Server, redis_binary, url_config

SECRET = "correct-horse"
MIB = 1 << 20

needs_redis = pytest.mark.skipif(redis_binary() is None, reason="no redis-server: `make servers`")


Make = Callable[..., SealedTier]


def names_of(count: int) -> list[Name]:
    return [name_of(number) for number in range(count)]


def slots_of(count: int, size_bytes: int = 4096) -> list[Buffers]:
    return [slot_of((size_bytes,)) for _ in range(count)]


READER = "reader on nopass ~safe-offload:* +get +exists"


def set_user(server: Server, rights: str) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", *rights.split())


# ---- who may log in -----------------------------------------------------------------------------


async def test_a_password_file_is_read_for_each_connection(server, make, tmp_path):
    file = tmp_path / "password"
    tier = make(f"redis://kv@{server.host_port}", password_file=str(file))
    assert "cannot be read: No such file" in await reason_of(tier)
    for password in ("first", "second"):  # it is changed while the tier is open
        set_user(server, f"kv reset on >{password} +@all ~*")
        with server.client() as client:
            client.execute_command("CLIENT", "KILL", "USER", "kv")
        file.write_text(f"{password}\n")
        assert await tier.probe([name_of(1)]) == [False]


def a_pipe(path: Path) -> None:
    os.mkfifo(path)
    other_end = os.open(path, os.O_RDWR)  # which outlives the test: who reads waits for nobody
    os.write(other_end, b"x" * 8192)


@pytest.mark.parametrize(
    ("put", "problem"),
    [
        (a_pipe, "it is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
        (Path.mkdir, "it is not a regular file"),
        (lambda path: path.write_bytes(b"x" * 4097), "it is longer than 4096 bytes"),
    ],
    ids=["pipe", "device", "directory", "long"],
)
async def test_what_has_taken_the_place_of_a_password_file_is_named(
    server, make, tmp_path, caplog, put, problem
):
    """Nobody waits for the other end of a pipe, which would take a thread for each connection."""
    file = tmp_path / "password"
    file.write_text("right\n")
    set_user(server, "kv reset on >right +@all ~*")
    tier = make(f"redis://kv@{server.host_port}", password_file=str(file))
    assert await tier.probe([name_of(1)]) == [False]
    file.unlink()
    put(file)
    with server.client() as client:
        client.execute_command("CLIENT", "KILL", "USER", "kv")
    reason = f'the "password_file" {file} cannot be read: {problem}'
    assert reason in await reason_of(tier)
    assert reason in caplog.text
    file.rmdir() if file.is_dir() else file.unlink()
    file.write_text("right\n")
    assert await tier.probe([name_of(1)]) == [False]


async def test_a_user_who_may_only_read_reads(server, make):
    await spill_one(make(f"redis://{server.host_port}"), name_of(1), filled((512,), 1))
    set_user(server, READER)
    tier, slot = make(f"redis://reader:any@{server.host_port}"), slot_of((512,))
    assert await tier.probe([name_of(1), name_of(2)]) == [True, False]
    assert await fetch_one(tier, name_of(1), slot) is Result.DONE
    assert bytes_of(slot) == bytes_of(filled((512,), 1))
    assert await spill_one(tier, name_of(2), filled((512,))) is Result.REFUSED

    tier = make(f"redis://reader:any@{server.host_port}", ttl_s=60.0)
    assert await fetch_one(tier, name_of(1), slot) is Result.FAILED, "it may not prolong"
    assert await fetch_one(tier, name_of(1), slot) is Result.DONE, "so it only reads"


async def test_nobody_is_there(make, tmp_path):
    held, port = hold_port()
    with held:
        assert "Connect call failed" in await reason_of(make(f"redis://127.0.0.1:{port}"))
    assert "No such file" in await reason_of(make(f"unix://{tmp_path}/none"))


def test_a_url_with_a_password_is_warned_about(caplog):
    tier_at(url_config(f"redis://:{SECRET}@127.0.0.1:1"))
    assert "contains a password" in caplog.text
    assert SECRET not in caplog.text


# ---- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_tls(tmp_path_factory, certificates):
    folder = tmp_path_factory.mktemp("tls")
    options = {"tls-auth-clients": "yes"}
    with Server(folder, options, binary=redis_binary(), tls=certificates) as server:
        yield server


@needs_redis
@pytest.mark.parametrize(
    ("url", "files", "why"),
    [
        ("rediss://localhost:{tls}", "ca cert key", ""),
        ("rediss://localhost:{tls}", "ca", "does not"),
        ("rediss://127.0.0.1:{tls}", "ca cert key", "was rejected: IP address mismatch"),
        ("rediss://localhost:{tls}", "", "was rejected: "),
        ("rediss://localhost:{tls}", "stranger", "was rejected: "),
        ("redis://localhost:{tls}", "", "write rediss://"),
        ("rediss://localhost:{plain}", "ca", "whether this port speaks TLS"),
    ],
)
async def test_with_tls_both_sides_show_a_certificate_or_say_why_not(
    with_tls, server, certificates, make, tmp_path, url, files, why
):
    values = {f"{file}_file": str(getattr(certificates, file, "")) for file in files.split()}
    if files == "stranger":
        values = {"ca_file": str(Certificates(tmp_path / "stranger").ca)}
    timeout_s = 0.5 if "{plain}" in url else 60.0  # which waits for more of a command
    tier = make(url.format(tls=with_tls.port, plain=server.port), timeout_s=timeout_s, **values)
    if why:
        reason = await reason_of(tier)
        assert why in reason
        assert "mismatch" not in reason or '"ca_file"' in reason
    else:
        assert await tier.probe([name_of(1)]) == [False]


# ---- what the server keeps ----------------------------------------------------------------------


async def test_the_time_of_an_object_begins_again_when_it_is_used(server, make):
    tier, names, slots = make(f"redis://{server.host_port}", ttl_s=60.0), names_of(3), slots_of(3)
    keys = [key_of(name) for name in names]
    await tier.spill(names, slots)
    with server.client() as client:
        for key in (*keys, description_key(SPACE)):
            assert 50_000 < client.pttl(key) <= 60_000
            client.pexpire(key, 10_000)
        await tier.fetch(names[:1], slots[:1])
        await tier.spill(names[1:2], slots[1:2])
        assert [client.pttl(key) > 50_000 for key in keys] == [True, True, False]
        client.pexpire(keys[0], 1)
        await until(lambda: not client.exists(keys[0]))
        assert await tier.probe(names) == [False, True, True]
        assert await fetch_one(tier, names[0], slots[0]) is Result.ABSENT


async def test_a_key_of_another_type_is_unreadable(server, make):
    tier = make(f"redis://{server.host_port}")
    with server.client() as client:
        client.lpush(key_of(name_of(1)), "x")
    assert await tier.probe([name_of(1)]) == [True]
    assert await fetch_one(tier, name_of(1), slot_of((512,))) is Result.UNREADABLE
    assert await tier.probe([name_of(1)]) == [False], "it is not offered again"


@pytest.mark.parametrize("length", [3 * MIB, 40 * MIB])
async def test_a_value_that_is_much_too_long_is_deleted(server, make, length):
    tier, names = make(f"redis://{server.host_port}", num_connections=1), names_of(4)
    await tier.spill(names, [filled((4096,), 1)] * 4)
    with server.client() as client:
        client.setrange(key_of(names[1]), length, b"x")
    results = await tier.fetch(names, slots_of(4))
    assert results == [Result.DONE, Result.CORRUPT, Result.DONE, Result.DONE]
    assert await tier.probe(names) == [True, False, True, True]


async def test_a_namespace_is_described_and_without_a_time_all_stays(server, make):
    await spill_one(make(f"redis://{server.host_port}"), name_of(1), filled((512,)))
    with server.client() as client:
        assert naming.facts_of(client.get(description_key(SPACE))) == FACTS
        assert client.pttl(key_of(name_of(1))) == client.pttl(description_key(SPACE)) == -1


async def test_a_database_is_selected(server, make):
    await spill_one(make(f"redis://{server.host_port}/3"), name_of(1), filled((512,)))
    assert await make(f"redis://{server.host_port}").probe([name_of(1)]) == [False]
    assert await make(f"unix://{server.socket}?db=3").probe([name_of(1)]) == [True]
    assert "no such database" in await reason_of(make(f"redis://{server.host_port}/99"))


async def test_connections_are_bounded_and_closed(server, make):
    tier, names = make(f"redis://{server.host_port}", num_connections=3), names_of(200)
    with server.client() as client:

        def num_clients() -> int:
            return sum(each["name"] == "safe-offload" for each in client.client_list())

        moves = [tier.spill(names[at : at + 20], slots_of(20)) for at in range(0, 200, 20)]
        await asyncio.gather(*moves, *(tier.probe(names) for _ in range(10)))
        await asyncio.gather(*(tier.fetch(names, slots_of(200)) for _ in range(5)))
        assert num_clients() == 3 + 1
        await tier.close()
        await until(lambda: num_clients() == 0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# ---- servers that hang and die ------------------------------------------------------------------


def guarded_tier_of(tier: SealedTier, url: str, **values: Any) -> GuardedTier:
    return GuardedTier(
        tier,
        url_config(url, **values),
        lambda generation: SPACE,
        slot_bytes=4096,
        chance=lambda: 0.5,
    )


async def test_the_others_of_a_cluster_go_on_when_one_is_killed(make, tmp_path):
    names, slots = names_of(120), slots_of(120)
    with Cluster(tmp_path) as cluster:
        dead = cluster.servers[2]
        is_on_dead = [cluster_slot_of(key_of(name)) >= -(-16384 * 2 // 3) for name in names]
        assert {*is_on_dead} == {True, False}
        tier = make(f"redis://{cluster.servers[0].host_port}")
        assert await tier.spill(names, slots) == [Result.DONE] * 120
        loads = [asyncio.ensure_future(tier.fetch(names, slots_of(120))) for _ in range(5)]
        await asyncio.sleep(0)
        dead.kill()
        async with asyncio.timeout(PATIENCE_S):
            for load in loads:
                for is_dead, result in zip(is_on_dead, await load, strict=True):
                    assert result is Result.DONE or is_dead
            alive = [not is_dead for is_dead in is_on_dead]
            assert await tier.probe(names) == alive
            expected = [Result.FAILED if is_dead else Result.DONE for is_dead in is_on_dead]
            assert await tier.fetch(names, slots) == expected
            for server in cluster.servers[:2]:
                server.kill()
            await reason_of(tier)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("pair"), 2) as cluster:
        yield cluster


async def test_the_others_of_a_cluster_go_on_when_one_is_stopped(pair, make):
    names, slots = names_of(60), slots_of(60)
    hung = pair.servers[1]
    is_on_hung = [cluster_slot_of(key_of(name)) >= 16384 // 2 for name in names]
    url = f"redis://{pair.servers[0].host_port}"
    tier = make(url)
    short, patient = (guarded_tier_of(tier, url, timeout_s=s) for s in (2 * STALL_S, 60.0))
    assert await tier.spill(names, slots) == [Result.DONE] * 60
    hung.stop()
    try:
        assert await short.probe(names) is None, "it has to be found out once"
        assert await patient.probe(names) == [not is_hung for is_hung in is_on_hung]
        expected = [Result.FAILED if is_hung else Result.DONE for is_hung in is_on_hung]
        assert await patient.fetch(names, slots) == expected
    finally:
        hung.go_on()


async def test_keys_that_have_moved_to_another_server_are_found(pair, make):
    """The last test with this cluster."""
    names, slots = names_of(60), slots_of(60)
    tier = make(f"redis://{pair.servers[0].host_port}")
    await tier.spill(names, slots)
    first, second = (server.client() for server in pair.servers)
    with first, second:
        second_id = second.execute_command("CLUSTER", "MYID")
        for name in names:  # what was on the first is lost, and belongs to the second
            slot = cluster_slot_of(key_of(name))
            if slot < 16384 // 2:
                first.delete(key_of(name))
                for client in (second, first):
                    client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", second_id)
    was_lost = [cluster_slot_of(key_of(name)) < 16384 // 2 for name in names]
    assert await tier.probe(names) == [not lost for lost in was_lost]
    found = await tier.fetch(names, slots)
    assert found == [Result.ABSENT if lost else Result.DONE for lost in was_lost]
    written = await tier.spill(names, slots)
    assert written == [Result.DONE if lost else Result.PRESENT for lost in was_lost]
