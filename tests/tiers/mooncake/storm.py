"""Engines that share a Mooncake Store, while they, their tiers, its machines and master are killed.

    python -m tests.tiers.mooncake.storm --seconds 300

Each engine reads and writes objects whose bytes follow from their key, and some of them are damaged
by a client of its own. Some give memory; others have their tier in a process, which is killed
during calls. Exit status 1 if wrong bytes were read, a slot was written to after its call had
returned, or an engine ended by itself.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Name, Result, Tier
from safe_offload.tiers.guarded_tier import GuardedTier
from safe_offload.tiers.naming import key_of
from safe_offload.tiers.process.process_tier import ProcessTier
from tests.mooncake_server import Master, Segment, mooncake_tier, open_client
from tests.tiers.contract import FACTS, SPACE, bytes_of, filled, slot_of
from tests.tiers.process.slots import Slots

NUM_ENGINES, NUM_SEGMENTS = 2, 2
NUM_KEYS, NUM_SLOTS = 200, 64
SHAPES = ((256 << 10,), (100_001, 13, 4096), (4096,) * 32)
SEGMENT_BYTES = 32 << 20
PAUSE_S = 0.05
MARK = 0xAA
KILL_AFTER_S = (0.001, 0.1, 0.5)
"""Into calls that take so long, the process of their tier is killed at times."""
LATE_S = 20.0
"""So long what a read has given back is looked at."""
WRONG, LATE, LONGEST_PROBE = "wrong", "late", "longest probe"


def name_of(number: int) -> Name:
    return Name(SPACE, number % 3, number.to_bytes(32, "big"))


class OwnSlots:
    """Slots of an engine's own, of all shapes, looked at for a while after they were given back."""

    numbers: Sequence[int] = range(NUM_KEYS)
    num_at_a_time = 8

    def __init__(self, url: str) -> None:
        self._sources = [filled(SHAPES[n % 3], n) for n in self.numbers]
        self._given_back: deque[tuple[float, Any]] = deque()
        self.config = TierConfig.at(url, segment_bytes=SEGMENT_BYTES, timeout_s=2.0)

    def open(self) -> Tier:
        return mooncake_tier(self.config, FACTS)

    def source(self, number: int) -> Any:
        return self._sources[number]

    def target(self, number: int) -> Any:
        return slot_of(SHAPES[number % 3])

    def content(self, slot: Any) -> bytes:
        return bytes_of(slot)

    def give_back(self, slots: Sequence[Any]) -> int:
        """Mark slots; return how many of those given back long ago have been written to."""
        for slot in slots:
            for buffer in slot:
                buffer[:] = bytes([MARK]) * buffer.nbytes
            self._given_back.append((time.monotonic(), slot))
        num_late = 0
        while self._given_back and self._given_back[0][0] < time.monotonic() - LATE_S:
            _, slot = self._given_back.popleft()
            num_late += any(bytes(b) != bytes([MARK]) * b.nbytes for b in slot)
        return num_late


class SharedSlots:
    """Slots that the process of a tier maps, of one shape; nobody writes to those of no call."""

    num_at_a_time = 24

    def __init__(self, url: str, shape: int) -> None:
        self.numbers = range(shape, NUM_KEYS, 3)
        # Without memory of its own, so that it waits for machines that have stopped.
        self.config = TierConfig.at(url, timeout_s=2.0)
        self._slots = Slots(NUM_SLOTS, SHAPES[shape])
        self._bytes = np.frombuffer(self._slots.memory, np.uint8)
        self._bytes[:] = MARK
        self._ranges = [self._slots.layout.ranges_of(slot_id) for slot_id in range(NUM_SLOTS)]
        self._turns = itertools.cycle(range(NUM_SLOTS))

    def open(self) -> Tier:
        return self._slots.open(self.config, FACTS)

    def source(self, number: int) -> Any:
        slot_id, data = self.target(number), bytes_of(filled(SHAPES[number % 3], number))
        for at, length in self._ranges[slot_id]:
            self._slots.memory[at : at + length], data = data[:length], data[length:]
        return slot_id

    def target(self, number: int) -> Any:
        return next(self._turns)

    def content(self, slot: Any) -> bytes:
        return b"".join(self._slots.memory[at : at + length] for at, length in self._ranges[slot])

    def give_back(self, slots: Sequence[Any]) -> int:
        """Mark slots; return whether others have been written to."""
        for at, length in (each for slot in slots for each in self._ranges[slot]):
            self._bytes[at : at + length] = MARK
        is_late = not (self._bytes == MARK).all()
        self._bytes[:] = MARK
        return is_late


