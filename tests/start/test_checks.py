"""What is refused in the process that the user starts, before it starts the engine's own."""

import contextlib
import functools
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from safe_offload.config.tiers import SHARED_HASH
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


@pytest.mark.parametrize("make", [dict, lambda written: SimpleNamespace(**written)])
@pytest.mark.parametrize("extra", [None, {}, {"cpu_bytes_to_use": 1, "lazy_offload": True}])
def test_the_flag_that_would_replace_us_is_our_size(make, extra, caplog):
    """As with vLLM's connectors, it counts before `cpu_bytes_to_use`."""
    written = {**OURS, "kv_connector_extra_config": extra}
    arguments = SimpleNamespace(kv_offloading_size=2.5, kv_transfer_config=make(written))
    with caplog.at_level("INFO", "vllm.safe_offload.start.checks"):
        engine_start.take_offloading_size(arguments)
        engine_start.take_offloading_size(arguments)
    config = arguments.kv_transfer_config
    taken = (config if make is dict else vars(config))["kv_connector_extra_config"]
    assert taken == {**(extra or {}), "cpu_bytes_to_use": 5 << 29}
    assert arguments.kv_offloading_size is None
    assert caplog.messages == ['--kv-offloading-size 2.5 is used as "cpu_bytes_to_use": "2.5GiB".']


@pytest.mark.parametrize(
    ("written", "backend"), [(multi(OTHER, OURS), "native"), (OURS, "lmcache")]
)
@pytest.mark.parametrize("make", [dict, lambda written: SimpleNamespace(**written)])
def test_the_flag_that_replaces_us_is_refused(written, backend, make):
    arguments = SimpleNamespace(
        kv_offloading_size=2.0,
        kv_offloading_backend=backend,
        kv_transfer_config=make(written),
    )
    with pytest.raises(ConfigError, match='write "cpu_bytes_to_use": "2GiB"'):
        engine_start.take_offloading_size(arguments)


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
    found = SimpleNamespace(**arguments)
    engine_start.take_offloading_size(found)
    assert vars(found) == arguments


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """No process above this one has checked the start, and this one leaves no mark."""
    monkeypatch.setenv(engine_start.CHECKED, "")


def is_checked() -> bool:
    """Whether the processes that this one starts leave the checks to it."""
    return os.environ[engine_start.CHECKED] == str(os.getpid())


def engine(written: dict[str, Any] | None, **parallel: Any) -> SimpleNamespace:
    defaults = {
        "distributed_executor_backend": "mp",
        "data_parallel_size_local": 1,
        "data_parallel_index": 0,
        "data_parallel_backend": "mp",
        "world_size": 4,
        "local_world_size": 4,
    }
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**written) if written else None,
        parallel_config=SimpleNamespace(**defaults | parallel),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )


