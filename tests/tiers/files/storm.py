"""Processes that share a directory of a file tier, and are killed at random.

    python -m tests.tiers.files.storm --minutes 10

Each reads and writes objects whose bytes follow from their key, twice as many as the capacity
holds, and some bytes on disk are flipped. Afterwards: no wrong byte was read, the directory never
held more than its capacity and one batch, what was being written is swept, and all that is left
passes `safe-offload cache verify`. Exit status 1 if not.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from safe_offload.commands.cache.place import open_place
from safe_offload.config.tiers import TierConfig
from safe_offload.config.units import MIB, format_bytes
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.files.capacity import EVICT_TO, ORPHAN_AGE_S, keep
from safe_offload.tiers.files.directory import open_root, walk
from tests.tiers.contract import SPACE, bytes_of, filled, slot_of, tier_at

NUM_PROCESSES = 4
NUM_KEYS = 320
LIMIT_BYTES = 16 * MIB
BATCH_BYTES = int((1 - EVICT_TO) * LIMIT_BYTES)
SHAPES = ((64 << 10,), (40_001, 13, 4096), (2048,) * 64)
SIZE_MAX = 1 << 20

Shared = Any  # an array in shared memory: how often each result came, then wrong objects


def name_of(number: int) -> Name:
    return Name(SPACE, number % 3, number.to_bytes(32, "big"))


class Storm:
    """The processes and what they count."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.seed = seed
        self.rng = random.Random(seed)
        self.sources = [filled(SHAPES[n % 3], n, shift=n % 2) for n in range(NUM_KEYS)]
        self.context = multiprocessing.get_context("fork")
        self.counts: Shared = self.context.Array("q", NUM_PROCESSES * 16, lock=False)
        self.processes: list[BaseProcess] = []
        self.num_started = 0
        self.num_kills = 0
        self.held_bytes_max = 0

    # ---- one of the processes -----------------------------------------------------------------

    def run_one(self, place: int, seed: int) -> None:
        asyncio.run(self._run_one(place, random.Random(seed)))

    async def _run_one(self, place: int, rng: random.Random) -> None:
        config = TierConfig.at(f"file://{self.root}", capacity_bytes=LIMIT_BYTES)
        tier = tier_at(config, SIZE_MAX)
        while True:
            numbers = rng.sample(range(NUM_KEYS), rng.randrange(1, 40))
            names = [name_of(n) for n in numbers]
            if rng.random() < 0.5:
                for result in await tier.spill(names, [self.sources[n] for n in numbers]):
                    self._count(place, result)
                continue
            await tier.probe(names)
            targets = [slot_of(SHAPES[n % 3], shift=rng.randrange(2)) for n in numbers]
            for number, target, result in zip(
                numbers, targets, await tier.fetch(names, targets), strict=True
            ):
                self._count(place, result)
                if result is Result.DONE and bytes_of(target) != bytes_of(self.sources[number]):
                    self.counts[place * 16 + 15] += 1

    def _count(self, place: int, result: Result) -> None:
        self.counts[place * 16 + list(Result).index(result)] += 1

    # ---- the storm ----------------------------------------------------------------------------

    def start(self, place: int) -> BaseProcess:
        self.num_started += 1
        process = self.context.Process(
            target=self.run_one, args=(place, self.seed * 100_000 + self.num_started)
        )
        process.start()
        return process

    def rage(self, seconds: float) -> None:
        """Kill one process after the other."""
        self.processes = [self.start(place) for place in range(NUM_PROCESSES)]
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s or not self.is_one():
            until_s = time.monotonic() + self.rng.uniform(0.05, 2.0 if seconds > 60 else 0.5)
            while time.monotonic() < until_s:
                self.held_bytes_max = max(self.held_bytes_max, self.held_bytes())
                if self.rng.random() < 0.2:
                    self.flip()
            place = self.rng.randrange(NUM_PROCESSES)
            self.kill(place)
            self.processes[place] = self.start(place)
        for place in range(NUM_PROCESSES):
            self.kill(place)

    def is_one(self) -> bool:
        """Objects were read, some of them with a flipped bit, and processes killed."""
        num_corrupt, num_done = self.result(Result.CORRUPT), self.result(Result.DONE)
        return num_done >= 100 and num_corrupt > 0 and self.num_kills >= NUM_PROCESSES

    def kill(self, place: int) -> None:
        process = self.processes[place]
        assert process.is_alive(), f"a process ended by itself: {process.exitcode}"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        self.num_kills += 1

    def held_bytes(self) -> int:
        root_fd = self._open()
        try:
            return sum(file.size_bytes for file, _ in walk(root_fd))
        finally:
            os.close(root_fd)

    def flip(self) -> None:
        """Flip a bit of some object."""
        root_fd = self._open()
        try:
            for file, folder_fd in walk(root_fd):
                if file.is_temporary or self.rng.random() > 0.02:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    file_fd = os.open(file.file, os.O_RDWR, dir_fd=folder_fd)
                    offset = self.rng.randrange(max(os.fstat(file_fd).st_size, 1))
                    found = os.pread(file_fd, 1, offset) or b"\0"
                    os.pwrite(file_fd, bytes([found[0] ^ 1 << self.rng.randrange(8)]), offset)
                    os.close(file_fd)
                    return
        finally:
            os.close(root_fd)

    def _open(self) -> int:
        self.root.mkdir(exist_ok=True, mode=0o700)
        return open_root(str(self.root))

    # ---- afterwards ---------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """What must not be."""
        found = []
        if num_wrong := sum(self.counts[15::16]):
            found.append(f"{num_wrong} objects with wrong bytes were read")
        if self.held_bytes_max > LIMIT_BYTES + BATCH_BYTES:
            found.append(f"{self.held_bytes_max} bytes were held, the limit is {LIMIT_BYTES}")
        root_fd = self._open()
        old_ns = time.time_ns() - int((ORPHAN_AGE_S + 1) * 1e9)
        num_orphans = 0
        for file, folder_fd in walk(root_fd):
            if file.is_temporary:
                num_orphans += 1
                os.utime(file.file, ns=(old_ns, old_ns), dir_fd=folder_fd)
        kept = keep(root_fd, LIMIT_BYTES)
        if kept is None or kept.num_orphans != num_orphans:
            found.append(f"{num_orphans} orphans, the sweep: {kept}")
        left = [file for file, _ in walk(root_fd) if file.is_temporary]
        if left:
            found.append(f"{len(left)} orphans are left")
        place = open_place(str(self.root), TierConfig.at(f"file://{self.root}"))
        bad = [item for item in place.items() if place.problem_of(item)]
        place.close()
        print(f"{num_orphans} orphans swept, {len(bad)} objects with a flipped bit left.")
        os.close(root_fd)
        return found

    def result(self, result: Result) -> int:
        return int(sum(self.counts[list(Result).index(result) :: 16]))


def main(arguments_given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    parser.add_argument("--directory", type=Path, help="where a directory is made for it")
    arguments = parser.parse_args(arguments_given)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        storm = Storm(Path(folder, "tier"), arguments.seed)
        print(f"seed {arguments.seed}, {NUM_PROCESSES} processes on {folder}", flush=True)
        storm.rage(arguments.minutes * 60)
        problems = storm.problems()
        counts = {result.value: storm.result(result) for result in Result if storm.result(result)}
    print(f"{storm.num_kills} kills; objects: {counts}")
    print(f"held at most {format_bytes(storm.held_bytes_max)} of {format_bytes(LIMIT_BYTES)}")
    print("\n".join(problems) or "no wrong byte, no orphan left, capacity kept")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
