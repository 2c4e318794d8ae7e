"""The steps of a campaign, those first that prove most a minute."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIGURES = "figures.json"
GRAPHS = {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
"""What vLLM does by default, with torch.compile; written down, so that a change of that is seen."""
SPECULATIVE: dict[str, Any] = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}
}
NOTHING: Mapping[str, Any] = {}
SLEEP = {"enable_sleep_mode": True}  # which vLLM refuses on the CPU, where it sleeps without it
CPU_MLA = {"attention_backend": "CPU_MLA"}  # the one with AMX takes no float32
SANITIZER = "compute-sanitizer"
TRACES = next(
    (file for up in (ROOT, ROOT.parent, ROOT.parents[1])
     if (file := up / "shared/traces/agents.json.gz").is_file()),
    ROOT / "shared/traces/agents.json.gz",
)  # fmt: skip
"""Recorded agents; `shared` lies in the checkout or beside it."""
SMALL = ("--prompt-tokens", "600", "--rounds", "1", "--cpu-bytes", "128MiB")


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        estimate_s: it is not begun with less than this left.
        command: with a GPU; `{folder}` is where it may leave what is to be kept.
        small: the same, so small that it runs on the CPU; empty if nothing of it can.
        num_gpus: that it needs.
        lacks: what this machine has not, without which it is left out; "" if nothing.
    """

    name: str
    estimate_s: float
    command: tuple[str, ...]
    small: tuple[str, ...] = ()
    num_gpus: int = 1
    lacks: str = ""

    def why_left_out(self, num_gpus: int, *, small: bool) -> str:
        """Return why it cannot run on a machine with so many GPUs; "" if it can."""
        if small:
            return self.lacks or ("" if self.small else "nothing of it runs without a GPU")
        lacks = f"needs {self.num_gpus} GPUs, found {num_gpus}"
        return self.lacks or (lacks if num_gpus < self.num_gpus else "")


