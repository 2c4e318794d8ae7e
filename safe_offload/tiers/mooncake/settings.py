"""Settings of a client of Mooncake Store, and the software and devices that it needs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from safe_offload.config.files import read_file
from safe_offload.config.printing import printable
from safe_offload.config.settings import size
from safe_offload.config.tiers import MAX_CAPACITY_BYTES, MooncakeConfig
from safe_offload.errors import ConfigError

TCP: Final = "tcp"
RDMA: Final = "rdma"
_DEFAULTS: Final = {"protocol": TCP, "device_name": "", "metadata_server": "P2PHANDSHAKE"}

# Without these a client tries for a minute and a half to reach a master, waits half a minute for a
# master or for each object of a machine that has stopped, and logs each step.
ENVIRONMENT: Final = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_LOG_LEVEL": "ERROR",
    # Otherwise each range of an object has a connection of its own; one moves a range at a time.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": "16",
}
_DEVICES: Final = "/sys/class/infiniband"
_FILE_BYTES_MAX: Final = 1 << 16


def complete(config: MooncakeConfig) -> MooncakeConfig:
    """Add the settings of `config_file`, and defaults.

    ConfigError: the file, a package, a library or a device is missing.
    """
    found = _read(config.config_file) if config.config_file else {}
    more: dict[str, Any] = {
        key: getattr(config, key) or found.get(key) or default for key, default in _DEFAULTS.items()
    }
    if config.segment_bytes is None and (written := found.get("global_segment_size")):
        more["segment_bytes"] = size(MAX_CAPACITY_BYTES).read("global_segment_size", written)
    config = replace(config, **more)
    if problem := _problem_of(config):
        raise ConfigError(f"the tier {config.location.label} cannot be used: {problem}")
    return config


def _problem_of(config: MooncakeConfig) -> str:
    try:
        import mooncake.store  # noqa: F401
    except ModuleNotFoundError:
        return "Mooncake is not installed. Fix: pip install 'safe-offload[mooncake]'."
    except ImportError as error:
        return (
            f"Mooncake cannot be loaded: {printable(str(error))}. Fix: apt-get install "
            "libibverbs1 librdmacm1 libcurl4 libnuma1."
        )
    devices = os.listdir(_DEVICES) if os.path.isdir(_DEVICES) else []
    if config.protocol == RDMA and not devices:
        return (
            f'"protocol" is "{RDMA}", and there is no RDMA device in {_DEVICES}. Fix: give the '
            f'container its devices (/dev/infiniband), or write "protocol": "{TCP}".'
        )
    names = [name.strip() for name in config.device_name.split(",") if name.strip()]
    if config.protocol == RDMA and (unknown := sorted({*names} - {*devices})):
        return (
            f'"device_name" names {unknown[0]}, which is not there. Fix: write one or more of '
            f"{', '.join(sorted(devices))}, or leave it out for all."
        )
    return ""


def _read(path: str) -> Mapping[str, Any]:
    """Return the content of a file as vLLM's MOONCAKE_CONFIG_PATH names it."""
    problem, found = "", {}
    try:
        found = json.loads(read_file(path, _FILE_BYTES_MAX)[0])
        texts = [found.get(key, "") for key in ("protocol", "device_name", "metadata_server")]
        if not all(isinstance(text, str) for text in texts) or texts[0] not in ("", TCP, RDMA):
            problem = "it has another protocol, device_name or metadata_server than Mooncake knows"
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
    except (ValueError, RecursionError, AttributeError):
        problem = "it is no mapping in JSON"
    if problem:
        raise ConfigError(
            f'"config_file" {path} cannot be used: {problem}. Fix: give the path of the file that '
            "MOONCAKE_CONFIG_PATH names for vLLM's MooncakeStoreConnector."
        )
    return found
