"""KV events: they report to routers which blocks can be hit on the host.

A `BlockStored` is added when a block is published in the directory and a `BlockRemoved` when it is
removed, so that a replay reproduces the directory (I12). No `AllBlocksCleared`: that names no
medium, and routers apply it to the GPU's blocks, too. An event needs the tokens of a block, which
are copied from the request when a store begins, because the request may be gone when it settles.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from safe_offload.compat import cache_hits, kv_events, specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")


class Described(Protocol):
    """The fields of a `RequestState` that are used here."""

    request: Request
    # Of its hashes that `Origins` knows; None before it is added and after its end.
    num_learned: int | None


Owner = tuple[Described, int]
"""See `Part.owners`."""
Key = tuple[int, bytes]
"""A KV cache group and a hash: a `directory.Key`."""


@dataclass(frozen=True, slots=True)
class Description:
    """The fields of a `BlockStored` besides the hash, as named by vLLM.

    Bound: the tokens of a block.
    """

    parent_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None

    def follows(self, block_hash: bytes, other: Description) -> bool:
        """Return whether it fits into one event with the block before it."""
        return (
            bool(other.token_ids)
            and self.parent_hash == block_hash
            and self.block_size == other.block_size
            and self.lora_id == other.lora_id
            and self.lora_name == other.lora_name
        )


class Origins:
    """The request of a hash, and the hash's index there.

    Bound: the hashes of live requests, and `num_kept`.

    Args:
        num_kept: maximum number of hashes of ended requests; the oldest are dropped first. Lazy
            stores need those of blocks on the GPU, eager ones none.
    """

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._places: dict[bytes, tuple[Request, int]] = {}
        self._ended: deque[tuple[Request, int]] = deque()
        self._num_ended = 0

    def __repr__(self) -> str:
        return f"Origins({len(self._places)} hashes)"

    def add(self, state: Described) -> None:
        """A request is new."""
        state.num_learned = 0

    def end(self, state: Described) -> None:
        """A request has ended."""
        if state.num_learned is None:
            return
        request, state.num_learned = state.request, None
        # Images, and embeddings in place of tokens, would stay in memory with their request.
        is_large = bool(request.mm_features) or request.prompt_embeds is not None
        if is_large or not self._num_kept:
            self._drop(request)
            return
        self._add_places(
            request, 0
        )  # it is kept longer than those that had some of its hashes before
        self._ended.append((request, len(request.block_hashes)))
        self._num_ended += len(request.block_hashes)
        while self._num_ended > self._num_kept:
            oldest, num_hashes = self._ended.popleft()
            self._num_ended -= num_hashes
            self._drop(oldest)

    def _drop(self, request: Request) -> None:
        for block_hash in request.block_hashes:
            place = self._places.get(block_hash)
            if place is not None and place[0] is request:
                del self._places[block_hash]

    def find(
        self, hashes: Sequence[bytes], owners: Iterable[Described] = ()
    ) -> list[tuple[Request, int] | None]:
        """Return request and index there of each hash; `owners` are requests that may have it."""
        for state in owners:
            self.learn(state)
        found = list(map(self._find, hashes))
        if None in found:  # of two requests that shared it the one that was learned last is gone
            for state in owners:
                self.learn(state, first=0)
            found = list(map(self._find, hashes))
        return found

    def learn(self, state: Described, first: int | None = None) -> None:
        """Learn the hashes that a live request has gained since the last call."""
        if state.num_learned is not None:
            self._add_places(state.request, state.num_learned if first is None else first)
            state.num_learned = len(state.request.block_hashes)

    def _find(self, block_hash: bytes) -> tuple[Request, int] | None:
        place = self._places.get(block_hash)
        if place is None:
            return None
        request, index = place
        hashes = request.block_hashes  # which change if its client changes the prompt
        return place if index < len(hashes) and hashes[index] == block_hash else None

    def _add_places(self, request: Request, first: int) -> None:
        hashes = request.block_hashes
        if first < len(hashes):
            places = zip(repeat(request), count(first), strict=False)
            self._places.update(zip(hashes[first:], places, strict=False))


class KvEvents:
    """Creates vLLM's events from the changes of the directory.

    Bound: a description for each slot that is being stored, a key for each slot, and the events of
    one step.

    Args:
        groups: the event fields of each KV cache group.
        hash_block_size: tokens of one hash of a request.
        is_shared: other engines store, too, and publish their own events.
    """

    def __init__(
        self,
        groups: Sequence[kv_events.EventGroup],
        hash_block_size: int,
        origins: Origins,
        *,
        is_shared: bool = False,
    ) -> None:
        self._is_shared = is_shared
        self._of_others: set[Key] = set()
        self._groups = groups
        self._hash_block_size = hash_block_size
        self._origins = origins
        self._being_stored: dict[Key, Description | None] = {}
        self._events: list[Any] = []
        self._is_withdrawn = False

    def __repr__(self) -> str:
        return f"KvEvents({len(self._events)} to take, {len(self._being_stored)} being stored)"

    @property
    def is_pending(self) -> bool:
        """Whether there are events to take."""
        return bool(self._events)

    # ---- the planner reports -------------------------------------------------------------------

    def seen(self, state: Described) -> None:
        """A request is new."""
        if not self._is_withdrawn:
            self._origins.add(state)

    def learn(self, state: Described) -> None:
        """Learn all hashes of a request again: an ended one with the same has removed them."""
        self._origins.learn(state, first=0)

    def ended(self, state: Described) -> None:
        """A request has ended; lazy stores may still store its blocks."""
        self._origins.end(state)

    def withdraw(self, keys: Iterable[Key]) -> None:
        """Report these, all keys, as removed, and nothing after that."""
        self.removed(keys)
        self._is_withdrawn = True
        self._being_stored.clear()

    # ---- the directory reports -----------------------------------------------------------------

    def storing(self, keys: Iterable[Key], owners: Iterable[Owner] = ()) -> None:
        """Stores of these keys begin, for these requests."""
        if self._is_withdrawn:
            return
        keys, states = list(keys), [state for state, _ in owners]
        places = self._origins.find([block_hash for _, block_hash in keys], states)
        for key, place in zip(keys, places, strict=True):
            self._being_stored[key] = self._describe(key[0], *place) if place else None

    def _describe(self, group_idx: int, request: Request, index: int) -> Description:
        hash_block_size = self._hash_block_size
        end = (index + 1) * hash_block_size
        block_size = self._groups[group_idx].block_size
        if end % block_size:  # vLLM finds a block by its first tokens too, in steps of one hash
            block_size = hash_block_size
        start = end - block_size
        lora = request.lora_request
        return Description(
            parent_hash=request.block_hashes[start // hash_block_size - 1] if start else None,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=block_size,
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            extra_keys=generate_block_hash_extra_keys(request, start, end, 0)[0],
        )

    def published(self, keys: Iterable[Key]) -> None:
        """Stores are published. Consecutive blocks of a prompt are one event, as in vLLM."""
        run: list[tuple[Key, Description]] = []
        for key in keys:
            if key not in self._being_stored:  # forgotten meanwhile
                continue
            description = self._being_stored.pop(key)
            if description is None and self._is_shared:
                self._of_others.add(key)
                continue
            if description is None:  # a lazy store, long after its request
                block_size = self._groups[key[0]].block_size
                description = Description(None, [], block_size, None, None, None)
            if run:
                (group_idx, block_hash), last = run[-1]
                if key[0] != group_idx or not description.follows(block_hash, last):
                    self._add_stored(run)
                    run = []
            run.append((key, description))
        if run:
            self._add_stored(run)

    def _add_stored(self, run: Sequence[tuple[Key, Description]]) -> None:
        (group_idx, _), first = run[0]
        parent = first.parent_hash
        has_extra_keys = any(description.extra_keys for _, description in run)
        extra_keys = [description.extra_keys for _, description in run] if has_extra_keys else None
        self._events.append(
            kv_events.block_stored(
                self._groups[group_idx],
                block_hashes=[maybe_convert_block_hash(block_hash) for (_, block_hash), _ in run],
                parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                token_ids=[token for _, description in run for token in description.token_ids],
                block_size=first.block_size,
                lora_id=first.lora_id,
                lora_name=first.lora_name,
                extra_keys=to_event_extra_keys(extra_keys),
            )
        )

    def removed(self, keys: Iterable[Key]) -> None:
        """Keys are dropped, including those of unsettled stores."""
        if self._is_withdrawn:
            return
        hashes: defaultdict[int, list[bytes | int]] = defaultdict(list)
        for key in keys:
            if key in self._being_stored:
                del self._being_stored[key]
            elif key in self._of_others:
                self._of_others.remove(key)
            else:
                group_idx, block_hash = key
                hashes[group_idx].append(maybe_convert_block_hash(block_hash))
        for group_idx, block_hashes in hashes.items():
            self._events.append(kv_events.block_removed(self._groups[group_idx], block_hashes))

    # ---- vLLM asks -----------------------------------------------------------------------------

    def take(self) -> Sequence[Any]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events


def make_events(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    is_lazy: bool,
    is_shared: bool = False,
) -> KvEvents | None:
    """Return the source of KV events, or None if vLLM publishes none.

    If lazy, blocks are also stored after their requests have ended. For `is_shared`, see
    `KvEvents`.
    """
    if not kv_events.publishes_kv_events(vllm_config):
        return None
    if (endpoint := kv_events.event_endpoint(vllm_config)) is not None:
        # vLLM has no hook that leaves them out: its pool of blocks has one switch for all requests.
        logger.warning(
            "vLLM's own KV events (medium GPU) contain the tokens of all requests, even those "
            'with "store": "nothing". Fix: restrict access to %s to your router.',
            endpoint,
        )
    sizes = specs.resolve_block_sizes(kv_cache_config, vllm_config)
    config = replace(kv_cache_config, num_blocks=1)
    coordinator = cache_hits.make_coordinator(vllm_config, config, *sizes)
    groups = kv_events.event_groups(kv_cache_config, coordinator.group_block_sizes)
    hash_block_size = sizes[1]
    hashes_per_block = max(group.block_size for group in groups) // hash_block_size
    num_kept = 2 * kv_cache_config.num_blocks * hashes_per_block if is_lazy else 0
    return KvEvents(groups, hash_block_size, Origins(num_kept), is_shared=is_shared)
