"""The steps of a campaign, those first that prove most a minute."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.engine import OURS

ROOT = Path(__file__).parents[2]
FIGURES = "figures.json"
GRAPHS = {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
"""What vLLM does by default, with torch.compile; written down, so that a change of that is seen."""
QUICK = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}, "max_num_seqs": 32}
"""Without torch.compile, which takes longer than what is measured: as in docs/benchmarks/gpu.md."""
POOL = {"kv_cache_memory_bytes": 3 << 30}
"""For prompts of 16,000 tokens. It is given, so that no engine measures what memory is free while
others start on the same GPU."""
SMALL_POOL = {"kv_cache_memory_bytes": 1_717_986_918}
"""1.6 GiB: of three prompts of the llama shape each pushes out the one before."""
AGENTS_POOL = {"kv_cache_memory_bytes": 8 << 30}
"""That the longest context fits into; how many blocks are used follows from the contexts."""

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
SMALL: tuple[str, ...] = ("--prompt-tokens", "600", "--rounds", "1", "--cpu-bytes", "128MiB")
LOADS = {"kv_connector": OURS, "kv_connector_extra_config": {"min_load_tokens": 0}}
"""A tiny model on a CPU computes as fast as it loads; a hit is to be loaded all the same."""
SMALL += ("--kv-transfer-config", json.dumps(LOADS))
SMALL_USERS = (
    *("--users", "1", "2", "4", "8", "--turns", "4", "--skip", "20", "--scale", "10"),
    *("--prompt-tokens", "16000", "--cpu-bytes", "4GiB", "--rounds", "3"),
    *("--kv-transfer-config", json.dumps({"kv_connector": OURS})),
)
"""Of the picture in docs/benchmarks: on a CPU, only contexts this long are faster to load."""
ENGINES = ("none", "ours", "SCO", "OC")
SMOKE = ("test_lane", "test_order")
"""Tests of a GPU that come first: whether copies and their order are right at all."""
BUDGET_S, UNPACKED_S = 540, 15
"""Of one call on a machine that is lent for ten minutes; and until the first step begins there."""


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        estimate_s: it is not begun with less than this left. Of an H200 (docs/benchmarks/gpu.md):
            engines take 26 s until vLLM is imported, 9 to start, 5 to end, 1.7 for each GiB of
            host memory that each locks, and 1.4 to 2.5 for a round.
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
    """Return all steps, in their order: those of `first_steps`, and what takes longer.

    Args:
        python: the interpreter that has vLLM.
    """
    return [*first_steps(python), *more_steps(python)]


def first_steps(python: str) -> list[Step]:
    """Return the steps that fit into one call of ten minutes on a machine that has nothing yet."""
    make = Maker(python)
    smoke = [file for file in find_gpu_tests() if file.stem in SMOKE]
    return [
        make.tests("smoke", 20, *smoke),
        make.llama(),
        make.quick("gemma3", 159, tiny="gemma3", rounds=10),
        make.quick("mla", 110, tiny="deepseek", rounds=10, cpu_only=CPU_MLA),
    ]


def more_steps(python: str) -> list[Step]:
    """Return what takes longer, or needs more than a GPU."""
    make = Maker(python)
    connectors = make.connectors
    contents = ROOT / "tests/gpu/test_contents.py"
    sanitized = make.tests("compute-sanitizer-test_contents", 300, contents, before=(SANITIZER,))
    sizes = ("--prompt-tokens", "16000", "--cpu-bytes", "8GiB")
    args = ("--engine-args", json.dumps(QUICK | SMALL_POOL))
    shape = ("--shape", "llama", *sizes, *args, "--logs", "{folder}")
    up_to_64k = ("--prompt-tokens", "64000", "--lengths", *(str(1000 << n) for n in range(7)))
    how: dict[str, Any] = {"only": ENGINES, "gpu_only": QUICK | AGENTS_POOL}
    lengths = connectors("lengths", 240, "return", "llama", *up_to_64k, **how)
    users = make.agents("users", 420, (2, 4, 8, 16, 32), 4, "--seconds", "20", turns=3)
    one_copy = ("--device", "cpu", "--quick", "--rounds", "1", "--layers", "2", "--blocks", "4")
    return [
        make.bench(
            *("breakdown", 46, "breakdown"),
            *(*shape, "--rounds", "3"),
            small=("--logs", "{folder}", *SMALL),
        ),
        replace(lengths, small=(*lengths.small, "--lengths", "300", "600")),
        replace(users, small=(*users.small, *SMALL_USERS)),
        connectors("tiers", 90, "tiers", "llama", "--cpu-bytes", "2GiB", gpu_only=QUICK),
        *(make.tests(f.stem, 120, f) for f in find_gpu_tests() if f.stem not in SMOKE),
        connectors("compiled", 150, "return", "llama"),
        connectors("return-gpt-oss", 150, "return", "gpt-oss", tiny="gemma3"),
        connectors("return-mamba", 150, "return", "mamba"),
        make.bench("copies", 150, "copies", "--device", "cuda", "--quick", small=one_copy),
        connectors("return-speculative", 150, "return", "llama", **SPECULATIVE),
        make.agents("agents-64", 401, [64], 16, turns=12),
        connectors("sleep", 100, "sleep", "llama", only=("ours",), gpu_only=SLEEP),
        connectors("two-gpus", 180, "return", "llama", num_gpus=2, tensor_parallel_size=2),
        connectors(
            *("two-gpus-mla", 180, "return", "mla"),
            tiny="deepseek",
            cpu_only=CPU_MLA,
            num_gpus=2,
            tensor_parallel_size=2,
        ),
        replace(sanitized, lacks="" if shutil.which(SANITIZER) else f"no {SANITIZER} here"),
    ]


class Maker:
    """Makes steps.

    Args:
        python: the interpreter that has vLLM.
    """

    def __init__(self, python: str) -> None:
        self._python = python

    def tests(
        self, name: str, estimate_s: float, *files: Path, before: tuple[str, ...] = ()
    ) -> Step:
        relative = [str(file.relative_to(ROOT)) for file in files]
        pytest = ("-m", "pytest", "-m", "gpu", "-v", "-x", "-rs", "-p", "no:cacheprovider")
        # signal: a test that hangs in Python fails alone; the limit of the step is for the rest.
        command = (*before, self._python, *pytest, "-o", "timeout_method=signal", *relative)
        collect = (self._python, "-m", "pytest", "--collect-only", "-q", *relative)
        return Step(name, estimate_s, command, collect)

    def bench(self, name: str, estimate_s: float, *words: str, small: tuple[str, ...] = ()) -> Step:
        figures = ("--json", f"{{folder}}/{FIGURES}")
        command = (self._python, "-m", "tests.benchmarks", *words, *figures)
        tried = (self._python, "-m", "tests.gpu.small", words[0], *small, *figures)
        return Step(name, estimate_s, command, tried if small else ())

    def connectors(
        self,
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
        sizes: tuple[str, ...] = ("--prompt-tokens", "16000", "--rounds", "3")
        sizes += ("--cpu-bytes", "16GiB")
        arguments = ("--engine-args", json.dumps({**GRAPHS, **POOL, **gpu_only, **engine_args}))
        small_arguments = ("--engine-args", json.dumps({**cpu_only, **engine_args}))
        what = ("--scenario", scenario)
        logs = ("--logs", "{folder}")
        small = (*what, "--model", tiny, *SMALL, *small_arguments, "--only", *only, *logs)
        full = (*what, "--shape", shape, *sizes, *words, *arguments, *logs)
        step = self.bench(name, estimate_s, "connectors", *full, small=small)
        return replace(step, num_gpus=num_gpus)

    def quick(
        self,
        shape: str,
        estimate_s: float,
        tiny: str,
        rounds: int,
        cpu_only: Mapping[str, Any] = NOTHING,
    ) -> Step:
        """`return` with all four, as short as it can be."""
        sizes = ("--rounds", str(rounds), "--cpu-bytes", "4GiB")
        return self.connectors(
            *(f"return-{shape}", estimate_s, "return", shape, *sizes),
            tiny=tiny,
            only=ENGINES,
            gpu_only=QUICK,
            cpu_only=cpu_only,
        )

    def llama(self) -> Step:
        """`return`, `busy` and agents on the same four engines, whose start takes longest."""
        also = ("--also", "return", "busy")
        step = self.agents("llama", 219, [16], 4, *also, "--cpu-bytes", "18GiB", turns=6)
        small = (*step.small, *also, "--also-tokens", "600", "--also-rounds", "1")
        return replace(step, small=small)

    def agents(
        self,
        name: str,
        estimate_s: float,
        users: Sequence[int],
        scale: int,
        *words: str,
        turns: int,
    ) -> Step:
        """Contexts of up to 64,000 and 16,000 tokens; on the CPU of 500."""
        traces = ("agents_engine", "--traces", str(TRACES), "--logs", "{folder}")
        who = ("--users", *map(str, users), "--scale", str(scale), "--turns", str(turns))
        limits = ("--think-s", "1", "--seconds", "40", "--rounds", "1")
        sizes = ("--prompt-tokens", str(256_000 // scale), "--cpu-bytes", "24GiB")
        args = ("--block-size", "16", "--engine-args", json.dumps(QUICK | AGENTS_POOL))
        full = (*traces, "--shape", "llama", *who, *limits, *sizes, *args, *words)
        few = ("--users", *("2", "3")[: len(users)], "--turns", "3", "--scale", "256")
        small = (*traces[1:], *few, "--think-s", "1", *SMALL, "--only", *ENGINES)
        step = self.bench(name, estimate_s, *full, small=small)
        return replace(step, lacks="" if TRACES.is_file() else f"no {TRACES.name} in shared/traces")
