"""A stand-in for NIXL beside ours, under vLLM's real MultiConnector.

What a client asks of it stands in `kv_transfer_params`, as NIXL's. A request with
`do_remote_prefill` has its whole prompt written by another engine, once, at moments that no stream
of this one orders. One with `do_remote_decode` keeps its blocks when it has stopped, until another
engine has read them.
Source: vLLM 0.32.0, kv_connector/v1/nixl/pull_scheduler.py, pull_worker.py, base_worker.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from tests.simulator.groups import Span, spans_written
from tests.simulator.words import place

if TYPE_CHECKING:
    from tests.simulator.engine_core import EngineCore

NAME, MODULE = "RemoteConnector", __name__
BROUGHT, SENT_ON = "do_remote_prefill", "do_remote_decode"
GARBAGE = -7
"""A word that no prefix has."""


@dataclass(frozen=True)
class Move:
    """What is received, or kept to be sent: tokens of a request, and the blocks of each group."""

    request_id: str
    start: int
    end: int
    tables: tuple[Any, ...]


@dataclass
class RemotePlan(KVConnectorMetadata):
    """What the ranks do from a step on."""

    received: list[Move] = field(default_factory=list)
    kept: list[Move] = field(default_factory=list)


class RemoteConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler side. The ranks are `RemoteRank`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._plan = RemotePlan()
        self._computed: dict[str, int] = {}
        specs = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
        self._has_windows = "SlidingWindowSpec" in specs
        self._num_blocks: int = kv_cache_config.num_blocks
        self._held: dict[str, int] = {}  # GPU blocks, by requests that wait or have not gone on

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # Of a prompt that is there, vLLM computes the last token again, and has given up for it the
        # block of the window that only this token reads: a fault of vLLM's, kept out of the way.
        count = request.num_prompt_tokens - self._has_windows - num_computed_tokens
        if not (request.kv_transfer_params or {}).get(BROUGHT) or count <= 0:
            return 0, False
        if self._has_windows and 2 * sum(self._held.values()) > self._num_blocks:
            return None, False  # what vLLM has against a standstill counts too few: loads/admission
        self._computed[request.request_id] = num_computed_tokens
        return count, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if not params.get(BROUGHT):
            return
        params[BROUGHT] = False  # once; whatever it was not chosen for is told to be read
        if num_external_tokens > 0:
            start = self._computed[request.request_id]
            tables = tuple(list(group) for group in blocks.blocks)
            end = start + num_external_tokens
            self._plan.received.append(Move(request.request_id, start, end, tables))
            held = [block for table in tables for block in table if not block.is_null]
            self._held[request.request_id] = len(held)

    def build_connector_meta(self, scheduler_output: Any) -> RemotePlan:
        for request_id in scheduler_output.num_scheduled_tokens:
            self._held.pop(request_id, None)
        plan, self._plan = self._plan, RemotePlan()
        return plan

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._computed.pop(request.request_id, None)
        self._held.pop(request.request_id, None)
        is_sent_on = (request.kv_transfer_params or {}).get(SENT_ON)
        has_stopped = request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        if not (is_sent_on and has_stopped and any(block_ids)):
            return False, None
        pool = self._kv_cache_manager.block_pool.blocks
        tables = tuple([pool[block_id] for block_id in group] for group in block_ids)
        move = Move(request.request_id, 0, request.num_prompt_tokens, tables)
        self._plan.kept.append(move)
        return True, {"remote_block_ids": block_ids}

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._kv_cache_manager = kv_cache_manager

    # What `KVConnectorBase_V1` wants of a worker.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def beside(ours: Any, place: str) -> Any:
    """MultiConnector's configuration, from that of ours; `place`: see `EngineShape.remote`."""
    from vllm.config import KVTransferConfig

    extra = ours.kv_connector_extra_config
    children = [
        {"kv_connector": NAME, "kv_role": "kv_both", "kv_connector_module_path": MODULE},
        {
            "kv_connector": ours.kv_connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    ]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy=ours.kv_load_failure_policy,
        kv_connector_extra_config={"connectors": children if place == "first" else children[::-1]},
    )


def ours_of(connectors: Any) -> Any:
    """The child that is ours."""
    return next(child for child in connectors if not isinstance(child, RemoteConnector))


def split(metadata: Any) -> tuple[Any, Any]:
    """Our plan and the stand-in's, which is None where ours is alone."""
    parts = getattr(metadata, "metadata", None)
    if parts is None:
        return metadata, None
    is_last = isinstance(parts[1], RemotePlan)
    return parts[not is_last], parts[is_last]


