"""The environment of a client of Mooncake Store, and the software and devices that it needs."""

from __future__ import annotations

import os
from typing import Final

from safe_offload.config.printing import printable
from safe_offload.config.tiers import MooncakeConfig
from safe_offload.errors import ConfigError

TCP: Final = "tcp"
RDMA: Final = "rdma"

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


def require_usable(config: MooncakeConfig) -> None:
    """Raise a ConfigError if a package, a library or a device is missing."""
    if problem := _problem_of(config):
        raise ConfigError(f"the tier {config.location.label} cannot be used: {problem}")


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
