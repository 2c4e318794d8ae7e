"""What users write in kv_connector_extra_config: what it means, and what is refused how."""

import dataclasses
import json
import math
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_offload.config.options import (
    EVICTION_POLICIES,
    MAX_BYTES_PER_SERVER,
    MAX_COPY_THREADS,
    MAX_NUM_SLOTS,
    MAX_TRANSFER_TIMEOUT_S,
    VALID_KEYS,
    OffloadConfig,
)
from safe_offload.config.settings import MAX_BYTES_PER_RANK, MIN_SIZE_BYTES
from safe_offload.config.tier_url import Location
from safe_offload.config.tiers import MAX_TIERS, TierConfig
from safe_offload.config.units import GIB, KIB, MIB, format_bytes
from safe_offload.errors import ConfigError
from safe_offload.scheduler.cache.eviction import POLICIES
from tests import config_table

SIZE_KEYS = ("cpu_bytes_to_use", "cpu_bytes_to_use_per_rank", "max_inflight_bytes")


def read(world_size: int = 1, /, **settings: object) -> OffloadConfig:
    return OffloadConfig.from_extra_config(settings, world_size=world_size)


def refusal(key: object, value: object, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_extra_config({key: value}, world_size=world_size)  # type: ignore[dict-item]
    return str(caught.value)


def test_nothing_set_means_the_defaults_of_simple_cpu_offload_connector():
    config = read()
    assert config.cpu_bytes_per_rank == 8 * GIB
    assert config.num_slots is None
    assert config.capacity_key == "cpu_bytes_to_use"
    assert config.lazy_offload is False
    assert config.max_inflight_bytes == 256 * MIB
    assert config.copy_threads == 1
    assert config.transfer_timeout_s == 30.0
    assert config.verify_every == 0
    assert config.verify_invariants is False


def test_no_mapping_at_all_is_an_empty_one():
    assert OffloadConfig.from_extra_config(None, world_size=1) == read()


def test_server_wide_bytes_are_divided_by_the_world_size():
    assert read(4, cpu_bytes_to_use=64 * GIB).cpu_bytes_per_rank == 16 * GIB
    assert read(3, cpu_bytes_to_use=64 * GIB).cpu_bytes_per_rank == 64 * GIB // 3
    assert read(8).cpu_bytes_per_rank == 1 * GIB
    assert read(8).world_size == 8


def test_bytes_per_rank_override_the_server_wide_bytes():
    config = read(4, cpu_bytes_to_use=64 * GIB, cpu_bytes_to_use_per_rank="2GiB")
    assert config.cpu_bytes_per_rank == 2 * GIB
    assert config.capacity_key == "cpu_bytes_to_use_per_rank"


def test_an_exact_number_of_blocks_overrides_bytes():
    config = read(num_cpu_blocks=100, cpu_bytes_to_use_per_rank="2GiB")
    assert config.num_slots == 100
    assert config.capacity_key == "num_cpu_blocks"


def test_a_value_that_another_key_overrides_is_checked_all_the_same():
    with pytest.raises(ConfigError, match="cpu_bytes_to_use"):
        read(cpu_bytes_to_use="junk", cpu_bytes_to_use_per_rank="2GiB", num_cpu_blocks=7)


def test_every_other_key_reaches_its_field():
    config = read(
        lazy_offload=True,
        max_inflight_bytes="64MiB",
        copy_threads=4,
        check_invariants=True,
        kv_offload_backend="cpu",
    )
    assert config.lazy_offload is True
    assert config.max_inflight_bytes == 64 * MIB
    assert config.copy_threads == 4
    assert config.verify_invariants is True


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        (8589934592, 8 * GIB),
        (8e9, 8_000_000_000),
        ("8589934592", 8 * GIB),
        ("8_589_934_592", 8 * GIB),
        ("8e9", 8_000_000_000),
        ("64GiB", 64 * GIB),
        ("64 GiB", 64 * GIB),
        (" 64gib ", 64 * GIB),
        ("64Gi", 64 * GIB),
        ("64GB", 64 * 10**9),
        ("512MiB", 512 * MIB),
        ("512 MB", 512 * 10**6),
        ("2TiB", 2048 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("0.1GiB", int(0.1 * GIB)),
        ("8192B", 8192),
        ("16KiB", 16 * KIB),
        (MIN_SIZE_BYTES, MIN_SIZE_BYTES),
        (MAX_BYTES_PER_RANK, MAX_BYTES_PER_RANK),
    ],
)
@pytest.mark.parametrize("key", SIZE_KEYS)
def test_a_size_is_read_in_every_way_that_has_one_meaning(key, written, size_bytes):
    config = read(**{key: written})
    field = "max_inflight_bytes" if key == "max_inflight_bytes" else "cpu_bytes_per_rank"
    value = getattr(config, field)
    assert value == size_bytes
    assert type(value) is int


