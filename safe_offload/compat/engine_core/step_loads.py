"""Loads in the very step that computes the rest of a prompt: where they are safe, and if one fails.

vLLM schedules such a request at once and lets other requests find its blocks. A load that fails is
reported by its blocks (`get_block_ids_with_load_errors`) with the output of its step. With
asynchronous scheduling, the next step has been launched by then: vLLM drops the request's token of
the first step, but accepts that of the second, and lets others find what was computed. So such
requests are preempted, as by a reset of the prefix cache, which drops the output of all steps in
flight, and their blocks are found no more. Of requests that wait for a load of their own and share
such blocks, vLLM lets only the first compute them; so while a load in the step is in flight, which
is until the output of that step at least, no request with blocks of the GPU begins to wait for a
load (`Planner.get_num_new_matched_tokens`).

While other requests run, the same holds. A load fills blocks that nobody has, nor a step in flight:
vLLM gives away the blocks of a step only after its output, and preempts none of its requests before
(`defer_block_free`). So only requests that found the loaded blocks since can have read them, in
steps in flight; and what these compute comes after the copy. On the device, so do the others' steps
(`cost.pays_in_step`).

Source: vLLM 0.32.0, Scheduler.schedule, _handle_invalid_blocks, update_from_output and
reset_prefix_cache of v1/core/sched/scheduler.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from safe_offload.compat.wrapping import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from safe_offload.config.options import OffloadConfig


def may_load_in_step(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: OffloadConfig,
    *,
    is_plain: bool,
) -> bool:
    """Return whether hits may be loaded in the step that needs them, where that pays.

    Such a load must not fail once the forward is launched, may delay only the requests of its step,
    and if it fails before, vLLM must be able to tell whose blocks it fills. So these go ahead of
    the step:

    - hits of several KV cache groups (not `is_plain`): block ids are unique in a group only, and
      vLLM raises on those that were not loaded. With EAGLE drafts or context parallelism, too
    - hits that pass a tier or another engine's slots, or with `verify`, which finds a changed slot
      only after the copy
    - targets that vLLM zeroes, which it omits for loads ahead of the step only
    - pipeline stages: a stage launches its forward before the others know that its load failed
    - data parallel engines, which go in step with one another; microbatches, whose streams do not
      wait for the stream that they start from as a whole
    - drafts: a padded step of drafts may be scheduled for a hit with one token left
    - a connector under MultiConnector (`config.transfer_config` sets `load_in_step` there), which
      may load the request with another one; a scheduler of the user's
    - a vLLM that cannot start loads before the forward, or drop the output of a step in flight
    """
    parallel = vllm_config.parallel_config
    return (
        config.load_in_step
        and is_plain
        and not config.uses_blocks_of_others
        and not config.verify_every
        and not getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
        and parallel.pipeline_parallel_size == 1
        and parallel.data_parallel_size == 1
        and getattr(parallel, "prefill_context_parallel_size", 1) == 1
        and not getattr(parallel, "use_ubatching", False)
        and vllm_config.speculative_config is None
        and vllm_config.scheduler_config.scheduler_cls is None
        and _fits()
    )


def preempt_failed() -> None:
    """Wrap `Scheduler._handle_invalid_blocks` of a vLLM that fits; a second call does nothing."""
    if _fits():
        wrap(Scheduler, "_handle_invalid_blocks", _then_preempt)


def _fits() -> bool:
    return (
        hasattr(SchedulerOutput, "has_sync_kv_loads")
        and hasattr(Scheduler, "_handle_invalid_blocks")
        and "drop_stale_output" in inspect.signature(Scheduler._preempt_request).parameters
    )


def _then_preempt(
    original: Callable[..., set[str]],
    scheduler: Any,
    /,
    invalid_block_ids: set[int],
    *args: Any,
    **kwargs: Any,
) -> set[str]:
    failed = original(scheduler, invalid_block_ids, *args, **kwargs)
    if failed and scheduler.recompute_kv_load_failures:
        manager, now_s, spoilt = scheduler.kv_cache_manager, monotonic(), set(invalid_block_ids)
        for request in reversed([r for r in scheduler.running if r.request_id in failed]):
            (block_ids,) = manager.get_block_ids(request.request_id)
            first = next(i for i, block_id in enumerate(block_ids) if block_id in spoilt)
            spoilt.update(block_ids[first:])
            scheduler.running.remove(request)
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            scheduler._preempt_request(request, now_s, drop_stale_output=True)
        manager.evict_blocks(spoilt)
    return failed
