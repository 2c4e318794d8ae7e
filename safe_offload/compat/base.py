"""vLLM's base classes of a connector and of its messages, and its names for hit sources."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HIT_SOURCES: Any = {"": CacheHitSource.HOST, "file": CacheHitSource.DISK}
    OTHER_HIT_SOURCE: Any = CacheHitSource.EXTERNAL_UNSPECIFIED
except ImportError:  # vLLM 0.31 does not distinguish hit sources
    HIT_SOURCES, OTHER_HIT_SOURCE = {}, None

__all__ = [
    "HIT_SOURCES",
    "OTHER_HIT_SOURCE",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
]
