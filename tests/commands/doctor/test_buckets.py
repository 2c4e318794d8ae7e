"""`safe-offload doctor` on buckets of tiers: a real store, and credentials that are made up."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import obstore
import pytest

from safe_offload.commands.doctor import tiers
from safe_offload.commands.doctor.tiers import check_tier
from safe_offload.config.tiers import TierConfig
from safe_offload.findings import Finding, Severity
from safe_offload.tiers.objects.bucket import open_store
from tests.commands.doctor.test_doctor import wrong
from tests.tiers.objects.scripted_bucket import ScriptedBucket, answer


@pytest.fixture(autouse=True)
def short(bucket_server, monkeypatch):
    monkeypatch.setattr(tiers, "OBJECT_BYTES", 64 << 10)


def found_of(url: str, endpoint: str) -> dict[str, Finding]:
    config = TierConfig.at(url, endpoint=endpoint)
    found = {one.id: one for one in check_tier(config, 131072)}
    assert found.pop("tiers.key")
    return found


def test_a_bucket_is_tried_and_left_as_it_was(bucket_server):
    found = found_of("s3://kv-cache/doctor", bucket_server.endpoint)
    assert not wrong(list(found.values()))
    assert set(found) == {"tiers.bucket", "tiers.access", "tiers.rate"}
    assert "tokens a second" in found["tiers.rate"].found
    bucket: Any = open_store(TierConfig.at("s3://kv-cache/doctor", endpoint=bucket_server.endpoint))
    assert not [meta["path"] for page in obstore.list(bucket) for meta in page]


def test_who_may_only_read(bucket_server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", bucket_server.reader_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", bucket_server.reader_secret)
    problem = found_of("s3://kv-cache/doctor", bucket_server.endpoint)["tiers.access"]
    assert problem.severity is Severity.ERROR
    assert "write: access denied (" in problem.found
    assert "delete: access denied (" in problem.found
    assert "list: " not in problem.found
    assert problem.fix


@pytest.mark.parametrize("url", ["s3://no-such-bucket/kv", "s3://kv-cache/x"])
def test_what_cannot_be_used(bucket_server, monkeypatch, url):
    secret = "hunter2-secret"
    if "no-such" not in url:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    found = found_of(url, bucket_server.endpoint)
    problem = found["tiers.bucket"]
    assert problem.severity is Severity.ERROR
    why = "there is no such bucket" if "no-such" in url else "access denied"
    assert why in problem.found
    assert problem.fix
    assert secret not in json.dumps([one.to_json() for one in found.values()])


async def test_a_machine_without_a_role_is_not_only_told_of_a_missing_bucket(
    monkeypatch,
):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    async with ScriptedBucket(lambda request: answer("404 Not Found")) as no_role:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", no_role.endpoint)
        found = await asyncio.to_thread(found_of, "s3://kv/x", "http://127.0.0.1:9")
    assert "or no credentials" in found["tiers.bucket"].found
    assert "create the bucket" in found["tiers.bucket"].fix
    assert "the role of the machine" in found["tiers.bucket"].fix


@pytest.mark.parametrize(
    ("limit", "word"), [("ANSWER_S", "the request failed"), ("TRIAL_S", "hangs")]
)
def test_a_store_that_answers_nothing(monkeypatch, limit, word):
    monkeypatch.setattr(tiers, limit, 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = found_of("s3://kv/x", f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert found["tiers.bucket"].severity is Severity.WARNING
    assert word in found["tiers.bucket"].found