@pytest.fixture
def taken_port():
    """A port at which something listens, while the one before it is free and nobody is given it."""
    for _ in range(1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with socket.socket() as holder:
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(("127.0.0.1", port - 1))
                yield port
                return


@pytest.mark.parametrize("key", ["tiers", "secondary_tiers", "shared_storage_path", "disk_path"])
def test_a_file_where_a_tier_wants_a_directory_is_refused(key, tmp_path, monkeypatch):
    """As SimpleCPUOffloadConnector leaves one behind at `disk_path`."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    path = tmp_path / "slots.bin"
    value: Any = {
        "tiers": [{"url": f"file://{path}"}],
        "secondary_tiers": [{"type": "fs", "root_dir": str(path)}],
    }.get(key, str(path))
    written = sized(10, "num_cpu_blocks")
    written["kv_connector_extra_config"] |= {key: value}
    if key == "disk_path":
        written["kv_connector_extra_config"]["kv_offload_backend"] = "disk"
    config = hashing(written, SHARED_HASH)
    prepare = functools.partial(engine_start.prepare_start, config)
    prepare()  # it may be made later
    path.write_bytes(bytes(4096))
    with pytest.raises(ConfigError, match=r'The tier ".*slots.bin" is not a directory'):
        prepare()
    config.parallel_config.distributed_executor_backend = "ray"
    prepare()  # the workers may be elsewhere
    config.parallel_config.distributed_executor_backend = "mp"
    path.unlink()
    path.mkdir()
    prepare()


@pytest.mark.parametrize("first", [0, 1])
def test_a_port_for_metrics_that_is_taken_is_refused_before_the_engine_starts(first, taken_port):
    """Two engines on this machine: the port of the second is taken."""
    written = sized(taken_port - 1 - first, "metrics_port")
    written["kv_connector_extra_config"]["num_cpu_blocks"] = 10  # whatever memory there is
    local = {"data_parallel_size_local": 2, "data_parallel_index": first}
    with pytest.raises(ConfigError, match=f"127.0.0.1:{taken_port} cannot be opened"):
        engine_start.prepare_start(engine(written, **local))
    assert not is_checked()
    for elsewhere in ({"data_parallel_backend": "ray"}, {"data_parallel_size_local": 1}):
        engine_start.prepare_start(engine(written, **(local | elsewhere)))


SERVER = {"enable_log_requests": False, "disable_log_stats": False}


@pytest.mark.parametrize(
    ("arguments", "rust", "cause"),
    [
        (SERVER, "1", "VLLM_USE_RUST_FRONTEND"),
        ({**SERVER, "disable_log_stats": True}, "0", "--disable-log-stats"),
        (SERVER, "0", None),
        (SERVER, None, None),
        ({"disable_log_stats": True}, "1", None),  # no server
    ],
)
def test_it_is_said_where_vllm_drops_our_metrics(arguments, rust, cause, caplog, monkeypatch):
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    if rust is not None:
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", rust)
    served = sized(9400, "metrics_port")
    for written, is_lost in ((OURS, True), (multi(OTHER, OURS), True), (served, False)):
        caplog.clear()
        engine_start.warn_of_lost_metrics(
            SimpleNamespace(**arguments, kv_transfer_config=SimpleNamespace(**written))
        )
        assert len(caplog.messages) == (is_lost and cause is not None)
        for message in caplog.messages:
            assert message.startswith(f"With {cause}, vLLM's /metrics lacks vllm:safe_offload")
            assert 'Fix: write "metrics_port": 9400' in message
    for nothing in (None, SimpleNamespace(**OTHER)):
        engine_start.warn_of_lost_metrics(SimpleNamespace(**arguments, kv_transfer_config=nothing))
    assert not caplog.messages


@pytest.mark.parametrize("written", [sized("4096TiB"), multi(OTHER, sized("4096TiB"))])
def test_a_pool_that_the_machine_cannot_hold_is_refused_before_the_engine_starts(written):
    with pytest.raises(ConfigError, match=r"needs 4096.00 TiB \(4 ranks on this machine"):
        engine_start.prepare_start(engine(written))
    assert not is_checked()


def test_all_data_parallel_engines_of_the_machine_are_counted(monkeypatch):
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
    assert is_checked()


@pytest.mark.parametrize(
    "config",
    [
        engine(sized("1MiB")),
        engine(sized(2**31 - 1, "num_cpu_blocks")),
        engine(sized("4096TiB"), distributed_executor_backend="ray"),
        engine(sized("4096TiB"), data_parallel_size_local=0),
    ],
)
def test_a_pool_that_may_fit_is_left_to_the_workers(config):
    engine_start.prepare_start(config)
    assert is_checked()


def test_without_prefix_caching_no_pool_is_taken():
    config = engine(sized("4096TiB"))
    config.cache_config.enable_prefix_caching = False
    engine_start.prepare_start(config)


def test_in_a_further_api_server_the_memory_is_the_engines_already(monkeypatch):
    monkeypatch.setenv(engine_start.CHECKED, "1")
    engine_start.prepare_start(engine(sized("4096TiB")))
    assert not is_checked()


@pytest.mark.parametrize("written", [None, OTHER, multi(OTHER)])
def test_engines_without_us_are_none_of_our_business(written):
    engine_start.prepare_start(engine(written))
    assert not is_checked()


# ---- hashes that tiers need ----------------------------------------------------------------------

TIERED = sized([{"url": "file:///mnt/nvme/kv"}], "tiers")
SHARED = sized("node", "share")


def hashing(written: dict[str, Any], algorithm: str) -> SimpleNamespace:
    config = engine(written)
    config.cache_config.prefix_caching_hash_algo = algorithm
    return config


@pytest.mark.parametrize("written", [TIERED, multi(OTHER, TIERED), SHARED])
def test_with_tiers_the_default_hash_is_one_that_all_processes_share(written, caplog):
    caplog.set_level("INFO")
    config = hashing(written, "sha256")
    engine_start.prepare_start(config)
    assert config.cache_config.prefix_caching_hash_algo == "sha256_cbor"
    assert "prefix_caching_hash_algo is sha256_cbor, not vLLM's default sha256" in caplog.text


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
@pytest.mark.parametrize("written", [OURS, OTHER])
def test_without_tiers_the_hash_stays_as_it_is(written, algorithm):
    config = hashing(written, algorithm)
    engine_start.prepare_start(config)
    assert config.cache_config.prefix_caching_hash_algo == algorithm


def test_a_hash_of_pickles_is_refused_with_tiers():
    with pytest.raises(ConfigError, match="Fix: write --prefix-caching-hash-algo sha256_cbor"):
        engine_start.prepare_start(hashing(TIERED, "xxhash"))
    assert not is_checked()


def test_a_hash_with_a_random_seed_is_refused_with_tiers(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        engine_start.prepare_start(hashing(TIERED, "xxhash_cbor"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    engine_start.prepare_start(hashing(TIERED, "xxhash_cbor"))


def test_a_further_api_server_settles_the_hash_too(monkeypatch):
    monkeypatch.setenv(engine_start.CHECKED, "1")
    config = hashing(TIERED, "sha256")
    engine_start.prepare_start(config)
    assert config.cache_config.prefix_caching_hash_algo == "sha256_cbor"
