"""What is refused in the process that the user starts, before it starts the engine's own."""

from types import SimpleNamespace
from typing import Any

import pytest

from safe_offload.config.transfer_config import CONNECTOR_NAME
from safe_offload.errors import ConfigError
from safe_offload.start import checks as engine_start
from safe_offload.worker.memory import host_memory

OURS = {"kv_connector": CONNECTOR_NAME, "kv_connector_extra_config": {}}
OTHER = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {}}


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def sized(value: Any, key: str = "cpu_bytes_to_use") -> dict[str, Any]:
    return {"kv_connector": CONNECTOR_NAME, "kv_connector_extra_config": {key: value}}


@pytest.mark.parametrize("written", [OURS, multi(OTHER, OURS)])
@pytest.mark.parametrize("make", [dict, lambda written: SimpleNamespace(**written)])
def test_the_flag_that_replaces_us_is_refused(written, make):
    arguments = SimpleNamespace(kv_offloading_size=2.0, kv_transfer_config=make(written))
    with pytest.raises(ConfigError, match='write "cpu_bytes_to_use": "2GiB"'):
        engine_start.require_no_other_offloading(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kv_offloading_size": None, "kv_transfer_config": OURS},
        {"kv_offloading_size": 2.0, "kv_transfer_config": OTHER},
        {"kv_offloading_size": 2.0, "kv_transfer_config": None},
        {},
    ],
)
def test_the_flag_without_us_is_none_of_our_business(arguments):
    engine_start.require_no_other_offloading(SimpleNamespace(**arguments))


@pytest.fixture
def listening(monkeypatch):
    """One entry for each call of `last_words.listen`."""
    calls: list[bool] = []
    monkeypatch.setattr(engine_start.last_words, "listen", lambda: calls.append(True))
    return calls


def engine(written: dict[str, Any] | None, **parallel: Any) -> SimpleNamespace:
    defaults = {
        "distributed_executor_backend": "mp",
        "data_parallel_size_local": 1,
        "world_size": 4,
        "local_world_size": 4,
    }
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**written) if written else None,
        parallel_config=SimpleNamespace(**defaults | parallel),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )


@pytest.mark.parametrize("written", [sized("4096TiB"), multi(OTHER, sized("4096TiB"))])
def test_a_pool_that_the_machine_cannot_hold_is_refused_before_the_engine_starts(
    written, listening
):
    with pytest.raises(ConfigError, match=r"needs 4096.00 TiB \(4 ranks on this machine"):
        engine_start.prepare_start(engine(written))
    assert not listening


def test_all_data_parallel_engines_of_the_machine_are_counted(listening, monkeypatch):
    """Each by itself would fit, and the kernel would end the server when they fill their pools."""
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 23 << 30)
    with pytest.raises(ConfigError) as refused:
        engine_start.prepare_start(engine(sized("11.3GiB"), data_parallel_size_local=8))
    message = str(refused.value)
    assert "needs 90.40 GiB (32 ranks on this machine, 2.82 GiB each)" in message
    assert "23.00 GiB of host memory is available" in message
    fit_mib = int(message.partition('at most "')[2].partition("MiB")[0])
    engine_start.prepare_start(engine(sized(f"{fit_mib}MiB"), data_parallel_size_local=8))
    assert 2 << 10 < fit_mib < 23 << 7, "for each engine its eighth, but for what must stay free"
    engine_start.prepare_start(engine(sized("11.3GiB")))
    assert listening == [True, True]


@pytest.mark.parametrize(
    "config",
    [
        engine(sized("1MiB")),
        engine(sized(2**31 - 1, "num_cpu_blocks")),
        engine(sized("4096TiB"), distributed_executor_backend="ray"),
        engine(sized("4096TiB"), data_parallel_size_local=0),
    ],
)
def test_a_pool_that_may_fit_is_left_to_the_workers(config, listening):
    engine_start.prepare_start(config)
    assert listening == [True]


def test_without_prefix_caching_no_pool_is_taken(listening):
    config = engine(sized("4096TiB"))
    config.cache_config.enable_prefix_caching = False
    engine_start.prepare_start(config)


def test_in_a_further_api_server_the_memory_is_the_engines_already(listening, monkeypatch):
    monkeypatch.setattr(engine_start.last_words, "is_another_listening", lambda: True)
    engine_start.prepare_start(engine(sized("4096TiB")))
    assert not listening


@pytest.mark.parametrize("written", [None, OTHER, multi(OTHER)])
def test_engines_without_us_are_none_of_our_business(written, listening):
    engine_start.prepare_start(engine(written))
    assert not listening


# ---- hashes that tiers need ----------------------------------------------------------------------

TIERED = sized([{"url": "file:///mnt/nvme/kv"}], "tiers")


def hashing(written: dict[str, Any], algorithm: str) -> SimpleNamespace:
    config = engine(written)
    config.cache_config.prefix_caching_hash_algo = algorithm
    return config


@pytest.mark.parametrize("written", [TIERED, multi(OTHER, TIERED)])
def test_with_tiers_the_default_hash_is_one_that_all_processes_share(written, listening, caplog):
    caplog.set_level("INFO")
    config = hashing(written, "sha256")
    engine_start.prepare_start(config)
    assert config.cache_config.prefix_caching_hash_algo == "sha256_cbor"
    assert "prefix_caching_hash_algo is sha256_cbor, not vLLM's default sha256" in caplog.text


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
@pytest.mark.parametrize("written", [OURS, OTHER])
def test_without_tiers_the_hash_stays_as_it_is(written, algorithm, listening):
    config = hashing(written, algorithm)
    engine_start.prepare_start(config)
    assert config.cache_config.prefix_caching_hash_algo == algorithm


def test_a_hash_of_pickles_is_refused_with_tiers(listening):
    with pytest.raises(ConfigError, match="Fix: write --prefix-caching-hash-algo sha256_cbor"):
        engine_start.prepare_start(hashing(TIERED, "xxhash"))
    assert not listening


def test_a_hash_with_a_random_seed_is_refused_with_tiers(listening, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        engine_start.prepare_start(hashing(TIERED, "xxhash_cbor"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    engine_start.prepare_start(hashing(TIERED, "xxhash_cbor"))


def test_a_further_api_server_settles_the_hash_too(listening, monkeypatch):
    monkeypatch.setattr(engine_start.last_words, "is_another_listening", lambda: True)
    config = hashing(TIERED, "sha256")
    engine_start.prepare_start(config)
    assert config.cache_config.prefix_caching_hash_algo == "sha256_cbor"
