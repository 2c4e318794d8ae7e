"""Four engines on one pool, of which one is killed each second: no wrong word, no slot is lost.

    python -m tests.node.storm --seconds 600

Each engine is two processes, as with vLLM: one decides, the other copies and compares. The first is
killed, and the other goes on with the copy that it has begun; or both are. Every other quarter of a
minute nobody is killed: how long requests take then is what the others' times are a ratio of.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from safe_offload.node import pools, table
from safe_offload.node.pools import open_rank
from tests.node.engines import (
    FOREIGN,
    LOADS,
    LOST,
    OCTAVE,
    STORES,
    TIMES,
    WRONG,
    Engine,
    pools_in,
    serve,
    wanted,
    word_of,
    words_of,
)

ENGINES = 4
CALM_S = 15.0


def storm(seconds: float, *, num_slots: int = 160, kill_every_s: float = 1.0) -> dict[str, float]:
    """Let it blow; return what was counted, and what is wrong with the slots at the end."""
    context = multiprocessing.get_context("fork")
    chance = random.Random(0)
    counts: list[Any] = []
    times = context.Array("q", 2 * TIMES, lock=False)
    is_stormy = context.Value("q", 1, lock=False)
    engines: list[Any] = []
    num_killed = num_ended = 0

    def start() -> tuple[Any, Any]:
        counts.append(context.Array("q", 5, lock=False))
        copier_pid = context.Value("q", 0, lock=False)
        args = num_slots, len(counts), counts[-1], copier_pid, times, is_stormy
        process = context.Process(target=serve, args=args)
        process.start()
        return process, copier_pid

    engines = [start() for _ in range(ENGINES)]
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(kill_every_s)
        for index, (process, _) in enumerate(engines):
            if not process.is_alive():
                num_ended += 1
                engines[index] = start()
        is_stormy.value = int((end_s - time.monotonic()) / CALM_S) % 2 == 0
        if not is_stormy.value:
            continue
        index = chance.randrange(ENGINES)
        process, copier_pid = engines[index]
        _kill(process, copier_pid, chance)
        num_killed += 1
        engines[index] = start()
    for process, copier_pid in engines:
        _kill(process, copier_pid, chance)
    time.sleep(0.5)
    found = {
        "killed": num_killed,
        "ended by themselves": num_ended,
        "stores": sum(each[STORES] for each in counts),
        "loads": sum(each[LOADS] for each in counts),
        "foreign": sum(each[FOREIGN] for each in counts),
        "lost": sum(each[LOST] for each in counts),
        "wrong": sum(each[WRONG] for each in counts),
    }
    return found | _lateness(times) | account(num_slots)


def _lateness(times: Any) -> dict[str, float]:
    """By how much requests are later beside kills."""
    late = {}
    for share in (0.5, 0.9, 0.99):
        calm, stormy = (_quantile(times[at : at + TIMES], share) for at in (0, TIMES))
        late[f"later at {share}"] = round(2 ** ((stormy - calm) / OCTAVE), 3)
    return late


def _quantile(counts: list[int], share: float) -> int:
    left = share * sum(counts)
    for index, count in enumerate(counts):
        left -= count
        if left <= 0:
            return index
    return 0


def _kill(process: Any, copier_pid: Any, chance: random.Random) -> None:
    os.kill(process.pid, signal.SIGKILL)
    if copier_pid.value and chance.random() < 0.5:
        os.kill(copier_pid.value, signal.SIGKILL)
    process.join()


def account(num_slots: int) -> dict[str, int]:
    """What is wrong with the slots when all engines are dead: everything is 0 if nothing is."""
    last = Engine(num_slots)
    last.table.bury(0.0)
    last.table.bury(table.DEAD_AFTER_S)
    last.slots.sync()
    file = open_rank(wanted(num_slots))
    words = words_of(file)
    torn = sum(
        int((words[slot] != word_of(key.block_hash)).any())
        for slot, key in last.slots.directory.kept().items()
    )
    marks = int(np.count_nonzero(last.table.marks))
    owned = int(np.count_nonzero(last.table.owners)) - len(_test_lots(num_slots))
    granted = last.slots.grant(num_slots)
    free = num_slots - table.reserved_slots(num_slots)
    last.slots.release(granted)
    last.check()
    last.close()
    file.locks.close()
    return {"torn": torn, "marks": marks, "owned": owned, "not grantable": free - len(granted)}


def _test_lots(num_slots: int) -> range:
    return range(table.reserved_slots(num_slots) // table.lot_slots_of(num_slots))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.node.storm")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=pools.BASE) as folder, pools_in(Path(folder)):
        for name, count in storm(options.seconds).items():
            print(f"{count:10} {name}")


if __name__ == "__main__":
    main()
