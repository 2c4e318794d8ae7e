"""The bucket as it is opened: credentials, errors, three kinds of store; and what a bad one does.

The stores are scripted ones on this machine. That they are like the clouds' own is not shown here.
"""

import asyncio
import logging
import sys
import types

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError
from safe_offload.tiers.base import Result
from safe_offload.tiers.choice import open_tier
from safe_offload.tiers.guarded_tier import GuardedTier
from safe_offload.tiers.naming import DESCRIPTION_FILE, HEADER_BYTES, description
from safe_offload.tiers.objects import bucket as objects_bucket
from safe_offload.tiers.objects.bucket import Problem, open_store, problem_of, shown
from safe_offload.tiers.objects.search import REQUESTS_MAX
from safe_offload.tiers.sealed_tier import SealedTier
from tests.tiers.contract import (
    FACTS,
    PATIENCE_S,
    SPACE,
    bytes_of,
    fetch_one,
    filled,
    name_of,
    slot_of,
    spill_one,
    tier_at,
)
from tests.tiers.objects.scripted_bucket import Request, ScriptedBucket, answer, known_to_the_tier
from tests.tiers.valkey.scripted_server import until

SECRET = "5ecre7/" * 4
SECRETS = {
    "AWS_ACCESS_KEY_ID": "access-5ecre7",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_SESSION_TOKEN": f"session-{SECRET}",
    "GOOGLE_BEARER_TOKEN": f"bearer-{SECRET}",
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_STORAGE_SAS_KEY": f"sv=2024-11-04&sig={SECRET}",
}
URLS = ("s3://bucket/kv", "gs://bucket/kv", "az://bucket/kv")
LENGTH = HEADER_BYTES + 4096


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Credentials that can be told from all else; no files of the user's."""
    known_to_the_tier(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in SECRETS.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture
async def bucket():
    async with ScriptedBucket() as bucket:
        yield bucket


def config_of(bucket: ScriptedBucket, url: str = URLS[0], timeout_s: float = 30.0) -> TierConfig:
    return TierConfig.at(url, endpoint=bucket.endpoint, timeout_s=timeout_s)


@pytest.fixture
async def tier(bucket):
    tier = tier_at(config_of(bucket))
    yield tier
    await tier.close()


# ---- three kinds of store -----------------------------------------------------------------------


@pytest.mark.parametrize("url", URLS)
async def test_objects_go_to_a_store_and_come_back(bucket, url):
    tier, name, source = tier_at(config_of(bucket, url)), name_of(1), filled((4096,))
    assert await tier.probe([name]) == [False]
    assert await spill_one(tier, name, source) is Result.DONE
    other = tier_at(config_of(bucket, url))
    assert await other.probe([name]) == [True]
    assert await spill_one(other, name, source) is Result.PRESENT
    target = slot_of((4096,))
    assert await fetch_one(other, name, target) is Result.DONE
    assert bytes_of(target) == bytes_of(source)
    paths = [path.replace("%2F", "/").replace("%2E", ".") for path in bucket.objects]
    folder = f"/bucket/kv/{SPACE.hex()}"
    assert paths == [
        f"{folder}/01/0000{name.block_hash.hex()}",
        f"{folder}/{DESCRIPTION_FILE}",
    ]
    assert list(bucket.objects.values())[1] == description(SPACE, FACTS)


@pytest.mark.parametrize("url", URLS)
async def test_what_is_corrupt_is_not_offered_and_can_be_written_again(bucket, url):
    """Deleted, or, by the scripted Azure, which does not know batches, kept."""
    tier, name = tier_at(config_of(bucket, url)), name_of(1)
    await spill_one(tier, name, filled((4096,), 1))
    path = next(iter(bucket.objects))
    bucket.objects[path] = bucket.objects[path][:-1] + b"x"
    assert await fetch_one(tier, name, slot_of((4096,))) is Result.CORRUPT
    assert await tier.probe([name]) == [False]
    assert (path in bucket.objects) == url.startswith("az")
    target = slot_of((4096,))
    assert await spill_one(tier, name, filled((4096,), 2)) is Result.DONE
    assert await fetch_one(tier, name, target) is Result.DONE
    assert bytes_of(target) == bytes_of(filled((4096,), 2))


def test_a_location_is_opened_without_asking_anything():
    for url in URLS:
        tier, _ = open_tier(TierConfig.at(url), 1 << 20, {})
        assert isinstance(tier, SealedTier)
        assert tier.label == url


# ---- requests -----------------------------------------------------------------------------------


async def test_a_probe_of_5600_names_asks_at_most_40_times(bucket, tier):
    names = [name_of(index, group_idx) for group_idx in range(2) for index in range(2800)]
    await tier.spill(names[:1], [filled((512,))])
    written = next(path for path in bucket.objects if not path.endswith(".json"))
    for name in [*names[:1500], *names[2800:4300]]:
        key = name.block_hash.hex()
        path = f"{written.rsplit('/', 2)[0]}/{key[-2:]}/{name.group_idx:04x}{key}"
        bucket.objects[path] = b""
    bucket.requests.clear()
    found = await tier.probe(names)
    assert found == [index % 2800 < 1500 for index in range(5600)]
    assert set(bucket.methods()) == {"HEAD"}
    assert len(bucket.requests) <= REQUESTS_MAX


async def test_what_was_seen_is_not_asked_for_again(bucket, tier):
    names = [name_of(index) for index in range(30)]
    await tier.spill(names, [filled((512,))] * 30)
    bucket.requests.clear()
    assert await tier.probe(names) == [True] * 30
    assert not bucket.requests
    bucket.objects.clear()
    assert await fetch_one(tier, names[0], slot_of((512,))) is Result.ABSENT
    assert await tier.probe(names) == [False] + [True] * 29


async def test_a_spill_costs_one_request_and_the_namespace_one_more(bucket, tier):
    await tier.spill([name_of(index) for index in range(20)], [filled((512,))] * 20)
    assert bucket.methods() == ["PUT"] * 21
    assert sum("if-none-match" in request.headers for request in bucket.requests) == 20


async def test_where_a_store_cannot_write_only_what_is_new_it_is_asked_first(bucket, tier):
    bucket.script = lambda request: (
        answer("501 Not Implemented")
        if "if-none-match" in request.headers
        else answer("404 Not Found" if request.method == "HEAD" else "200 OK")
    )
    assert await spill_one(tier, name_of(1), filled((512,))) is Result.DONE
    assert bucket.methods() == ["PUT", "PUT", "PUT"]
    assert await spill_one(tier, name_of(2), filled((512,))) is Result.DONE
    assert bucket.methods()[3:] == ["HEAD", "PUT"]


async def test_of_two_fetches_the_first_has_the_connections(bucket):
    tier = tier_at(TierConfig.at(URLS[0], endpoint=bucket.endpoint, num_connections=4))
    names, slots = [name_of(index) for index in range(40)], [slot_of((512,))] * 40
    bucket.script = lambda request: answer("404 Not Found")
    bucket.may_read.clear()
    fetches = [asyncio.ensure_future(tier.fetch(names[:20], slots[:20]))]
    await until(lambda: len(bucket.requests) == 4)
    fetches.append(asyncio.ensure_future(tier.fetch(names[20:], slots[20:])))
    bucket.may_read.set()
    assert await asyncio.gather(*fetches) == [[Result.ABSENT] * 20] * 2
    first = {name.block_hash.hex() for name in names[:20]}
    asked = [request.path.partition("?")[0][-64:] in first for request in bucket.requests]
    assert asked[:16] == [True] * 16
    assert sum(asked) == 20
    await tier.close()


async def test_while_something_is_fetched_spills_have_a_quarter(bucket):
    tier = tier_at(TierConfig.at(URLS[0], endpoint=bucket.endpoint, num_connections=4))
    num_open: list[int] = []

    def script(request: Request) -> bytes | None:
        num_open.append(bucket.num_open)
        return None if request.method == "GET" else answer("200 OK")

    bucket.script = script
    names = [name_of(index) for index in range(20)]
    fetching = asyncio.ensure_future(tier.fetch(names, [slot_of((512,))] * 20))
    await until(lambda: len(bucket.requests) == 4)
    assert await tier.spill(names, [filled((512,))] * 20) == [Result.DONE] * 20
    assert max(num_open) <= 4 + 2, "one closes while the next opens"
    fetching.cancel()
    await fetching
    num_open.clear()
    assert await tier.spill(names, [filled((512,))] * 20) == [Result.DONE] * 20
    assert max(num_open) > 2, "now they have more"
    await tier.close()


@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Slow Down", ""])
async def test_nothing_is_tried_twice(bucket, tier, status):
    bucket.script = lambda request: answer(status) if status else b""
    assert await fetch_one(tier, name_of(1), slot_of((4096,))) is Result.FAILED
    assert bucket.methods() == ["GET"]
    with pytest.raises(OSError, match="failed"):
        await tier.probe([name_of(1)])
    assert bucket.methods() == ["GET", "HEAD"]


async def test_of_a_store_that_only_fails_not_all_is_asked(bucket, tier):
    bucket.script = lambda request: answer("500 Internal Server Error")
    names, slots = [name_of(index) for index in range(200)], [slot_of((512,))] * 200
    assert await tier.fetch(names, slots) == [Result.FAILED] * 200
    assert len(bucket.requests) <= 2 * 16 + 1


# ---- answers that are bad -----------------------------------------------------------------------

CHUNKED = b"%x\r\n" % (3 * LENGTH) + bytes(3 * LENGTH) + b"\r\n0\r\n\r\n"
BAD_ANSWERS = {
    "short": answer("200 OK", bytes(LENGTH - 1)),
    "long": answer("200 OK", bytes(LENGTH + 1)),
    "zeros": answer("200 OK", bytes(LENGTH)),
    "cut": answer("200 OK", bytes(LENGTH))[:-1],
    "2^63": answer("200 OK", bytes(LENGTH), Content_Length=str(1 << 63)),
    "2^64": answer("200 OK", bytes(LENGTH), Content_Length=str(1 << 64)),
    "negative": answer("200 OK", bytes(LENGTH), Content_Length="-1"),
    "no length": answer("200 OK", bytes(LENGTH), Content_Length=""),
    "two lengths": answer("200 OK", bytes(LENGTH), content_length=str(LENGTH + 1)),
    "chunks": answer("200 OK", CHUNKED, Transfer_Encoding="chunked", Content_Length=""),
    "chunks beyond": answer(
        "200 OK", CHUNKED, Transfer_Encoding="chunked", Content_Length=str(LENGTH)
    ),
    "a part": answer(
        "206 Partial Content", bytes(LENGTH), Content_Range=f"bytes 0-{LENGTH - 1}/99999"
    ),
    "empty": answer("204 No Content"),
    "not modified": answer("304 Not Modified"),
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "a long header": b"HTTP/1.1 200 OK\r\nx: " + b"x" * 1_000_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("bad", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
async def test_a_bad_answer_is_a_miss(bucket, tier, bad):
    bucket.script = lambda request: bad if request.method == "GET" else answer("200 OK")
    result = await asyncio.wait_for(fetch_one(tier, name_of(1), slot_of((4096,))), PATIENCE_S)
    assert result in (Result.FAILED, Result.CORRUPT)
    assert bucket.methods().count("GET") == 1
    bucket.script = None
    assert await spill_one(tier, name_of(2), filled((4096,))) is Result.DONE
    assert await fetch_one(tier, name_of(2), slot_of((4096,))) is Result.DONE


async def test_redirects_in_a_circle_end(bucket, tier):
    bucket.script = lambda request: answer("302 Found", Location=bucket.endpoint + request.path)
    assert await fetch_one(tier, name_of(1), slot_of((4096,))) is Result.FAILED
    assert len(bucket.requests) <= 20


# ---- deadlines ----------------------------------------------------------------------------------


async def test_a_store_that_does_not_answer_is_given_up_at_the_deadline(bucket):
    config = config_of(bucket, timeout_s=0.2)
    guarded = GuardedTier(tier_at(config), config, lambda generation: SPACE, slot_bytes=4096)
    bucket.script = lambda request: None
    names = [name_of(index) for index in range(50)]
    for call in (guarded.fetch, guarded.spill):
        slots = [filled((4096,)) for _ in names]
        results = await asyncio.wait_for(call(names, slots), PATIENCE_S)
        assert results is not None
        assert set(results) <= {Result.FAILED, Result.CANCELLED}
        assert guarded.num_running == 0
    assert await asyncio.wait_for(guarded.probe(names), PATIENCE_S) is None
    bucket.script = None
    await guarded.close()
    await until(lambda: not bucket.num_open)  # connections of what was given up are closed


# ---- secrets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", URLS)
async def test_no_secret_is_shown(bucket, url, caplog):
    """Even if the store sends back all that it was sent."""

    def echo(request: Request) -> bytes:
        sent = "\n".join([request.path, *request.headers.values()]).encode()
        return answer("403 Forbidden", b"<Error><Code>Denied</Code>" + sent + b"</Error>")

    bucket.script = echo
    caplog.set_level(logging.DEBUG)
    config = config_of(bucket, url)
    guarded = GuardedTier(tier_at(config), config, lambda generation: SPACE, slot_bytes=4096)
    names = [name_of(1)]
    assert await guarded.fetch(names, [slot_of((4096,))]) == [Result.FAILED]
    assert await guarded.spill(names, [slot_of((4096,))]) == [Result.REFUSED]
    assert await guarded.probe(names) is None
    with pytest.raises(OSError, match="access denied") as caught:
        await guarded.tier.probe(names)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("failed to read: access denied" in line for line in lines) == 1
    assert sum("failed to write: access denied" in line for line in lines) == 1
    what_is_shown = [
        *(caplog.text, *map(repr, guarded.take_calls()), repr(guarded), str(config)),
        *(repr(guarded.tier), repr(caught.value), repr(caught.value.__cause__)),
        repr(caught.value.__context__ if not caught.value.__suppress_context__ else ""),
    ]
    assert not [secret for secret in ("5ecre7", "sig=") if secret in "".join(what_is_shown)]
    sent = "".join(str(request) for request in bucket.requests)
    assert "5ecre7" in sent, "the store was sent what must not be shown"
    await guarded.close()


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (FileNotFoundError("x"), Problem.NOT_FOUND),
        (FileNotFoundError("status code: 404: <Code>NoSuchBucket</Code>"), Problem.NO_BUCKET),
        (RuntimeError("status code: 507 Insufficient Storage: "), Problem.FULL),
        (RuntimeError("status code: 403: <Code>QuotaExceeded</Code>"), Problem.FULL),
        (RuntimeError("status code: 412 Precondition Failed: "), Problem.EXISTS),
        (RuntimeError("status code: 501 Not Implemented: "), Problem.UNSUPPORTED),
        (RuntimeError("status code: 500 Internal Server Error: "), Problem.OTHER),
        (RuntimeError("anything"), Problem.OTHER),
    ],
)
def test_errors_are_told_apart(error, problem):
    assert problem_of(error) is problem


def test_of_an_error_only_its_type_status_and_code_are_shown():
    error = RuntimeError(f"PUT https://x/?sig={SECRET} status code: 403: <Code>AccessDenied</Code>")
    assert shown(error) == "RuntimeError, status 403, AccessDenied"
    assert shown(RuntimeError(f"<Code>{SECRET}</Code>")) == "RuntimeError"


# ---- credentials --------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'safe-offload\[s3\]'"):
        open_store(TierConfig.at("s3://bucket/kv"))


@pytest.mark.parametrize(
    ("url", "variable", "value"),
    [
        ("az://bucket/kv", "AZURE_STORAGE_ACCOUNT_NAME", None),
        ("gs://bucket/kv", "GOOGLE_SERVICE_ACCOUNT_KEY", SECRET),
    ],
)
def test_settings_that_cannot_be_used_are_refused(url, variable, value, monkeypatch):
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="cannot be opened with") as caught:
        open_store(TierConfig.at(url))
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__


