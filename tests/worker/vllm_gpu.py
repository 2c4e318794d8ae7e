"""vLLM's own GPU worker and model runners, driven without a GPU, over the device of threads.

What runs is vLLM's code: `Worker.initialize_from_config`, `compile_or_warm_up_model`, `sleep` and
`wake_up`; both runners' `initialize_kv_cache` and `capture_model`, down to where `torch.cuda.graph`
is entered; the warm-up of kernels; the connector's factory, state and mixins, and steps without a
forward. Stand-ins are torch's GPU calls, attention backends and block tables, and the model.

Source: vllm/v1/worker/gpu_worker.py, gpu_model_runner.py, gpu/model_runner.py, gpu/kv_connector.py
(0.32.0 and 0.33.0).
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.compilation import cuda_graph
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_shutdown,
    kv_transfer_state,
)
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker import gpu_model_runner as v1
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu import model_runner as v2

from safe_offload.connector import SafeCPUOffloadConnector
from safe_offload.protocol import EMPTY_PLAN, Outcome, StepPlan
from safe_offload.worker import opening as opening_module
from safe_offload.worker import rank_memory
from safe_offload.worker.copies.gpu import GpuBackend
from safe_offload.worker.copies.rows import Rows
from safe_offload.worker.memory import page_lock, placement
from tests.simulator.vllm_setup import (
    EngineShape,
    as_model_runner,
    make_config,
    make_kv_cache_config,
)
from tests.worker.copies.fake_device import INDEX, FakeGpu, FakeRows

HOOKS = (
    "register_kv_caches", "unregister_kv_caches", "restore_kv_caches", "handle_preemptions",
    "bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer",
    "finish_forward", "wait_for_save", "get_transfer_results", "build_connector_worker_meta",
    "clear_connector_metadata", "reset_capture_state", "shutdown",
)  # fmt: skip
GRAPH_SIZES = (4, 2)
WARM_UP_SIZE = 16
SLAB_BYTES = 4096
TRANSFER_LAYER = "layer.0"


class Machine:
    """The memory, the GPU of threads, and what has happened on it."""

    def __init__(self, shape: EngineShape, gpu: FakeGpu) -> None:
        self.kv_cache_config = make_kv_cache_config(shape)
        self.gpu = gpu
        self.trace: list[str] = []  # hooks of the connector and moments of vLLM, in order
        self.during_capture: Callable[[], object] = lambda: None  # called inside of every capture
        tensors = self.kv_cache_config.kv_cache_tensors
        self.block_bytes = tensors[0].block_stride
        self.storage = torch.zeros(tensors[0].size, dtype=torch.uint8)
        self.kv_caches = {
            name: self.storage.view(-1, tensor.block_stride)
            for tensor in tensors
            for name in tensor.layers
        }
        self.model = Model(self)  # of the runner

    # ---- what torch does on a GPU --------------------------------------------------------------

    @contextlib.contextmanager
    def capture(self, *_: Any, **__: Any) -> Iterator[None]:
        """`torch.cuda.graph`: it synchronizes, then captures in the mode "global".

        An invalidated capture raises when it ends, which is the end of the engine.
        """
        self.gpu.synchronize()
        self.trace.append("capture begins")
        with self.gpu.capturing() as capture:
            yield
            self.during_capture()
        if capture.invalidated_by:
            raise RuntimeError(f"CUDA error 901: {capture.invalidated_by} during the capture")
        self.trace.append("capture ends")

    def synchronize(self, *_: Any) -> None:
        """`torch.accelerator.synchronize`."""
        self.gpu.synchronize()

    def open_backend(self, storage: Any, _: Any, layout: Any, host: Any, config: Any) -> Any:
        """Like the product's, over the GPU of threads."""
        device = self.gpu.open()
        rows = Rows(storage, torch.device("cpu"), layout.geometry)
        backend = GpuBackend(device, storage.data_ptr(), layout, host, None)
        return backend, FakeRows(self.gpu, device, rows)

    # ---- memory --------------------------------------------------------------------------------

    def fill(self, block: int, value: int) -> None:
        """Write a block, as a kernel of the forward does."""
        address = self.storage.data_ptr() + block * self.block_bytes
        size_bytes = self.block_bytes
        self.gpu.compute.enqueue(lambda: ctypes.memset(address, value, size_bytes))

    def read(self, block: int) -> set[int]:
        """All values in a block, when the compute stream has come to its end."""
        self.gpu.compute.synchronize()
        return set(self.storage.view(-1, self.block_bytes)[block].tolist())