async def run_engine(url: str, seed: int, log: Path) -> None:
    """Read and write until killed; what was counted is in the log."""
    rng, counts = random.Random(seed), Counter[str]()
    slots = SharedSlots(url, seed // 2 % 3) if seed % 2 else OwnSlots(url)
    inner = slots.open()
    tier = GuardedTier(inner, slots.config, lambda _: SPACE, slot_bytes=256 << 10)
    vandal = open_client(f"{slots.config.location.host}:{slots.config.location.port}")
    while True:
        numbers = rng.sample(slots.numbers, slots.num_at_a_time)
        names = [name_of(n) for n in numbers]
        start_s = time.monotonic()
        await tier.probe(names)
        counts[LONGEST_PROBE] = max(counts[LONGEST_PROBE], int(1e3 * (time.monotonic() - start_s)))
        if rng.random() < 0.5:
            used = [slots.source(n) for n in numbers]
            call = asyncio.ensure_future(in_two(tier.spill, names, used))
            await kill_sometimes(inner, call, rng, counts)
            counts.update(each.value for each in await call)
        else:
            used = [slots.target(n) for n in numbers]
            call = asyncio.ensure_future(in_two(tier.fetch, names, used))
            await kill_sometimes(inner, call, rng, counts)
            results = await call
            counts.update(each.value for each in results)
            for number, slot, result in zip(numbers, used, results, strict=False):
                expected = bytes_of(filled(SHAPES[number % 3], number))
                counts[WRONG] += result is Result.DONE and slots.content(slot) != expected
        if seed % 2 or used[0] is not slots.source(numbers[0]):
            counts[LATE] += slots.give_back(used)
        if rng.random() < 0.05:
            await asyncio.to_thread(damage, vandal, key_of(names[0]).decode(), rng)
        log.write_text(json.dumps(counts))  # noqa: ASYNC240 - a line, and nobody waits
        await asyncio.sleep(PAUSE_S)


async def in_two(move: Callable[..., Any], names: list[Name], slots: list[Any]) -> list[Result]:
    """Fetch or spill in two calls at a time, which keeps all channels of a client busy."""
    calls = (move(names[at::2], slots[at::2]) for at in range(2))
    results = [Result.CANCELLED] * len(names)
    for at, found in enumerate(await asyncio.gather(*calls)):
        results[at::2] = found or results[at::2]
    return results


async def kill_sometimes(
    tier: Tier, call: asyncio.Future[Any], rng: random.Random, counts: Counter[str]
) -> None:
    """Kill the process of a tier, if it has one, in the middle of a call."""
    if isinstance(tier, ProcessTier) and rng.random() < 0.5:
        await asyncio.wait([call], timeout=rng.choice(KILL_AFTER_S))
        if not call.done() and not tier.process.is_over():
            os.kill(tier.process.pid, signal.SIGKILL)
            counts["tier killed"] += 1


def damage(store: object, key: str, rng: random.Random) -> None:
    """Put something else in the place of an object, if it is there."""
    data = bytearray(store.get(key))  # type: ignore[attr-defined]
    if data:
        data[rng.randrange(len(data))] ^= 1
        store.remove(key, True)  # type: ignore[attr-defined]
        store.put(key, bytes(data[: rng.choice([len(data), len(data) - 1])]))  # type: ignore[attr-defined]


class Engine:
    """A process with `run_engine`."""

    def __init__(self, folder: Path, url: str, seed: int) -> None:
        self.log = folder / f"engine-{seed}.json"
        command = [sys.executable, "-m", "tests.tiers.mooncake.storm", "--engine", url]
        with open(folder / f"engine-{seed}.log", "w") as log:
            self.process = subprocess.Popen(
                [*command, "--seed", str(seed), "--log", str(self.log)], stdout=log, stderr=log
            )

    def kill(self) -> int:
        """Kill it; return how it had ended by itself, 0 if it had not."""
        ended = self.process.poll()
        self.process.kill()
        self.process.wait()
        return ended or 0


def rage(folder: Path, seconds: float, seed: int) -> Counter[str]:
    """Kill and stop what there is, in turns; return all counts."""
    rng, counts, seeds = random.Random(seed), Counter[str](), iter(range(seed * 1000, 10**9))
    with Master(folder, client_ttl="3") as master:
        segments = [Segment(folder, master, SEGMENT_BYTES) for _ in range(NUM_SEGMENTS)]
        for segment in segments:
            segment.start()
        engines = [Engine(folder, master.url, next(seeds)) for _ in range(NUM_ENGINES)]
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            time.sleep(rng.uniform(2.0, 8.0))
            what = rng.choice(["engine", "segment", *["segment stopped"] * 3, "master"])
            counts[f"{what} killed" if what != "segment stopped" else what] += 1
            place = rng.randrange(2)
            if what == "engine":
                counts["ended by itself"] += engines[place].kill() != 0
                engines[place] = Engine(folder, master.url, next(seeds))
            elif what == "segment":
                segments[place].kill()
                segments[place].start()
            elif what == "segment stopped":
                segments[place].suspend()
                time.sleep(rng.uniform(1.0, rng.choice([4.0, 12.0])))
                segments[place].resume()
            else:
                master.kill()
                time.sleep(rng.uniform(0.0, 3.0))
                master.start()
        for engine in engines:
            counts["ended by itself"] += engine.kill() != 0
        for segment in segments:
            segment.kill()
    for log in folder.glob("engine-*.json"):
        found = Counter(json.loads(log.read_text() or "{}"))
        longest = max(found.pop(LONGEST_PROBE, 0), counts[LONGEST_PROBE])
        counts += found
        counts[LONGEST_PROBE] = longest
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        while True:  # the master may be away when it starts
            try:
                asyncio.run(run_engine(arguments.engine, arguments.seed, arguments.log))
            except OSError:
                time.sleep(0.2)
    folder = Path(tempfile.mkdtemp(prefix="safe-offload-storm-"))
    counts = rage(folder, arguments.seconds, arguments.seed)
    print(", ".join(f"{what}: {count}" for what, count in sorted(counts.items())))
    is_well = not (counts[WRONG] or counts[LATE] or counts["ended by itself"]) and counts["done"]
    print("no wrong byte, no late write" if is_well else f"FAILED; logs are in {folder}")
    return 0 if is_well else 1


if __name__ == "__main__":
    os.environ["PYTHONFAULTHANDLER"] = "1"
    sys.exit(main())