@pytest.mark.parametrize("key", SIZE_KEYS)
@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("64G", "ambiguous"),
        ("64m", "ambiguous"),
        ("64 Quux", "unknown"),
        ("GiB", "not a size"),
        ("", "not a size"),
        ("64,000", "not a size"),
        ("٣GiB", "not a size"),
        ("64 GiB please", "not a size"),
        ("0x10000", "not a size"),
        ("nan", "not a size"),
        ("1e999999999", "not a size"),
        pytest.param("9" * 5000, "not a size", id="5000 nines"),
        ("-64GiB", "negative"),
        ("8192.5", "fraction"),
        (8192.5, "fraction"),
        (-1, "negative"),
        (-1e9, "negative"),
        (0, "zero"),
        (0.0, "zero"),
        ("0GiB", "zero"),
        (64, "too small"),
        ("1KiB", "too small"),
        (MIN_SIZE_BYTES - 1, "too small"),
        (MAX_BYTES_PER_SERVER + 1, "too large"),
        pytest.param(10**5000, "too large", id="5001 digits"),
        pytest.param(-(10**5000), "negative", id="minus 5001 digits"),
        ("999999PiB", "too large"),
        (1e300, "too large"),
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        (True, "bool"),
        (None, "null"),
        ([1], "list"),
        ({"bytes": 1}, "dict"),
        (b"64GiB", "bytes"),
    ],
)
def test_a_size_that_cannot_be_meant_is_refused_with_the_fix(key, written, problem):
    message = refusal(key, written)
    assert f'"{key}"' in message
    assert problem in message
    assert "Allowed: a whole number of bytes" in message
    assert "Fix: " in message


def test_a_number_without_its_unit_is_answered_with_the_unit():
    assert '"64GiB"' in refusal("cpu_bytes_to_use", 64)


def test_an_ambiguous_unit_is_answered_with_both_meanings():
    message = refusal("cpu_bytes_to_use", "64G")
    assert '"64GiB" or "64GB"' in message


def test_a_share_per_rank_that_is_too_small_is_refused():
    assert read(1, cpu_bytes_to_use="16KiB").cpu_bytes_per_rank == 16 * KIB
    assert "8 ranks" in refusal("cpu_bytes_to_use", "16KiB", world_size=8)
    assert read(8, cpu_bytes_to_use_per_rank="16KiB").cpu_bytes_per_rank == 16 * KIB


def test_a_server_may_have_more_than_one_rank_can_address():
    assert read(8, cpu_bytes_to_use="100TiB").cpu_bytes_per_rank == 12_800 * GIB
    read(cpu_bytes_to_use=MAX_BYTES_PER_SERVER)
    assert "too large" in refusal("cpu_bytes_to_use_per_rank", MAX_BYTES_PER_RANK + 1)
    assert "too large" in refusal("max_inflight_bytes", MAX_BYTES_PER_RANK + 1)


@pytest.mark.parametrize(
    ("key", "maximum"), [("num_cpu_blocks", MAX_NUM_SLOTS), ("copy_threads", MAX_COPY_THREADS)]
)
def test_a_count_must_be_a_whole_number_in_its_range(key, maximum):
    field = {"num_cpu_blocks": "num_slots", "copy_threads": "copy_threads"}[key]
    for written in (1, 2.0, maximum):
        assert getattr(read(**{key: written}), field) == int(written)
    for written in (0, -1, maximum + 1, 1.5, "4", "4GiB", True, None, float("nan"), [4]):
        message = refusal(key, written)
        assert f'"{key}"' in message
        assert f"Allowed: a whole number of 1 to {maximum}" in message
        assert "Fix: " in message


