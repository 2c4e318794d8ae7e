"""Facts that vLLM derives from the user's arguments, in a process of its own.

Importing vLLM takes seconds, may fail and may end the process. The process has the environment and
loads the plugins of the server that the user is about to start.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import TypeAdapter

PROBE: Final = "safe_offload.commands.doctor.probe"
PROBE_TIMEOUT_S: Final = 300.0
MARK: Final = "safe-offload-doctor:"
"""The beginning of a line with facts; vLLM prints other lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfigFacts:
    """The configuration of an engine with these arguments, as vLLM and we have completed it."""

    prefix_caching: bool
    hash_algorithm: str
    transfer_config: dict[str, Any]
    num_ranks: int  # workers of one engine
    num_local_ranks: int  # workers on this machine, of all data-parallel replicas here
    other_offloading_gib: float | None  # `--kv-offloading-size`; None if it is not set


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of a model's configuration, for all ranks together, as if there were one."""

    block_bytes: int  # of a GPU block, over all layers
    num_request_blocks: int  # that a request of `max_model_len` holds
    max_model_len: int
    num_groups: int
    is_mla: bool = False  # ranks of one engine may hold the same

    @property
    def token_bytes(self) -> float:
        """Return the host memory of one token in a request of `max_model_len`."""
        return self.num_request_blocks * self.block_bytes / self.max_model_len


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts:
    """The facts of the process; each `..._problem` is why some are missing."""

    installed: str = ""  # package of vLLM and its version, such as "vllm 0.32.0"; empty if none is
    version: str = ""  # of vLLM; empty if it cannot be imported
    torch_version: str = ""  # empty if it cannot be imported
    torch_cuda: str = ""  # that torch was built for; empty if for none, as `torch_hip`
    torch_hip: str = ""
    num_gpus: int = 0  # that torch sees
    problem: str = ""
    connector: str = ""  # module that vLLM takes our name for; empty if it does not know the name
    connector_problem: str = ""
    arguments_problem: str = ""
    engine: EngineConfigFacts | None = None
    engine_problem: str = ""
    model_name: str = ""  # empty if none was given
    model: ModelFacts | None = None
    model_problem: str = ""


@dataclass(slots=True)
class VllmProbe:
    """The process with vLLM; it starts at once, so that other checks run beside it."""

    arguments: Sequence[str]  # of `vllm serve`
    _process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROBE, *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def facts(self) -> VllmFacts:
        """Wait for the process; return its last facts, even if it failed."""
        try:
            output, _ = self._process.communicate(timeout=PROBE_TIMEOUT_S)
            problem = f"the process ended with status {self._process.returncode}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, _ = self._process.communicate()
            problem = f"it did not answer within {PROBE_TIMEOUT_S:.0f} s"
        return read_output(output, problem)


def read_output(output: str, problem: str) -> VllmFacts:
    """Return the facts in a process's output; `problem` describes its end."""
    lines = output.splitlines()
    answers = [line for line in lines if line.startswith(MARK)]
    written: dict[str, Any] = json.loads(answers[-1].removeprefix(MARK)) if answers else {}
    if not written.pop("is_complete", False):
        last = next((line for line in reversed(lines) if line.strip() and line not in answers), "")
        written["problem"] = written.get("problem") or f"{problem}: {last.strip()}"
    return TypeAdapter(VllmFacts).validate_python(written)
