"""What tests ask of host memory."""

from safe_offload.errors import InvariantError
from safe_offload.worker.memory.host_memory import HostMemory


def is_closed(memory: HostMemory) -> bool:
    """Whether the memory has been given back: it refuses to be used."""
    try:
        _ = memory.tensor
    except InvariantError:
        return True
    return False
