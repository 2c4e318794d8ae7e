"""A tier: what it reads and writes, against what its device, network or store gives.

The tier is a directory, or what a url names: a Valkey or Redis server, an object store. Objects of
each size are written and read by the tier, and as many bytes by as little code as can be, in pieces
of the same size, in the same rounds: of a directory by plain pwrite and pread of large new files,
from as many threads, past the page cache (O_DIRECT) where the file system can; of a server over as
many plain sockets to a process of this machine; of an object store by the library's own put and
get. CPU time is that of the whole process. A probe asks for objects of which half are there.

With --engine, real engines answer prompts computed, from the GPU, from the host and from the tier.
"""

import argparse
import asyncio
import json
import mmap
import os
import resource
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    median_and_spread,
    publish,
    table,
)
from safe_offload.config.settings import size
from safe_offload.config.tier_url import FILE, SERVERS, URL_KEY
from safe_offload.config.tiers import TIER_SETTINGS, TierConfig, tiers
from safe_offload.config.units import format_bytes
from safe_offload.errors import ConfigError, SafeOffloadError
from safe_offload.tiers.base import Buffers, Name, Result, Tier
from safe_offload.tiers.choice import open_tier
from safe_offload.worker.loop_thread import new_event_loop
from tests.benchmarks.tiers_engine import EngineBenchOptions, EngineFound, measure_engines, render
from tests.benchmarks.tiers_limits import DeviceLimit, Limit, SocketLimit, StoreLimit, delete_all

GIB = 1 << 30
SIZE_BYTES_MAX = 64 * GIB
PROBED_KEYS = 5_600
PROBE_OBJECT_BYTES = 4096
TIER_WRITE, TIER_READ = "tier writes", "tier reads"
ROWS = {row.key: row for row in TIER_SETTINGS.values()}
OPTIONS: dict[str, type] = {"threads": int, "connections": int, "timeout_s": float}
OPTIONS |= dict.fromkeys(
    ("password_file", "ca_file", "cert_file", "key_file", "endpoint", "hmac_key_file"), str
)
"""Settings of a tier that are options here."""
ROUND_BYTES, ROUND_BYTES_REMOTE = "1GiB", "128MiB"
TTL = "1h"
"""What is written to a server is gone after this, however the benchmark ends."""
METHOD = {
    "device": "Objects are whole files with a header and a checksum; the device's limit is plain "
    "pwrite and pread of a large new file for each of as many threads, in pieces of the same size.",
    "socket": "Objects have a header and a checksum. The socket's limit is as many plain "
    "connections as the tier has, to a process of this machine, without TLS, which sends or takes "
    "the same bytes: for a server on another machine it is no limit of the network.",
    "store": "Objects have a header and a checksum; the store's limit is the library's own put and "
    "get of one new object for each, as many at a time as the tier has connections.",
}
METHOD_OF_ALL = (
    "All ways take turns in every round. A share is the median over the rounds of the limit's time "
    "/ the tier's. CPU time is user and system time of this process."
)