def test_an_eviction_policy_is_one_that_there_is():
    assert read().eviction_policy == "lru"
    for written in POLICIES:
        assert read(eviction_policy=written).eviction_policy == written
    assert tuple(POLICIES) == EVICTION_POLICIES
    assert '"lru", "slru"' in refusal("eviction_policy", "fifo")


def test_a_copy_path_is_one_of_a_few_words():
    assert read().copy_path == "auto"
    for written in ("auto", "batch", "kernel", "each"):
        assert read(copy_path=written).copy_path == written
    for written in ("Auto", "", "dma", 1, True, None, ["batch"]):
        message = refusal("copy_path", written)
        assert 'Allowed: "auto", "batch", "kernel", "each"' in message
        assert "Fix: " in message


@pytest.mark.parametrize("written", [1, 0.5, 30, 2.0, MAX_TRANSFER_TIMEOUT_S])
def test_a_deadline_is_a_number_of_seconds(written):
    timeout_s = read(transfer_timeout_s=written).transfer_timeout_s
    assert type(timeout_s) is float
    assert timeout_s == written


@pytest.mark.parametrize(
    "written",
    [
        0,
        -1,
        -0.5,
        MAX_TRANSFER_TIMEOUT_S + 1,
        1 << 2000,
        "30",
        "30s",
        True,
        None,
        [30],
        math.nan,
        math.inf,
        -math.inf,
    ],
)
def test_a_deadline_that_cannot_be_meant_is_refused_with_the_fix(written):
    message = refusal("transfer_timeout_s", written)
    assert f"Allowed: seconds, more than 0 and at most {MAX_TRANSFER_TIMEOUT_S}" in message
    assert 'such as "transfer_timeout_s": 30' in message


@pytest.mark.parametrize(
    ("written", "tokens"), [("auto", None), (0, 0), (256, 256), (2.0, 2), (2**31 - 1, 2**31 - 1)]
)
def test_from_how_many_tokens_a_hit_is_loaded_is_a_number_or_left_to_measuring(written, tokens):
    assert read(min_load_tokens=written).min_load_tokens == tokens
    assert read().min_load_tokens is None


@pytest.mark.parametrize(
    "written", [-1, 2**31, 0.5, "256", "Auto", "", True, None, [1], math.nan, math.inf]
)
def test_a_least_hit_that_cannot_be_meant_is_refused_with_the_fix(written):
    message = refusal("min_load_tokens", written)
    assert 'Allowed: "auto", or a whole number of 0 to 2147483647' in message
    assert "Fix: " in message


@pytest.mark.parametrize(
    ("written", "every"),
    [("off", 0), ("load", 1), ("sample:1", 1), ("sample:16", 16), ("sample:999999999", 999999999)],
)
def test_what_is_verified_is_said_in_a_word(written, every):
    assert read(verify=written).verify_every == every


@pytest.mark.parametrize(
    "written",
    [
        "on",
        "Load",
        "",
        "sample",
        "sample:",
        "sample:0",
        "sample:-1",
        "sample:1.5",
        "sample:٣",
        "sample:9999999999",
        True,
        False,
        None,
        1,
        ["load"],
    ],
)
def test_a_way_to_verify_that_does_not_exist_is_refused_with_the_fix(written):
    message = refusal("verify", written)
    assert 'Allowed: "off", "load"' in message
    assert '"sample:N"' in message
    assert 'Fix: write "verify": "load"' in message


@pytest.mark.parametrize("key", ["lazy_offload", "check_invariants"])
@pytest.mark.parametrize("written", ["yes", "1", "", "\u0442rue", 0, 1, None, 0.0, [], {}])
def test_a_switch_must_be_a_boolean(key, written):
    message = refusal(key, written)
    assert f'"{key}": true' in message
    assert "without quotes" in message


