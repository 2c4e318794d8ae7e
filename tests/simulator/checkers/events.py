"""I12: replaying the KV events gives exactly what can be hit on the host."""

from collections.abc import Callable, Sequence
from typing import Any

from tests.simulator.checkers.taps import tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding

MEDIUM = "CPU"
Replayed = set[tuple[int, Any]]
"""KV cache group and hash, as events have it."""


class EventChecker:
    """A router: it reads what vLLM publishes, as it is on the wire, and believes it.

    What can be hit it asks the directory, as a hit does. What a block is made of it asks vLLM's
    requests.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._side = core.connector.side
        self.replayed: Replayed = set()
        self._blocks: dict[Any, tuple[Any, list[int], str | None]] = {}
        """By the hash of `EngineShape.hash_tokens` tokens: the hash before, the tokens, the salt"""
        self._num_hashes: dict[Any, int] = {}
        self._stored_here: Replayed = set()
        """By this engine of a pool, for requests: others tell what they have stored."""
        if core.shape.has_events and core.node is not None:
            tap(self._side.hits.directory, "begin_store", self._see_store)
        if core.shape.has_events:
            tap(core.scheduler, "add_request", self._see_request)
            tap(core.scheduler.kv_event_publisher, "publish", self._see_published)

    def check(self) -> None:
        """Compare, unless something has not been published yet."""
        if not self._core.shape.has_events or self._side.hits.directory.events.is_pending:
            return
        expected = self._in_the_directory()
        if self._core.node is not None:
            expected &= self._stored_here | self.replayed
        if self.replayed != expected:
            raise Finding(
                "I12",
                f"told of {len(self.replayed - expected)} blocks that cannot be hit, "
                f"not of {len(expected - self.replayed)} that can",
            )

    def check_drained(self) -> None:
        """Once all work has drained, nothing waits to be published."""
        if self._core.shape.has_events and self._side.hits.directory.events.is_pending:
            raise Finding("I12", "KV events wait to be published, and the engine is idle")

    def _in_the_directory(self) -> Replayed:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        if self._side.statistics().is_disabled:
            return set()
        directory = self._side.hits.directory
        return {
            (group_idx, maybe_convert_block_hash(block_hash))
            for group_idx, table in enumerate(directory.tables)
            for block_hash in table
            if directory.find(group_idx, block_hash) is not None
        }

    def _see_store(
        self,
        original: Callable[..., None],
        slots: Sequence[int],
        group_idx: int,
        hashes: Sequence[bytes],
        more_keys: Any,
        owners: Sequence[Any] = (),
    ) -> None:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        original(slots, group_idx, hashes, more_keys, owners)
        keys = {(group_idx, maybe_convert_block_hash(block_hash)) for block_hash in hashes}
        self._stored_here = self._stored_here | keys if owners else self._stored_here - keys

    # ---- what vLLM knows and publishes ---------------------------------------------------------

    def _see_request(self, original: Callable[[Any], None], request: Any) -> None:
        self._num_hashes[request] = 0
        original(request)

    def _see_published(self, original: Callable[[Any], None], batch: Any) -> None:
        import msgspec
        from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

        original(batch)
        self._learn_hashes()
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
        for event in sent.events:
            if getattr(event, "medium", MEDIUM) != MEDIUM:
                continue
            if isinstance(event, BlockStored):
                self._replay_stored(event)
            elif isinstance(event, BlockRemoved):
                self._replay_removed(event)

    def _replay_stored(self, event: Any) -> None:
        keys = [(event.group_idx, block_hash) for block_hash in event.block_hashes]
        if len(set(keys)) < len(keys) or not self.replayed.isdisjoint(keys):
            raise Finding("I12", "told of a block that was there already")
        self.replayed.update(keys)
        group = self._core.shape.parsed_groups[event.group_idx]
        if (event.locality, event.lora_id, event.lora_name) != ("LOCAL", None, None):
            raise Finding("I12", f"wrong fields: {event}")
        if (event.kv_cache_spec_sliding_window is not None) != (group.kind == "window"):
            raise Finding("I12", f"a window of {event.kv_cache_spec_sliding_window}: {group}")
        if event.block_size not in (group.block_tokens, self._core.shape.hash_tokens):
            raise Finding("I12", f"a block of {event.block_size} tokens: {group}")
        if event.token_ids:
            self._check_tokens(event)
        else:
            self._check_may_lack_tokens(event)

    def _check_tokens(self, event: Any) -> None:
        """What the event says of each block is what its request says."""
        size, parent = event.block_size, event.parent_block_hash
        if len(event.token_ids) != size * len(event.block_hashes):
            raise Finding("I12", f"{len(event.token_ids)} tokens in blocks of {size}: {event}")
        for index, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[index * size : (index + 1) * size]
            extra_keys = event.extra_keys[index] if event.extra_keys else None
            last, salt = block_hash, None
            found: list[int] = []
            for _ in range(size // self._core.shape.hash_tokens):
                last, part, salt = self._blocks[last]
                found = part + found
            if (parent, tokens) != (last, found):
                raise Finding("I12", f"a block of other tokens than said: {event}")
            if extra_keys != ((salt,) if salt and last is None else None):
                raise Finding("I12", f"a salt that is not the request's: {event}")
            parent = block_hash

    def _check_may_lack_tokens(self, event: Any) -> None:
        """Only lazy stores forget what a block was made of, long after its request."""
        if not self._core.config.lazy_offload:
            raise Finding("I12", f"tokens of a block are not told: {event}")

    def _replay_removed(self, event: Any) -> None:
        keys = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
        if not keys <= self.replayed:
            raise Finding("I12", "told that a block is gone that was not there")
        self.replayed -= keys

    def _learn_hashes(self) -> None:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        size = self._core.shape.hash_tokens
        for request, num_known in list(self._num_hashes.items()):
            hashes = request.block_hashes
            for index in range(num_known, len(hashes)):
                before = maybe_convert_block_hash(hashes[index - 1]) if index else None
                tokens = list(request.all_token_ids[index * size : (index + 1) * size])
                block_hash = maybe_convert_block_hash(hashes[index])
                self._blocks[block_hash] = before, tokens, request.cache_salt
            self._num_hashes[request] = len(hashes)
            if request.is_finished():
                del self._num_hashes[request]
