"""What vLLM's model runners do in a step, as far as KV cache and tokens are concerned.

It reads vLLM's block tables as they stand when a step has been scheduled and says which words the
step reads and writes. The tokens that it samples are those that the prefix leads to
(`words.Sequel`), whatever the memory holds: a wrong word in memory is a finding of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.simulator.chance import Chance
from tests.simulator.device import Device
from tests.simulator.findings import Findings
from tests.simulator.groups import NO_REPLAY, Group, Span, spans_read, spans_written
from tests.simulator.vllm_setup import EngineShape
from tests.simulator.words import VOCABULARY, Sequel, place, wrong

ATTENTION = ("full", "mla", "window", "chunk", "replay")
"""Kinds of groups whose new blocks vLLM zeroes, if there are states or several precisions."""


@dataclass(slots=True)
class RequestWork:
    """What one request reads and writes in one step, for each group."""

    request_id: str
    sequel: Sequel
    start: int
    reads: list[list[Span]]
    writes: list[list[Span]]
    wrong: list[list[Span]]  # writes of draft tokens that turn out wrong
    # States that are copied to another block ahead of the forward: what is read, where it goes
    # (Mamba, when a step crosses into a new block).
    moved: list[tuple[int, int]]
    # States that are copied behind it, to the block of the boundary that drafts passed.
    saved: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StateColumns:
    """Where in a block table a step with drafts has its Mamba states.

    Each draft leaves a state in a column of its own. The right one is read there by the next step,
    or moved to where that step has its first. Source: vLLM 0.32.0, v1/worker/mamba_utils.py,
    preprocess_mamba and postprocess_mamba_fused_kernel.
    """

    read: int  # of the state behind what was computed before; negative if there is none
    first: int  # of the state behind the tokens that are no drafts
    moved: list[tuple[int, int]]  # ahead of the forward, from one column to another
    saved: list[tuple[int, int]]  # behind it
    next: tuple[int, int]  # first column, and how many behind it the next step finds its state

    @classmethod
    def of(
        cls, before: tuple[int, int] | None, block: int, start: int, running: int, ends: range
    ) -> StateColumns:
        """Find them.

        Args:
            before: `next` of the step before.
            start: tokens that are computed before.
            running: tokens behind those of the step that are no drafts.
            ends: from there with the drafts that are right to there with all drafts.
        """
        column, offset = before if before is not None else ((start - 1) // block, 0)
        first = (ends.stop - 1) // block
        moved, saved = [], []
        if column >= 0 and column != first:
            moved, offset = [(column + offset, first)], 0
        boundary = ends.start // block * block
        after = ends.start - running
        if boundary >= max(running, 1):
            source, target = first + boundary - running, boundary // block - 1
            saved = [(source, target)] if source != target else []
            after = 0 if first == target else after
        return cls(first + offset if column >= 0 else -1, first, moved, saved, (first, after))


@dataclass(slots=True)
class Batch:
    """One step: what the scheduler asked for, what the ranks do, what is sampled."""

    number: int
    scheduled: Any
    works: list[RequestWork]
    sampled: list[list[int]]
    drafts: dict[str, list[int]]  # what the drafter proposes for the next step, by request
    zeroed: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]
    results: dict[int, Any] = field(default_factory=dict)
    spoilt: set[str] = field(default_factory=set)  # requests that have read what was not loaded

    @property
    def request_ids(self) -> list[str]:
        return list(self.scheduled.num_scheduled_tokens)


class ModelRunner:
    """Prepares the steps of all ranks.

    `shape`: of the engine; `scheduler`: vLLM's, whose block tables are read; `chance`: decides
    which draft tokens are right; `findings`: where a wrong word is reported.
    """

    def __init__(
        self, shape: EngineShape, scheduler: Any, chance: Chance, findings: Findings
    ) -> None:
        self._shape = shape
        self._scheduler = scheduler
        self._chance = chance
        self._findings = findings
        self._num_batches = 0
        self._num_computed: dict[str, int] = {}
        self._num_loaded: dict[str, int] = {}
        self._columns: dict[str, tuple[int, int]] = {}
        self._excused: dict[tuple[int, int], int] = {}  # last step, by rank and block
        self._is_zeroed = scheduler.kv_cache_manager.kv_cache_config.needs_kv_cache_zeroing
        self.sequels: dict[str, Sequel] = {}

    def load_in_step(self, request_id: str, num_tokens: int) -> None:
        """Let the next step of a request write these tokens too, which vLLM counts as computed."""
        self._num_loaded[request_id] = num_tokens

    def excuse(self, rank: int, block_ids: set[int], last_step: int) -> None:
        """Up to this step a rank may read blocks that it has not loaded, as vLLM is told of it."""
        self._excused.update(((rank, block_id), last_step) for block_id in block_ids)

    def prepare(self, scheduled: Any) -> Batch:
        """Read the block tables of a step that has just been scheduled."""
        for request_id in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            self._num_computed.pop(request_id, None)
            self._columns.pop(request_id, None)
        works, sampled = [], []
        drafts: dict[str, list[int]] = {}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            num_loaded = self._num_loaded.pop(request_id, 0)
            work, tokens = self._work(scheduled, request_id, num_loaded + count)
            works.append(work)
            sampled.append(tokens)
            if tokens and self._shape.num_draft_tokens:
                drafts[request_id] = self._draft(request_id)
        batch = Batch(
            self._num_batches,
            scheduled,
            works,
            sampled,
            drafts,
            tuple(scheduled.new_block_ids_to_zero or ()),
            tuple(
                (copy.src_block_id, copy.dst_block_id)
                for copy in getattr(scheduled, "kv_cache_block_copies", None) or ()
            ),
        )
        self._num_batches += 1
        return batch

    def _work(self, scheduled: Any, request_id: str, count: int) -> tuple[RequestWork, list[int]]:
        request = self._scheduler.requests[request_id]
        sequel = self.sequels[request_id]
        start = request.num_computed_tokens - count
        # With speculative decoding the scheduler runs ahead of what was accepted.
        start = min(start, self._num_computed.get(request_id, start))
        draft_ids = scheduled.scheduled_spec_decode_tokens.get(request_id, ())
        tokens: list[int] = []
        right_end = start + count
        if not request.is_prefill_chunk:
            num_accepted = self._num_accepted(request_id, start + count - len(draft_ids), draft_ids)
            right_end = start + count - len(draft_ids) + num_accepted
            tokens = [sequel.token(right_end - i) for i in range(num_accepted, -1, -1)]
        self._num_computed[request_id] = right_end
        work = RequestWork(request_id, sequel, start, [], [], [], [], [])
        replay = self._replay(request)
        columns = None
        end = start + count
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        for group, manager in zip(self._shape.parsed_groups, managers, strict=True):
            table = manager.req_to_blocks[request_id]
            if group.kind == "mamba" and self._shape.num_draft_tokens:
                columns = StateColumns.of(
                    self._columns.get(request_id),
                    group.block_tokens,
                    start,
                    end - len(draft_ids),
                    range(right_end, end),
                )
                _add_states(work, columns, table, end - len(draft_ids), right_end, end)
            else:
                work.reads.append(spans_read(group, table, start, replay))
                work.writes.append(spans_written(group, table, start, right_end, replay))
                is_all_right = right_end == end
                rest = [] if is_all_right else spans_written(group, table, right_end, end)
                work.wrong.append(rest)
                work.moved += _moved(group, table, start, end)
            checkpoint = getattr(manager, "_checkpoints", {}).get(request_id)
            if checkpoint is not None and start < checkpoint[0] < end:
                block_id = table[checkpoint[1]].block_id
                work.writes[-1].append(Span(block_id, 0, start, checkpoint[0], is_state=True))
        if columns is not None:
            self._columns[request_id] = columns.next
        return work, tokens

    def _replay(self, request: Any) -> range:
        """Positions that are computed again because a hit brings no sliding windows."""
        start = getattr(request, "replay_start", 0)
        if not start:
            return NO_REPLAY
        return range(start, start + self._scheduler.prefix_replay_tokens)

    def _num_accepted(self, request_id: str, first: int, draft_ids: Any) -> int:
        """How many leading draft tokens, for the positions from `first` on, are right."""
        sequel = self.sequels[request_id]
        for index, token in enumerate(draft_ids):
            position = first + index
            # -1: the scheduler does not know the draft, the workers do; or there is none.
            if token == -1 and not self._shape.is_async:
                return index
            proposed = self._proposal(request_id, position) if token == -1 else token
            if proposed != sequel.token(position):
                return index
        return len(draft_ids)

    def _draft(self, request_id: str) -> list[int]:
        first = self._num_computed[request_id] + 1
        count = self._shape.num_draft_tokens
        return [self._proposal(request_id, first + index) for index in range(count)]

    def _proposal(self, request_id: str, position: int) -> int:
        token = self.sequels[request_id].token(position)
        is_right = self._chance.happens(0.6, "draft", request_id, position)
        return token if is_right else (token + 1) % VOCABULARY

    # ---- on a device ---------------------------------------------------------------------------

    def move_states(self, batch: Batch, device: Device) -> None:
        """What Mamba's align mode copies between blocks ahead of the forward."""
        for work in batch.works:
            for source, target in work.moved:
                device.copy_block(source, target)

    def compute(self, batch: Batch, device: Device) -> None:
        """The forward: write every word that is computed, check every word that is read.

        A layer writes the keys and values of all tokens of a step before its attention reads, so a
        request may read what another computes in the same step. A state, and what a ring has had
        before, are read first.
        """
        groups = list(enumerate(self._shape.parsed_groups))
        for group_idx, group in groups:
            if group.kind in ("mamba", "ring"):
                self._read(batch, group_idx, device)
                self._write(batch, group_idx, device)
            else:
                self._write(batch, group_idx, device)
                self._read(batch, group_idx, device)
            if self._is_zeroed and group.kind in ATTENTION:
                self._check_kind(batch, group_idx, device)
        for work in batch.works:
            for source, target in work.saved:
                device.copy_block(source, target)

    def _read(self, batch: Batch, group_idx: int, device: Device) -> None:
        bits = place(group_idx, self._shape.holder_of(device.rank))
        for work in batch.works:
            for span in work.reads[group_idx]:
                if self._excused.get((device.rank, span.block_id), -1) >= batch.number:
                    batch.spoilt.add(work.request_id)
                else:
                    self._check(work, group_idx, span, device, bits)

    def _check_kind(self, batch: Batch, group_idx: int, device: Device) -> None:
        """Where vLLM zeroes blocks, attention finds nothing of another group in any of its blocks.

        It reads whole blocks and masks what lies behind a request's tokens, but a number of another
        precision may be none, and stay so behind a mask.
        """
        size = self._shape.parsed_groups[group_idx].block_tokens
        for work in batch.works:
            spans = (*work.reads[group_idx], *work.writes[group_idx], *work.wrong[group_idx])
            for block_id in {span.block_id for span in spans} - {0}:
                if strange := device.strangers(block_id, size, group_idx):
                    self._findings.add(
                        "I6",
                        f"rank {device.rank}: request {work.request_id} has in block {block_id} of "
                        f"group {group_idx} what groups {strange} have left there",
                    )

    def _write(self, batch: Batch, group_idx: int, device: Device) -> None:
        bits = place(group_idx, self._shape.holder_of(device.rank))
        for work in batch.works:
            for span in work.writes[group_idx]:
                words = span.words(work.sequel, bits, self._shape.block_words)
                device.write(span.block_id, span.first, words)
            for span in work.wrong[group_idx]:
                words = span.words(work.sequel, bits, self._shape.block_words)
                words = [wrong(word, batch.number) for word in words]
                device.write(span.block_id, span.first, words)

    def _check(
        self, work: RequestWork, group_idx: int, span: Span, device: Device, bits: int
    ) -> None:
        expected = span.words(work.sequel, bits, self._shape.block_words)

        def report(wrong: str) -> None:
            self._findings.add(
                "I6",
                f"rank {device.rank}: request {work.request_id} reads at {work.start} computed "
                f"tokens, in group {group_idx}, block {span.block_id}, positions {span.start} to "
                f"{span.end - 1}: {wrong}",
            )

        if span.block_id == 0:
            report("this is vLLM's null block")
        device.check(span.block_id, span.first, expected, report)


def _moved(group: Group, table: Any, start: int, end: int) -> list[tuple[int, int]]:
    """The state that is copied to a new block when a step crosses into one (source, target)."""
    if group.kind != "mamba" or start == 0:
        return []
    source = (start - 1) // group.block_tokens
    target = (end - 1) // group.block_tokens
    if source == target:
        return []
    return [(table[source].block_id, table[target].block_id)]


def _add_states(
    work: RequestWork, columns: StateColumns, table: Any, running: int, right_end: int, end: int
) -> None:
    """What a step with drafts does to the Mamba states of one group."""

    def state(column: int, behind: int) -> Span:
        return Span(table[column].block_id, 0, behind - 1, behind, is_state=True)

    states = [state(columns.first + behind - running, behind) for behind in range(running, end + 1)]
    num_right = right_end - running + 1
    work.reads.append([state(columns.read, work.start)] if columns.read >= 0 else [])
    work.writes.append(states[:num_right])
    work.wrong.append(states[num_right:])
    work.moved += [(table[a].block_id, table[b].block_id) for a, b in columns.moved]
    work.saved += [(table[a].block_id, table[b].block_id) for a, b in columns.saved]