@pytest.mark.parametrize("key", ["lazy_offload", "enable_cross_layers_blocks"])
def test_a_switch_may_be_a_word_as_other_connectors_read_it(key):
    for written in (True, "true", "True", "TRUE"):
        assert getattr(read(**{key: written}), key) is True
    for written in (False, "false", "False"):
        assert getattr(read(**{key: written}), key) is False


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("cpu_bytes_to_uze", "cpu_bytes_to_use"),
        ("cpu_bytes", "cpu_bytes_to_use"),
        ("CPU-Bytes-To-Use-Per-Rank", "cpu_bytes_to_use_per_rank"),
        ("num_blocks", "num_cpu_blocks"),
        ("lazy", "lazy_offload"),
        ("copy_thread", "copy_threads"),
        ("max_bytes_inflight", "max_inflight_bytes"),
        ("invariants", "check_invariants"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key, nearest):
    message = refusal(key, 123)
    assert f'["{key}"] = ***: this is not a setting' in message
    assert f'Fix: write "{nearest}"' in message
    assert all(valid in message for valid in VALID_KEYS)


def test_a_key_that_is_near_to_nothing_is_refused_without_a_guess():
    assert "Fix: remove it" in refusal("zzz", 1)
    assert "Fix: remove it" in refusal(7, 1)
    assert "Fix: remove it" in refusal("x" * 10_000_000, 1)


def test_simple_cpu_offload_connectors_disk_is_one_tier():
    config = read(4, kv_offload_backend="disk", disk_path="/mnt/kv/")
    assert config.tiers == (TierConfig(Location("file", "/mnt/kv"), 4 * 100 * GIB),)
    config = read(2, kv_offload_backend="disk", disk_path="/mnt/kv", disk_capacity_bytes="1TiB")
    assert config.tiers[0].capacity_bytes == 2 << 40, "there each rank has a file of that size"
    assert read(kv_offload_backend="cpu").tiers == ()


@pytest.mark.parametrize(
    ("written", "problem", "fix"),
    [
        ({"kv_offload_backend": "disk"}, "no directory", 'add "disk_path": "/mnt/nvme/kv"'),
        ({"disk_path": "/mnt/kv"}, "no effect alone", 'add "kv_offload_backend": "disk"'),
        ({"disk_capacity_bytes": "1TiB"}, "no effect alone", 'add "kv_offload_backend": "disk"'),
        (
            {"kv_offload_backend": "disk", "disk_path": "/mnt/kv", "tiers": []},
            '"tiers" is written too',
            'move the directory into "tiers"',
        ),
        (
            {"kv_offload_backend": "disk", "disk_path": "mnt/kv"},
            "not absolute",
            'write "disk_path": "/mnt/nvme/kv"',
        ),
    ],
)
def test_what_cannot_be_meant_by_the_keys_of_a_disk_is_refused(written, problem, fix):
    with pytest.raises(ConfigError) as caught:
        read(**written)
    assert problem in str(caught.value)
    assert f"Fix: {fix}" in str(caught.value)


@pytest.mark.parametrize("written", ["gpu", "CPU", "", None, True, 1, ["cpu"]])
def test_another_backend_than_these_is_refused(written):
    assert 'Allowed: "cpu", "disk"' in refusal("kv_offload_backend", written)


# ---- tiers ---------------------------------------------------------------------------------------

URL = "file:///mnt/nvme/kv"


def tier(**written: object) -> TierConfig:
    (found,) = read(tiers=[{"url": URL, **written}]).tiers
    return found


def tier_refusal(*written: object) -> str:
    return refusal("tiers", list(written))


def test_a_tier_is_a_url_and_what_else_is_written():
    assert read().tiers == ()
    assert tier() == TierConfig(Location("file", "/mnt/nvme/kv"))
    assert tier(
        capacity="1TiB",
        namespace="blue",
        model_version="7",
        store="evicted",
        max_bytes_per_s="500MB",
        wait_s=0.5,
        timeout_s=3,
        threads=8,
    ) == TierConfig(
        Location("file", "/mnt/nvme/kv"), 1 << 40, "blue", "7", True, 500_000_000, 0.5, 3.0, 8
    )


