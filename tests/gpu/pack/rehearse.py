"""Tries what was unpacked without a GPU: all imports of an engine, and its configurations.

Packages that the machine with the GPU lacks are hidden; vLLM is told of a GPU that is not there.
Then the modules of an engine on it are imported, and for each step and connector the configuration
of its engine is made. `make gpu-pack` runs this in the checkout that was unpacked, with the
variables that `unpack.sh` sets.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import tempfile
import traceback
from argparse import ArgumentParser
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

THERE = ("torch", "transformers", "cupy", "pytest", "pytest-timeout", "numpy", "scipy", "pandas",
         "matplotlib", "pillow", "psutil", "requests", "aiohttp", "einops", "sentencepiece",
         "protobuf", "py-cpuinfo", "pyyaml", "cloudpickle", "six", "setuptools", "nvidia-ml-py",
         "prometheus-client", "tqdm", "triton", "importlib-metadata", "httpx", "uvloop", "xxhash",
         "numba")  # fmt: skip
"""Packages of the machine with the GPU, where engines have run; it has what these need, too."""
ASKED = ("supports_fp8", "supports_block_fp8", "supports_fp4")
"""Kernels that vLLM's modules ask of its library as they are imported: cutlass_scaled_mm_…"""
MODULES = """
vllm.vllm_flash_attn vllm.v1.engine.core vllm.v1.engine.async_llm vllm.v1.engine.core_client
vllm.v1.executor.uniproc_executor vllm.v1.executor.multiproc_executor
vllm.v1.worker.gpu_worker vllm.v1.worker.gpu_model_runner vllm.v1.worker.gpu.model_runner
vllm.v1.attention.backends.flash_attn vllm.v1.attention.backends.mla.flashattn_mla
vllm.v1.attention.backends.triton_attn vllm.v1.sample.sampler vllm.v1.spec_decode.ngram_proposer
vllm.model_executor.models.llama vllm.model_executor.models.gemma3
vllm.model_executor.models.deepseek_v2 vllm.model_executor.model_loader.dummy_loader
vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector
vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
vllm.v1.simple_kv_offload.manager vllm.v1.simple_kv_offload.worker
safe_offload.connector safe_offload.worker.opening safe_offload.worker.copies.gpu
safe_offload.worker.copies.row_kernel safe_offload.worker.copies.driver
tests.gpu.campaign tests.gpu.weights tests.benchmarks.connectors tests.benchmarks.agents_engine
tests.benchmarks.breakdown
"""


class Hidden(PathFinder):
    """Finds nothing of packages that are here and will not be there."""

    names: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        is_hidden = fullname.partition(".")[0] in cls.names
        return None if is_hidden else super().find_spec(fullname, path, target)


def needed_by(names: tuple[str, ...]) -> set[str]:
    """Return packages with all that they need, of those that are here."""
    found, left = set[str](), [*names]
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        found.add(name)
        try:
            needs = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        left += [Requirement(one).name for one in needs if "extra ==" not in one]
    return found


def hide_what_will_not_be_there() -> None:
    packed = {Path(entry).resolve() for entry in os.environ["PYTHONPATH"].split(":")}
    there, visible = needed_by(THERE), set[str]()
    hidden = set[str]()
    for one in importlib.metadata.distributions():
        name = canonicalize_name(one.metadata["Name"])
        tops = {str(file).partition("/")[0].partition(".")[0] for file in one.files or ()}
        is_packed = Path(str(one.locate_file(""))).resolve() in packed
        (visible if is_packed or name in there else hidden).update(tops)
    for entry in {*packed, Path.cwd()}:
        visible |= {path.name.partition(".")[0] for path in entry.iterdir()}
    Hidden.names = frozenset(name for name in hidden - visible if name.isidentifier())
    sys.meta_path[sys.meta_path.index(PathFinder)] = Hidden


