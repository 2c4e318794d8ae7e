"""vLLM's GPU worker from its start to its end, both model runners: nothing of ours is in its way.

vLLM's own code is driven over the GPU of threads (vllm_gpu.py). Steps with a forward are run by
tests/engine on the CPU; the tests at the end read the order of their hooks in vLLM's source, and
fail when a version changes it.
"""

import ast
import inspect
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1

from safe_offload.protocol import FailureReason, StepPlan, Transfer
from safe_offload.worker import self_test
from safe_offload.worker.opening import Opened, Opening
from safe_offload.worker.self_test import SelfTest
from tests.worker.copies.fake_device import FakeGpu
from tests.worker.vllm_gpu import GRAPH_SIZES, Worker, end_worker, make_worker
from tests.worker.waiting import PATIENCE_S, wait_until

HAS_SLEEP_HOOKS = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
"""From vLLM 0.33 on."""


@pytest.fixture
def gpu():
    made = FakeGpu()
    yield made
    made.may_lock.set()
    end_worker()
    made.close()
    assert made.violations == []
    assert made.locked == {}


@pytest.fixture(params=[False, True], ids=["V1", "V2"])
def is_v2(request):
    return bool(request.param)


@pytest.fixture
def worker(monkeypatch, gpu, is_v2):
    """A worker of either kind, not started."""
    return make_worker(monkeypatch, gpu, is_v2=is_v2)


@pytest.fixture
def opened(monkeypatch):
    """What the worker copies with, once it has started."""
    found: list[Opened] = []
    original = Opening.open

    def watched_open(opening: Opening, kv_caches: Any) -> Opened | None:
        result = original(opening, kv_caches)
        found.extend([result] if result else [])
        return result

    monkeypatch.setattr(Opening, "open", watched_open)
    return found


def store(transfer_id: int, block: int, slot: int) -> StepPlan:
    return StepPlan(stores_after_forward=(Transfer(transfer_id, (block,), (slot,)),))


def load(transfer_id: int, block: int, slot: int) -> StepPlan:
    return StepPlan(loads=(Transfer(transfer_id, (block,), (slot,)),))


def settle(worker: Worker, *transfer_ids: int) -> dict[int, FailureReason | None]:
    """Step without a forward until transfers have been reported; returns what became of them."""
    found = {outcome.transfer_id: outcome.failure for outcome in worker.outcomes}
    end_s = time.monotonic() + PATIENCE_S
    while not found.keys() >= set(transfer_ids):
        assert time.monotonic() < end_s, f"only {found}"
        for outcome in worker.step():
            found[outcome.transfer_id] = outcome.failure
    return found


class Turns(threading.Event):
    """Stands for `FakeGpu.may_lock`: one slab for each turn given, all once it is set."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = threading.Semaphore(0)

    def give(self) -> None:
        self._turns.release()

    def set(self) -> None:
        super().set()
        self.give()

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set() or self._turns.acquire(timeout=timeout)


def is_all_locked(opened: list[Opened]) -> bool:
    (backend,) = (one.backend for one in opened)
    return backend.num_usable_slots == backend.num_slots


def trace_of(worker: Worker, action: Callable[[], object]) -> list[str]:
    """What happens on the machine meanwhile."""
    worker.machine.trace.clear()
    action()
    return list(worker.machine.trace)


# ---- start ---------------------------------------------------------------------------------------


def test_vllm_registers_first_then_warms_up_then_captures_and_calls_no_other_hook(worker, is_v2):
    trace = trace_of(worker, worker.start)
    assert trace[0] == "register_kv_caches"
    assert trace.count("capture begins") == trace.count("capture ends") == len(GRAPH_SIZES)
    first_capture = trace.index("capture begins")
    assert "forward" in trace[:first_capture], "kernels are warmed up before"
    assert trace[first_capture + 1] == "forward", "and the model runs inside"
    hooks = [word for word in trace if "_" in word]
    assert hooks == ["register_kv_caches", *(["reset_capture_state"] if is_v2 else [])]


def test_a_profile_of_graphs_before_the_kv_cache_is_there_registers_nothing(worker):
    worker.model_runner.initialize_kv_cache(worker.machine.kv_cache_config, is_profiling=True)
    assert not has_kv_transfer_group()
    assert worker.machine.trace == []


def test_page_locking_goes_on_during_every_capture_and_invalidates_none(worker, gpu, opened):
    """The first run on a GPU would have ended here: vllm#45850, #46933, #48053."""
    gpu.may_lock = turns = Turns()
    nums_locked: list[int] = []

    def lock_one() -> None:
        before = len(gpu.locked)
        turns.give()
        wait_until(lambda: len(gpu.locked) > before or bool(gpu.capture.invalidated_by))
        nums_locked.append(len(gpu.locked))

    worker.machine.during_capture = lock_one
    worker.start()
    assert nums_locked == [2, 3], "the first slab was there before"
    turns.set()
    wait_until(lambda: is_all_locked(opened))


