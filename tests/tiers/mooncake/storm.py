"""Engines that share a Mooncake Store, while they, its machines and its master are killed.

    python -m tests.tiers.mooncake.storm --seconds 300

Each engine gives memory, reads and writes objects whose bytes follow from their key, and some of
them are damaged by a client of its own. Exit status 1 if wrong bytes were read, a slot was written
to after its read had returned, or an engine ended by itself.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.guarded_tier import GuardedTier
from safe_offload.tiers.naming import key_of
from tests.mooncake_server import Master, Segment, mooncake_tier, open_client
from tests.tiers.contract import FACTS, SPACE, bytes_of, filled, slot_of

NUM_ENGINES, NUM_SEGMENTS = 2, 2
NUM_KEYS = 200
SHAPES = ((256 << 10,), (100_001, 13, 4096), (4096,) * 32)
SEGMENT_BYTES = 32 << 20
PAUSE_S = 0.05
MARK = 0xAA
LATE_S = 20.0
"""So long what a read has given back is looked at."""
WRONG, LATE, LONGEST_PROBE = "wrong", "late", "longest probe"


def name_of(number: int) -> Name:
    return Name(SPACE, number % 3, number.to_bytes(32, "big"))


async def run_engine(url: str, seed: int, log: Path) -> None:
    """Read and write until killed; what was counted is in the log."""
    rng, counts = random.Random(seed), Counter[str]()
    config = TierConfig.at(url, segment_bytes=SEGMENT_BYTES, timeout_s=2.0)
    sources = [filled(SHAPES[n % 3], n) for n in range(NUM_KEYS)]
    tier = GuardedTier(mooncake_tier(config, FACTS), config, lambda _: SPACE, slot_bytes=256 << 10)
    given_back: deque = deque()
    vandal = open_client(f"{config.location.host}:{config.location.port}")
    while True:
        numbers = rng.sample(range(NUM_KEYS), 8)
        names = [name_of(n) for n in numbers]
        start_s = time.monotonic()
        await tier.probe(names)
        counts[LONGEST_PROBE] = max(counts[LONGEST_PROBE], int(1e3 * (time.monotonic() - start_s)))
        if rng.random() < 0.5:
            counts.update(
                each.value for each in await tier.spill(names, [sources[n] for n in numbers]) or ()
            )
        else:
            targets = [slot_of(SHAPES[n % 3]) for n in numbers]
            results = await tier.fetch(names, targets) or ()
            counts.update(each.value for each in results)
            for number, target, result in zip(numbers, targets, results, strict=False):
                is_wrong = result is Result.DONE and bytes_of(target) != bytes_of(sources[number])
                counts[WRONG] += is_wrong
                for buffer in target:
                    buffer[:] = bytes([MARK]) * buffer.nbytes
                given_back.append((time.monotonic(), target))
        while given_back and given_back[0][0] < time.monotonic() - LATE_S:
            _, target = given_back.popleft()
            counts[LATE] += any(bytes(b) != bytes([MARK]) * b.nbytes for b in target)
        if rng.random() < 0.05:
            await asyncio.to_thread(damage, vandal, key_of(names[0]).decode(), rng)
        log.write_text(json.dumps(counts))  # noqa: ASYNC240 - a line, and nobody waits
        await asyncio.sleep(PAUSE_S)


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
            what = rng.choice(["engine", "segment", "segment stopped", "master"])
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
                time.sleep(rng.uniform(1.0, 12.0))
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
