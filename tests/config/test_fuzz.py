"""Junk as configuration: one line that says what to do, or settings that work; never anything else.

test_options.py has the rules one by one. Here is what no one would write on purpose: control
characters and lone surrogates in keys and values, values that cannot be rendered, nested junk, and
the same inside of a whole `--kv-transfer-config`.
"""

import enum
import sys
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_offload.config.options import (
    MAX_BYTES_PER_SERVER,
    MAX_COPY_THREADS,
    MAX_NUM_SLOTS,
    MAX_TRANSFER_TIMEOUT_S,
    OUTER_KEYS,
    VALID_KEYS,
    OffloadConfig,
)
from safe_offload.config.settings import MAX_BYTES_PER_RANK, MIN_SIZE_BYTES
from safe_offload.config.tiers import TIER_KEYS
from safe_offload.errors import ConfigError
from safe_offload.start import plugin

MESSAGE_LENGTH_MAX = 900


class ManyLines:
    """An object whose rendering has several lines."""

    def __repr__(self) -> str:
        return "one\ntwo\r\nthree\x1b[31m"


class Tier(enum.IntEnum):
    """A number that is not quite a number."""

    FIRST = 1


any_text = st.text(alphabet=st.characters(), max_size=40)  # with control characters, surrogates
sizes = st.integers(0, 1 << 50) | st.builds(
    "{}{}{}".format,
    st.integers() | st.floats() | st.sampled_from(["", "-", "1e3", "1_0", "٣", "1e99"]),
    st.sampled_from(["", " ", "\t"]),
    st.sampled_from(["", "B", "KiB", "GiB", "Gi", "gb", "G", "PB", "K", "quux"]),
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(1 << 70), max_value=1 << 70)
    | st.floats()
    | any_text
    | sizes
    | st.binary(max_size=8)
    | st.sampled_from(
        [
            *(ManyLines(), Tier.FIRST, object(), ..., NotImplemented, int),
            *(np.int64(7), np.float64("nan"), np.arange(3), Decimal("1e999"), Fraction(1, 3)),
            *(float("inf"), 1e300, 1j, range(3), "1" * 5000, "9" * 39 + "B"),
            *("64G", "٣GiB", "1e99PiB", "1e-9GiB", "0x10", "\uff11GiB", " 1 GiB ", "1GiB\n", "NaN"),
        ]
    )
)
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(any_text | st.integers() | st.none(), inner, max_size=3)
    ),
    max_leaves=6,
)
near_keys = st.sampled_from(VALID_KEYS).flatmap(
    lambda key: st.sampled_from(
        [key, key.upper(), f" {key} ", key.replace("_", "-"), f"{key}\n", key[:-1], f"{key}\0"]
    )
)
keys = st.sampled_from(VALID_KEYS) | near_keys | st.sampled_from(OUTER_KEYS) | any_text
extras = (
    st.dictionaries(st.sampled_from(VALID_KEYS), junk, max_size=4)
    | st.dictionaries(keys | st.integers() | st.none() | st.tuples(any_text), junk, max_size=3)
    | junk
)


def refusal(extra: Any, world_size: int = 1) -> str | None:
    """The message with which settings are refused; None if they work."""
    try:
        OffloadConfig.from_extra_config(extra, world_size=world_size)
    except ConfigError as error:
        return str(error)
    return None


def check_message(message: str, extra: object) -> None:
    """One printable line with what is allowed and the fix; a setting is named with its value."""
    assert message.isprintable(), "one line, and nothing that could move a terminal's cursor"
    assert len(message) <= MESSAGE_LENGTH_MAX
    assert "Fix: " in message
    if isinstance(extra, Mapping):
        assert message.startswith(("kv_connector_extra_config[", "world_size"))
        assert "]: " in message or "] = " in message
        assert "Allowed" in message
    else:
        assert message.startswith("kv_connector_extra_config is ")
        assert "expected a mapping" in message


@settings(max_examples=200)
@given(extra=extras, world_size=st.integers(min_value=1, max_value=2048))
def test_whatever_is_written_works_or_is_answered_with_one_line(extra, world_size):
    message = refusal(extra, world_size)
    if message is not None:
        check_message(message, extra)
        return
    assert extra is None or set(extra) <= set(VALID_KEYS)
    assert refusal(extra) is None, "the plugin may check before the world size is known"
    config = OffloadConfig.from_extra_config(extra, world_size=world_size)
    assert type(config.cpu_bytes_per_rank) is int
    assert MIN_SIZE_BYTES <= config.cpu_bytes_per_rank <= MAX_BYTES_PER_SERVER
    assert MIN_SIZE_BYTES <= config.max_inflight_bytes <= MAX_BYTES_PER_RANK
    assert config.num_slots is None or 1 <= config.num_slots <= MAX_NUM_SLOTS
    assert 1 <= config.copy_threads <= MAX_COPY_THREADS
    assert 0 < config.transfer_timeout_s <= MAX_TRANSFER_TIMEOUT_S
    assert 0 <= config.verify_every <= 999_999_999
    assert type(config.lazy_offload) is bool
    assert type(config.verify_invariants) is bool


tier = st.fixed_dictionaries(
    {},
    optional={
        "url": any_text
        | junk
        | st.builds("file://{}".format, any_text)
        | st.builds("file:///{}".format, any_text)
        | st.builds("{}://{}".format, any_text, any_text),
        **{key: junk for key in TIER_KEYS if key != "url"},
    },
) | st.dictionaries(any_text | st.sampled_from(TIER_KEYS) | st.none() | st.integers(), junk)


@settings(max_examples=100)
@given(tiers=st.lists(tier, max_size=3))
def test_whatever_is_written_of_tiers_works_or_is_answered_with_one_line(tiers):
    message = refusal({"tiers": tiers})
    if message is not None:
        check_message(message, {"tiers": tiers})
        assert message.startswith('kv_connector_extra_config["tiers"][')
        return
    for found in OffloadConfig.from_extra_config({"tiers": tiers}, world_size=1).tiers:
        location = found.location
        assert location.host or location.path.startswith("/")
        assert location.host or location.path.strip("/")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [nested(sys.getrecursionlimit() * 2), "x\n" * 100_000, [["\n"] * 10_000], {"\ud800": "\r\n"}],
    ids=["deep", "long", "wide", "surrogate"],
)
def test_what_is_deep_long_or_wide_is_answered_with_a_short_line(value):
    for key in VALID_KEYS:
        message = refusal({key: value})
        assert message is not None
        check_message(message, {})


# ---- the whole of --kv-transfer-config ---------------------------------------------------------

outer = st.fixed_dictionaries(
    {"kv_connector": st.just(plugin.CONNECTOR_NAME)},
    optional={
        "kv_role": junk | st.sampled_from(["kv_both", "kv_producer", "kv_consumer"]),
        "kv_connector_extra_config": extras,
        "kv_load_failure_policy": junk | st.sampled_from(["fail", "recompute"]),
        "engine_id": junk,
        "kv_connector_module_path": junk,
    },
)


@settings(max_examples=150)
@given(config=outer)
def test_a_whole_config_works_or_ends_in_the_error_of_a_wrong_argument(config):
    """vLLM's command line catches ValueError, which ConfigError and pydantic's errors are."""
    from vllm.config import KVTransferConfig

    plugin.register()
    try:
        made = KVTransferConfig(**config)
    except ValueError:
        return
    assert made.kv_role is not None
    extra = made.kv_connector_extra_config
    assert OffloadConfig.from_extra_config(extra, world_size=1).cpu_bytes_per_rank > 0