@dataclass(frozen=True, slots=True)
class TierBenchOptions:
    """What to measure, and where."""

    written: Mapping[str, Any]  # the tier as `tiers` in a configuration has it
    config: TierConfig  # the same, read
    object_bytes: tuple[int, ...]
    round_bytes: int
    rounds: int


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "place",
        metavar="DIR_OR_URL",
        help="a directory on the device, or the url of a tier; what is made there is deleted, on a "
        f"server after {TTL}",
    )
    add(
        "--object-bytes",
        nargs="+",
        default=["2MiB", "256KiB"],
        metavar="SIZE",
        help="sizes of objects: of one block on one rank (2MiB 256KiB)",
    )
    add(
        "--round-bytes",
        metavar="SIZE",
        help=f"a way moves in a round ({ROUND_BYTES}; {ROUND_BYTES_REMOTE} if not of a directory)",
    )
    add("--rounds", type=int, default=5, help="after a warm-up (%(default)s)")
    for key, kind in OPTIONS.items():
        add(f"--{key.replace('_', '-')}", type=kind, metavar="X", help=ROWS[key].help)
    add("--engine", metavar="MODEL", help="ask engines too: llama, gemma3, deepseek, or any model")
    add("--prompt-tokens", type=int, default=16_000, help="of their prompts (%(default)s)")
    how: dict[str, Any] = {"type": json.loads, "default": {}, "metavar": "JSON"}
    add("--engine-args", help="more arguments of vllm.LLM", **how)
    add("--extra-config", help="more keys of kv_connector_extra_config", **how)
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks tiers`."""
    options = read_options(arguments)
    machine = describe_machine()
    with _place_of_ours(options) as written:
        found, probes_s = measure(options, written, print)
    engines = None
    if arguments.engine:
        with _place_of_ours(options) as written:
            engines = measure_engines(_engine_options(arguments, written), print)
    publish(make_report(options, found, probes_s, engines, machine), arguments)
    return 1 if engines is not None and engines.num_different_answers else 0


def _engine_options(
    arguments: argparse.Namespace, written: Mapping[str, Any]
) -> EngineBenchOptions:
    return EngineBenchOptions(
        tier=written,
        model=arguments.engine,
        prompt_tokens=arguments.prompt_tokens,
        rounds=arguments.rounds,
        extra=arguments.extra_config,
        engine_args=arguments.engine_args,
    )


def read_options(arguments: argparse.Namespace) -> TierBenchOptions:
    url = arguments.place
    if "://" not in url:
        url = f"file://{quote(str(Path(url).absolute()))}"
    asked = {key: getattr(arguments, key) for key in OPTIONS}
    written = {URL_KEY: url} | {key: value for key, value in asked.items() if value is not None}
    config = read_tier(written)
    is_folder = config.location.scheme == FILE
    round_bytes = arguments.round_bytes or (ROUND_BYTES if is_folder else ROUND_BYTES_REMOTE)
    options = TierBenchOptions(
        written=written,
        config=config,
        object_bytes=tuple(_object_bytes(text) for text in arguments.object_bytes),
        round_bytes=size(SIZE_BYTES_MAX).read("--round-bytes", round_bytes),
        rounds=arguments.rounds,
    )
    if is_folder:
        _require_room(options)
    return options


def read_tier(written: Mapping[str, Any]) -> TierConfig:
    """Return what one entry of `tiers` means."""
    config: TierConfig = tiers().read("tiers", [dict(written)])[0]
    return config


def _require_room(options: TierBenchOptions) -> None:
    folder = Path(options.config.location.path)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no directory. Fix: create it on the device to test")
    free_bytes = shutil.disk_usage(folder).free
    # What a round wrote stays to the end: an ext4 without journal is slow to make files for
    # minutes after many were deleted (recently_deleted in fs/ext4/ialloc.c, Linux 6.1).
    needed_bytes = 2 * (options.rounds + 2) * options.round_bytes
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{folder} has {format_bytes(free_bytes)} left, and the benchmark takes "
            f"{format_bytes(needed_bytes)}. Fix: a smaller --round-bytes"
        )


def _object_bytes(text: str) -> int:
    found = size(GIB).read("--object-bytes", text)
    if not isinstance(found, int) or found % mmap.PAGESIZE:
        raise ConfigError(f"--object-bytes: expected a multiple of {mmap.PAGESIZE}, found {text}")
    return found


@contextmanager
def _place_of_ours(options: TierBenchOptions) -> Iterator[dict[str, Any]]:
    """Yield the tier in a place that nothing else uses, as `tiers` has it; delete it then."""
    word, location = f"safe-offload-bench-{secrets.token_hex(4)}", options.config.location
    written = dict(options.written)
    if location.scheme == FILE:
        folder = Path(location.path) / word
        folder.mkdir(mode=0o700)
        try:
            yield written | {URL_KEY: f"file://{quote(str(folder))}"}
        finally:
            shutil.rmtree(folder)
    elif location.scheme in SERVERS:
        yield written | {"ttl": TTL, "namespace": word}
    else:
        written[URL_KEY] = f"{written[URL_KEY].rstrip('/')}/{word}"
        try:
            yield written
        finally:
            delete_all(read_tier(written))


def measure(
    options: TierBenchOptions, written: Mapping[str, Any], say: Callable[[str], None]
) -> tuple[list[SizeFound], list[float]]:
    found = []
    for object_bytes in options.object_bytes:
        say(f"objects of {format_bytes(object_bytes)} ...")
        rig = _Rig(read_tier(written), object_bytes, max(1, options.round_bytes // object_bytes))
        try:
            found.append(rig.time_in_turn(options.rounds))
        finally:
            rig.close()
    say(f"a probe of {PROBED_KEYS} keys ...")
    return found, _time_probes(read_tier(written), options.rounds)


class _Rig:
    """A tier, its limit beside it, and the memory that both read and write."""

    def __init__(self, config: TierConfig, object_bytes: int, num_objects: int) -> None:
        self._object_bytes, self._num_objects = object_bytes, num_objects
        memory = mmap.mmap(-1, object_bytes * num_objects)
        pattern = os.urandom(min(len(memory), 1 << 20))
        for start in range(0, len(memory), len(pattern)):
            end = min(start + len(pattern), len(memory))
            memory[start:end] = pattern[: end - start]
        view = memoryview(memory)
        starts = range(0, len(view), object_bytes)
        self._slots: list[Buffers] = [(view[i : i + object_bytes],) for i in starts]
        self._limit = _limit_of(config, self._slots)
        self._runner = asyncio.Runner(loop_factory=new_event_loop)
        self._tier, self._namespace = _open(config, object_bytes)

    def time_in_turn(self, rounds: int) -> SizeFound:
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
            # Writes come before reads; of the two, another one goes first each time.
            for ways in (list(writes.items()), list(reads.items())):
                for way, call in ways if index % 2 else ways[::-1]:
                    sample = _time(lambda call=call, index=index: call(index))  # type: ignore[misc]
                    if index:
                        samples[way].append(sample)
        return SizeFound(self._object_bytes, self._num_objects, limit.name, samples)

    def _names(self, generation: int) -> list[Name]:
        return names(self._namespace, self._num_objects, generation)

    def _spill(self, generation: int) -> None:
        _require(self._runner.run(self._tier.spill(self._names(generation), self._slots)))

    def _fetch(self, generation: int) -> None:
        _require(self._runner.run(self._tier.fetch(self._names(generation), self._slots)))

    def close(self) -> None:
        self._runner.run(self._tier.close())
        self._runner.close()
        self._limit.close()


def _limit_of(config: TierConfig, slots: Sequence[Buffers]) -> Limit:
    location = config.location
    if location.scheme == FILE:
        folder = Path(location.path) / f"limit-{slots[0][0].nbytes}"
        return DeviceLimit(folder, slots, config.num_threads)
    if location.scheme in SERVERS:
        return SocketLimit(slots, config.num_connections, is_unix=not location.host)
    return StoreLimit(config, slots)


def _open(config: TierConfig, slot_bytes: int) -> tuple[Tier, bytes]:
    facts = {"benchmark": config.namespace, "bytes": str(slot_bytes)}
    tier, namespace_of = open_tier(config, slot_bytes, facts)
    return tier, namespace_of("")


def names(namespace: bytes, count: int, generation: int) -> list[Name]:
    head = generation.to_bytes(8, "big")
    return [Name(namespace, 0, head + i.to_bytes(24, "big")) for i in range(count)]


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


def _time_probes(config: TierConfig, rounds: int) -> list[float]:
    """Return the seconds of each probe, half of whose keys are there."""
    memory = mmap.mmap(-1, PROBE_OBJECT_BYTES)
    slots: list[Buffers] = [(memoryview(memory),)] * (PROBED_KEYS // 2)
    found = []
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        tier, namespace = _open(config, PROBE_OBJECT_BYTES)
        there = names(namespace, len(slots), 0)
        _require(runner.run(tier.spill(there, slots)))
        asked = there + names(namespace, PROBED_KEYS - len(there), 1)
        for _ in range(rounds + 1):
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
    if engines is not None:
        lines.append(render(engines))
    figures = {
        "sizes": [asdict(one) for one in found],
        "probe_seconds": list(probes_s),
        "engines": None if engines is None else asdict(engines),
    }
    asked = {
        "place": options.config.location.label,
        "object_bytes": list(options.object_bytes),
        "round_bytes": options.round_bytes,
        "rounds": options.rounds,
    }
    return Report(f"{METHOD[limit]} {METHOD_OF_ALL}", lines, figures, asked, machine)
