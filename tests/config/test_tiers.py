"""What users write in `"tiers"`: what it means, and what is refused how."""

import os
from pathlib import Path
from typing import Any

import pytest

from safe_offload.config.options import OffloadConfig
from safe_offload.config.tier_url import Location
from safe_offload.config.tiers import KINDS, MAX_TIERS, FileConfig, TierConfig
from safe_offload.errors import ConfigError

URL = "file:///mnt/nvme/kv"


def read(*written: object) -> tuple[TierConfig, ...]:
    return OffloadConfig.from_extra_config({"tiers": list(written)}, world_size=1).tiers


def tier(**written: object) -> Any:
    (found,) = read({"url": URL, **written})
    return found


def refusal(value: object) -> str:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_extra_config({"tiers": value}, world_size=1)
    assert "hunter2" not in str(caught.value)
    return str(caught.value)


def test_a_tier_is_a_url_and_what_else_is_written():
    assert read() == ()
    assert tier() == FileConfig(Location("file", "/mnt/nvme/kv"))
    written = {"capacity": "1TiB", "namespace": "blue", "model_version": "7", "store": "evicted"}
    limits = {"max_bytes_per_s": "500MB", "wait_s": 0.5, "timeout_s": 3, "threads": 8}
    common = "blue", "7", "evicted", 500_000_000, 0.5, 3.0
    assert tier(**written, **limits) == FileConfig(
        Location("file", "/mnt/nvme/kv"), *common, capacity_bytes=1 << 40, num_threads=8
    )


def test_tiers_keep_their_order():
    near, far = {"url": "file:///near"}, {"url": "file:///far"}
    assert [found.location.path for found in read(near, far)] == ["/near", "/far"]
    assert [found.location.path for found in read(far, near)] == ["/far", "/near"]


def test_there_is_an_end_to_tiers():
    many = [{"url": f"file:///{index}"} for index in range(MAX_TIERS + 1)]
    assert f"0 to {MAX_TIERS} mappings" in refusal(many)
    assert len(read(*many[1:])) == MAX_TIERS


@pytest.mark.parametrize("written", [None, "file:///mnt/kv", {"url": URL}, 3])
def test_tiers_are_a_list(written):
    assert "this is not a list" in refusal(written)


# ---- urls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///mnt/kv", "/mnt/kv"),
        ("FILE:///mnt/kv/", "/mnt/kv"),
        ("file://localhost/mnt/kv", "/mnt/kv"),
        ("file:///mnt//kv/../kv", "/mnt/kv"),
        ("file:///mnt/my%20disk%23", "/mnt/my disk#"),
    ],
)
def test_urls_that_name_a_directory(url, path):
    assert tier(url=url).location.path == path


@pytest.mark.parametrize(
    ("url", "problem", "fix"),
    [
        ("/mnt/kv", "this is not a url", '"file:///mnt/kv"'),
        ("mnt/kv", "this is not a url", ""),
        ("file://mnt/kv", '"mnt" takes the place of a host name', '"file:///mnt/kv"'),
        ("file://", "not absolute", ""),
        ("file://./kv", "not absolute", f'"file://{Path.cwd()}/kv"'),
        ("file://~/kv", "not absolute", f'"file://{Path.home()}/kv"'),
        ("file:///", "the root of a file system", ""),
        ("file:///..", "the root of a file system", ""),
        ("file:///a?b", "%3F", ""),
        ("file:///a%0Ab", "unprintable", ""),
        ("redis://", "it has no host name", ""),
        ("rediss:///0", "it has no host name", ""),
        ("redis://kv:99999", "is invalid", ""),
        ("redis://kv/x", "is not a database number", ""),
        ("redis://kv?db=1", "settings of the tier", ""),
        ("redis://k v", "it has no host name", ""),
        ("redis://:hunter2@k v", '"redis://***"', ""),
        ("unix://run/x", "three slashes", ""),
        ("unix:///run/x?x=1", "may follow the path", ""),
        ("unix://:pa/hunter2@/run/x", "as %2F", ""),
        ("s3://", "it has no bucket name", ""),
        ("s3://key:hunter2@bucket", "credentials are not allowed here", ""),
        ("s3://bucket/a b", "letters, digits", ""),
        ("gs://bucket/../x", "letters, digits", ""),
        ("ftp://kv", 'the scheme "ftp" is unknown', "or remove this tier"),
        ("reids://kv", 'the scheme "reids" is unknown', KINDS["redis"].example),
        ("valkye://kv", "valkey://", KINDS["redis"].example),
        (7, "this is not a string", ""),
    ],
)
def test_urls_that_name_none_are_refused_with_one_that_does(url, problem, fix):
    message = refusal([{"url": url}])
    kind = KINDS.get(str(url).partition("://")[0])
    assert message.startswith('kv_connector_extra_config["tiers"][0]["url"] = ')
    assert problem in message
    assert (fix or f'"{kind.example if kind else URL}"') in message.partition("Fix: ")[2]