def test_tiers_keep_their_order():
    near, far = {"url": "file:///near"}, {"url": "file:///far"}
    assert [found.location.path for found in read(tiers=[near, far]).tiers] == ["/near", "/far"]
    assert [found.location.path for found in read(tiers=[far, near]).tiers] == ["/far", "/near"]


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
        ("mnt/kv", "this is not a url", '"file:///mnt/nvme/kv"'),
        ("file://mnt/kv", '"mnt" stands where a machine is named', '"file:///mnt/kv"'),
        ("file://", "not absolute", '"file:///mnt/nvme/kv"'),
        ("file://./kv", "not absolute", f'"file://{Path.cwd()}/kv"'),
        ("file://~/kv", "not absolute", f'"file://{Path.home()}/kv"'),
        ("file:///", "the whole file system", '"file:///mnt/nvme/kv"'),
        ("file:///..", "the whole file system", '"file:///mnt/nvme/kv"'),
        ("file:///a?b", "%3F", '"file:///mnt/nvme/kv"'),
        ("file:///a%0Ab", "cannot be printed", '"file:///mnt/nvme/kv"'),
        ("redis://", "it names no machine", '"redis://valkey.internal:6379"'),
        ("rediss:///0", "it names no machine", '"rediss://valkey.internal:6379"'),
        ("redis://kv:99999", "cannot be read", '"redis://valkey.internal:6379"'),
        ("redis://kv/x", "is not the number of a database", '"redis://valkey.internal:6379"'),
        ("redis://kv?db=1", "setting of the tier", '"redis://valkey.internal:6379"'),
        ("redis://k v", "it names no machine", '"redis://valkey.internal:6379"'),
        ("redis://:hunter2@k v", '"redis://***"', '"redis://valkey.internal:6379"'),
        ("unix://run/x", "three slashes", '"unix:///run/valkey/valkey.sock"'),
        ("unix:///run/x?x=1", "may follow the path", '"unix:///run/valkey/valkey.sock"'),
        ("unix://:pa/hunter2@/run/x", "as %2F", '"unix:///run/valkey/valkey.sock"'),
        ("s3://", "it names no bucket", '"s3://bucket/kv"'),
        ("s3://key:hunter2@bucket", "credentials do not belong here", '"s3://bucket/kv"'),
        ("s3://bucket/a b", "letters, digits", '"s3://bucket/kv"'),
        ("gs://bucket/../x", "letters, digits", '"gs://bucket/kv"'),
        ("ftp://kv", 'the scheme "ftp" is unknown', "or leave this tier out"),
        ("reids://kv", 'the scheme "reids" is unknown', '"redis://valkey.internal:6379"'),
        ("valkye://kv", "valkey://", '"redis://valkey.internal:6379"'),
        (7, "this is not a string", '"file:///mnt/nvme/kv"'),
    ],
)
def test_urls_that_name_none_are_refused_with_one_that_does(url, problem, fix):
    message = tier_refusal({"url": url})
    assert message.startswith('kv_connector_extra_config["tiers"][0]["url"] = ')
    assert problem in message
    assert fix in message.partition("Fix: ")[2]
    assert "hunter2" not in message


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


@pytest.mark.parametrize(
    "tiers",
    [
        {"url": "redis://:hunter2@kv"},
        [["redis://:hunter2@kv"]],
        [{"url": "redis://:hunter2@kv", "capacity": 7}],
        [{"url": "redis://a:hunter2/with@slash@kv"}],
        [{"url": "s3://hunter2@kv"}],
        [{"url": "ftp://a:hunter2@kv"}],
        [{"url": "redis://a:b@kv", "redis://:hunter2@kv": 1}],
    ],
)
def test_no_message_shows_a_password(tiers):
    assert "hunter2" not in refusal("tiers", tiers)


def test_of_two_passwords_none_is_dropped():
    message = tier_refusal({"url": "redis://:hunter2@kv", "password_file": "/run/secrets/kv"})
    assert '["password_file"]' in message
    assert "the url has a password too" in message
    assert "hunter2" not in message