class Model(torch.nn.Module):
    """One layer of attention, with vLLM's own wrapper around it that calls the connector."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.attend = maybe_transfer_kv_layer(self._attend)

    def forward(self, **_: Any) -> torch.Tensor:
        self.attend(TRANSFER_LAYER)
        return torch.zeros(1, 1)

    def _attend(self, layer_name: str) -> None:
        self.machine.trace.append("forward")


class Runner:
    """What both model runners have; what is not set here does nothing."""

    def __init__(self, machine: Machine, vllm_config: Any) -> None:
        self.machine = machine
        self.vllm_config = vllm_config
        for name in ("cache", "model", "parallel", "scheduler", "compilation", "observability"):
            setattr(self, f"{name}_config", getattr(vllm_config, f"{name}_config"))
        self.device = torch.device("cpu")
        self.max_model_len = vllm_config.model_config.max_model_len
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.jit_warmup_registry = MagicMock()
        self.speculative_config = vllm_config.speculative_config
        self.supports_mm_inputs = self.is_pooling_model = self.is_encoder_decoder = False
        self.lora_config = self.execute_model_state = self.eplb_state = None

    def in_forward(self, mode: CUDAGraphMode = CUDAGraphMode.NONE, num_tokens: int = 1) -> Any:
        """The context of a forward, with attention."""
        return set_forward_context(
            {TRANSFER_LAYER: object()},
            self.vllm_config,
            num_tokens=num_tokens,
            cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(num_tokens),
            slot_mapping={},
        )

    def get_model(self) -> Model:
        return self.machine.model

    def nothing(self, *_: Any, **__: Any) -> None:
        """What vLLM calls, and is of no matter here."""

    maybe_remove_all_loras = nothing


class RunnerV1(Runner, v1.GPUModelRunner):
    """vLLM's V1 runner."""

    def __init__(self, machine: Machine, vllm_config: Any) -> None:
        super().__init__(machine, vllm_config)
        self.model = cuda_graph.CUDAGraphWrapper(
            machine.model, vllm_config, runtime_mode=CUDAGraphMode.FULL
        )
        self.encoder_cudagraph_manager = None
        descriptors = [BatchDescriptor(size) for size in GRAPH_SIZES]
        self.cudagraph_dispatcher = SimpleNamespace(
            get_capture_descs=lambda: [(CUDAGraphMode.FULL, descriptors)]
        )
        self.load_config = SimpleNamespace(use_tqdm_on_load=False)
        self.attn_groups: list[Any] = []

    def initialize_kv_cache_tensors(
        self, *_: Any, kv_cache_allocation_context: Any = None
    ) -> dict[str, torch.Tensor]:
        with kv_cache_allocation_context or contextlib.nullcontext():
            return self.machine.kv_caches

    may_add_encoder_only_layers_to_kv_cache_config = Runner.nothing
    maybe_add_kv_sharing_layers_to_kv_cache_groups = Runner.nothing
    initialize_attn_backend = initialize_metadata_builders = Runner.nothing
    may_reinitialize_input_batch = _dummy_sampler_run = Runner.nothing

    def _dummy_run(
        self, num_tokens: int, cudagraph_runtime_mode: CUDAGraphMode | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.machine.trace.append("dummy run")
        with self.in_forward(cudagraph_runtime_mode or CUDAGraphMode.NONE, num_tokens):
            hidden = self.model()
        return hidden, hidden

    def synchronize_input_prep(self) -> Any:
        return contextlib.nullcontext()

    def _update_states(self, _: Any) -> None:
        self.machine.trace.append("update states")


class GraphManager(v2.ModelCudaGraphManager):
    """vLLM's V2 graphs; it enters `torch.cuda.graph` around a forward."""

    def __init__(self, vllm_config: Any, *_: Any, **__: Any) -> None:
        self.vllm_config, self.device, self.pool = vllm_config, torch.device("cpu"), (0, 0)
        self.ubatch_runner = self._max_full_descs_to_capture = self._capture_mem_samples = None
        self.breakable_cg_runner, self.use_breakable_cg = None, False
        self.graphs, self._graphs_captured = {}, False
        self._capture_descs = {
            CUDAGraphMode.FULL: [
                cudagraph_utils.BatchExecutionDescriptor(
                    cg_mode=CUDAGraphMode.FULL, num_tokens=size, num_reqs=size
                )
                for size in GRAPH_SIZES
            ]
        }

    def capture(self, model: Any, *_: Any, **__: Any) -> None:
        def create_forward_fn(desc: Any, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            def forward(mode: CUDAGraphMode) -> None:
                with set_forward_context(
                    {TRANSFER_LAYER: object()},
                    self.vllm_config,
                    num_tokens=desc.num_tokens,
                    cudagraph_runtime_mode=mode,
                    slot_mapping={},
                ):
                    model()

            return forward

        cudagraph_utils.CudaGraphManager.capture(self, create_forward_fn)


class RunnerV2(Runner, v2.GPUModelRunner):
    """vLLM's V2 runner."""

    def __init__(self, machine: Machine, vllm_config: Any) -> None:
        super().__init__(machine, vllm_config)
        self.model = machine.model
        self.kv_connector = v2.NO_OP_KV_CONNECTOR
        self.model_state = MagicMock(supports_mm_inputs=False, max_encoder_len=0)
        self.model_state.get_additional_cg_support.return_value = ()
        self.compilation_config = MagicMock()
        self.speculator = self.pcp_manager = self.adaptive_verification = None
        self.rejection_sampler = self.aux_output_connector = self.kv_block_zeroer = None
        self.dcp_size, self.dcp_rank, self.decode_query_len = 1, 0, 1
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.num_speculative_steps, self.is_last_pp_rank = 0, True
        self.lora_capture_cases: list[Any] = []
        self.use_aux_hidden_state_outputs = False
        self.intermediate_tensors = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self.__dict__[name] = MagicMock(name=name)
        return found

    def _dummy_run(self, num_tokens: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        self.machine.trace.append("dummy run")
        self.kv_connector.set_disabled(True)
        with self.in_forward(CUDAGraphMode.NONE, num_tokens):
            hidden = self.model()
        self.kv_connector.set_disabled(False)
        return hidden, hidden

    def execute_model(self, scheduler_output: SchedulerOutput, *_: Any, **__: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            return super().execute_model(scheduler_output)
        with self.in_forward(num_tokens=scheduler_output.total_num_scheduled_tokens):
            self.model()  # of the warm-up
        return None

    def sample_tokens(self, _: Any) -> Any:
        return None

    def update_pp_decode_requests(self) -> None:
        self.machine.trace.append("update states")

    free_states = add_requests = update_requests = finish_requests = Runner.nothing

    def _merge_ec_connector_no_forward(self, _: Any, output: Any) -> Any:
        return output


class Sleeper:
    """Sleep mode: the memory of the KV cache is gone until wake-up."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def suspend(self, level: int) -> None:
        self._machine.trace.append("memory gone")
        self._machine.storage.fill_(0xEE)

    def resume(self, tags: list[str] | None) -> None:
        self._machine.trace.append("memory back")
        self._machine.storage.zero_()


class Worker(gpu_worker.Worker):
    """vLLM's GPU worker."""

    def __init__(self, machine: Machine, vllm_config: Any, *, is_v2: bool) -> None:
        self.machine = machine
        self.vllm_config = vllm_config
        for name in ("cache", "model", "parallel", "scheduler", "compilation", "observability",
                     "profiler"):  # fmt: skip
            setattr(self, f"{name}_config", getattr(vllm_config, f"{name}_config"))
        self.outcomes: list[Outcome] = []
        self.rank = self.local_rank = 0
        self.device = torch.device("cpu")
        self.profiler = None
        self.use_v2_model_runner = is_v2
        self.elastic_ep_executor = MagicMock()
        self.model_runner: Any = (RunnerV2 if is_v2 else RunnerV1)(machine, vllm_config)
        self._pp_send_work: list[Any] = []
        self._sleep_mode_backend = Sleeper(machine)
        self._sleep_saved_buffers: dict[str, Any] = {}
        self._sleep_saved_parameters: dict[str, Any] = {}
        self._sleep_saved_draft_buffers: dict[str, Any] = {}

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        # The memory of the KV cache is there already.
        return self.machine.gpu.pool() if tag == "runtime" else contextlib.nullcontext()

    def _maybe_activate_jit_monitor(self) -> None:
        pass

    def synchronize_device(self) -> None:
        self.machine.synchronize()

    def annotate_profile(self, _: Any) -> Any:
        return contextlib.nullcontext()

    def start(self) -> None:
        """What the executor asks of a worker, in its order, once the memory is known."""
        self.initialize_from_config(self.machine.kv_cache_config)
        self.compile_or_warm_up_model()

    def step(self, plan: StepPlan = EMPTY_PLAN) -> list[Outcome]:
        """One step without a forward; returns what the connector has reported, `outcomes` all."""
        scheduler_output = SchedulerOutput.make_empty()
        scheduler_output.kv_connector_metadata = plan
        output = self.execute_model(scheduler_output)
        told = output.kv_connector_output
        report = told.kv_connector_worker_meta if told is not None else None
        new = list(report.outcomes) if report is not None else []
        self.outcomes += new
        return new


def make_worker(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, *, is_v2: bool) -> Worker:
    """A worker that has not been started; `end_worker` ends it.

    `monkeypatch`: takes torch's GPU calls away for the test; `gpu`: of the KV cache; the calling
    thread has used it; `is_v2`: which model runner.
    """
    shape = EngineShape(is_v2=is_v2, has_streams=True)
    vllm_config = make_config(shape)
    vllm_config.model_config.enforce_eager = False
    vllm_config.kernel_config.enable_jit_warmup = True
    compilation = vllm_config.compilation_config
    compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "eager"
    compilation.cudagraph_mode = CUDAGraphMode.FULL
    compilation.cudagraph_capture_sizes = list(GRAPH_SIZES)
    compilation.compile_sizes = [WARM_UP_SIZE]
    compilation.cudagraph_num_of_warmups = 1
    machine = Machine(shape, gpu)
    compilation.static_forward_context[TRANSFER_LAYER] = SimpleNamespace(
        kv_cache=machine.kv_caches[TRANSFER_LAYER]
    )
    _replace_what_needs_a_gpu(monkeypatch, machine)
    _watch_hooks(monkeypatch, machine)
    _put_on_gpu(monkeypatch, machine)
    with as_model_runner(shape):
        return Worker(machine, vllm_config, is_v2=is_v2)


def end_worker() -> None:
    """End the connector, as the worker does at its own end."""
    ensure_kv_transfer_shutdown()


def _put_on_gpu(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Let the connector find the KV cache on the GPU of threads."""
    storage, device = machine.storage.untyped_storage(), torch.device("cuda", INDEX)
    monkeypatch.setattr(rank_memory, "SLAB_BYTES", SLAB_BYTES)
    monkeypatch.setattr(opening_module, "storage_of", lambda _: (storage, device))
    over_threads = functools.partial(opening_module.Opening, open_backend=machine.open_backend)
    monkeypatch.setattr(opening_module, "Opening", over_threads)
    monkeypatch.setattr(page_lock, "PAUSE_S", 0.0)
    # Small slabs are many, and the system takes long to say where they lie.
    monkeypatch.setattr(placement, "pages_of", lambda *_: placement.Pages(None, {}))


def _watch_hooks(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Note every call of the connector's, on whatever thread."""
    for name in HOOKS:
        hook = getattr(SafeCPUOffloadConnector, name, None)
        if hook is None:  # of a later vLLM
            continue

        def watched(self: Any, *args: Any, _name: str = name, _hook: Any = hook, **kw: Any) -> Any:
            machine.trace.append(_name)
            return _hook(self, *args, **kw)

        monkeypatch.setattr(SafeCPUOffloadConnector, name, watched)


def _replace_what_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    nothing = MagicMock()

    def replace(owner: Any, *unused: str, **names: Any) -> None:
        for name, stand_in in (dict.fromkeys(unused, nothing) | names).items():
            monkeypatch.setattr(owner, name, stand_in)

    @contextlib.contextmanager
    def captured(*_: Any, **__: Any) -> Iterator[None]:
        yield

    from_032 = {"capture_pool": captured} if hasattr(cuda_graph, "capture_pool") else {}
    replace(
        torch.accelerator,
        "empty_cache",
        synchronize=machine.synchronize,
        get_memory_info=lambda *_: (1 << 30, 1 << 31),
    )
    replace(torch.cuda, CUDAGraph=nothing, graph=machine.capture)
    replace(kv_transfer_state, "_sync_engine_id_across_tp")
    replace(parallel_state, get_world_group=lambda: SimpleNamespace(local_rank=0))
    group = SimpleNamespace(is_last_rank=True, is_first_rank=True)
    replace(
        gpu_worker,
        *("set_random_seed", "freeze_gc_heap", "maybe_attach_gc_debug_callback"),
        "enable_gpu_sync_check",
        kernel_warmup=lambda worker: worker.model_runner._dummy_run(1),
        has_compiled_submodule=lambda _: True,
        get_pp_group=lambda: group,
    )
    replace(
        cuda_graph,
        "current_stream",
        **from_032,
        weak_ref_tensors=lambda tensors: tensors,
        current_platform=SimpleNamespace(
            get_global_graph_pool=lambda: None, graph_pool_handle=lambda: None
        ),
    )
    replace(
        v1,
        *("lock_workspace", "prepare_kernel_block_sizes", "initialize_mamba_ssu_backend"),
        graph_capture=captured,
        is_global_first_rank=lambda: False,
        has_ec_transfer=lambda: False,
    )
    # It collects garbage, half a second each time.
    replace(v1.GPUModelRunner, _freeze_gc=contextlib.nullcontext)
    replace(v2, freeze_gc_for_cudagraph_capture=contextlib.nullcontext)
    replace(
        cudagraph_utils,
        "current_stream",
        graph_capture=captured,
        is_global_first_rank=lambda: False,
        **from_032,
    )
    _replace_parts_of_v2(replace, machine)


def _replace_parts_of_v2(replace: Callable[..., None], machine: Machine) -> None:
    def init_kv_cache(*_: Any, kv_cache_allocation_context: Any = None, **__: Any) -> Any:
        with kv_cache_allocation_context or contextlib.nullcontext():
            return machine.kv_caches

    replace(
        v2,
        *("BlockTables", "initialize_mamba_ssu_backend", "check_attention_cp_compatibility"),
        *("lock_workspace", "create_lora_capture_hook"),
        init_attn_backend=lambda *_, **__: ([], MagicMock(), []),
        maybe_create_adaptive_verification_manager=lambda **_: None,
        pcp=SimpleNamespace(maybe_build_pcp_manager=lambda *_, **__: None),
        maybe_build_ubatch_runner=lambda *_, **__: None,
        has_compiled_submodule=lambda _: True,
        ModelCudaGraphManager=GraphManager,
        init_kv_cache=init_kv_cache,
    )