class FakeProvider:
    """In the place of what reads files with boto3."""

    def __call__(self) -> dict[str, object]:
        found = {"access_key_id": "from-a-file", "secret_access_key": "s"}
        return {**found, "token": None, "expires_at": None}


@pytest.fixture
def no_credentials(monkeypatch):
    for variable in SECRETS:
        monkeypatch.delenv(variable)


@pytest.fixture
def boto3(monkeypatch):
    def put_in(provider: type) -> None:
        module = types.ModuleType("obstore.auth.boto3")
        module.Boto3CredentialProvider = provider  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "obstore.auth.boto3", module)

    return put_in


@pytest.mark.parametrize("how", ["profile", "file", "file elsewhere", "environment"])
async def test_credentials_come_from_the_environment_and_else_from_the_files_of_aws(
    bucket, how, tmp_path, monkeypatch, boto3
):
    boto3(FakeProvider)
    file = tmp_path / (".aws/credentials" if how == "file" else "elsewhere")
    if how in ("profile", "environment"):
        monkeypatch.setenv("AWS_PROFILE", "kv")
    else:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    if how == "file elsewhere":
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    if how != "environment":
        for variable in SECRETS:
            monkeypatch.delenv(variable)
    tier = tier_at(config_of(bucket))
    await tier.probe([name_of(1)])
    key = "access-5ecre7" if how == "environment" else "from-a-file"
    assert f"Credential={key}/" in bucket.requests[0].headers["authorization"]
    await tier.close()


def test_a_profile_that_cannot_be_read_is_refused(monkeypatch, no_credentials, boto3):
    class Broken:
        def __init__(self) -> None:
            raise ValueError(f"something with {SECRET}")

    boto3(Broken)
    assert objects_bucket.open_store(TierConfig.at("s3://bucket/kv")) is not None
    monkeypatch.setenv("AWS_PROFILE", "kv")
    with pytest.raises(ConfigError, match="AWS_PROFILE is set") as caught:
        open_store(TierConfig.at("s3://bucket/kv"))
    assert SECRET not in str(caught.value)