@pytest.mark.parametrize(
    ("url", "location", "label"),
    [
        ("redis://kv", Location("redis", host="kv", port=6379), "redis://kv:6379"),
        ("valkey://kv:7/", Location("redis", host="kv", port=7), "redis://kv:7"),
        (
            "rediss://me:pass%40@[::1]:7/3",
            Location("rediss", host="::1", port=7, database=3, user="me", password="pass@"),
            "rediss://[::1]:7/3",
        ),
        (
            "unix://:pw@/run/v.sock?db=2",
            Location("unix", "/run/v.sock", database=2, password="pw"),
            "unix:///run/v.sock?db=2",
        ),
        ("s3://bucket", Location("s3", host="bucket"), "s3://bucket"),
        ("S3://bucket/kv/prod/", Location("s3", "kv/prod", "bucket"), "s3://bucket/kv/prod"),
        ("azure://c/x", Location("az", "x", "c"), "az://c/x"),
    ],
)
def test_urls_that_name_servers_and_buckets(url, location, label):
    found = tier(url=url).location
    assert found == location
    assert (found.user, found.password) == (location.user, location.password)
    assert found.label == label
    assert "pass@" not in f"{found} {tier(url=url)}"


# ---- settings of one tier ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"url": "redis://kv", "capacity": "1TiB"}, "redis:// has no such setting"),
        ({"url": "redis://kv", "capacity": "1TiB"}, "maxmemory"),
        ({"url": "s3://b", "capacity": "1TiB"}, "a lifecycle rule of the bucket"),
        ({"url": URL, "ttl": "7d"}, "Allowed: it beside redis://, rediss://, unix://. Fix: remove"),
        ({"url": URL, "connections": 4}, 'use "threads"'),
        ({"url": "redis://kv", "threads": 4}, 'use "connections"'),
        ({"url": "redis://kv", "ca_file": "/ca.pem"}, "write rediss:// for TLS"),
        ({"url": "rediss://kv", "cert_file": "/c.pem"}, 'Fix: add "key_file"'),
        ({"url": "rediss://kv", "key_file": "/c.pem"}, 'Fix: add "cert_file"'),
        ({"url": "redis://kv", "ttl": "week"}, 'Fix: write "ttl": "7d" for a week'),
        ({"url": "redis://kv", "ttl": 0}, 'Fix: write "ttl": "7d" for a week'),
        ({"url": "redis://kv", "password_file": "x"}, "the path is not absolute"),
        (
            {"url": "redis://:hunter2@kv", "password_file": "/pw"},
            '["password_file"] = ***: the url',
        ),
        ({"url": "s3://b", "endpoint": "minio:9000"}, "this is not an address"),
        ({"url": "s3://b", "endpoint": "http://a:hunter2@m"}, 'http://***@m": credentials'),
        ({"url": URL, "endpoint": "http://m"}, "it beside s3://, gs://, az://"),
        ({"url": URL, "hmac_key_file": ""}, "the path is not absolute"),
        (
            {"url": URL, "hmac_key_file": "/h", "encryption_key_file": "/e"},
            '["hmac_key_file"] = ***: encryption seals objects too',
        ),
        ({"url": URL, "keep": 1}, 'write "keep": true'),
        ({}, '["tiers"][0] = {}: "url" is missing'),
        ("file:///mnt/kv", '["tiers"][0] = ***: this is not a mapping'),
        ({"url": URL, "tti": 3}, '["tiers"][0]["tti"] = ***: this is not a setting of a tier'),
        ({"url": URL, "wait": 3}, 'Fix: write "wait_s" if you mean that'),
        ({"url": URL, 7: 3}, '["tiers"][0][7] = ***: this is not a setting of a tier'),
        ({"url": URL, "wait_s": 0}, '["tiers"][0]["wait_s"] = 0: it is not more than 0'),
        ({"url": URL, "timeout_s": "5"}, '["tiers"][0]["timeout_s"] = "5"'),
        ({"url": URL, "capacity": 1}, '["tiers"][0]["capacity"] = 1: 1 bytes is too small'),
        ({"url": URL, "store": "all"}, 'Allowed: "computed", "evicted", "hit"'),
        ({"url": URL, "threads": 0}, '["tiers"][0]["threads"] = 0: it is too small'),
        ({"url": URL, "namespace": 3}, '["tiers"][0]["namespace"] = 3'),
        ({"url": URL, "model_version": "a\n"}, "unprintable"),
    ],
)
def test_what_a_tier_cannot_mean_is_refused_where_it_stands(written, message):
    assert message in refusal([written])


