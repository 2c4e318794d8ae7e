"""`safe-offload cache` on an object store: a real one, and times of writing that are made up."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore

from safe_offload.commands.cache import places
from safe_offload.commands.cache.bucket_store import BucketStore
from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.naming import DESCRIPTION_FILE, namespace_folder, path_of
from safe_offload.tiers.objects.store import open_store
from safe_offload.tiers.seal import Seal
from tests.bucket_server import BucketServer
from tests.commands.cache.calls import (
    AFTER_RESET,
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
from tests.tiers.objects.scripted_bucket import ScriptedBucket, answer

PLACE = "s3://kv-cache/prod"
SECRET = "aHVudGVyMi1zZWNyZXQ"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    "GOOGLE_BEARER_TOKEN": SECRET,
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_STORAGE_SAS_KEY": f"sv=2024-11-04&sig={SECRET}",
}


@pytest.fixture(scope="module")
def server() -> Iterator[BucketServer]:
    with BucketServer() as server:
        yield server


@pytest.fixture
def bucket(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With 10 objects of a namespace, 3 of another, and objects of others."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    bucket: Any = open_store(TierConfig.at(PLACE, endpoint=server.endpoint))
    if left := [meta["path"] for page in obstore.list(bucket) for meta in page]:
        obstore.delete(bucket, left)
    fill(bucket)
    return bucket


def fill(bucket: Any) -> None:
    for space, number in ((FIRST, 10), (AFTER_RESET, 3)):
        obstore.put(bucket, f"{namespace_folder(space)}/{DESCRIPTION_FILE}", described(space))
        for n in range(number):
            obstore.put(bucket, path_in(n, space), value_of(name_of(n, space=space)))
    obstore.put(bucket, "mine/notes.txt", b"mine")
    obstore.put(bucket, f"{namespace_folder(FIRST)}/mine.txt", b"mine")


def path_in(number: int, space: bytes = FIRST) -> str:
    return "/".join((namespace_folder(space), *path_of(name_of(number, space=space))))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], server: BucketServer) -> Call:
    run = caller(capsys)
    return lambda *arguments: run(*arguments, "--endpoint", server.endpoint)


def paths(bucket: Any) -> list[str]:
    return sorted(meta["path"] for page in obstore.list(bucket) for meta in page)


# ---- a real store -----------------------------------------------------------------------------


def test_ls_shows_what_it_shows_of_a_directory(call: Call, bucket: Any) -> None:
    status, text = call("ls", PLACE)
    assert status == 0
    head, *rows, total = text.splitlines()
    assert head.split() == ["NAMESPACE", "OBJECTS", "SIZE", "LAST", "WRITTEN", "OLDEST", "MODEL"]
    by_namespace = {row.split()[0]: row for row in rows}
    assert set(by_namespace) == {namespace_folder(FIRST), namespace_folder(AFTER_RESET)}
    assert by_namespace[namespace_folder(FIRST)].split()[1:4] == ["10", "160.00", "KiB"]
    assert by_namespace[namespace_folder(FIRST)].endswith("meta-llama/Llama-3.1-8B")
    assert by_namespace[namespace_folder(AFTER_RESET)].endswith("(after a reset)")
    assert total == f"2 namespaces, 13 objects, 208.00 KiB in {PLACE}"
    assert call("ls", f"{PLACE}/none") == (
        0,
        f"No engine has stored anything in {PLACE}/none.\n",
    )


Damage = Callable[[Any, str, bytes], object]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda bucket, path, value: obstore.put(bucket, path, flipped(value, 0)), "no header"),
        (lambda bucket, path, value: obstore.put(bucket, path, flipped(value, -1)), "checksum"),
        (lambda bucket, path, value: obstore.put(bucket, path, value[:-1]), "says 12288"),
        (lambda bucket, path, value: obstore.put(bucket, path, value + b"x"), "says 12288"),
        (lambda bucket, path, value: obstore.put(bucket, path, b""), "no header"),
        (lambda bucket, path, value: obstore.rename(bucket, path, f"{path}ab"), "another object"),
        (
            lambda bucket, path, value: obstore.rename(bucket, path, path.replace("/03/", "/04/")),
            "another object",
        ),
    ],
)
def test_verify_finds_what_is_bad_and_deletes_it_if_it_is_told_to(
    call: Call, bucket: Any, damage: Damage, problem: str
) -> None:
    assert call("verify", PLACE) == (0, "13 objects, 208.00 KiB checked: 0 bad.\n")
    damage(bucket, path_in(3), value_of(name_of(3, space=FIRST)))
    status, text = call("verify", PLACE)
    assert status == 1
    assert problem in text.splitlines()[0]
    assert "1 bad" in text
    status, document = read(call, "verify", PLACE, "--delete")
    assert (status, len(document["bad"]), document["deleted"]) == (0, 1, True)
    assert call("verify", PLACE)[0] == 0


def test_sealed_objects_are_checked_with_their_key_only(
    call: Call, bucket: Any, tmp_path: Path
) -> None:
    seal = Seal(KEY)
    space = bytes(16)
    obstore.put(bucket, f"{namespace_folder(space)}/{DESCRIPTION_FILE}", described(space, seal))
    obstore.put(bucket, path_in(1, space), value_of(name_of(1, space=space), seal))
    assert "1 more objects are sealed with a key" in call("verify", PLACE)[1]
    key_file = tmp_path / "key"
    key_file.write_text(KEY.hex())
    key_file.chmod(0o400)
    found = call("verify", PLACE, "--hmac-key-file", key_file)
    assert found == (0, "14 objects, 224.00 KiB checked: 0 bad.\n")


def test_rm_deletes_one_namespace_and_no_other(call: Call, bucket: Any) -> None:
    status, text = call("rm", PLACE, namespace_folder(FIRST)[:6])
    assert (status, text) == (0, f"Deleted {namespace_folder(FIRST)}: 10 objects, 160.00 KiB.\n")
    left = paths(bucket)
    assert f"{namespace_folder(FIRST)}/mine.txt" in left
    assert f"{namespace_folder(FIRST)}/{DESCRIPTION_FILE}" not in left
    assert len([path for path in left if path.startswith(namespace_folder(AFTER_RESET))]) == 4


def test_rm_all_deletes_what_is_ours_and_nothing_else(call: Call, bucket: Any) -> None:
    assert read(call, "rm", PLACE, "--all")[1]["num_objects"] == 13
    assert paths(bucket) == sorted(["mine/notes.txt", f"{namespace_folder(FIRST)}/mine.txt"])


def test_prune_to_nothing(call: Call, bucket: Any) -> None:
    _, document = read(call, "prune", PLACE, "--older-than", "0s")
    assert (document["num_evicted"], document["held_bytes"]) == (13, 0)


# ---- what is wrong ----------------------------------------------------------------------------


def check_refusal(found: tuple[int, str], *words: str) -> None:
    status, text = found
    assert status == 1
    for word in (*words, "Fix: "):
        assert word in text
    assert len(text.splitlines()) == 1


def test_what_cannot_be_done_is_refused_with_the_fix(
    call: Call, bucket: Any, server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refusal(call("ls", "s3://no-such-bucket/kv"), "there is no such bucket")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.reader_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.reader_secret)
    assert call("ls", PLACE)[0] == 0
    check_refusal(call("rm", PLACE, "--all"), "does not allow it")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-secret")
    status, text = call("ls", PLACE)
    check_refusal((status, text), "does not allow it")
    assert "hunter2" not in text


def test_no_store(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bucket: Any
) -> None:
    run = caller(capsys)
    check_refusal(run("ls", PLACE, "--endpoint", "http://127.0.0.1:9"), "the request failed")
    check_refusal(run("ls", PLACE, "--endpoint", "http://u:hunter2@h"), "do not belong here")


@pytest.mark.parametrize("place", ["s3://bucket/kv", "gs://bucket/kv", "az://bucket/kv"])
async def test_every_kind_of_store_is_asked(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    async with ScriptedBucket(lambda request: answer("404 Not Found")) as bucket:
        endpoint = f"{bucket.endpoint}/account" if place.startswith("az") else bucket.endpoint
        run = caller(capsys)
        found = await asyncio.to_thread(run, "ls", place, "--endpoint", endpoint)
    check_refusal(found, place, "there is no such bucket", "make the bucket")
    assert SECRET not in found[1]
    assert bucket.methods() == ["GET"]


# ---- what a real store cannot be made to say ----------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of a bucket, so that it can be said when objects were written."""
    store = LocalStore(tmp_path)
    fill(store)
    monkeypatch.setattr(places, "open_store", lambda place, c: BucketStore(c, store=store))
    return tmp_path


