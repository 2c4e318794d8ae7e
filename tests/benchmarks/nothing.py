"""A connector that does nothing: what vLLM itself asks for any."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class NothingMetadata(KVConnectorMetadata):
    """Nothing."""


class NothingConnector(KVConnectorBase_V1, SupportsHMA):
    """Never hits, loads or stores."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Store nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_tokens: int) -> None:
        """Note nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> NothingMetadata:
        return NothingMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    request_finished_all_groups = request_finished