def wrap(output: Any, connectors: Any) -> None:
    """Put what the ranks of ours have reported where MultiConnector looks for it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiKVConnectorStats,
        MultiKVConnectorWorkerMetadata,
    )

    ours, report = ours_of(connectors), output.kv_connector_worker_meta
    if report is not None:
        parts = tuple(report if child is ours else None for child in connectors)
        output.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(parts)
    if output.kv_connector_stats is not None:
        stats = {type(ours).__name__: output.kv_connector_stats}
        output.kv_connector_stats = MultiKVConnectorStats(data=stats)


@dataclass
class _Receiving:
    """A transfer that writes blocks of this rank."""

    pending: list[tuple[int, int, int]]  # block, word in it, what is written; the last first
    ticks_left: int
    fails: bool


class RemoteRank:
    """What NIXL does on one rank: words arrive, kept blocks are read, both are reported."""

    def __init__(self, core: EngineCore, rank: int) -> None:
        self._core = core
        self._rank = rank
        self._receiving: dict[str, _Receiving] = {}
        self._kept: dict[str, tuple[Move, int]] = {}
        self._num_moves = 0

    def start(self, plan: RemotePlan) -> None:
        """Begin what a plan names, right where ours begins its loads."""
        for move in plan.received:
            self._receiving[move.request_id] = self._receive(move)
        for move in plan.kept:
            stream = self._stream()
            self._kept[move.request_id] = (move, stream.randint(0, 60))

    def _stream(self) -> Any:
        self._num_moves += 1
        return self._core.chance.stream("remote", self._rank, self._num_moves)

    def _receive(self, move: Move) -> _Receiving:
        stream = self._stream()
        words = [
            (span.block_id, span.first + index, word)
            for group_idx, span in self._spans(move)
            for index, word in enumerate(self._words(move, group_idx, span))
        ]
        stream.shuffle(words)
        fails = stream.random() < self._core.shape.remote_failures
        if fails:
            words = [(b, i, GARBAGE) for b, i, _ in words[: len(words) // 2]]
        return _Receiving(words, stream.randint(0, 40), fails)

    def _spans(self, move: Move) -> list[tuple[int, Span]]:
        return [
            (group_idx, span)
            for group_idx, (group, table) in enumerate(
                zip(self._core.shape.parsed_groups, move.tables, strict=True)
            )
            for span in spans_written(group, table, move.start, move.end)
        ]

    def _words(self, move: Move, group_idx: int, span: Span) -> list[int]:
        shape = self._core.shape
        bits = place(group_idx, shape.holder_of(self._rank))
        return span.words(self._core.runner.sequels[move.request_id], bits, shape.block_words)

    def tick(self) -> None:
        """Time passes."""
        device = self._core.workers[self._rank].device
        for number, receiving in enumerate(self._receiving.values()):
            receiving.ticks_left -= 1
            count = len(receiving.pending)
            if receiving.ticks_left >= 0:
                draw = self._core.chance.bits("remote tick", self._rank, device.num_ticks, number)
                count = draw % (count + 1)
            for _ in range(count):
                block_id, index, word = receiving.pending.pop()
                device.write(block_id, index, [word])
        self._kept = {i: (move, left - 1) for i, (move, left) in self._kept.items()}

    def report(self) -> tuple[set[str], set[str], set[str]]:
        """Requests that were sent, those that were received, and which of these failed."""
        over = [i for i, one in self._receiving.items() if one.ticks_left < 0 and not one.pending]
        failed = {i for i in over if self._receiving.pop(i).fails}
        sent = {i for i, (_, left) in self._kept.items() if left < 0}
        for request_id in sent:
            self._check_kept(self._kept.pop(request_id)[0])
        return sent, set(over), failed

    def _check_kept(self, move: Move) -> None:
        """What was kept until now has been neither overwritten nor given to another."""
        device = self._core.workers[self._rank].device
        for group_idx, span in self._spans(move):

            def found(wrong: str, group_idx: int = group_idx, span: Span = span) -> None:
                self._core.findings.add(
                    "I2",
                    f"rank {self._rank}: what {move.request_id} keeps to be sent, group "
                    f"{group_idx}, block {span.block_id}: {wrong}",
                )

            device.check(span.block_id, span.first, self._words(move, group_idx, span), found)