def find_gpu_tests() -> list[Path]:
    """Return the files that have tests of a GPU; each is run alone, as a device may be lost."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marker = "pytest.mark." + "gpu"
    return [file for file in files if file.parent.name == "gpu" or marker in file.read_text()]


def make_steps(python: str) -> list[Step]:
    """Return all steps, in their order.

    Args:
        python: the interpreter that has vLLM.
    """

    def tests(file: Path, *before: str) -> Step:
        relative = str(file.relative_to(ROOT))
        pytest = (python, "-m", "pytest", "-m", "gpu", "-v", "-x", "-rs", "-p", "no:cacheprovider")
        # signal: a test that hangs in Python fails alone; the limit of the step is for the rest.
        command = (*before, *pytest, "-o", "timeout_method=signal", relative)
        collect = (python, "-m", "pytest", "--collect-only", "-q", relative)
        return Step(f"{'-'.join((*before[:1], file.stem))}", 60, command, collect)

    def bench(name: str, estimate_s: float, *words: str, small: tuple[str, ...] = ()) -> Step:
        figures = ("--json", f"{{folder}}/{FIGURES}")
        command = (python, "-m", "tests.benchmarks", *words, *figures)
        tried = (python, "-m", "tests.gpu.small", words[0], *small, *figures) if small else ()
        return Step(name, estimate_s, command, tried)

    def connectors(
        name: str,
        estimate_s: float,
        scenario: str,
        shape: str,
        *words: str,
        tiny: str = "llama",
        only: tuple[str, ...] = ("none", "ours"),
        gpu_only: Mapping[str, Any] = NOTHING,
        cpu_only: Mapping[str, Any] = NOTHING,
        num_gpus: int = 1,
        **engine_args: Any,
    ) -> Step:
        sizes = ("--prompt-tokens", "16000", "--rounds", "3", "--cpu-bytes", "16GiB")
        arguments = ("--engine-args", json.dumps({**GRAPHS, **gpu_only, **engine_args}))
        small_arguments = ("--engine-args", json.dumps({**cpu_only, **engine_args}))
        what = ("--scenario", scenario)
        logs = ("--logs", "{folder}")
        small = (*what, "--model", tiny, *SMALL, *small_arguments, "--only", *only, *logs)
        full = (*what, "--shape", shape, *sizes, *words, *arguments, *logs)
        step = bench(name, estimate_s, "connectors", *full, small=small)
        return replace(step, num_gpus=num_gpus)

    def engine(name: str, estimate_s: float, *words: str, small: tuple[str, ...] = ()) -> Step:
        sizes = ("--shape", "llama", "--prompt-tokens", "16000", "--logs", "{folder}")
        arguments = ("--engine-args", json.dumps(GRAPHS))
        tried = ("--logs", "{folder}", *SMALL, *small)
        return bench(name, estimate_s, name, *sizes, *words, *arguments, small=tried)

    def agents(users: int, scale: int) -> Step:
        """Contexts of up to 64,000 and 16,000 tokens; on the CPU of 500."""
        name, words = f"agents-{users}", ("agents_engine", "--traces", str(TRACES), "--logs")
        sizes = ("--prompt-tokens", str(256_000 // scale), "--rounds", "2", "--cpu-bytes", "16GiB")
        full: tuple[str, ...] = (
            *words,
            "{folder}",
            "--shape",
            "llama",
            "--users",
            str(users),
            "--scale",
        )
        full = (*full, str(scale), *sizes, "--engine-args", json.dumps(GRAPHS))
        small = ("--traces", str(TRACES), "--logs", "{folder}", "--users", "3", "--turns", "3",
                 "--scale", "256", *SMALL, "--only", "none", "ours")  # fmt: skip
        step = bench(name, 240, *full, small=small)
        return replace(step, lacks="" if TRACES.is_file() else f"no {TRACES.name} in shared/traces")

    sanitized = tests(ROOT / "tests/gpu/test_contents.py", SANITIZER)
    llama = ("--model", "llama", "--prompt-tokens", "600", "--rounds", "1", "--cpu-bytes", "64MiB")
    quick = ("--blocks", "4", "--copy-rounds", "3")
    one_copy = ("--device", "cpu", "--quick", "--rounds", "1", "--layers", "2", "--blocks", "4")
    return [
        *map(tests, find_gpu_tests()),
        bench("link", 45, "link", small=("--bytes", "65536", "--seconds", "0.1")),
        bench(
            "layouts",
            200,
            *("layouts", "--device", "cuda", "--shape", "llama", "--prompt-tokens", "16000"),
            *("--rounds", "3", "--answer-tokens", "64", "--cpu-bytes", "16GiB"),
            small=(*llama, *quick, "--device", "cpu"),
        ),
        engine("breakdown", 90, "--rounds", "5", "--cpu-bytes", "16GiB"),
        connectors("busy", 180, "busy", "llama"),
        connectors("locking", 120, "locking", "llama", "--cpu-bytes", "64GiB"),
        connectors("return-llama", 150, "return", "llama"),
        connectors("return-gemma3", 150, "return", "gemma3", tiny="gemma3"),
        connectors("return-gpt-oss", 150, "return", "gpt-oss", tiny="gemma3"),
        connectors("return-mamba", 150, "return", "mamba"),
        connectors(*("return-mla", 150, "return", "mla"), tiny="deepseek", cpu_only=CPU_MLA),
        connectors("ends", 150, "ends", "llama", cpu_only={"dtype": "bfloat16"}),
        bench("copies", 150, "copies", "--device", "cuda", "--quick", small=one_copy),
        connectors("return-speculative", 150, "return", "llama", **SPECULATIVE),
        agents(16, 4),
        agents(64, 16),
        engine("beside", 240, small=("--blocks", "4", "--max-num-batched-tokens", "128")),
        bench("one-memory", 90, "one_memory", small=("--blocks", "4")),
        connectors("async", 150, "return", "llama", async_scheduling=True),
        connectors("preempted", 180, "preempted", "llama"),
        connectors("restart", 120, "restart", "llama"),
        connectors("soak", 240, "soak", "llama", "--rounds", "10"),
        connectors("sleep", 100, "sleep", "llama", only=("ours",), gpu_only=SLEEP),
        connectors("sigterm", 100, "sigterm", "llama", only=("ours",)),
        connectors("two-gpus", 180, "return", "llama", num_gpus=2, tensor_parallel_size=2),
        connectors(
            *("two-gpus-mla", 180, "ranks", "mla"),
            tiny="deepseek",
            cpu_only=CPU_MLA,
            num_gpus=2,
            tensor_parallel_size=2,
        ),
        replace(sanitized, lacks="" if shutil.which(SANITIZER) else f"no {SANITIZER} here"),
    ]