def test_prune_to_a_size_deletes_what_was_written_first(call: Call, folder: Path) -> None:
    for n in range(10):
        at_s = time.time() - 1000 + 10 * n
        os.utime(folder / path_in(n), (at_s, at_s))
    _, document = read(call, "prune", PLACE, "--to", 5 * STORED_BYTES)
    assert (document["num_evicted"], document["held_bytes"]) == (8, 5 * STORED_BYTES)
    assert [(folder / path_in(n)).exists() for n in range(10)] == [False] * 8 + [True] * 2


def test_prune_by_age_deletes_all_that_is_older(call: Call, folder: Path) -> None:
    for n in range(4):
        at_s = time.time() - 8 * 86400
        os.utime(folder / path_in(n), (at_s, at_s))
    _, text = call("prune", PLACE, "--older-than", "7d")
    assert text.startswith("Deleted 4 objects, 64.00 KiB")


def test_what_is_gone_meanwhile_is_passed_over(folder: Path) -> None:
    config = TierConfig.at(PLACE)
    store = BucketStore(config, store=LocalStore(folder))
    items = list(store.items(namespace_folder(FIRST)))
    for n in range(5):
        (folder / path_in(n)).unlink()
    with pytest.raises(FileNotFoundError):
        list(store.pieces(items[0]))
    store.delete(items)
    assert not [path for path in folder.rglob("0000*") if namespace_folder(FIRST) in str(path)]