def stand_in_for_libraries() -> None:
    """Take the place of vLLM's libraries, which need a torch for CUDA."""
    import torch

    for name in (*(f"cutlass_scaled_mm_{one}" for one in ASKED), "cutlass_group_gemm_supported"):
        setattr(torch.ops._C, name, lambda *_: False)
    (vllm,) = (Path(one) for one in os.environ["PYTHONPATH"].split(":") if Path(one).name == "vllm")
    for file in vllm.rglob("*.so"):
        parts = file.relative_to(vllm).with_name(file.name.partition(".")[0]).parts
        sys.modules[".".join(parts)] = ModuleType(".".join(parts))
        print("not loaded, as this torch is for a CPU:", file.name)


def pretend_a_gpu() -> None:
    """Tell vLLM of a GPU of compute capability 9.0."""
    import torch

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that vLLM takes Triton without a driver
    if torch.version.cuda is None:
        stand_in_for_libraries()
    properties = SimpleNamespace(
        total_memory=80 << 30, multi_processor_count=132, major=9, minor=0, name="none"
    )
    answers: dict[str, Any] = {
        "get_device_capability": (9, 0),
        "get_device_name": "none",
        "device_count": 1,
        "get_device_properties": properties,
    }
    for name, found in answers.items():
        setattr(torch.cuda, name, lambda *_, found=found: found)
    import vllm.platforms as platforms

    platforms.builtin_platform_plugins["cuda"] = lambda: "vllm.platforms.cuda.CudaPlatform"
    print("platform:", type(platforms.current_platform).__name__)


class Attempts:
    """What was tried; `num_failed` of them did not go well."""

    num_failed = 0

    def attempt(self, what: str, function: Callable[[], object]) -> None:
        try:
            print("ok", what, function() or "", flush=True)
        except BaseException:
            self.num_failed += 1
            print("FAILED", what)
            traceback.print_exc(file=sys.stdout)


def configure(engine: str, words: list[str], folder: Path) -> str:
    """Return what an engine of a step's command would be configured to."""
    from vllm.config import CompilationConfig, KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from safe_offload.commands.bench import engine as bench_engine
    from safe_offload.commands.bench.engine_report import BASELINE
    from tests.benchmarks import agents_engine, connectors
    from tests.gpu import shapes

    parser = ArgumentParser()
    module = agents_engine if words[0] == "agents_engine" else connectors
    module.add_arguments(parser)
    few = ("--cpu-bytes", "256MiB")  # ours looks whether a machine has the memory
    arguments = parser.parse_args([*words[1:], *few])
    options = bench_engine.read_options(arguments)
    options = shapes.take_shape(options, arguments.shape, folder)
    how = bench_engine.engine_options(options)[BASELINE].arguments
    del how["worker_extension_cls"], how["load_format"]  # known in a worker only
    how["compilation_config"] = CompilationConfig(**how["compilation_config"])
    config = connectors.make_config(engine, options)
    if config is not None:
        assert isinstance(config["kv_connector_extra_config"]["cpu_bytes_to_use"], int)
        how["kv_transfer_config"] = KVTransferConfig(**config)
    made = EngineArgs(**how).create_engine_config()
    graphs, chunk = made.compilation_config.cudagraph_mode, options.max_num_batched_tokens
    return f"V2 runner: {made.use_v2_model_runner}, graphs: {graphs}, chunk {chunk}"


def main() -> int:
    """Try all; return 1 if anything is missing."""
    hide_what_will_not_be_there()
    pretend_a_gpu()
    attempts = Attempts()
    for module in MODULES.split():
        attempts.attempt(module, lambda module=module: importlib.import_module(module) and None)  # type: ignore[misc]
    from tests.benchmarks import connectors
    from tests.gpu.steps import first_steps

    for step in first_steps(sys.executable):
        words = [word.replace("{folder}", tempfile.gettempdir()) for word in step.command[3:]]
        if words[0] not in ("connectors", "agents_engine"):
            continue
        for engine in connectors.ENGINES:
            with tempfile.TemporaryDirectory() as name:
                attempts.attempt(
                    f"{step.name}, {engine}",
                    lambda e=engine, w=words, n=name: configure(e, w, Path(n)),  # type: ignore[misc]
                )
    print("failed:", attempts.num_failed)
    return int(attempts.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
