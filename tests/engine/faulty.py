"""Makes the copies of a server fail and stall: `COPY_FAULTS` in its environment.

COPY_FAULTS='{"fail": 0.02, "stall": 0.01, "stall_s": 1.0, "seed": 1}': of the copies of a worker,
two in a hundred raise and one in a hundred takes a second longer. With "wrong": true every load
reads its first slot in place of its last.
"""

import dataclasses
import random
import threading
from collections.abc import Mapping
from typing import Any


def break_copies(faults: Mapping[str, Any]) -> None:
    """Replace the method that copies by one that sometimes does not, here and in forks."""
    from safe_offload.worker.copies.base import Direction
    from safe_offload.worker.copies.cpu import CpuBackend

    rng = random.Random(faults["seed"])
    run = CpuBackend._run
    fail, stall = faults.get("fail", 0.0), faults.get("stall", 0.0)

    def run_or_not(self: Any, copy: Any) -> None:
        draw = rng.random()
        if draw < fail:
            raise OSError("failed by the test")
        if draw < fail + stall:
            threading.Event().wait(faults["stall_s"])
        if faults.get("wrong") and copy.direction is Direction.LOAD:
            slot_ids = copy.slot_ids.copy()
            slot_ids[-1] = slot_ids[0]
            copy = dataclasses.replace(copy, slot_ids=slot_ids)
        run(self, copy)

    CpuBackend._run = run_or_not  # type: ignore[method-assign]
