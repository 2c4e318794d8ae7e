"""The connector that nobody can build: it has all that was computed, and a load takes no time.

On virtual time it says what the KV pool alone costs: requests wait where it does not hold them all.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tests.benchmarks.nothing import NothingConnector, NothingMetadata

IDEAL = "IdealConnector"
KVConnectorFactory.register_connector(IDEAL, __name__, IDEAL)


class IdealConnector(NothingConnector):
    """Hits end at any block; what a step computes is there from the next one on."""

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self._block_size = self._vllm_config.cache_config.block_size
        self._requests: dict[str, Any] = {}
        self._hashes: set[bytes] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        """Return a hit that needs no load."""
        end = num_computed // self._block_size
        last = (request.num_tokens - 1) // self._block_size
        while end < last and request.block_hashes[end] in self._hashes:
            end += 1
        return end * self._block_size - num_computed, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_tokens: int) -> None:
        self._requests[request.request_id] = request

    def build_connector_meta(self, scheduler_output: Any) -> NothingMetadata:
        for name, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[name]
            end = (request.num_computed_tokens + num_tokens) // self._block_size
            self._hashes.update(request.block_hashes[:end])
        return super().build_connector_meta(scheduler_output)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._requests.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    request_finished_all_groups = request_finished