def test_one_place_is_one_tier_whoever_logs_in():
    urls = ("redis://a:hunter2@kv", "redis://kv:6379/0")
    message = tier_refusal(*({"url": url} for url in urls))
    assert 'tier 1, ["tiers"][0], has the same url' in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"url": "redis://kv", "capacity": "1TiB"}, "redis:// has no such setting"),
        ({"url": "redis://kv", "capacity": "1TiB"}, "maxmemory"),
        ({"url": "s3://b", "capacity": "1TiB"}, "a lifecycle rule of the bucket"),
        ({"url": URL, "ttl": "7d"}, "Allowed: it beside redis://, rediss://, unix://. Fix: remove"),
        ({"url": URL, "connections": 4}, '"threads" says'),
        ({"url": "redis://kv", "threads": 4}, '"connections" says'),
        ({"url": "redis://kv", "ca_file": "/ca.pem"}, "write rediss:// for TLS"),
        ({"url": "rediss://kv", "cert_file": "/c.pem"}, 'Fix: add "key_file"'),
        ({"url": "rediss://kv", "key_file": "/c.pem"}, 'Fix: add "cert_file"'),
        ({"url": "redis://kv", "ttl": "week"}, 'Fix: write "ttl": "7d" for a week'),
        ({"url": "redis://kv", "ttl": 0}, 'Fix: write "ttl": "7d" for a week'),
        ({"url": "redis://kv", "password_file": "x"}, "the path is not absolute"),
        ({"url": "s3://b", "endpoint": "minio:9000"}, "this is not an address"),
        ({"url": "s3://b", "endpoint": "http://a:hunter2@m"}, 'http://***@m": credentials'),
        ({"url": URL, "endpoint": "http://m"}, "it beside s3://, gs://, az://"),
        ({"url": URL, "hmac_key_file": ""}, "the path is not absolute"),
        ({"url": URL, "keep": 1}, 'write "keep": true'),
    ],
)
def test_settings_that_do_not_fit_are_refused(written, message):
    refused = tier_refusal(written)
    assert message in refused
    assert "hunter2" not in refused


def test_the_settings_of_servers_and_buckets():
    found = tier(
        **{"url": "rediss://kv", "ttl": "12h", "connections": 8, "keep": True},
        **{"password_file": "/pw", "ca_file": "/ca", "cert_file": "/crt", "key_file": "/key"},
    )
    assert found == TierConfig.at(
        **{"url": "rediss://kv", "ttl_s": 43200.0, "num_connections": 8, "keep": True},
        **{"password_file": "/pw", "ca_file": "/ca", "cert_file": "/crt", "key_file": "/key"},
    )
    assert tier(url="s3://b", endpoint="http://minio:9000/").endpoint == "http://minio:9000"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, '["tiers"][0] = {}: it has no "url"'),
        ("file:///mnt/kv", '["tiers"][0] = ***: this is not a mapping'),
        ({"url": URL, "tti": 3}, '["tiers"][0]["tti"] = ***: this is not a setting of a tier'),
        ({"url": URL, "wait": 3}, 'Fix: write "wait_s" if that is meant'),
        ({"url": URL, 7: 3}, '["tiers"][0][7] = ***: this is not a setting of a tier'),
        ({"url": URL, "wait_s": 0}, '["tiers"][0]["wait_s"] = 0: it is not more than 0'),
        ({"url": URL, "timeout_s": "5"}, '["tiers"][0]["timeout_s"] = "5"'),
        ({"url": URL, "capacity": 1}, '["tiers"][0]["capacity"] = 1: 1 bytes is too small'),
        ({"url": URL, "store": "all"}, 'Allowed: "computed", "evicted"'),
        ({"url": URL, "threads": 0}, '["tiers"][0]["threads"] = 0: it is too small'),
        ({"url": URL, "namespace": 3}, '["tiers"][0]["namespace"] = 3'),
        ({"url": URL, "model_version": "a\n"}, "cannot be printed"),
    ],
)
def test_what_a_tier_cannot_mean_is_refused_where_it_stands(written, message):
    assert message in tier_refusal(written)


