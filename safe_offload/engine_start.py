"""Checks in the process that a user starts, before it starts the engine's own processes.

An error here is the last thing that is printed. Workers check the memory again when they take it.
"""

from collections.abc import Mapping
from typing import Any

from safe_offload import last_words
from safe_offload.config import OffloadConfig
from safe_offload.errors import ConfigError
from safe_offload.transfer_config import CONNECTOR_NAME, children_of, is_ours


def require_no_other_offloading(arguments: Any) -> None:
    """Refuse the flag with which vLLM silently takes another connector.

    Args:
        arguments: vLLM's EngineArgs.

    Raises:
        ConfigError: `--kv-offloading-size` is set beside a configuration that names us.

    Source: vLLM 0.32.0, VllmConfig._post_init_kv_transfer_config.
    """
    size_gib = getattr(arguments, "kv_offloading_size", None)
    if size_gib is None or not _ours(getattr(arguments, "kv_transfer_config", None)):
        return
    raise ConfigError(
        f"--kv-offloading-size {size_gib:g} makes vLLM use a connector of its own in the place of "
        f"{CONNECTOR_NAME}. Fix: remove --kv-offloading-size (and --kv-offloading-backend), and "
        f'write "cpu_bytes_to_use": "{size_gib:g}GiB" in kv_connector_extra_config.'
    )


def prepare_start(config: Any) -> None:
    """Refuse a host pool that this machine cannot hold, and listen for what the engine refuses.

    Args:
        config: vLLM's VllmConfig.

    Raises:
        ConfigError: the pool is too large.
    """
    ours = _ours(config.kv_transfer_config)
    # If another API server has started this one, the engine may have taken the memory already.
    if not ours or last_words.is_another_listening():
        return
    parallel = config.parallel_config
    # Workers that Ray starts, or of an engine elsewhere, use another machine's memory.
    is_here = parallel.distributed_executor_backend in ("mp", "uni") and (
        parallel.data_parallel_size_local > 0
    )
    for written in ours if is_here and config.cache_config.enable_prefix_caching else ():
        _require_memory(written, parallel)
    last_words.listen()


def _ours(transfer_config: Any) -> list[Mapping[str, Any]]:
    """Return every configuration of our connector in a KVTransferConfig, a mapping or None."""
    if transfer_config is None:
        return []
    is_mapping = isinstance(transfer_config, Mapping)
    written = transfer_config if is_mapping else vars(transfer_config)
    return [each for each in (written, *children_of(written)) if is_ours(each)]


def _require_memory(written: Mapping[str, Any], parallel: Any) -> None:
    from safe_offload.worker.host_memory import available_host_bytes, check_host_bytes

    config = OffloadConfig.from_extra_config(
        written.get("kv_connector_extra_config"), world_size=parallel.world_size
    )
    if config.num_slots is not None:
        return  # only a worker knows how many bytes that is
    check_host_bytes(
        config,
        pool_bytes_per_rank=config.cpu_bytes_per_rank,
        num_ranks_on_host=getattr(parallel, "local_world_size", parallel.world_size),
        available_bytes=available_host_bytes(),
    )
