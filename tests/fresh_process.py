"""Processes that have not imported vLLM yet, without waiting seconds for what vLLM itself imports.

One process imports that once, and each script runs in a fork of it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch._inductor.lowering",
    "torch._inductor.standalone_compile",
    "transformers.modeling_gguf_pytorch_utils",
    "openai.types.responses",
]
"""Most of what `import vllm` takes. Those that do not exist are left out."""

TIMEOUT_S = 240.0


def run_script(script: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a script in a folder, which is also the first place it imports from; return its output.

    Raises:
        AssertionError: it failed or took too long; the message has what it printed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    log = folder / "log"
    process: Any = context.Process(target=_run, args=(script, folder, log, environment))
    process.start()
    process.join(TIMEOUT_S)
    process.kill()
    process.join()
    text = log.read_text()
    assert process.exitcode == 0, text
    return text


def _run(script: str, folder: Path, log: Path, environment: dict[str, str]) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