def test_nothing_of_ours_comes_from_the_memory_that_sleeps_with_the_kv_cache(worker, gpu):
    """vLLM registers inside of a pool of torch's, which is unmapped while the engine sleeps."""
    worker.start()
    assert gpu.pooled == []


def is_timing() -> bool:
    return "safe-offload-idle-timing" in {thread.name for thread in threading.enumerate()}


def test_copies_are_timed_again_when_vllm_has_captured_and_until_the_first_step(
    worker, monkeypatch
):
    """Others may have held up the bus or the driver as this engine started."""
    monkeypatch.setattr(self_test, "IDLE_PAUSES_S", (0.0,) * 10_000)
    attempts, time_again = [], SelfTest.time_again
    monkeypatch.setattr(
        SelfTest, "time_again", lambda test: (time_again(test), attempts.append(test))
    )
    worker.start()
    assert not is_timing(), "a capture can be invalidated by what others call meanwhile"
    for block in range(40):
        worker.machine.fill(block, block + 1)
    assert worker.get_kv_connector_handshake_metadata() is None
    wait_until(lambda: len(attempts) > 1)
    worker.step(store(1, block=2, slot=0))
    assert not is_timing()
    assert [worker.machine.read(block) for block in range(40)] == [{b + 1} for b in range(40)]
    assert settle(worker, 1) == {1: None}
    worker.get_kv_connector_handshake_metadata()
    assert not is_timing(), "blocks and slots are in use by now"


@pytest.mark.parametrize("ends", ["shutdown", "sleep"])
def test_nothing_is_timed_where_the_memory_goes_away(worker, monkeypatch, ends):
    monkeypatch.setattr(self_test, "IDLE_PAUSES_S", (0.0,) * 10_000)
    sleeps = ends == "sleep"
    monkeypatch.setattr(worker.vllm_config.model_config, "enable_sleep_mode", sleeps, raising=False)
    worker.start()
    worker.get_kv_connector_handshake_metadata()
    assert is_timing() is not sleeps
    worker.shutdown()
    assert not is_timing()


# ---- sleep ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_SLEEP_HOOKS, reason="vLLM 0.32 tells connectors nothing of its sleep")
@pytest.mark.parametrize("tags", [None, ["kv_cache"]])
def test_copies_end_before_the_memory_is_gone_and_go_on_when_it_is_back(
    worker, tags, opened, monkeypatch
):
    machine = worker.machine
    worker.start()
    machine.fill(2, 20)
    backend = opened[0].backend
    issue = backend.issue

    def issue_late(*arguments: Any) -> Any:
        """vLLM waits for the device, which has not been given the copy yet."""
        time.sleep(0.3)
        return issue(*arguments)

    monkeypatch.setattr(backend, "issue", issue_late)
    worker.step(store(1, block=2, slot=0))
    trace = trace_of(worker, lambda: worker.sleep(level=1))
    assert trace == ["unregister_kv_caches", "memory gone"]
    worker.step(load(2, block=3, slot=0))
    worker.step(store(3, block=3, slot=0))
    assert settle(worker, 1, 2, 3) == {
        1: None,
        2: FailureReason.CANCELLED,
        3: FailureReason.CANCELLED,
    }
    assert machine.read(3) == {0xEE}, "nothing wrote into memory that is gone"
    assert trace_of(worker, lambda: worker.wake_up(tags)) == ["memory back", "restore_kv_caches"]
    worker.step(load(4, block=3, slot=0))
    assert settle(worker, 4)[4] is None
    assert machine.read(3) == {20}


@pytest.mark.skipif(not HAS_SLEEP_HOOKS, reason="vLLM 0.32 tells connectors nothing of its sleep")
def test_waking_up_the_weights_alone_does_not_bring_the_kv_cache_back(worker):
    worker.start()
    worker.sleep(level=1)
    assert trace_of(worker, lambda: worker.wake_up(["weights"])) == ["memory back"]
    worker.step(load(1, block=3, slot=0))
    assert settle(worker, 1) == {1: FailureReason.CANCELLED}


