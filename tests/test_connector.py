"""The frame around both halves: no error leaves a hook, and a wrong setting stops the start."""

import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput

from safe_offload.compat import engine_config
from safe_offload.compat.base import KVConnectorRole, KVConnectorTransferResults
from safe_offload.connector import SafeCPUOffloadConnector
from safe_offload.errors import ConfigError, InvariantError
from safe_offload.observe.counters import Count
from safe_offload.protocol import EMPTY_PLAN, Capacity, StepPlan, StepReport, Transfer
from safe_offload.scheduler.planner import Planner
from safe_offload.worker import bridge
from safe_offload.worker.bridge import WorkerBridge
from safe_offload.worker.opening import Opening
from tests.simulator.vllm_setup import EngineShape, make_config, make_kv_cache_config

BLOCKS = 9
MANAGER: Any = SimpleNamespace(
    coordinator=SimpleNamespace(single_type_managers=[None, None]),
    block_pool=SimpleNamespace(num_gpu_blocks=BLOCKS, null_block=SimpleNamespace(block_id=0)),
)
"""As much of vLLM's as the planner reads when it is made."""
BLOCK_SIZE = 16
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
PAGE = SPEC.page_size_bytes
SLOTS = 7


@pytest.fixture
def make_connector():
    made: list[SafeCPUOffloadConnector] = []

    def make(
        role: KVConnectorRole = KVConnectorRole.SCHEDULER,
        change: Callable[[VllmConfig], object] = lambda config: None,
        **extra: object,
    ) -> SafeCPUOffloadConnector:
        config = make_config(EngineShape())
        config.cache_config.block_size = BLOCK_SIZE
        config.cache_config.num_gpu_blocks = BLOCKS
        config.model_config.max_model_len = SLOTS * BLOCK_SIZE
        config.kv_transfer_config.kv_connector_extra_config = {"num_cpu_blocks": SLOTS, **extra}
        change(config)
        size = PAGE * BLOCKS
        kv_cache_config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[KVCacheTensor(size, ["layer"], size, PAGE)],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], SPEC)],
        )
        made.append(SafeCPUOffloadConnector(config, role, kv_cache_config))
        made[-1].bind_kv_cache_manager(MANAGER)
        return made[-1]

    yield make
    for connector in made:
        connector.shutdown()


@pytest.fixture
def worker(make_connector):
    connector = make_connector(KVConnectorRole.WORKER)
    connector.register_kv_caches({"layer": torch.zeros(BLOCKS, PAGE, dtype=torch.uint8)})
    return connector


def contained(connector: SafeCPUOffloadConnector) -> int:
    return connector._counters[Count.CONTAINED_ERRORS]


