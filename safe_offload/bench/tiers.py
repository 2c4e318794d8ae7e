"""A directory as a tier: what it reads and writes, against what its device gives.

Objects of each size are written and read by the tier, and as many bytes by plain pwrite and pread:
from as many threads, each with one large new file, in pieces of the same size, in the same rounds.
Both go past the page cache (O_DIRECT) where the file system can. CPU time is that of the whole
process. A probe asks for objects of which half are there.

With --engine, real engines answer prompts computed, from the GPU, from the host and from the tier.
"""

import argparse
import asyncio
import json
import mmap
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safe_offload.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    median_and_spread,
    publish,
    table,
)
from safe_offload.bench.tiers_engine import (
    EngineBenchOptions,
    EngineFound,
    measure_engines,
    render,
)
from safe_offload.errors import ConfigError, SafeOffloadError
from safe_offload.settings import size
from safe_offload.tier_config import TierConfig
from safe_offload.units import format_bytes
from safe_offload.worker.tiers.base import Buffers, Name, Result
from safe_offload.worker.tiers.files import FileTier

GIB = 1 << 30
SIZE_BYTES_MAX = 64 * GIB
PROBED_KEYS = 5_000
PROBE_OBJECT_BYTES = 4096
TIER_WRITE, TIER_READ, LIMIT_WRITE, LIMIT_READ = (
    *("tier writes", "tier reads"),
    *("device writes", "device reads"),
)
LIMIT_OF = {TIER_WRITE: LIMIT_WRITE, TIER_READ: LIMIT_READ}
METHOD = (
    "Objects are whole files with a header and a checksum; the device's limit is plain pwrite and "
    "pread of a large new file for each of as many threads, in pieces of the same size. All ways "
    "take turns in every round. A share is the median over the rounds of device time / tier time. "
    "CPU time is user and system time of the process."
)


@dataclass(frozen=True, slots=True)
class TierBenchOptions:
    """What to measure, and where."""

    folder: Path
    object_bytes: tuple[int, ...]
    round_bytes: int
    rounds: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One way in one round."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class SizeFound:
    """All samples of objects of one size."""

    object_bytes: int
    num_objects: int
    samples: dict[str, list[Sample]]

    @property
    def size_bytes(self) -> int:
        """Return the bytes that each way moves in a round."""
        return self.object_bytes * self.num_objects

    def rates(self, way: str) -> list[float]:
        """Return GB/s of each round."""
        return [self.size_bytes / sample.seconds / 1e9 for sample in self.samples[way]]

    def share(self, way: str) -> float:
        """Return how much of the device's rate the tier reaches."""
        pairs = zip(self.samples[LIMIT_OF[way]], self.samples[way], strict=True)
        return statistics.median(limit.seconds / tier.seconds for limit, tier in pairs)

    def cpu_s_per_gib(self, way: str) -> float:
        """Return CPU seconds for a GiB."""
        cpu_s = statistics.median(sample.cpu_s for sample in self.samples[way])
        return cpu_s * GIB / self.size_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `safe-offload bench tiers`."""
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="on the device; what is made in it is deleted")
    add(
        "--object-bytes",
        nargs="+",
        default=["2MiB", "256KiB"],
        metavar="SIZE",
        help="sizes of objects: of one block on one rank (2MiB 256KiB)",
    )
    add(
        "--round-bytes", default="1GiB", metavar="SIZE", help="a way moves in a round (%(default)s)"
    )
    add("--rounds", type=int, default=5, help="after a warm-up (%(default)s)")
    add("--threads", type=int, default=TierConfig("file", "/").num_threads, help="(%(default)s)")
    add("--engine", metavar="MODEL", help="ask engines too: llama, gemma3, deepseek, or any model")
    add("--prompt-tokens", type=int, default=16_000, help="of their prompts (%(default)s)")
    how: dict[str, Any] = {"type": json.loads, "default": {}, "metavar": "JSON"}
    add("--engine-args", help="more arguments of vllm.LLM", **how)
    add("--extra-config", help="more keys of kv_connector_extra_config", **how)
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `safe-offload bench tiers`."""
    options = read_options(arguments)
    machine = describe_machine()
    found, probes_s = measure(options, print)
    engines = None
    if arguments.engine:
        engines = measure_engines(_engine_options(arguments), print)
    publish(make_report(options, found, probes_s, engines, machine), arguments)
    return 1 if engines is not None and engines.num_different_answers else 0