@pytest.mark.skipif(HAS_SLEEP_HOOKS, reason="vLLM 0.33 calls hooks")
def test_the_sleep_of_032_calls_no_hook(worker):
    """Documented as a limit; when this fails, take it out of the documentation."""
    worker.start()
    assert trace_of(worker, lambda: worker.sleep(level=1)) == ["memory gone"]


# ---- end -----------------------------------------------------------------------------------------


def test_the_connector_ends_before_the_runner_frees_the_memory(worker, gpu, monkeypatch):
    worker.start()
    worker.step(store(1, block=2, slot=0))
    monkeypatch.setattr(
        type(worker.model_runner), "shutdown", lambda self: self.machine.trace.append("freed")
    )
    assert trace_of(worker, worker.shutdown) == ["shutdown", "freed"]
    assert gpu.locked == {}


# ---- vLLM's source -------------------------------------------------------------------------------


def calls_of(function: Callable[..., object], *names: str) -> list[str]:
    """The calls in a function's source by these names, in order; `self.` and the like left out."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    found = [ast.unparse(call.func).removeprefix("self.") for call in calls]
    return [name for name in found if name in names]


def test_the_engine_profiles_then_makes_the_kv_cache_then_warms_up():
    names = ("determine_available_memory", "initialize_from_config", "compile_or_warm_up_model")
    names = tuple(f"model_executor.{name}" for name in names)
    assert calls_of(EngineCore._initialize_kv_caches, *names) == list(names)


def test_the_engine_asks_for_the_handshake_when_the_workers_have_captured():
    names = ["_initialize_kv_caches", "model_executor.get_kv_connector_handshake_metadata"]
    assert calls_of(EngineCore.__init__, *names) == names


def test_v1_calls_the_connector_around_its_forward():
    names = ["get_kv_transfer_group().handle_preemptions", "_update_states"]
    names += ["kv_connector_no_forward", "maybe_get_kv_connector_output", "_model_forward"]
    assert calls_of(V1.execute_model, *names) == names
    assert calls_of(V1._update_states, "_zero_block_ids") == ["_zero_block_ids"]
    drafting = ("propose_draft_token_ids", "drafter.dummy_run", "finalize_kv_connector")
    assert calls_of(V1.sample_tokens, *drafting).index("finalize_kv_connector") == (
        len(calls_of(V1.sample_tokens, *drafting)) - 1
    )


def test_v2_calls_the_connector_around_its_forward():
    assert calls_of(V2.update_requests, "kv_block_zeroer.zero_block_ids")
    forwards = ["cudagraph_manager.run_fullgraph", "kv_connector.pre_forward", "ubatch_runner.run",
                "cudagraph_manager.run_pw_graph", "model"]  # fmt: skip
    expected = ["update_requests", "kv_connector.pre_forward", *forwards,
                "kv_connector.finish_forward"]  # fmt: skip
    assert calls_of(V2.execute_model, *expected, "kv_connector.post_forward") == expected
    sampling = ("kv_connector.post_forward", "speculator.propose", "kv_connector.finalize_step")
    _, *last_rank = calls_of(V2.sample_tokens, *sampling)
    before_033 = ["speculator.propose", "kv_connector.post_forward"]
    assert last_rank == (list(sampling) if HAS_SLEEP_HOOKS else before_033)


def test_dummy_runs_leave_the_connector_alone():
    hooks = ("get_kv_transfer_group", "maybe_get_kv_connector_output", "kv_connector_no_forward",
             "finalize_kv_connector")  # fmt: skip
    assert calls_of(V1._dummy_run, *hooks) == []
    disabled = ["kv_connector.set_disabled", "execute_model", "kv_connector.set_disabled"]
    assert calls_of(V2._dummy_run, *disabled) == disabled


def test_vllm_captures_graphs_where_it_is_known_to():
    """The wrapper and the V2 graphs are driven above; the others are called by the same method."""
    root = Path(vllm.__file__).parent
    files = [*(root / "v1").rglob("*.py"), *(root / "compilation").rglob("*.py")]
    words = ("torch.cuda.graph(", ".capture_begin(")
    capturing = {
        str(file.relative_to(root))
        for file in files
        if any(word in file.read_text(encoding="utf-8") for word in words)
    }
    assert capturing == {
        "compilation/breakable_cudagraph.py",
        "compilation/cuda_graph.py",
        "v1/spec_decode/gemma4.py",  # when its weights are loaded, before there is a KV cache
        "v1/worker/encoder_cudagraph.py",
        "v1/worker/gpu/cudagraph_utils.py",
        "v1/worker/gpu_ubatch_wrapper.py",
    }