def check_logged(records: list[logging.LogRecord], hook: str) -> None:
    """The error is told once, with its hook and where it comes from."""
    errors = [record for record in records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert errors[0].getMessage().startswith(f"{hook} failed in SafeCPUOffloadConnector")
    assert errors[0].exc_info is not None
    assert str(errors[0].exc_info[1]) == "injected"


# ---- starting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("executor", "is_child"), [("mp", True), ("uni", False)])
def test_a_worker_knows_whether_vllm_has_started_a_process_for_it(
    make_connector, monkeypatch, executor, is_child
):
    def run_by(config: VllmConfig) -> None:
        config.parallel_config.distributed_executor_backend = executor

    made: list[tuple[bool, bool]] = []

    def make(opening: Opening, *, is_beside_scheduler: bool) -> None:
        made.append((opening.is_child, is_beside_scheduler))

    monkeypatch.setattr(bridge, "WorkerBridge", make)
    make_connector(KVConnectorRole.WORKER, run_by)
    assert made == [(is_child, not is_child)]


def launch(config: VllmConfig, num_ranks: int = 2) -> None:
    """Each rank runs a scheduler, which would wait for the reports of all others."""
    config.parallel_config.distributed_executor_backend = "external_launcher"
    config.parallel_config.world_size = num_ranks


def use_hisparse(config: VllmConfig) -> None:
    config.attention_config = SimpleNamespace(hisparse_config=object())


def return_experts(config: VllmConfig) -> None:
    config.aux_output_config.enable_return_routed_experts = True


def keep_experts(config: VllmConfig) -> None:
    return_experts(config)
    config.aux_output_config.max_bytes = 1 << 30


def switch_off(config: VllmConfig) -> None:
    config.cache_config.enable_prefix_caching = False


def fail(config: VllmConfig) -> None:
    config.kv_transfer_config.kv_load_failure_policy = "fail"


def leave(config: VllmConfig) -> None:
    """Change nothing."""


@pytest.mark.parametrize("role", KVConnectorRole)
@pytest.mark.parametrize(
    ("change", "extra", "message"),
    [
        (leave, {"cpu_bytes_to_used": "1GiB"}, '"cpu_bytes_to_use"'),
        (leave, {"num_cpu_blocks": 0}, "num_cpu_blocks"),
        (leave, {"lazy_offload": "yes"}, "lazy_offload"),
        (launch, {}, r'"external_launcher" with 2 ranks.*Fix: .*"mp"'),
        (use_hisparse, {}, r"HiSparse.*Fix: "),
    ],
)
def test_what_cannot_be_used_stops_the_start(make_connector, role, change, extra, message):
    with pytest.raises(ConfigError, match=message):
        make_connector(role, change, **extra)


TIERED = {"tiers": [{"url": "file:///mnt/kv"}]}
CAPS_HITS = hasattr(AuxOutputSchedulerConnector, "cap_external_hit")


@pytest.mark.parametrize("role", KVConnectorRole)
@pytest.mark.parametrize(
    ("change", "extra", "message"),
    [
        (return_experts, {}, r"Fix: .*--aux-output-config.max_bytes high enough"),
        (keep_experts, TIERED, r'Fix: .*remove "tiers"'),
        (keep_experts, {"share": "node"}, r'Fix: .*remove "tiers" and "share"'),
        (keep_experts, {}, None),
    ],
)
def test_hits_whose_routed_experts_vllm_has_not_stop_the_start(
    make_connector, role, change, extra, message, monkeypatch
):
    """From 0.33 on vLLM cuts such hits itself."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    if message is None or CAPS_HITS:
        make_connector(role, change, **extra)
        return
    with pytest.raises(ConfigError, match=message):
        make_connector(role, change, **extra)


@pytest.mark.parametrize("role", KVConnectorRole)
def test_one_rank_may_be_launched_by_others(make_connector, role):
    make_connector(role, lambda config: launch(config, 1))


@pytest.mark.parametrize("role", KVConnectorRole)
def test_a_group_that_vllm_keeps_on_the_host_stops_the_start(role):
    """HiSparse has a pool of its own for it, whose ids are those of no GPU block."""
    group = KVCacheGroupSpec(["layer"], SPEC)
    group.host_resident = True
    tensor = KVCacheTensor(PAGE * BLOCKS, ["layer"], PAGE * BLOCKS, PAGE)
    cache = KVCacheConfig(BLOCKS, [tensor], [group])
    with pytest.raises(ConfigError, match=r"HiSparse.*Fix: "):
        SafeCPUOffloadConnector(make_config(EngineShape()), role, cache)


def test_a_pool_too_small_for_one_block_stops_the_start():
    large = KVCacheConfig(
        num_blocks=2,
        kv_cache_tensors=[KVCacheTensor(2 << 20, ["layer"], 2 << 20, 1 << 20)],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], SPEC)],
    )
    config = make_config(EngineShape())
    config.kv_transfer_config.kv_connector_extra_config = {"cpu_bytes_to_use": 4096}
    with pytest.raises(ConfigError, match=r"at least one block, 1.00 MiB. Fix: raise it"):
        SafeCPUOffloadConnector(config, KVConnectorRole.SCHEDULER, large)


def test_an_unsupported_cache_stops_the_start_of_a_worker(make_connector):
    connector = make_connector(KVConnectorRole.WORKER)
    caches = {name: torch.zeros(BLOCKS, PAGE, dtype=torch.uint8) for name in ("a", "b")}
    with pytest.raises(ConfigError, match="one backing allocation"):
        connector.register_kv_caches(caches)


@pytest.mark.parametrize(
    ("change", "extra", "warnings"),
    [
        (leave, {"num_cpu_blocks": BLOCKS}, []),
        (fail, {"num_cpu_blocks": BLOCKS}, ['"kv_load_failure_policy": "recompute"']),
        (leave, {}, ["The host pool is small"]),
        (switch_off, {}, ["Prefix caching is off.* Fix: remove --no-enable-prefix-caching"]),
    ],
)
def test_what_is_hardly_meant_is_warned_about_once(make_connector, logged, change, extra, warnings):
    make_connector(KVConnectorRole.WORKER, change, **extra)
    assert not logged, "the scheduler says it, not every worker once more"
    make_connector(KVConnectorRole.SCHEDULER, change, **extra)
    assert [record.levelname for record in logged] == ["WARNING"] * len(warnings)
    for record, words in zip(logged, warnings, strict=True):
        assert re.search(words, record.getMessage())


# ---- doing nothing -----------------------------------------------------------------------------


@pytest.fixture(params=KVConnectorRole, ids=lambda role: role.name)
def idle(request, make_connector):
    """A connector of either role without prefix caching."""
    return make_connector(request.param, switch_off)


@pytest.mark.parametrize("role", KVConnectorRole)
@pytest.mark.parametrize(("num_stages", "num_drafts"), [(2, 2), (2, 0), (1, 2)])
def test_states_that_earlier_stages_have_too_late_are_not_kept(
    logged, role, num_stages, num_drafts
):
    """With drafts, only the last pipeline stage knows in time how many were accepted."""
    shape = EngineShape(("full", "mamba"), pipeline_ranks=num_stages, num_draft_tokens=num_drafts)
    connector = SafeCPUOffloadConnector(make_config(shape), role, make_kv_cache_config(shape))
    connector.bind_kv_cache_manager(MANAGER)
    is_idle = not isinstance(connector.side, Planner | WorkerBridge)
    assert is_idle is (num_stages > 1 and num_drafts > 0)
    told = [record.getMessage() for record in logged if "Mamba" in record.getMessage()]
    assert len(told) == (is_idle and role is KVConnectorRole.SCHEDULER)
    assert all("Fix: remove" in message for message in told)


def test_without_prefix_caching_every_hook_has_its_neutral_answer(idle, logged):
    logged.clear()
    request: Any = SimpleNamespace(lora_request=None)
    idle.bind_kv_cache_manager(MANAGER)
    idle.on_new_request(request)
    assert idle.get_num_new_matched_tokens(request, 0) == (0, False)
    idle.update_state_after_alloc(request, request, 5)
    assert idle.build_connector_meta(request) == EMPTY_PLAN
    idle.update_connector_output(KVConnectorOutput())
    assert idle.request_finished(request, []) == (False, None)
    assert idle.request_finished_all_groups(request, ([],)) == (False, None)
    assert not idle.has_pending_push_work()
    assert idle.reset_cache() is True
    idle.register_kv_caches({"a": torch.zeros(4), "b": torch.zeros(4)})
    idle.handle_preemptions(EMPTY_PLAN)
    idle.bind_connector_metadata(EMPTY_PLAN)
    idle.start_load_kv(None)
    idle.wait_for_layer_load("a")
    idle.save_kv_layer("a", torch.zeros(1), None)
    idle.wait_for_save()
    assert idle.get_transfer_results(set()) == KVConnectorTransferResults(
        finished_recving=set(), failed_recving=set()
    )
    assert idle.build_connector_worker_meta() is None
    idle.clear_connector_metadata()
    assert idle.get_kv_connector_stats() is None
    assert not list(idle.take_events())
    assert not idle.requires_kv_delivery
    idle.shutdown()
    assert not logged


# ---- scheduler side ----------------------------------------------------------------------------

SCHEDULER_HOOKS = {
    "on_new_request": ((SimpleNamespace(lora_request=None),), None),
    "get_num_new_matched_tokens": ((None, 0), (0, False)),
    "update_state_after_alloc": ((None, None, 0), None),
    "build_connector_meta": ((None,), EMPTY_PLAN),
    "update_connector_output": ((KVConnectorOutput(),), None),
    "request_finished": ((None, []), (False, None)),
    "has_pending_push_work": ((), False),
    "reset_cache": ((), True),
}
"""Hook, and method of the planner: arguments, the answer if that raises."""


@pytest.mark.parametrize("hook", SCHEDULER_HOOKS)
def test_an_error_on_the_scheduler_side_ends_in_its_hook(make_connector, monkeypatch, logged, hook):
    connector = make_connector()
    arguments, answer = SCHEDULER_HOOKS[hook]
    monkeypatch.setattr(connector.side, hook, Mock(side_effect=RuntimeError("injected")))
    assert getattr(connector, hook)(*arguments) == answer
    check_logged(logged, hook)
    assert contained(connector) == 1
    assert connector.side.statistics().is_disabled


def test_a_broken_promise_is_raised_in_tests_and_kept_from_the_engine_in_production(
    make_connector, monkeypatch
):
    break_promise = Mock(side_effect=InvariantError("I1", "a leased slot was evicted"))
    tested = make_connector(check_invariants=True)
    monkeypatch.setattr(tested.side, "get_num_new_matched_tokens", break_promise)
    with pytest.raises(InvariantError, match="I1"):
        tested.get_num_new_matched_tokens(None, 0)
    served = make_connector()
    monkeypatch.setattr(served.side, "get_num_new_matched_tokens", break_promise)
    assert served.get_num_new_matched_tokens(None, 0) == (0, False)
    assert contained(served) == 1


# ---- worker side -------------------------------------------------------------------------------

PLAN = StepPlan(
    loads=(Transfer(1, (1,), (1,)),),
    stores_before_forward=(Transfer(2, (2,), (2,)),),
    stores_after_forward=(Transfer(3, (3,), (3,)),),
    fences=(2,),
    failures=("r",),
)

WORKER_HOOKS = {
    "handle_preemptions": ((PLAN,), None),
    "bind_connector_metadata": ((PLAN,), None),
    "start_load_kv": ((None,), None),
    "wait_for_save": ((), None),
    "get_transfer_results": ((set(),), KVConnectorTransferResults()),
    "build_connector_worker_meta": ((), None),
    "clear_connector_metadata": ((), None),
    "shutdown": ((), None),
}
"""Hook, and method of the bridge: arguments, the answer if that raises."""


@pytest.mark.parametrize("hook", WORKER_HOOKS)
def test_an_error_on_the_worker_side_ends_in_its_hook(worker, monkeypatch, logged, hook):
    arguments, answer = WORKER_HOOKS[hook]
    with monkeypatch.context() as patch:
        patch.setattr(worker.side, hook, Mock(side_effect=RuntimeError("injected")))
        assert getattr(worker, hook)(*arguments) == answer
    check_logged(logged, hook)
    assert contained(worker) == 1
    assert worker.get_kv_connector_stats().reduce() == {"contained_errors": 1}


def test_a_step_of_hooks_reaches_the_bridge_in_vllm_s_order(worker, monkeypatch):
    called: list[str] = []
    for method in WORKER_HOOKS:
        original = getattr(worker.side, method)
        monkeypatch.setattr(
            worker.side,
            method,
            lambda *args, method=method, original=original: (
                called.append(method) or original(*args)
            ),
        )
    worker.handle_preemptions(PLAN)
    worker.bind_connector_metadata(PLAN)
    assert worker._get_connector_metadata() is PLAN
    worker.wait_for_layer_load("layer")
    worker.save_kv_layer("layer", torch.zeros(1), None)
    worker.start_load_kv(None, request_ids=[])
    worker.wait_for_save()
    results = worker.get_transfer_results({"gone"})
    assert results.finished_recving == results.failed_recving == {"r"}
    assert results.finished_recving is not results.failed_recving
    assert not results.finished_sending
    report = worker.build_connector_worker_meta()
    assert isinstance(report, StepReport)
    assert report.capacities == (Capacity(0, SLOTS),)
    worker.clear_connector_metadata()
    assert not worker.has_connector_metadata()
    hooks = [hook for hook in WORKER_HOOKS if hook != "shutdown"]
    place = hooks.index("start_load_kv")
    assert called == [*hooks[:place], "start_load_kv", *hooks[place:]], "twice without streams"
    monkeypatch.undo()


# ---- statistics --------------------------------------------------------------------------------


def test_statistics_are_told_when_something_changed(make_connector, monkeypatch):
    connector = make_connector()
    gauges = {"slots": 0}
    monkeypatch.setattr(connector.side, "gauges", lambda: dict(gauges))
    assert connector.get_kv_connector_stats().reduce() == {"slots": 0}
    assert connector.get_kv_connector_stats() is None
    connector._counters[Count.HIT_TOKENS] += 4
    assert connector.get_kv_connector_stats().reduce() == {"slots": 0, "hit_tokens": 4}
    gauges["slots"] = 9
    monkeypatch.setattr(connector.side, "has_changed", True)
    assert connector.get_kv_connector_stats().reduce() == {"slots": 9}
    assert connector.get_kv_connector_stats() is None


def test_statistics_that_vllm_adds_to_do_not_hide_the_next_change(make_connector, monkeypatch):
    connector = make_connector()
    gauges = {"slots": 0}
    monkeypatch.setattr(connector.side, "gauges", lambda: dict(gauges))
    total = connector.get_kv_connector_stats()
    gauges["slots"] = 5
    monkeypatch.setattr(connector.side, "has_changed", True)
    total.aggregate(connector.build_kv_connector_stats({"gauges": {"slots": 5}}))
    assert connector.get_kv_connector_stats().reduce() == {"slots": 5}


@pytest.mark.parametrize(
    ("num_same", "backend", "num_on_machine", "context_ranks", "expected"),
    [
        (1, "mp", 8, 1, 1),
        (8, "mp", 8, 1, 8),
        (8, "mp", 32, 1, 8),  # four pipeline stages
        (16, "mp", 8, 1, 8),  # two machines
        (8, "mp", 12, 1, 4),  # a stage ends in the middle of a machine
        (8, "ray", 8, 1, 1),
        (8, "mp", 8, 2, 1),
    ],
)
def test_ranks_that_hold_the_same_on_one_machine_keep_one_copy(
    num_same, backend, num_on_machine, context_ranks, expected
):
    parallel = SimpleNamespace(
        distributed_executor_backend=backend,
        local_world_size=num_on_machine,
        prefill_context_parallel_size=context_ranks,
    )
    cache = SimpleNamespace(kv_tp_replicas=num_same)
    assert (
        engine_config.ranks_per_copy(SimpleNamespace(parallel_config=parallel), cache) == expected
    )