def _engine_options(arguments: argparse.Namespace) -> EngineBenchOptions:
    return EngineBenchOptions(
        folder=arguments.folder,
        model=arguments.engine,
        prompt_tokens=arguments.prompt_tokens,
        rounds=arguments.rounds,
        extra=arguments.extra_config,
        engine_args=arguments.engine_args,
    )


def read_options(arguments: argparse.Namespace) -> TierBenchOptions:
    """Return what was asked for; raise ConfigError if it makes no sense."""
    for name in ("rounds", "threads"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name}: expected at least 1")
    read = size(SIZE_BYTES_MAX).read
    options = TierBenchOptions(
        folder=arguments.folder,
        object_bytes=tuple(_object_bytes(text) for text in arguments.object_bytes),
        round_bytes=read("--round-bytes", arguments.round_bytes),
        rounds=arguments.rounds,
        threads=arguments.threads,
    )
    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder} is no directory. Fix: create it on the device to test")
    free_bytes = shutil.disk_usage(options.folder).free
    # What a round wrote stays to the end: an ext4 without journal is slow to make files for
    # minutes after many were deleted (recently_deleted in fs/ext4/ialloc.c, Linux 6.1).
    needed_bytes = 2 * (options.rounds + 2) * options.round_bytes
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{options.folder} has {format_bytes(free_bytes)} left, and the benchmark takes "
            f"{format_bytes(needed_bytes)}. Fix: a smaller --round-bytes"
        )
    return options


def _object_bytes(text: str) -> int:
    found = size(GIB).read("--object-bytes", text)
    if not isinstance(found, int) or found % mmap.PAGESIZE:
        raise ConfigError(f"--object-bytes: expected a multiple of {mmap.PAGESIZE}, found {text}")
    return found


