"""Requests of an S3 bucket as they go over the network: on both event loops, with TLS or without.

tests/tiers/test_given_up.py has the calls that are given up in the middle.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Result
from safe_offload.tiers.sealed_tier import SealedTier
from tests.tiers.contract import fetch_one, filled, name_of, slot_of, tier_at
from tests.tiers.objects.scripted_bucket import (
    NO_CONTENT,
    ScriptedBucket,
    answer,
    head_from,
    known_to_the_tier,
)
from tests.tiers.valkey.scripted_server import PATIENCE_S, Peer, Script, ScriptedServer
from tests.valkey_server import Certificates


@pytest.fixture(autouse=True)
def environment(monkeypatch, certificates):
    known_to_the_tier(monkeypatch)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))


@contextlib.contextmanager
def tier_of(
    script: Script, tls: Certificates | None = None, host: str = "localhost"
) -> Iterator[tuple[SealedTier, ScriptedServer]]:
    with ScriptedServer(script, tls=tls) as server:
        endpoint = f"http{'s' if tls else ''}://{host}:{server.port}"
        yield tier_at(TierConfig.at("s3://bucket/kv", endpoint=endpoint)), server


def test_connections_are_used_again(runner, tls):
    def script(peer: Peer) -> None:
        try:
            while head_from(peer).startswith(b"HEAD "):
                peer.send(NO_CONTENT)
        finally:
            has_ended.set()

    async def ask(tier: SealedTier, server: ScriptedServer) -> None:
        assert [await tier.probe([name_of(number)]) for number in range(20)] == [[True]] * 20
        assert server.num_connections == 1
        await tier.close()
        assert await asyncio.to_thread(has_ended.wait, PATIENCE_S)

    has_ended = threading.Event()
    with tier_of(script, tls) as (tier, server):
        runner.run(ask(tier, server))


@pytest.mark.parametrize("trouble", ["an unknown authority", "another name"])
def test_a_server_that_is_not_who_it_should_be_is_sent_nothing(
    runner, certificates, monkeypatch, caplog, trouble
):
    heard: list[bytes] = []
    host = "127.0.0.1"
    if trouble == "an unknown authority":
        monkeypatch.delenv("SSL_CERT_FILE")
        host = "localhost"
    with tier_of(lambda peer: heard.append(head_from(peer)), certificates, host) as (tier, _):
        assert runner.run(fetch_one(tier, name_of(1), slot_of((512,)))) is Result.FAILED
        runner.run(tier.close())
    assert not heard
    assert "failed to read: the request failed (GenericError). Fix" in caplog.text
    assert all(record.levelno < logging.ERROR for record in caplog.records)


async def test_credentials_that_cannot_be_had_are_named(monkeypatch, caplog):
    """They are asked for when they are needed: here, of a machine that has no role.

    That there is none (404) does not mean that there is no object.
    """
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    async with ScriptedBucket(lambda request: answer("404 Not Found")) as no_role:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", no_role.endpoint)
        tier = tier_at(TierConfig.at("s3://bucket/kv", endpoint="http://127.0.0.1:1"))
        names, slots = [name_of(1), name_of(2)], [filled((512,)), filled((512,))]
        assert await tier.fetch(names, slots) == [Result.FAILED] * 2
        assert await tier.spill(names, slots) == [Result.FAILED] * 2
        with pytest.raises(OSError, match="no credentials were found"):
            await tier.probe(names)
        await tier.close()
    for what in ("read", "write", "probe"):
        told = f"Tier s3://bucket/kv failed to {what}: there is no such bucket, or no credentials"
        assert told in caplog.text
    assert "check the variables AWS_…, the role of the" in caplog.text
