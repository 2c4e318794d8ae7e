"""Some answers of hostile servers; `python -m tests.tiers.hostile` takes many more."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Result
from safe_offload.tiers.seal import PLAIN
from safe_offload.tiers.valkey import servers as valkey_servers
from safe_offload.tiers.valkey.login import Login
from tests.tiers.contract import bytes_of, fetch_one, filled, name_of, slot_of, spill_one, tier_at
from tests.tiers.hostile import faulty, fuzz
from tests.tiers.hostile.answers import PASSWORD, Choice
from tests.tiers.hostile.fuzz import Fuzz, run
from tests.tiers.hostile.server import PROTOCOLS, RESP, HostileServer, read_command

NUM_ANSWERS = 100
FOUND_BY = {
    faulty.TRUSTS: "an object with wrong bytes was served",
    faulty.RAISES: "fetch raises",
    faulty.WRITES_LATE: "a slot was written to after its call had returned",
    faulty.HANGS: "a call hangs",
    faulty.TELLS: "a secret",
    faulty.FORGES: "what cannot be printed",
    faulty.FORGETS: "tasks are left",
    faulty.LEAKS: "files are left",
    faulty.HOARDS: "memory has grown",
    faulty.BLOCKS: "the loop did nothing else",
}
"""By a fault of a tier, what is said of it."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_but_misses_comes_of_a_hostile_server(protocol, tmp_path):
    report = run(protocol, tmp_path, seed=1, num_answers=NUM_ANSWERS)
    assert not report.findings, str(report)
    assert report.num_right > 0
    assert sum(report.answers.values()) >= NUM_ANSWERS


@pytest.mark.nightly
def test_every_fault_of_a_bad_tier_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "GRACE_S", 1.0)
    monkeypatch.setattr(fuzz, "RECOVERY_ROUNDS", 2)
    with HostileServer(RESP, tmp_path) as server:
        bad = Fuzz(server, 1, lambda config: faulty.FaultyTier(config, faulty.FAULTS))
        report = bad.run(NUM_ANSWERS)
    for fault in faulty.FAULTS:
        said = FOUND_BY[fault]
        assert any(said in finding for finding in report.findings), f"{fault}:\n{report}"


def test_the_nth_answer_follows_from_the_seed():
    def chosen(seed: int) -> list[int]:
        choice = Choice(seed=seed)
        return [choice.next().randrange(1 << 30) for _ in range(200)]

    assert chosen(1) == chosen(1) != chosen(2)


@contextlib.asynccontextmanager
async def scripted(answer: Callable[[list[bytes]], bytes]) -> AsyncIterator[TierConfig]:
    """A server that answers each command so, and the settings of a tier on it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while (command := await read_command(reader)) is not None:
                writer.write(answer(command[0]))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield TierConfig.at(f"redis://:{PASSWORD}@127.0.0.1:{port}/1")


async def test_a_connection_that_is_given_up_while_it_logs_in_is_given_up_at_once():
    """At whatever step of logging in that is."""
    async with scripted(lambda words: b"+OK\r\n") as config:
        login = Login(config)
        for num_steps in range(100):
            connecting = asyncio.ensure_future(login.connect(login.home))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            was_done = connecting.done()
            connecting.cancel()
            await asyncio.wait({connecting})
            assert was_done or connecting.cancelled(), num_steps
            if was_done:
                connecting.result().abort()
        (await login.connect(login.home)).abort()


async def test_keys_that_had_no_server_of_a_cluster_are_asked_for_again(monkeypatch):
    monkeypatch.setattr(valkey_servers, "REFRESH_S", 0.0)
    replies = [b"*0\r\n"]

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"CLUSTER":
            return replies[-1]
        return b":1\r\n" if words[0] == b"EXISTS" else b"+OK\r\n"

    async with scripted(answer) as config:
        tier = tier_at(config)
        with pytest.raises(OSError, match="no server of the cluster"):
            await tier.probe([name_of(1)])
        node = b"*3\r\n$9\r\n127.0.0.1\r\n:%d\r\n$1\r\na\r\n" % config.location.port
        replies.append(b"*1\r\n*3\r\n:0\r\n:16383\r\n" + node)
        assert await tier.probe([name_of(1)]) == [True]
        await tier.close()


async def test_an_object_that_could_not_be_deleted_is_written_over():
    slot = filled((4096,))
    good = PLAIN.header(name_of(1), slot) + bytes_of(slot)
    stored = [good[:-1] + bytes([good[-1] ^ 1])]

    def answer(words: list[bytes]) -> bytes:
        match words[0]:
            case b"GET":
                return b"$%d\r\n%b\r\n" % (len(stored[-1]), stored[-1])
            case b"SET":
                stored.append(good)
            case b"EXISTS":
                return b":1\r\n"
            case b"DEL" | b"CLUSTER":
                return b"-ERR no\r\n"
        return b"+OK\r\n"

    async with scripted(answer) as config:
        tier = tier_at(config)
        assert await fetch_one(tier, name_of(1), slot_of((4096,))) is Result.CORRUPT
        assert await tier.probe([name_of(1)]) == [False]
        assert await spill_one(tier, name_of(1), slot) is Result.DONE
        assert await tier.probe([name_of(1)]) == [True]
        assert await fetch_one(tier, name_of(1), slot_of((4096,))) is Result.DONE
        await tier.close()
