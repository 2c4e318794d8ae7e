"""Four engines on one pool, of which one is killed or stopped each second: no wrong word.

    python -m tests.node.storm --seconds 600

Each engine is two processes, as with vLLM: one decides, the other copies and compares. The first is
killed, and the other goes on with the copy that it has begun; or both are. Or both are stopped for
some seconds, and go on, or are killed; every other engine stops itself when it has the place of a
neighbour for the first time, which cannot wake then. How long others have no hit afterwards is
measured. Every other quarter of a minute nobody is killed: how long requests take then is what the
others' times are a ratio of.
"""

from __future__ import annotations

import argparse
import contextlib
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
    HIT_MS,
    LOADS,
    LOST,
    OCTAVE,
    STALLS,
    STOPS,
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
POLL_S = 0.02
KINDS = "killed", "stopped", "stopped with a neighbour's place", "ended by themselves"
COUNTED = {
    **{"stores": STORES, "loads": LOADS, "foreign": FOREIGN, "lost": LOST, "wrong": WRONG},
    "kept from their slots for a second": STALLS,
}


class Fighter:
    """An engine of the storm, from its start to its end."""

    def __init__(self, num_slots: int, seed: int, times: Any, is_stormy: Any) -> None:
        self.is_to_stop = seed % 2 == 0
        context = multiprocessing.get_context("fork")
        self.counts = context.Array("q", STOPS + 1, lock=False)
        self.counts[STOPS] = self.is_to_stop
        self.copier_pid = context.Value("q", 0, lock=False)
        args = num_slots, seed, self.counts, self.copier_pid, times, is_stormy
        self.process = context.Process(target=serve, args=args)
        self.process.start()
        self.stopped_until_s = 0.0  # while it is
        self.free_since_ms = 0.0  # another went on or died, and this one had no hit since

    def signal(self, number: int, *, is_both: bool = True) -> None:
        """Send a signal to the one process or both."""
        for process_id in (self.process.pid, self.copier_pid.value if is_both else 0):
            if process_id:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, number)

    def stop(self, chance: random.Random) -> None:
        """Stop both for some seconds."""
        self.stopped_until_s = time.monotonic() + chance.uniform(0.5, 5.0)
        self.signal(signal.SIGSTOP)

    def has_stopped(self) -> bool:
        """Whether the first process has stopped itself, and nobody knows yet."""
        if self.counts[STOPS] or self.stopped_until_s or not self.is_to_stop:
            return False
        found = Path(f"/proc/{self.process.pid}/stat").read_text()
        return found.rpartition(")")[2].split()[0] == "T"

    def kill(self, chance: random.Random) -> None:
        """Kill the first process, or both; the other ends with what it copies."""
        self.signal(signal.SIGKILL, is_both=chance.random() < 0.5)
        self.signal(signal.SIGCONT)
        self.process.join()


def storm(seconds: float, *, num_slots: int = 160, kill_every_s: float = 1.0) -> dict[str, float]:
    """Let it blow; return what was counted, and what is wrong with the slots at the end."""
    chance, context = random.Random(0), multiprocessing.get_context("fork")
    times = context.Array("q", 2 * TIMES, lock=False)
    is_stormy = context.Value("q", 1, lock=False)
    all_of_them: list[Fighter] = []
    found = dict.fromkeys(KINDS, 0.0)
    longest_ms = 0.0

    def start() -> Fighter:
        all_of_them.append(Fighter(num_slots, len(all_of_them) + 1, times, is_stormy))
        return all_of_them[-1]

    engines = [start() for _ in range(ENGINES)]
    next_s, end_s = time.monotonic(), time.monotonic() + seconds
    while (now_s := time.monotonic()) < end_s:
        time.sleep(POLL_S)
        for index, engine in enumerate(engines):
            if engine.free_since_ms and engine.counts[HIT_MS] > engine.free_since_ms:
                longest_ms = max(longest_ms, engine.counts[HIT_MS] - engine.free_since_ms)
                engine.free_since_ms = 0.0
            if not engine.process.is_alive():
                found["ended by themselves"] += 1
                engines[index] = start()
            elif engine.has_stopped():
                engine.is_to_stop = False
                engine.stop(chance)
                found["stopped with a neighbour's place"] += 1
            elif engine.stopped_until_s and now_s > engine.stopped_until_s:
                engine.stopped_until_s = engine.free_since_ms = 0.0
                if chance.random() < 0.3:
                    engine.kill(chance)
                    engines[index] = start()
                engine.signal(signal.SIGCONT)
                for other in engines:
                    is_free = not (other.stopped_until_s or other.free_since_ms)
                    other.free_since_ms = 1e3 * now_s if is_free else other.free_since_ms
        is_stormy.value = int((end_s - now_s) / CALM_S) % 2 == 0
        if now_s < next_s + kill_every_s or not is_stormy.value:
            continue
        next_s, index = now_s, chance.randrange(ENGINES)
        engine = engines[index]
        if engine.stopped_until_s or chance.random() < 0.5:
            engine.kill(chance)
            found["killed"] += 1
            engines[index] = start()
        else:
            engine.stop(chance)
            found["stopped"] += 1
    for engine in engines:
        engine.kill(chance)
    time.sleep(0.5)
    for name, place in COUNTED.items():
        found[name] = sum(each.counts[place] for each in all_of_them)
    waiting_ms = [1e3 * end_s - each.free_since_ms for each in engines if each.free_since_ms]
    found["seconds without a hit"] = round(max([longest_ms, *waiting_ms]) / 1e3, 2)
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


def account(num_slots: int) -> dict[str, int]:
    """What is wrong with the slots when all engines are dead: everything is 0 if nothing is."""
    last = Engine(num_slots)
    last.table.bury(0.0)
    last.lots.sync()
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
