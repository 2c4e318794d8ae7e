"""Makes copies fail and stall, in every Python process that has this folder in PYTHONPATH.

COPY_FAULTS='{"fail": 0.02, "stall": 0.01, "stall_s": 1.0, "seed": 1}': of the copies of a worker,
two in a hundred raise and one in a hundred takes a second longer. With "corrupt": true every copy
delivers a wrong byte.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import json
import os
import random
import sys
import threading
from types import ModuleType
from typing import Any

PATCHED = "safe_offload.worker.copies.cpu"


def break_copies(backend: ModuleType) -> None:
    """Replace the method that copies by one that sometimes does not."""
    faults = json.loads(os.environ["COPY_FAULTS"])
    rng = random.Random(faults["seed"])
    run = backend.CpuBackend._run

    def run_or_not(self: Any, copy: Any) -> None:
        draw = rng.random()
        if draw < faults["fail"]:
            raise OSError("failed by the test")
        if draw < faults["fail"] + faults["stall"]:
            threading.Event().wait(faults["stall_s"])
        run(self, copy)
        if faults.get("corrupt"):
            target = self._table.ranges(self._table.runs(copy)).targets[0]
            ctypes.c_uint8.from_address(int(target)).value ^= 1

    backend.CpuBackend._run = run_or_not


class Finder(importlib.abc.MetaPathFinder):
    """Finds one module, once, and breaks it when it has been loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """See MetaPathFinder."""
        if name != PATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_break(module: ModuleType) -> None:
            execute(module)
            break_copies(module)

        spec.loader.exec_module = execute_and_break  # type: ignore[method-assign]
        return spec


if "COPY_FAULTS" in os.environ:
    sys.meta_path.insert(0, Finder())
