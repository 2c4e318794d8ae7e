"""Settings that work and are hardly what was meant: what is said, with which numbers."""

import dataclasses
import logging
from typing import Any

import pytest

import safe_offload
from safe_offload.compat import specs
from safe_offload.config.options import OffloadConfig
from safe_offload.start import advice as start_advice
from tests.simulator.vllm_setup import EngineShape, make_config, make_kv_cache_config

FULL = EngineShape(groups=("full@16",), num_blocks=101, max_model_len=640)
NUM_REQUEST = 40


def said(logged: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in logged]


def advise(
    num_slots: int, shape: EngineShape = FULL, role: str = "kv_both", **extra: Any
) -> tuple[Any, Any]:
    config, cache = make_config(shape), make_kv_cache_config(shape)
    config.kv_transfer_config.kv_role = role
    config.kv_transfer_config.kv_connector_extra_config = extra
    settings = OffloadConfig.from_extra_config(extra, world_size=4)
    start_advice.advise(config, cache, settings, num_slots)
    return config, cache


@pytest.mark.parametrize(
    ("extra", "role", "expected"),
    [
        ({"cpu_bytes_to_use": "1GiB"}, "kv_both", ""),
        ({"num_cpu_blocks": 7}, "kv_both", ""),
        ({}, "kv_consumer", '"kv_role" (this connector always stores and loads).'),
        (
            {"cpu_bytes_to_use": "1GiB", "num_cpu_blocks": 7},
            "kv_both",
            '"num_cpu_blocks" ("cpu_bytes_to_use" takes precedence).',
        ),
        (
            {"cpu_bytes_to_use": 9999999, "cpu_bytes_to_use_per_rank": 99999, "num_cpu_blocks": 7},
            "kv_both",
            '"cpu_bytes_to_use" ("cpu_bytes_to_use_per_rank" takes precedence); '
            '"num_cpu_blocks" ("cpu_bytes_to_use_per_rank" takes precedence).',
        ),
        (
            {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": "1GiB"},
            "kv_both",
            '"spec_name" (there is one backend, with tiers below it).',
        ),
    ],
)
def test_settings_without_effect_are_named_once_with_the_reason(logged, extra, role, expected):
    advise(100, role=role, **extra)
    line = "These settings have no effect; remove them: " + expected
    assert said(logged) == ([line] if expected else [])


def test_ranks_that_hold_the_same_may_share_a_copy(logged):
    config, cache = make_config(FULL), make_kv_cache_config(FULL)
    cache.kv_tp_replicas = 4
    config.kv_transfer_config.kv_connector_extra_config = {}
    settings = OffloadConfig.from_extra_config({}, world_size=4)
    settings = dataclasses.replace(settings, ranks_per_copy=4)
    info = start_advice.advise(config, cache, settings, 100)
    assert said(logged) == []
    assert int(info["host_bytes_per_rank"]) == 100 * specs.block_bytes(cache) // 4


def test_a_pool_of_the_gpus_size_is_not_small(logged):
    advise(100)
    assert said(logged) == []


def test_a_pool_smaller_than_the_gpus_is_said_with_both_numbers(logged):
    _, cache = advise(99, num_cpu_blocks=99)
    (message,) = said(logged)
    assert '"num_cpu_blocks" gives each rank 99 blocks' in message
    assert "the GPU's own pool has 100 blocks" in message
    assert "max_model_len" not in message
    assert "at least 100." in message
    assert specs.block_bytes(cache) > 0
    assert " KiB)" in message


def test_in_lazy_mode_the_host_adds_to_the_gpu(logged):
    advise(NUM_REQUEST, lazy_offload=True)
    assert said(logged) == []


def test_a_pool_smaller_than_the_longest_request_is_said_with_both_numbers(logged):
    _, cache = advise(NUM_REQUEST - 1, lazy_offload=True)
    (message,) = said(logged)
    size_mib = -(-NUM_REQUEST * 4 * specs.block_bytes(cache) // (1 << 20))
    assert '"cpu_bytes_to_use" gives each rank 39 blocks' in message
    assert "max_model_len (640 tokens) needs 40 blocks" in message
    assert f'at least "{size_mib}MiB"' in message, "of all four ranks"


def test_a_sliding_window_needs_no_more_than_its_window(logged):
    """Groups of a hybrid model are counted as vLLM counts them."""
    shape = EngineShape(groups=("full@16", "window:64@16"), num_blocks=101, max_model_len=640)
    config, cache = advise(100, shape, lazy_offload=True)
    num_blocks = specs.num_blocks_of_longest_request(config, cache)
    assert NUM_REQUEST < num_blocks < 2 * NUM_REQUEST
    assert said(logged) == []
    advise(num_blocks - 1, shape, lazy_offload=True)
    assert f"needs {num_blocks} blocks" in said(logged)[0]


def test_advice_that_cannot_be_given_does_not_end_the_start(logged, monkeypatch):
    monkeypatch.setattr(start_advice, "_advise_on_pool", None)
    advise(1)
    assert said(logged) == []


@pytest.mark.parametrize(
    ("groups", "num_slots", "expected"),
    [
        (("full@16",), 80, "about 1280 tokens, or 2.0 requests of max_model_len (640 tokens)"),
        # Of a sliding window a request holds the blocks of the window only.
        (("full@16", "window:32@16"), 80, "requests of max_model_len (640 tokens)"),
    ],
)
def test_one_line_says_how_the_connector_is_set_up(caplog, groups, num_slots, expected):
    with caplog.at_level("INFO", "vllm.safe_offload.start.advice"):
        config, cache = advise(
            num_slots, dataclasses.replace(FULL, groups=groups), eviction_policy="lru"
        )
    (line,) = {m for m in caplog.messages if m.startswith("safe_offload ")}
    assert expected in line
    assert f"safe_offload {safe_offload.__version__}: eager stores, lru eviction" in line
    assert "Per rank (4): up to 80 slots" in line
    assert f"KV cache groups: {len(groups)}" in line
    num_request = specs.num_blocks_of_longest_request(config, cache)
    assert f"about {int(80 / num_request * 640)} tokens" in line


def test_variables_of_lmcache_are_named_once(logged, monkeypatch):
    advise(100)
    assert not [message for message in said(logged) if "LMCACHE_" in message]
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "20")
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "256")
    advise(100)
    (line,) = [message for message in said(logged) if "LMCACHE_" in message]
    assert "no effect here: LMCACHE_CHUNK_SIZE, LMCACHE_MAX_LOCAL_CPU_SIZE. Fix: set" in line
