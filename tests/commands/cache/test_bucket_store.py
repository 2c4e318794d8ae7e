"""`safe-offload cache` on object stores: what cannot be done; test_places.py has what can."""

import asyncio

import pytest

from safe_offload.commands.cache.place import config_of, open_place
from safe_offload.tiers.naming import namespace_folder
from safe_offload.tiers.objects import bucket_store as store
from tests.commands.cache.calls import AFTER_RESET, FIRST, caller, check_refusal, read
from tests.tiers.objects.scripted_bucket import ScriptedBucket, answer

SECRET = "aHVudGVyMi1zZWNyZXQ"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    "GOOGLE_BEARER_TOKEN": SECRET,
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_STORAGE_SAS_KEY": f"sv=2024-11-04&sig={SECRET}",
}


def test_rm_by_age_in_a_bucket(call, bucket):
    none = f"{bucket.url}/none"
    assert call("ls", none) == (0, f"No engine has stored anything in {none}.\n")
    _, document = read(call, "rm", bucket.url, "--all", "--older-than", "0s")
    assert document["num_objects"] == 13


@pytest.mark.parametrize("scheme", ["s3", "az"])  # the second lists all that there is
def test_namespaces_are_found_a_page_at_a_time(call, bucket, monkeypatch, scheme):
    pages = []

    async def noted(left):
        pages.append(await next_of(left))
        return pages[-1]

    next_of = store.next_page
    monkeypatch.setattr(store, "PAGE_ITEMS", 2)
    monkeypatch.setattr(store, "next_page", noted)
    monkeypatch.setattr(store, "_SKIPPING", ("s3",) if scheme == "s3" else ())
    config = config_of(bucket.url, {"endpoint": bucket.endpoint})
    place = open_place(bucket.url, config)
    assert place.namespaces() == sorted(map(namespace_folder, (FIRST, AFTER_RESET)))
    place.close()
    assert max(len(page or []) for page in pages) == 2
    assert len(pages) <= 6 if scheme == "s3" else len(pages) >= 8


def test_what_cannot_be_done_is_refused_with_the_fix(
    call, bucket, bucket_server, capsys, monkeypatch
):
    run, url = caller(capsys), bucket.url
    check_refusal(run("ls", url, "--endpoint", "http://127.0.0.1:9"), "the request failed")
    check_refusal(run("ls", url, "--endpoint", "http://u:hunter2@h"), "are not allowed here")
    check_refusal(call("ls", "s3://no-such-bucket/kv"), "there is no such bucket")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", bucket_server.reader_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", bucket_server.reader_secret)
    assert call("ls", url)[0] == 0
    check_refusal(call("rm", url, "--all"), "access denied")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-secret")
    check_refusal(call("ls", url), "access denied")


@pytest.mark.parametrize("place", ["s3://bucket/kv", "gs://bucket/kv", "az://bucket/kv"])
async def test_every_kind_of_store_is_asked(place, capsys, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    async with ScriptedBucket(lambda request: answer("404 Not Found")) as bucket:
        endpoint = f"{bucket.endpoint}/account" if place.startswith("az") else bucket.endpoint
        run = caller(capsys)
        found = await asyncio.to_thread(run, "ls", place, "--endpoint", endpoint)
    check_refusal(found, place, "there is no such bucket", "create the bucket")
    assert SECRET not in found[1]
    assert bucket.methods() == ["GET"]
