"""What users write in kv_connector_extra_config: what it means, and what is refused how."""

import dataclasses
import math

import pytest

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
from safe_offload.config.tiers import FileConfig
from safe_offload.config.units import GIB, KIB, MIB, format_bytes
from safe_offload.errors import ConfigError
from safe_offload.scheduler.eviction.policies import POLICIES
from tests import config_table

SIZE_KEYS = ("cpu_bytes_to_use", "cpu_bytes_to_use_per_rank", "max_inflight_bytes")
COUNTS = {"num_cpu_blocks": MAX_NUM_SLOTS, "copy_threads": MAX_COPY_THREADS}
COPY_PATHS = ("auto", "batch", "kernel", "each")
NAN = float("nan")


def read(world_size: int = 1, /, **settings: object) -> OffloadConfig:
    return OffloadConfig.from_extra_config(settings, world_size=world_size)


def refusal(key: object, value: object, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_extra_config({key: value}, world_size=world_size)  # type: ignore[dict-item]
    return str(caught.value)


def rows(table: dict) -> list:
    """The values of a table with what each of them comes to."""
    return [(written, expected) for expected, values in table.items() for written in values]


# ---- what is read --------------------------------------------------------------------------------


def test_nothing_set_means_the_defaults_of_simple_cpu_offload_connector():
    config = read()
    assert config == OffloadConfig.from_extra_config(None, world_size=1)
    assert (config.cpu_bytes_per_rank, config.capacity_key) == (8 * GIB, "cpu_bytes_to_use")
    assert (config.num_slots, config.min_load_tokens, config.tiers) == (None, None, ())
    assert (config.max_inflight_bytes, config.transfer_timeout_s) == (256 * MIB, 30.0)
    assert (config.copy_threads, config.verify_every) == (1, 0)
    assert (config.lazy_offload, config.verify_invariants) == (False, False)
    assert (config.eviction_policy, config.copy_path) == ("returns", "auto")


def test_server_wide_bytes_are_divided_by_the_world_size():
    assert read(4, cpu_bytes_to_use=64 * GIB).cpu_bytes_per_rank == 16 * GIB
    assert read(3, cpu_bytes_to_use=64 * GIB).cpu_bytes_per_rank == 64 * GIB // 3
    assert read(8).cpu_bytes_per_rank == 1 * GIB
    assert read(8).world_size == 8
    assert read(8, cpu_bytes_to_use="100TiB").cpu_bytes_per_rank == 12_800 * GIB, "no rank has more"
    read(cpu_bytes_to_use=MAX_BYTES_PER_SERVER)
    assert read(1, cpu_bytes_to_use="16KiB").cpu_bytes_per_rank == 16 * KIB
    assert "8 ranks" in refusal("cpu_bytes_to_use", "16KiB", world_size=8)
    assert read(8, cpu_bytes_to_use_per_rank="16KiB").cpu_bytes_per_rank == 16 * KIB


def test_of_several_sizes_one_counts_and_all_are_checked():
    config = read(4, cpu_bytes_to_use=64 * GIB, cpu_bytes_to_use_per_rank="2GiB")
    assert (config.cpu_bytes_per_rank, config.capacity_key) == (
        2 * GIB,
        "cpu_bytes_to_use_per_rank",
    )
    config = read(num_cpu_blocks=100, cpu_bytes_to_use_per_rank="2GiB")
    assert (config.num_slots, config.capacity_key) == (None, "cpu_bytes_to_use_per_rank")
    config = read(num_cpu_blocks=4468, cpu_bytes_to_use="120GiB")
    assert (config.num_slots_of(3 << 20), config.capacity_key) == (40 << 10, "cpu_bytes_to_use")
    config = read(num_cpu_blocks=100)
    assert (config.num_slots_of(3 << 20), config.capacity_key) == (100, "num_cpu_blocks")
    with pytest.raises(ConfigError, match="cpu_bytes_to_use"):
        read(cpu_bytes_to_use="junk", cpu_bytes_to_use_per_rank="2GiB", num_cpu_blocks=7)


SIZES = {
    8 * GIB: (8589934592, "8589934592", "8_589_934_592"),
    8_000_000_000: (8e9, "8e9"),
    64 * GIB: ("64GiB", "64 GiB", " 64gib ", "64Gi"),
    64 * 10**9: ("64GB",),
    512 * MIB: ("512MiB",),
    512 * 10**6: ("512 MB",),
    2048 * GIB: ("2TiB",),
    3 * GIB // 2: ("1.5GiB",),
    int(0.1 * GIB): ("0.1GiB",),
    8192: ("8192B",),
    16 * KIB: ("16KiB",),
    MIN_SIZE_BYTES: (MIN_SIZE_BYTES,),
    MAX_BYTES_PER_RANK: (MAX_BYTES_PER_RANK,),
}


@pytest.mark.parametrize(("written", "size_bytes"), rows(SIZES))
@pytest.mark.parametrize("key", SIZE_KEYS)
def test_a_size_is_read_in_every_way_that_has_one_meaning(key, written, size_bytes):
    config = read(**{key: written})
    field = "max_inflight_bytes" if key == "max_inflight_bytes" else "cpu_bytes_per_rank"
    value = getattr(config, field)
    assert value == size_bytes
    assert type(value) is int


READ = {
    ("num_cpu_blocks", "num_slots"): {1: (1,), 2: (2.0,), MAX_NUM_SLOTS: (MAX_NUM_SLOTS,)},
    ("copy_threads", "copy_threads"): {1: (1,), 2: (2.0,), MAX_COPY_THREADS: (MAX_COPY_THREADS,)},
    ("eviction_policy", "eviction_policy"): {each: (each,) for each in POLICIES},
    ("copy_path", "copy_path"): {each: (each,) for each in COPY_PATHS},
    ("share", "sharing"): {"node": ("node",)},
    ("transfer_timeout_s", "transfer_timeout_s"): {
        each: (each,) for each in (1, 0.5, 30, 2.0, MAX_TRANSFER_TIMEOUT_S)
    },
    ("min_load_tokens", "min_load_tokens"): {
        None: ("auto",),
        **{int(each): (each,) for each in (0, 256, 2.0, 2**31 - 1)},
    },
    ("verify", "verify_every"): {
        0: ("off",),
        1: ("load", "sample:1"),
        16: ("sample:16",),
        999999999: ("sample:999999999",),
    },
    **{
        (key, field): {True: (True, "true", "True", "TRUE"), False: (False, "false", "False")}
        for key, field in (
            ("lazy_offload", "lazy_offload"),
            ("enable_cross_layers_blocks", "enable_cross_layers_blocks"),
            ("check_invariants", "verify_invariants"),
        )
    },
}


@pytest.mark.parametrize(("key", "field"), READ)
def test_every_other_key_reaches_its_field(key, field):
    for written, expected in rows(READ[key, field]):
        value = getattr(read(**{key: written}), field)
        assert value == expected
        assert type(value) is (float if field == "transfer_timeout_s" else type(expected))
    assert tuple(POLICIES) == EVICTION_POLICIES


# ---- what is refused -----------------------------------------------------------------------------

NO_SIZES = {
    "ambiguous": ("64G", "64m"),
    "unknown": ("64 Quux",),
    "not a size": (
        *("GiB", "", "64,000", "٣GiB", "64 GiB please", "0x10000", "nan", "1e999999999"),
        "9" * 5000,
    ),
    "negative": ("-64GiB", -1, -1e9, -(10**5000)),
    "fraction": ("8192.5", 8192.5),
    "zero": (0, 0.0, "0GiB"),
    "too small": (64, "1KiB", MIN_SIZE_BYTES - 1),
    "too large": (MAX_BYTES_PER_SERVER + 1, 10**5000, "999999PiB", 1e300),
    "finite": (NAN, math.inf),
    "bool": (True,),
    "null": (None,),
    "list": ([1],),
    "dict": ({"bytes": 1},),
    "bytes": (b"64GiB",),
}


@pytest.mark.parametrize("key", SIZE_KEYS)
@pytest.mark.parametrize("problem", NO_SIZES)
def test_a_size_that_cannot_be_meant_is_refused_with_the_fix(key, problem):
    for written in NO_SIZES[problem]:
        message = refusal(key, written)
        assert f'"{key}"' in message
        assert problem in message
        assert "Allowed: an integer number of bytes" in message
        assert "Fix: " in message


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("cpu_bytes_to_use", 64, '"64GiB"'),
        ("cpu_bytes_to_use", "64G", '"64GiB" or "64GB"'),
        ("cpu_bytes_to_use_per_rank", MAX_BYTES_PER_RANK + 1, "too large"),
        ("max_inflight_bytes", MAX_BYTES_PER_RANK + 1, "too large"),
        ("kv_load_failure_policy", "recompute", "one level up"),
        ("kv_role", "kv_both", "one level up"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(key, written, expected):
    assert expected in refusal(key, written)


REFUSED = {
    **{
        key: (
            (0, -1, maximum + 1, 1.5, "", "4", "4GiB", True, None, NAN, [4]),
            (f'"{key}"', f"Allowed: an integer from 1 to {maximum}", "Fix: "),
        )
        for key, maximum in COUNTS.items()
    },
    "eviction_policy": (("fifo",), ('"returns", "lru"',)),
    "copy_path": (
        ("Auto", "", "dma", 1, True, None, ["batch"]),
        ('Allowed: "auto", "batch", "kernel", "each"', "Fix: "),
    ),
    "transfer_timeout_s": (
        (
            *(0, -1, -0.5, MAX_TRANSFER_TIMEOUT_S + 1, 1 << 2000, "30", "30s", True, None, [30]),
            *(NAN, math.inf, -math.inf),
        ),
        (
            f"Allowed: seconds, more than 0 and at most {MAX_TRANSFER_TIMEOUT_S}",
            'such as "transfer_timeout_s": 30',
        ),
    ),
    "min_load_tokens": (
        (-1, 2**31, 0.5, "256", "Auto", "", True, None, [1], NAN, math.inf),
        ('Allowed: "auto", or an integer from 0 to 2147483647', "Fix: "),
    ),
    "verify": (
        (
            *("on", "Load", "", "sample", "sample:", "sample:0", "sample:-1", "sample:1.5"),
            *("sample:٣", "sample:9999999999", True, False, None, 1, ["load"]),
        ),
        ('Allowed: "off", "load"', '"sample:N"', 'Fix: write "verify": "load"'),
    ),
    **{
        key: (
            ("yes", "1", "", "\u0442rue", 0, 1, None, 0.0, [], {}),
            (f'"{key}": true', "without quotes"),
        )
        for key in ("lazy_offload", "check_invariants")
    },
    "share": (("rack", True), ('Allowed: "node"',)),
    "kv_offload_backend": (("gpu", "CPU", "", None, True, 1, ["cpu"]), ('Allowed: "cpu", "disk"',)),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_cannot_be_meant_is_refused_with_the_fix(key):
    values, parts = REFUSED[key]
    for written in values:
        message = refusal(key, written)
        assert [part for part in parts if part not in message] == [], written


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


@pytest.mark.parametrize("key", ["zzz", 7, "x" * 100_000])
def test_a_key_that_is_near_to_nothing_is_refused_without_a_guess(key):
    assert "Fix: remove it" in refusal(key, 1)


def test_simple_cpu_offload_connectors_disk_is_one_tier():
    config = read(4, kv_offload_backend="disk", disk_path="/mnt/kv/")
    assert config.tiers == (FileConfig(Location("file", "/mnt/kv"), capacity_bytes=4 * 100 * GIB),)
    config = read(2, kv_offload_backend="disk", disk_path="/mnt/kv", disk_capacity_bytes="1TiB")
    assert config.tiers[0].limit_bytes == 2 << 40, "there each rank has a file of that size"
    assert read(kv_offload_backend="cpu").tiers == ()


DISK = {"kv_offload_backend": "disk"}


@pytest.mark.parametrize(
    ("written", "problem", "fix"),
    [
        (DISK, "no directory", 'add "disk_path": "/mnt/nvme/kv"'),
        ({**DISK, "disk_path": None}, "no directory", 'add "disk_path": "/mnt/nvme/kv"'),
        ({"disk_path": "mnt/kv"}, "not absolute", 'write "disk_path": "/mnt/nvme/kv"'),
        (
            {**DISK, "disk_path": "/mnt/kv", "tiers": []},
            '"tiers" is also set',
            'move the directory into "tiers"',
        ),
        ({**DISK, "disk_path": "mnt/kv"}, "not absolute", 'write "disk_path": "/mnt/nvme/kv"'),
    ],
)
def test_what_cannot_be_meant_by_the_keys_of_a_disk_is_refused(written, problem, fix):
    with pytest.raises(ConfigError) as caught:
        read(**written)
    assert problem in str(caught.value)
    assert f"Fix: {fix}" in str(caught.value)


@pytest.mark.parametrize("world_size", [0, -1, True, 1.0, None, "2"])
def test_a_world_size_that_is_not_a_number_of_ranks_is_refused(world_size):
    with pytest.raises(ConfigError, match="world_size"):
        OffloadConfig.from_extra_config({}, world_size=world_size)


def test_sizes_are_shown_in_units():
    assert format_bytes(8 * GIB) == "8.00 GiB"
    assert format_bytes(1536 * MIB) == "1.50 GiB"
    assert format_bytes(MIB) == "1.00 MiB"
    assert format_bytes(0) == "0 bytes"


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


def test_tenants_are_refused_beside_shared_slots():
    with pytest.raises(ConfigError, match='remove "share", or "tenants"'):
        OffloadConfig.from_extra_config(
            {"share": "node", "tenants": "/etc/tenants.json"}, world_size=1
        )