def test_a_directory_is_one_tier():
    message = tier_refusal({"url": "file:///a"}, {"url": "file:///b"}, {"url": "file:///b/"})
    problem = 'tier 2, ["tiers"][1], has the same directory'
    assert f'["tiers"][2]["url"] = "file:///b/": {problem}' in message


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {},
            {"store": "evicted"},
            '["store"] = "evicted": the first tier has "computed", and what is written goes to all '
            "tiers. Allowed: all tiers with it, or all without. "
            'Fix: write "store": "evicted" into each tier, or into none.',
        ),
        (
            {"store": "evicted"},
            {"store": "computed"},
            '["store"] = "computed": the first tier has "evicted", and what is written goes to all '
            "tiers. Allowed: all tiers with it, or all without. "
            'Fix: write "store": "evicted" into each tier, or into none.',
        ),
        (
            {"model_version": "7"},
            {},
            '["model_version"] = "": the first tier has "7", and what is written goes to all '
            "tiers. Allowed: all tiers with it, or all without. "
            'Fix: write "model_version": "7" into each tier, or into none.',
        ),
        (
            {"model_version": ""},
            {"model_version": "8"},
            '["model_version"] = "8": the first tier has "", and what is written goes to all '
            "tiers. Allowed: all tiers with it, or all without. "
            'Fix: write "model_version": "8" into each tier, or into none.',
        ),
    ],
)
def test_tiers_of_different_kinds_are_refused(first, second, message):
    for between in ((), ({"url": "file:///b", **first},)):
        place = f'kv_connector_extra_config["tiers"][{1 + len(between)}]'
        written = {"url": "file:///a", **first}, *between, {"url": "file:///c", **second}
        assert tier_refusal(*written) == place + message


@pytest.mark.parametrize(("first", "second"), [("one", "None"), ("none", "***")])
def test_tiers_with_and_without_a_key_are_refused(first, second):
    keyed = {"url": "rediss://kv", "hmac_key_file": "/run/secrets/kv/hmac.key"}
    written = [keyed, {"url": "file:///a"}][:: 1 if first == "one" else -1]
    assert tier_refusal(*written) == (
        f'kv_connector_extra_config["tiers"][1]["hmac_key_file"] = {second}: the first tier '
        f"has {first}: whoever can write to a tier without a key could have his blocks, and all "
        "that is computed after them, sealed with yours. Allowed: all tiers with it, or all "
        "without. Fix: write "
        '"hmac_key_file" into each tier, directories too (one file does for all), or into none.'
    )


def test_each_tier_may_have_a_key_of_its_own():
    tiers = [{"url": f"file:///{name}", "hmac_key_file": f"/{name}.key"} for name in "ab"]
    assert [tier.hmac_key_file for tier in read(tiers=tiers).tiers] == ["/a.key", "/b.key"]


def test_tiers_of_one_kind_are_read():
    alike = {"store": "evicted", "model_version": "7"}
    near, far = {"url": "file:///a", **alike}, {"url": "file:///b", **alike, "model_version": "8"}
    found = read(tiers=[near, {**far, "namespace": "blue", "wait_s": 1}]).tiers
    assert [tier.model_version for tier in found] == ["7", "8"]
    assert all(tier.stores_evicted for tier in found)


def test_there_is_an_end_to_tiers():
    many = [{"url": f"file:///{index}"} for index in range(MAX_TIERS + 1)]
    assert f"0 to {MAX_TIERS} mappings" in refusal("tiers", many)
    assert len(read(tiers=many[1:]).tiers) == MAX_TIERS


@pytest.mark.parametrize("written", [None, "file:///mnt/kv", {"url": URL}, 3])
def test_tiers_are_a_list(written):
    assert "this is not a list" in refusal("tiers", written)


def test_a_field_of_the_outer_config_is_sent_one_level_up():
    assert "one level up" in refusal("kv_load_failure_policy", "recompute")
    assert "one level up" in refusal("kv_role", "kv_both")


@pytest.mark.parametrize("written", [[], "64GiB", 64, True, object()])
def test_settings_that_are_no_mapping_are_refused(written):
    with pytest.raises(ConfigError, match="expected a mapping"):
        OffloadConfig.from_extra_config(written, world_size=1)


@pytest.mark.parametrize("world_size", [0, -1, True, 1.0, None, "2"])
def test_a_world_size_that_is_not_a_number_of_ranks_is_refused(world_size):
    with pytest.raises(ConfigError, match="world_size"):
        OffloadConfig.from_extra_config({}, world_size=world_size)


def test_a_value_that_cannot_be_rendered_is_refused_like_any_other():
    class Unprintable:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "<Unprintable>" in refusal("cpu_bytes_to_use", Unprintable())
    assert '["nonsense"] = ***' in refusal("nonsense", Unprintable())


