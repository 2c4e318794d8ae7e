"""Checks in the process that a user starts, so that an error is the last line of its output.

Workers check the memory again when they allocate it.
"""

import logging
import os
from collections.abc import Mapping
from socket import create_server
from typing import Any, Final

from safe_offload.config.options import MAX_BYTES_PER_SERVER, OffloadConfig
from safe_offload.config.settings import MIN_SIZE_BYTES, refuse
from safe_offload.config.tier_url import FILE
from safe_offload.config.tiers import SHARED_HASH
from safe_offload.config.transfer_config import CONNECTOR_NAME, is_ours, ours_of, settings_of
from safe_offload.config.units import GIB
from safe_offload.errors import ConfigError

_RUST: Final = "VLLM_USE_RUST_FRONTEND"
_EXTRA_KEY: Final = "kv_connector_extra_config"
DEFAULT_HASH: Final = "sha256"
"""vLLM's; its replacement is as strong, since both are SHA-256."""

CHECKED: Final = "SAFE_OFFLOAD_CHECKED"
"""Environment variable: the id of the process that has checked the start, for its children."""

logger = logging.getLogger(f"vllm.{__name__}")


def take_offloading_size(arguments: Any) -> None:
    """Let `--kv-offloading-size` beside our name be our size; vLLM would take another connector.

    As there it is of all ranks, and overrides `cpu_bytes_to_use`. `arguments` are vLLM's
    EngineArgs. Source: vLLM 0.31 to 0.33, VllmConfig._post_init_kv_transfer_config.
    """
    size_gib: Any = getattr(arguments, "kv_offloading_size", None)
    config: Any = getattr(arguments, "kv_transfer_config", None)
    if size_gib is None or not ours_of(config):
        return
    is_number = isinstance(size_gib, int | float) and not isinstance(size_gib, bool)
    if not is_number or not MIN_SIZE_BYTES <= size_gib * GIB <= MAX_BYTES_PER_SERVER:
        allowed = f"a number of GiB, at most {MAX_BYTES_PER_SERVER // GIB}"
        problem, fix = "this is not a size in GiB", "write --kv-offloading-size 64, or omit it"
        refuse("--kv-offloading-size", size_gib, problem, allowed, fix)
    written = config if isinstance(config, dict) else vars(config)
    if not is_ours(written) or getattr(arguments, "kv_offloading_backend", "native") != "native":
        raise ConfigError(
            f"--kv-offloading-size {size_gib:g} would replace {CONNECTOR_NAME} by a connector of "
            f"vLLM's. Fix: remove --kv-offloading-size and --kv-offloading-backend, and "
            f'write "cpu_bytes_to_use": "{size_gib:g}GiB" in kv_connector_extra_config.'
        )
    extra = written.get(_EXTRA_KEY)
    if extra is not None and not isinstance(extra, Mapping):
        return  # which is refused with it
    sized = {**(extra or {}), "cpu_bytes_to_use": int(size_gib * GIB)}
    written[_EXTRA_KEY] = sized
    arguments.kv_offloading_size = None
    logger.info('--kv-offloading-size %g is used as "cpu_bytes_to_use": "%gGiB".', *[size_gib] * 2)


def prepare_start(config: Any) -> None:
    """Settle hashes; refuse a pool, ports and directories that vLLM's `config` cannot use."""
    from safe_offload.compat import engine_config

    parallel = config.parallel_config
    ours = settings_of(config.kv_transfer_config, parallel.world_size)
    if any(settings.uses_blocks_of_others for settings in ours):
        _settle_hashes(config)
    # If another API server has started this one, the engine may have taken the memory already.
    if not ours or _is_checked_by_another():
        return
    for settings in ours if config.cache_config.enable_prefix_caching else ():
        _require_ports(settings, parallel)
        if engine_config.are_workers_here(parallel):
            _require_memory(settings, parallel)
            _require_directories(settings)
    os.environ[CHECKED] = str(os.getpid())


def warn_of_lost_metrics(arguments: Any) -> None:
    """Warn if the /metrics of vLLM's server, whose arguments these are, lacks our series."""
    if not hasattr(arguments, "enable_log_requests") or _is_checked_by_another():
        return
    cause = "--disable-log-stats" if arguments.disable_log_stats else _RUST
    is_lost = arguments.disable_log_stats or os.environ.get(_RUST, "0") != "0"
    ours = settings_of(getattr(arguments, "kv_transfer_config", None)) if is_lost else ()
    if not all(config.metrics_port for config in ours):
        logger.warning(
            'With %s, vLLM\'s /metrics lacks vllm:safe_offload_... Fix: write "metrics_port": '
            "9400 in kv_connector_extra_config, and scrape that port too.",
            cause,
        )


def _is_checked_by_another() -> bool:
    return os.environ.get(CHECKED, "") not in ("", str(os.getpid()))


def _settle_hashes(config: Any) -> None:
    """Replace vLLM's default hash algorithm by one that is the same in all processes.

    Nothing has been hashed yet: the engine's own processes get this configuration.
    """
    from safe_offload.compat import engine_config

    cache_config = config.cache_config
    if cache_config.prefix_caching_hash_algo == DEFAULT_HASH:
        cache_config.prefix_caching_hash_algo = SHARED_HASH
        logger.info(
            "prefix_caching_hash_algo is %s, not vLLM's default %s: shared blocks need hashes "
            "that are the same in every process.",
            SHARED_HASH,
            DEFAULT_HASH,
        )
    engine_config.require_shared_hashes(config)


def _require_ports(config: OffloadConfig, parallel: Any) -> None:
    """Refuse a port now that an engine of this machine could not open after loading the model."""
    first = int(parallel.data_parallel_index)
    is_here = parallel.data_parallel_backend == "mp" and ":" not in config.metrics_host  # no IPv6
    if config.metrics_port is not None and is_here:
        for index in range(first, first + int(parallel.data_parallel_size_local)):
            config.open_metrics(index, lambda port, host: create_server((host, port)).close())


def _require_directories(config: OffloadConfig) -> None:
    """Refuse a directory tier whose path is a file: each access would fail."""
    for tier in config.tiers:
        path = tier.location.path
        if tier.location.scheme == FILE and os.path.exists(path) and not os.path.isdir(path):
            raise ConfigError(
                f'The tier "{path}" is not a directory. Objects are files in a directory; a file '
                "of another connector is not read. Fix: name a directory, or remove the file."
            )


def _require_memory(config: OffloadConfig, parallel: Any) -> None:
    from safe_offload.compat import engine_config
    from safe_offload.worker.memory.host_memory import available_host_bytes, check_host_bytes

    if not config.num_slots and not config.sharing:  # else only a worker knows how many bytes
        check_host_bytes(
            config,
            bytes_per_rank=config.cpu_bytes_per_rank,
            num_ranks_on_host=engine_config.num_ranks_on_host(parallel),
            available_bytes=available_host_bytes(),
        )
