"""A tier: what it reads and writes, against what its device, network or store gives.

The tier is a directory, or what a url names: a Valkey or Redis server, an object store. Objects of
each size are written and read by the tier, and as many bytes by as little code as can be, in pieces
of the same size, in the same rounds: of a directory by plain pwrite and pread of large new files,
from as many threads, past the page cache (O_DIRECT) where the file system can; of a server over as
many plain sockets to a process of this machine; of an object store by the library's own put and
get. CPU time is that of the whole process. A probe asks for objects of which half are there.

What is written is deleted, however this ends.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import signal
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    median_and_spread,
    publish,
    table,
)
from safe_offload.commands.bench.tier_limits import DeviceLimit, Limit, SocketLimit, StoreLimit
from safe_offload.commands.bench.tier_place import EndedError, Place, Signals, place_of, taken
from safe_offload.commands.cache import places
from safe_offload.commands.progress import Progress
from safe_offload.config.settings import size
from safe_offload.config.tier_url import FILE, MOONCAKE, SERVERS
from safe_offload.config.tiers import TIER_SETTINGS, TierConfig
from safe_offload.config.units import GIB, MIB, format_bytes
from safe_offload.errors import ConfigError, SafeOffloadError
from safe_offload.event_loop import new_event_loop
from safe_offload.mapped_files import map_new
from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.choice import open_tier
from safe_offload.tiers.naming import HEADER_BYTES

T = TypeVar("T")
SIZE_BYTES_MAX: Final = 64 * GIB
PROBED_KEYS: Final = 5_600
PROBE_OBJECT_BYTES: Final = 4096
TIER_WRITE, TIER_READ = "tier writes", "tier reads"
ROWS: Final = {row.key: row for row in TIER_SETTINGS.values()}
OPTIONS: Final[dict[str, tuple[str, type]]] = {
    "--threads": ("threads", int),
    "--connections": ("connections", int),
    "--timeout-s": ("timeout_s", float),
}
"""Options, and the settings of a tier that they are, beside those of `safe-offload cache`."""
ROUND_BYTES, ROUND_BYTES_REMOTE = 256 * MIB, 128 * MIB
METHOD: Final = {
    "device": "Objects are whole files with a header and a checksum; the device's limit is plain "
    "pwrite and pread of a large new file for each of as many threads, in pieces of the same size.",
    "socket": "Objects have a header and a checksum. The socket's limit is as many plain "
    "connections as the tier has, to a process of this machine, without TLS, which sends or takes "
    "the same bytes: for a server on another machine it is no limit of the network.",
    "store": "Objects have a header and a checksum; the store's limit is the library's own put and "
    "get of one new object for each, as many at a time as the tier has connections.",
}
METHOD_OF_ALL: Final = (
    "All ways take turns in every round. A share is the median over the rounds of the limit's time "
    "/ the tier's. CPU time is user and system time of this process."
)


@dataclass(frozen=True, slots=True)
class TierBenchOptions:
    """What to measure, and where."""

    url: str  # or the path of a directory
    config: TierConfig
    object_bytes: tuple[int, ...]
    round_bytes: int
    rounds: int

    def num_objects(self, object_bytes: int) -> int:
        """Return how many objects of a size a way moves in a round."""
        return max(1, self.round_bytes // object_bytes)

    @property
    def written_bytes(self) -> list[int]:
        """Return the bytes that a warm-up or round writes, of each size: the tier and its limit."""
        ways = 1 if self.config.location.scheme in SERVERS else 2  # a socket keeps nothing
        return [
            self.num_objects(size_bytes) * (ways * size_bytes + HEADER_BYTES)
            for size_bytes in self.object_bytes
        ]

    @property
    def probe_bytes(self) -> int:
        return PROBED_KEYS // 2 * (PROBE_OBJECT_BYTES + HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class Sample:
    """One way in one round."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class SizeFound:
    """All samples of objects of one size, and the word for what sets the limit."""

    object_bytes: int
    num_objects: int
    limit: str
    samples: dict[str, list[Sample]]

    @property
    def size_bytes(self) -> int:
        return self.object_bytes * self.num_objects

    def rates(self, way: str) -> list[float]:
        return [self.size_bytes / sample.seconds / 1e9 for sample in self.samples[way]]

    def share(self, way: str) -> float:
        limit = self.samples[f"{self.limit} {way.split()[1]}"]
        pairs = zip(limit, self.samples[way], strict=True)
        return statistics.median(limit.seconds / tier.seconds for limit, tier in pairs)

    def cpu_s_per_gib(self, way: str) -> float:
        cpu_s = statistics.median(sample.cpu_s for sample in self.samples[way])
        return cpu_s * GIB / self.size_bytes


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "place",
        metavar="URL_OR_DIR",
        help="a directory on the device, or the url of a tier",
    )
    add(
        "--object-bytes",
        nargs="+",
        default=["2MiB", "256KiB"],
        metavar="SIZE",
        help="object sizes, one block on one rank each (2MiB 256KiB)",
    )
    add(
        "--round-bytes",
        metavar="SIZE",
        help=f"bytes that a method moves in a round ({format_bytes(ROUND_BYTES)}; "
        f"{format_bytes(ROUND_BYTES_REMOTE)} over the network)",
    )
    add("--rounds", type=int, default=5, help="rounds after a warm-up (%(default)s)")
    for option, (key, kind) in OPTIONS.items():
        add(option, type=kind, metavar="X", help=ROWS[key].help)
    places.add_options(parser)
    add_output_arguments(parser)