def measure(
    options: TierBenchOptions, say: Callable[[str], None]
) -> tuple[list[SizeFound], list[float]]:
    """Return what was found for each size, and the seconds of the probes; `say` takes progress."""
    found = []
    with tempfile.TemporaryDirectory(prefix="safe-offload-bench-", dir=options.folder) as name:
        for object_bytes in options.object_bytes:
            say(f"objects of {format_bytes(object_bytes)} ...")
            num_objects = max(1, options.round_bytes // object_bytes)
            rig = _Rig(Path(name) / str(object_bytes), object_bytes, num_objects, options.threads)
            try:
                samples = rig.time_in_turn(options.rounds)
            finally:
                rig.close()
            found.append(SizeFound(object_bytes, num_objects, samples))
        say(f"a probe of {PROBED_KEYS} keys ...")
        probes_s = _time_probes(Path(name) / "probe", options)
    return found, probes_s


class _Rig:
    """A tier, a large file beside it, and the memory that both read and write."""

    def __init__(self, folder: Path, object_bytes: int, num_objects: int, threads: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._num_objects = num_objects
        self._object_bytes = object_bytes
        self._memory = mmap.mmap(-1, object_bytes * num_objects)
        pattern = os.urandom(min(len(self._memory), 1 << 20))
        for start in range(0, len(self._memory), len(pattern)):
            end = min(start + len(pattern), len(self._memory))
            self._memory[start:end] = pattern[: end - start]
        view = memoryview(self._memory)
        starts = range(0, len(view), object_bytes)
        self._slots: list[Buffers] = [(view[i : i + object_bytes],) for i in starts]
        self._runner = asyncio.Runner()
        self._tier = open_tier(folder / "tier", object_bytes, threads)
        self._threads = ThreadPoolExecutor(threads)
        self._num_threads = threads
        self._generation = 0

    def time_in_turn(self, rounds: int) -> dict[str, list[Sample]]:
        """Time every way once in each round, the warm-up not counted."""
        ways: dict[str, Callable[[], None]] = {
            LIMIT_WRITE: lambda: self._move(os.pwritev),
            TIER_WRITE: self._spill,
            LIMIT_READ: lambda: self._move(os.preadv),
            TIER_READ: self._fetch,
        }
        samples: dict[str, list[Sample]] = {way: [] for way in ways}
        for index in range(rounds + 1):
            self._generation = index
            # Writes come before reads; of the two, another one goes first each time.
            pairs = [[LIMIT_WRITE, TIER_WRITE], [LIMIT_READ, TIER_READ]]
            for way in (way for pair in pairs for way in (pair if index % 2 else pair[::-1])):
                sample = _time(ways[way])
                if index:
                    samples[way].append(sample)
        return samples

    def _names(self) -> list[Name]:
        return names(self._num_objects, self._generation)

    def _spill(self) -> None:
        _require(self._runner.run(self._tier.spill(self._names(), self._slots)))

    def _fetch(self) -> None:
        _require(self._runner.run(self._tier.fetch(self._names(), self._slots)))

    def _move(self, call: Callable[[int, Any, int], int]) -> None:
        """Read or write large files, each thread one, with every n-th piece."""

        def run(first: int) -> None:
            pieces = range(first, self._num_objects, self._num_threads)
            file = _open_direct(self._folder / f"large-{self._generation}-{first}")
            os.ftruncate(file, len(pieces) * self._object_bytes)
            for place, index in enumerate(pieces):
                moved = call(file, self._slots[index], place * self._object_bytes)
                if moved != self._object_bytes:
                    raise SafeOffloadError(f"moved {moved} of {self._object_bytes} bytes")
            os.close(file)

        list(self._threads.map(run, range(self._num_threads)))

    def close(self) -> None:
        """Give back what was taken."""
        self._runner.run(self._tier.close())
        self._runner.close()
        self._threads.shutdown()
        shutil.rmtree(self._folder)


def open_tier(folder: Path, slot_bytes: int, threads: int) -> FileTier:
    """Return a tier in a new folder."""
    folder.mkdir(mode=0o700)
    return FileTier(TierConfig("file", str(folder), num_threads=threads), slot_bytes)


def names(count: int, generation: int) -> list[Name]:
    """Return names that no other generation has."""
    head = generation.to_bytes(8, "big")
    return [Name(b"\0" * 32, 0, head + i.to_bytes(24, "big")) for i in range(count)]


def _open_direct(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


def _require(results: Sequence[Result]) -> None:
    bad = {result.value for result in results if result is not Result.DONE}
    if bad:
        raise SafeOffloadError(f"the tier says {', '.join(sorted(bad))} of objects that it has")


def _time(way: Callable[[], None]) -> Sample:
    before, start_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    way()
    seconds, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(seconds, cpu_s)


def _time_probes(folder: Path, options: TierBenchOptions) -> list[float]:
    """Return the seconds of each probe, half of whose keys are there."""
    memory = mmap.mmap(-1, PROBE_OBJECT_BYTES)
    slots: list[Buffers] = [(memoryview(memory),)] * (PROBED_KEYS // 2)
    found = []
    with asyncio.Runner() as runner:
        tier = open_tier(folder, PROBE_OBJECT_BYTES, options.threads)
        there = names(len(slots), 0)
        _require(runner.run(tier.spill(there, slots)))
        asked = there + names(PROBED_KEYS - len(there), 1)
        for _ in range(options.rounds + 1):
            start_s = time.perf_counter()
            present = runner.run(tier.probe(asked))
            found.append(time.perf_counter() - start_s)
            if present != [True] * len(there) + [False] * (PROBED_KEYS - len(there)):
                raise SafeOffloadError("a probe found other objects than those that are there")
        runner.run(tier.close())
    return found[1:]


def make_report(
    options: TierBenchOptions,
    found: Sequence[SizeFound],
    probes_s: Sequence[float],
    engines: EngineFound | None,
    machine: dict[str, Any],
) -> Report:
    """Return tables of what was found."""
    rows = [["objects", "way", "GB/s", "objects/s", "of the device", "CPU s a GiB"]]
    for one in found:
        for way in one.samples:
            objects_per_s = statistics.median(one.rates(way)) * 1e9 / one.object_bytes
            rows.append(
                [
                    format_bytes(one.object_bytes),
                    way,
                    median_and_spread(one.rates(way), ".2f"),
                    f"{objects_per_s:.0f}",
                    f"{one.share(way):.2f}" if way in LIMIT_OF else "",
                    f"{one.cpu_s_per_gib(way):.3f}",
                ]
            )
    probe = median_and_spread([1e3 * seconds for seconds in probes_s], ".1f")
    lines = [table(rows, num_left=2), f"a probe of {PROBED_KEYS} keys: {probe} ms"]
    if engines is not None:
        lines.append(render(engines))
    figures = {
        "sizes": [asdict(one) for one in found],
        "probe_seconds": list(probes_s),
        "engines": None if engines is None else asdict(engines),
    }
    asked = {name: str(value) for name, value in asdict(options).items()}
    return Report(METHOD, lines, figures, asked, machine)