def test_a_message_does_not_grow_with_the_value():
    assert len(refusal("cpu_bytes_to_use", "x" * 1_000_000)) < 1000
    assert len(refusal("y" * 1_000_000, "x" * 1_000_000)) < 1000


def test_a_config_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        read().copy_threads = 2  # type: ignore[misc]


def test_sizes_are_shown_in_units():
    assert format_bytes(8 * GIB) == "8.00 GiB"
    assert format_bytes(1536 * MIB) == "1.50 GiB"
    assert format_bytes(MIB) == "1.00 MiB"
    assert format_bytes(0) == "0 bytes"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=60),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3)
    ),
    max_leaves=5,
)
sizes_in_words = st.builds(
    "{}{}{}".format,
    st.integers() | st.floats() | st.sampled_from(["", "-", "1e3", "1_0", "٣", "1e99"]),
    st.sampled_from(["", " ", "\t"]),
    st.sampled_from(["", "B", "KiB", "GiB", "Gi", "gb", "G", "PB", "K", "quux"]),
)
any_values = (
    json_values
    | sizes_in_words
    | st.binary(max_size=8)
    | st.complex_numbers()
    | st.decimals()
    | st.integers(min_value=0, max_value=1 << 50)
)


@settings(max_examples=400, deadline=None)
@given(
    extra=st.dictionaries(st.sampled_from(VALID_KEYS), any_values, max_size=4)
    | st.dictionaries(json_values.filter(lambda v: v.__hash__ is not None), any_values, max_size=3)
    | any_values,
    world_size=st.integers(min_value=1, max_value=64),
)
def test_whatever_is_written_is_a_config_within_its_bounds_or_a_config_error(extra, world_size):
    try:
        config = OffloadConfig.from_extra_config(extra, world_size=world_size)
    except ConfigError:
        return
    assert type(config.cpu_bytes_per_rank) is int
    assert MIN_SIZE_BYTES <= config.cpu_bytes_per_rank <= MAX_BYTES_PER_SERVER
    assert MIN_SIZE_BYTES <= config.max_inflight_bytes <= MAX_BYTES_PER_RANK
    assert config.num_slots is None or 1 <= config.num_slots <= MAX_NUM_SLOTS
    assert 1 <= config.copy_threads <= MAX_COPY_THREADS
    assert 0 < config.transfer_timeout_s <= MAX_TRANSFER_TIMEOUT_S
    assert 0 <= config.verify_every <= 999_999_999
    assert type(config.lazy_offload) is bool
    assert type(config.verify_invariants) is bool
    # So the plugin may check before the world size is known.
    OffloadConfig.from_extra_config(extra, world_size=1)


@settings(max_examples=300, deadline=None)
@given(size_bytes=st.integers(min_value=MIN_SIZE_BYTES, max_value=MAX_BYTES_PER_RANK))
def test_a_size_means_the_same_as_number_as_string_and_through_json(size_bytes):
    text = json.dumps({"cpu_bytes_to_use": size_bytes})
    for extra in (json.loads(text), {"cpu_bytes_to_use": str(size_bytes)}):
        config = OffloadConfig.from_extra_config(extra, world_size=1)
        assert config.cpu_bytes_per_rank == size_bytes


def test_ranks_with_one_copy_have_the_slots_of_their_memory_together():
    config = OffloadConfig.from_extra_config({"cpu_bytes_to_use": 800 * KIB}, world_size=8)
    assert config.num_slots_of(10 * KIB) == 10
    together = dataclasses.replace(config, ranks_per_copy=8)
    assert together.num_slots_of(10 * KIB) == 80
    counted = dataclasses.replace(together, num_slots=7)
    assert counted.num_slots_of(10 * KIB) == 7, "so many are in the one copy"
    assert together.num_slots_of(200 * KIB) == 4
    with pytest.raises(ConfigError, match=r"gives each rank 100\.00 KiB; expected at least one"):
        config.num_slots_of(200 * KIB)


def test_the_tables_on_the_page_are_those_of_the_settings():
    found = config_table.TABLE.findall(config_table.PAGE.read_text())
    assert found == config_table.tables(), "write them again: python -m tests.config_table"
