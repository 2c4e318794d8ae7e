"""The blocks that a step allocates, and those that it writes before our hooks are called."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def early_written_block_ids(
    scheduler_output: SchedulerOutput, state_group_ids: Sequence[int]
) -> set[int]:
    """Return the blocks that Model Runner V2 may write before it calls `handle_preemptions`.

    V2 zeroes new blocks, copies blocks on write and moves Mamba states before the connector's
    `pre_forward` (vLLM 0.32.0, v1/worker/gpu/model_runner.py:1236-1270, :1820, :2003), so a fence
    is too late. V1 does all of it after the hook (gpu_model_runner.py:3971, :3979, :4091).
    """
    written = set(getattr(scheduler_output, "new_block_ids_to_zero", None) or ())
    written |= _copy_targets(scheduler_output)
    if state_group_ids:
        tables = [new.block_ids for new in scheduler_output.scheduled_new_reqs]
        tables += scheduler_output.scheduled_cached_reqs.new_block_ids
        for group_idx in state_group_ids:
            for table in tables:
                written.update(table[group_idx] if table else ())
    return written


def allocated_block_ids(scheduler_output: SchedulerOutput) -> set[int]:
    """Return the blocks that were allocated in this step, with all those of new requests.

    The target of a copy-on-write may be in no table (vLLM 0.32.0,
    MambaManager.allocate_new_blocks).
    """
    tables = [new.block_ids for new in scheduler_output.scheduled_new_reqs]
    tables += [table for table in scheduler_output.scheduled_cached_reqs.new_block_ids if table]
    ids = {block_id for table in tables for group in table for block_id in group}
    return ids | _copy_targets(scheduler_output)


def spoilt_block_ids(
    outputs: Iterable[SchedulerOutput], bad_block_ids: Collection[int]
) -> set[int]:
    """Return the bad blocks, and those behind them, of requests in these steps in flight."""
    spoilt: set[int] = set()
    request_ids: set[str] = set()
    for output in outputs:
        cached = output.scheduled_cached_reqs
        tables = [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]
        tables += [t for t in zip(cached.req_ids, cached.new_block_ids, strict=True) if t[1]]
        for request_id, table in tables:
            for block_ids in table:
                is_known = request_id in request_ids
                is_bad = [is_known or b in bad_block_ids or b in spoilt for b in block_ids]
                if any(is_bad):
                    request_ids.add(request_id)
                    spoilt.update(block_ids[is_bad.index(True) :])
    return spoilt


def _copy_targets(scheduler_output: SchedulerOutput) -> set[int]:
    copies = getattr(scheduler_output, "kv_cache_block_copies", None)
    return {copy.dst_block_id for copy in copies or ()}