def run_command(arguments: Namespace) -> int:
    """Run `safe-offload bench tier`."""
    options = read_options(arguments)
    machine = describe_machine()
    try:
        with Signals() as signals:
            found, probes_s = measure(options, signals)
    except EndedError as ended:
        name = signal.Signals(ended.number).name
        print(f"Ended by {name}; written objects are deleted.", file=sys.stderr)
        return 128 + ended.number
    except OSError as error:
        label = options.config.location.label
        raise SafeOffloadError(f"{label}: {error.strerror or error}") from error
    publish(make_report(options, found, probes_s, machine), arguments)
    return 0


def read_options(arguments: Namespace) -> TierBenchOptions:
    settings = [*(key for key, _ in OPTIONS.values()), *places.OPTIONS.values()]
    config = places.config_of(arguments.place, {key: getattr(arguments, key) for key in settings})
    default = ROUND_BYTES if config.location.scheme == FILE else ROUND_BYTES_REMOTE
    if arguments.rounds < 1:
        raise ConfigError("--rounds: expected at least 1")
    return TierBenchOptions(
        url=arguments.place,
        config=config,
        object_bytes=tuple(dict.fromkeys(map(_object_bytes, arguments.object_bytes))),
        round_bytes=size(SIZE_BYTES_MAX).read("--round-bytes", arguments.round_bytes or default),
        rounds=arguments.rounds,
    )


def _object_bytes(text: str) -> int:
    found = size(GIB).read("--object-bytes", text)
    if not isinstance(found, int) or found % mmap.PAGESIZE:
        raise ConfigError(f"--object-bytes: expected a multiple of {mmap.PAGESIZE}, found {text}")
    return found


def measure(options: TierBenchOptions, signals: Signals) -> tuple[list[SizeFound], list[float]]:
    """Measure in a place that nothing else uses, and delete what was written."""
    place = place_of(options.config, options.url)
    rounds, written = options.rounds + 1, options.written_bytes
    all_bytes = rounds * sum(written) + options.probe_bytes
    at_once_bytes = all_bytes if place.keeps_all else max(*written, options.probe_bytes)
    print(
        f"Writes {format_bytes(all_bytes)}, at most {format_bytes(at_once_bytes)} at a time, and "
        f"uses {format_bytes(options.round_bytes)} of memory. {place.promise}",
        file=sys.stderr,
    )
    num_moved = sum(4 * rounds * options.num_objects(each) for each in options.object_bytes)
    found = []
    with (
        taken(place, at_once_bytes, signals),
        Progress("measuring", total=num_moved) as progress,
    ):
        for object_bytes in options.object_bytes:
            rig = _Rig(place, signals, object_bytes, options.num_objects(object_bytes))
            try:
                found.append(rig.time_in_turn(options.rounds, progress))
            finally:
                rig.close()
        return found, _time_probes(place, signals, options.rounds)


class _Rig:
    """A tier, its limit beside it, and the memory that both read and write."""

    def __init__(self, place: Place, signals: Signals, object_bytes: int, num_objects: int) -> None:
        self._place, self._signals = place, signals
        self._object_bytes, self._num_objects = object_bytes, num_objects
        memory = map_new(object_bytes * num_objects)
        pattern = os.urandom(min(len(memory), 1 << 20))
        for start in range(0, len(memory), len(pattern)):
            end = min(start + len(pattern), len(memory))
            memory[start:end] = pattern[: end - start]
        view = memoryview(memory)
        starts = range(0, len(view), object_bytes)
        self._slots: list[Buffers] = [(view[i : i + object_bytes],) for i in starts]
        self._runner = asyncio.Runner(loop_factory=new_event_loop)
        self._tier, namespace_of = open_tier(place.config, object_bytes, dict(place.facts))
        self._namespace = namespace_of("")
        self._limit = self._make_limit()

    def _make_limit(self) -> Limit:
        config, slots = self._place.config, self._slots
        if config.location.scheme == FILE:
            folder = Path(config.location.path).with_name(f"limit-{self._object_bytes}")
            return DeviceLimit(folder, slots, config.num_threads)
        if config.location.scheme in (*SERVERS, MOONCAKE):
            return SocketLimit(slots, config.num_connections, is_unix=not config.location.host)
        paths = lambda n: self._place.paths(self._limit_names(n))  # noqa: E731
        return StoreLimit(config, slots, paths, self._run)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._signals.run(self._runner, work)

    def time_in_turn(self, rounds: int, progress: Progress) -> SizeFound:
        """Time every way once in each round, the warm-up not counted."""
        limit = self._limit
        writes: dict[str, Callable[[int], None]] = {
            f"{limit.name} writes": limit.write,
            TIER_WRITE: self._spill,
        }
        reads: dict[str, Callable[[int], None]] = {
            f"{limit.name} reads": limit.read,
            TIER_READ: self._fetch,
        }
        samples: dict[str, list[Sample]] = {way: [] for way in (*writes, *reads)}
        for index in range(rounds + 1):
            written = self._names(index)
            if limit.name == StoreLimit.name:
                written += self._limit_names(index)
            self._place.note(written)
            # Writes come before reads; of the two, another one goes first each time.
            for ways in (list(writes.items()), list(reads.items())):
                for way, call in ways if index % 2 else ways[::-1]:
                    sample = _time(lambda call=call, index=index: call(index))  # type: ignore[misc]
                    progress.advance(self._num_objects, self._num_objects * self._object_bytes)
                    if index:
                        samples[way].append(sample)
            with self._signals.held():
                self._place.forget(written)
        return SizeFound(self._object_bytes, self._num_objects, limit.name, samples)

    def _names(self, generation: int) -> list[Name]:
        return names(self._namespace, self._num_objects, generation, self._object_bytes)

    def _limit_names(self, generation: int) -> list[Name]:
        """Names that no object of the tier has."""
        return names(self._namespace, self._num_objects, generation, self._object_bytes + 1)

    def _spill(self, generation: int) -> None:
        results = self._run(self._tier.spill(self._names(generation), self._slots))
        _require(results, "written")

    def _fetch(self, generation: int) -> None:
        results = self._run(self._tier.fetch(self._names(generation), self._slots))
        _require(results, "read")

    def close(self) -> None:
        with self._signals.held():
            self._runner.run(self._tier.close())
            self._runner.close()
            self._limit.close()