def test_the_settings_of_servers_and_buckets():
    files = {"password_file": "/pw", "ca_file": "/ca", "cert_file": "/crt", "key_file": "/key"}
    found = tier(url="rediss://kv", ttl="12h", connections=8, keep=True, **files)
    assert found == TierConfig.at(
        "rediss://kv", ttl_s=43200.0, num_connections=8, keep=True, **files
    )
    assert tier(url="s3://b", endpoint="http://minio:9000/").endpoint == "http://minio:9000"


@pytest.mark.parametrize("key", ["password_file", "ca_file", "hmac_key_file"])
def test_a_pipe_in_the_place_of_a_file_is_refused_before_anyone_waits_for_it(tmp_path, key):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        message = refusal([{"url": "rediss://kv", key: str(path)}])
        assert "it is not a regular file. Allowed: the absolute path of a file" in message


# ---- several tiers -------------------------------------------------------------------------------


def test_a_place_is_one_tier_whoever_logs_in():
    message = refusal([{"url": f"file:///{name}"} for name in ("a", "b", "b/")])
    problem = 'tier 2, ["tiers"][1], has the same directory'
    assert f'["tiers"][2]["url"] = "file:///b/": {problem}' in message
    message = refusal([{"url": "redis://a:hunter2@kv"}, {"url": "redis://kv:6379/0"}])
    assert 'tier 1, ["tiers"][0], has the same url' in message


@pytest.mark.parametrize(
    ("key", "first", "second", "common"),
    [
        ("store", None, "evicted", "evicted"),
        ("store", "evicted", "computed", "evicted"),
        ("store", "hit", "evicted", "hit"),
        ("model_version", "7", None, "7"),
        ("model_version", "", "8", "8"),
    ],
)
def test_tiers_of_different_kinds_are_refused(key, first, second, common):
    default = {"store": "computed", "model_version": ""}[key]
    problem = (
        f'["{key}"] = "{second or default}": the first tier has "{first or default}", and all '
        "tiers get the same writes. Allowed: all tiers with it, or all without. "
        f'Fix: write "{key}": "{common}" into each tier, or into none.'
    )
    one, other = ({} if value is None else {key: value} for value in (first, second))
    for between in ((), ({"url": "file:///b", **one},)):
        place = f'kv_connector_extra_config["tiers"][{1 + len(between)}]'
        written = {"url": "file:///a", **one}, *between, {"url": "file:///c", **other}
        assert refusal(written) == place + problem


@pytest.mark.parametrize("key", ["hmac_key_file", "encryption_key_file"])
@pytest.mark.parametrize(("first", "second"), [("one", "None"), ("none", "***")])
def test_tiers_with_and_without_a_key_are_refused(first, second, key):
    keyed = {"url": "rediss://kv", key: "/run/secrets/kv/a.key"}
    written = [keyed, {"url": "file:///a"}][:: 1 if first == "one" else -1]
    assert refusal(written) == (
        f'kv_connector_extra_config["tiers"][1]["{key}"] = {second}: the first tier '
        f"has {first}: anyone who can write to the tier without a key could get forged blocks, and "
        "everything computed from them, sealed with yours. Allowed: all tiers with it, or all "
        "without. Fix: write "
        f'"{key}" into each tier, directories too (one file does for all), or into none.'
    )


def test_a_tier_that_signs_and_one_that_encrypts_are_read():
    found = read(
        {"url": "file:///a", "hmac_key_file": "/h"}, {"url": URL, "encryption_key_file": "/e"}
    )
    assert [tier.has_key for tier in found] == [True, True]


def test_tiers_of_one_kind_are_read():
    alike = {"store": "evicted", "model_version": "7", "hmac_key_file": "/a.key"}
    other = {"model_version": "8", "namespace": "blue", "wait_s": 1, "hmac_key_file": "/b.key"}
    found = read({"url": "file:///a", **alike}, {"url": "file:///b", **alike, **other})
    assert [tier.model_version for tier in found] == ["7", "8"]
    assert [tier.hmac_key_file for tier in found] == ["/a.key", "/b.key"]
    assert all(tier.store == "evicted" for tier in found)
