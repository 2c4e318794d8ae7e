"""Where hits may be loaded in the step that needs them; what a failed one does is simulated."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.v1.core.sched.output import SchedulerOutput

from safe_offload.compat.engine_core.step_loads import may_load_in_step
from safe_offload.config.options import OffloadConfig

TIERS = [{"url": "file:///tmp/kv"}]


def may_load(extra: Any = None, *, is_plain: bool = True, is_zeroed: bool = False, **more: Any):
    """`more`: fields of vLLM's configuration, by its part and name."""
    vllm_config: Any = SimpleNamespace(
        parallel_config=ParallelConfig(),
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        speculative_config=None,
    )
    for name, value in more.items():
        part, _, field = name.partition("__")
        assert not field or hasattr(getattr(vllm_config, part), field)
        setattr(getattr(vllm_config, part) if field else vllm_config, field or part, value)
    config = OffloadConfig.from_extra_config(extra, world_size=1)
    cache: Any = SimpleNamespace(needs_kv_cache_zeroing=is_zeroed)
    return may_load_in_step(vllm_config, cache, config, is_plain=is_plain)


def test_hits_of_full_attention_in_own_host_memory_may_be_loaded_in_the_step():
    assert may_load()
    assert may_load(parallel_config__tensor_parallel_size=2)


@pytest.mark.parametrize(
    "why_not",
    [
        {"extra": {"load_in_step": False}},
        {"extra": {"tiers": TIERS}},
        {"extra": {"share": "node"}},
        {"extra": {"verify": "load"}},
        {"extra": {"verify": "sample:2"}},
        {"is_plain": False},
        {"is_zeroed": True},
        {"parallel_config__pipeline_parallel_size": 2},
        {"parallel_config__data_parallel_size": 2},
        {"parallel_config__prefill_context_parallel_size": 2},
        {"parallel_config__enable_dbo": True},
        {"parallel_config__ubatch_size": 2},
        {"speculative_config": "drafts"},
        {"scheduler_config__scheduler_cls": "mine.Scheduler"},
    ],
    ids=str,
)
def test_all_others_are_loaded_ahead_of_the_step(why_not):
    assert not may_load(**why_not)


def test_a_vllm_without_such_loads_has_none(monkeypatch):
    monkeypatch.delattr(SchedulerOutput, "has_sync_kv_loads")
    assert not may_load()