def names(namespace: bytes, count: int, generation: int, kind: int) -> list[Name]:
    """Return names of objects; `kind` and generation tell them from others."""
    head = kind.to_bytes(8, "big") + generation.to_bytes(8, "big")
    return [Name(namespace, 0, head + i.to_bytes(16, "big")) for i in range(count)]


def _require(results: Sequence[Result], done: str) -> None:
    bad = [result.value for result in results if result is not Result.DONE]
    if bad:
        what = ", ".join(sorted(set(bad)))
        fix = "see the lines above"
        if Result.FULL.value in bad:
            fix = "free space, or lower --round-bytes"
        elif Result.ABSENT.value in bad:
            fix = "the server evicts new objects: lower --round-bytes"
        raise SafeOffloadError(
            f"{len(bad)} of {len(results)} objects could not be {done}: {what}. Fix: {fix}"
        )


def _time(way: Callable[[], None]) -> Sample:
    before, start_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    way()
    seconds, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(seconds, cpu_s)


def _time_probes(place: Place, signals: Signals, rounds: int) -> list[float]:
    """Return the seconds of each probe, half of whose keys are there."""
    memory = mmap.mmap(-1, PROBE_OBJECT_BYTES)
    slots: list[Buffers] = [(memoryview(memory),)] * (PROBED_KEYS // 2)
    found = []
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        tier, namespace_of = open_tier(place.config, PROBE_OBJECT_BYTES, dict(place.facts))
        there = names(namespace_of(""), len(slots), 0, 0)
        absent = names(namespace_of(""), PROBED_KEYS - len(there), 1, 0)
        try:
            place.note(there)
            _require(signals.run(runner, tier.spill(there, slots)), "written")
            for _ in range(rounds + 1):
                start_s = time.perf_counter()
                present = signals.run(runner, tier.probe(there + absent))
                found.append(time.perf_counter() - start_s)
                if present != [True] * len(there) + [False] * len(absent):
                    raise SafeOffloadError("a probe returned wrong results")
        finally:
            with signals.held():
                runner.run(tier.close())
    return found[1:]


def make_report(
    options: TierBenchOptions,
    found: Sequence[SizeFound],
    probes_s: Sequence[float],
    machine: dict[str, Any],
) -> Report:
    limit = found[0].limit
    rows = [["objects", "way", "GB/s", "objects/s", f"of the {limit}", "CPU s a GiB"]]
    for one in found:
        for way in one.samples:
            objects_per_s = statistics.median(one.rates(way)) * 1e9 / one.object_bytes
            rows.append(
                [
                    format_bytes(one.object_bytes),
                    way,
                    median_and_spread(one.rates(way), ".2f"),
                    f"{objects_per_s:.0f}",
                    f"{one.share(way):.2f}" if way in (TIER_WRITE, TIER_READ) else "",
                    f"{one.cpu_s_per_gib(way):.3f}",
                ]
            )
    probe = median_and_spread([1e3 * seconds for seconds in probes_s], ".1f")
    lines = [table(rows, num_left=2), f"a probe of {PROBED_KEYS} keys: {probe} ms"]
    figures = {
        "sizes": [asdict(one) for one in found],
        "probe_seconds": list(probes_s),
    }
    asked = {
        "place": options.config.location.label,
        "object_bytes": list(options.object_bytes),
        "round_bytes": options.round_bytes,
        "rounds": options.rounds,
    }
    return Report(f"{METHOD[limit]} {METHOD_OF_ALL}", lines, figures, asked, machine)
