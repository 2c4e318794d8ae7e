"""Rates of tiers whose objects are plain, sealed with a key (HMAC) or encrypted (AES-256-GCM).

Each kind of tier that this machine has is written and read in the same rounds with each, in this
process: its CPU time is the tier's, with what Valkey's and Mooncake's clients do, without servers.
"""

import argparse
import asyncio
import mmap
import os
import secrets
import tempfile
import time
from pathlib import Path

from safe_offload.commands.bench.report import Report, add_output_arguments, publish
from safe_offload.config.tiers import TierConfig
from safe_offload.config.units import GIB, KIB, MIB, format_bytes
from safe_offload.event_loop import new_event_loop
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.choice import open_store, open_tier
from safe_offload.tiers.store import trial_facts
from tests.benchmarks.report import describe_machine, table
from tests.benchmarks.tier_servers import tier_servers

SIZES = (2 * MIB, 256 * KIB)
SEALS = {"plain": "", "HMAC": "hmac_key_file", "encrypted": "encryption_key_file"}


async def measure(config: TierConfig, size_bytes: int, total_bytes: int) -> list[float]:
    """Return bytes a second and CPU seconds a GiB of writing, and of reading."""
    tier, namespace_of = open_tier(config, size_bytes, trial_facts())
    space, count = namespace_of(""), total_bytes // size_bytes
    names = [Name(space, 0, index.to_bytes(32, "big")) for index in range(count)]
    memory = memoryview(mmap.mmap(-1, total_bytes))
    memory[:] = os.urandom(total_bytes)
    slots = [(memory[n * size_bytes : (n + 1) * size_bytes],) for n in range(count)]
    await tier.probe(names)
    found = []
    for move in (tier.spill, tier.fetch):
        start_s, cpu_s = time.perf_counter(), time.process_time()
        results = await move(names, slots)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
        if set(results) != {Result.DONE}:
            raise RuntimeError(f"{config.location.label}: {set(results)}")
        found += [total_bytes / wall_s, cpu_s * GIB / total_bytes]
    await tier.close()
    store = open_store(config)
    await store.delete([store.key_of(name) for name in names])
    await store.close()
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--total-mib", type=int, default=256)
    add_output_arguments(parser)


def run_command(options: argparse.Namespace) -> int:
    """Print the best of the rounds, as others may use the cores; return the exit status."""
    machine = describe_machine()
    samples: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, tier_servers(2 * GIB) as (urls, _):
        key = Path(folder) / "key"
        key.write_text(secrets.token_hex(32))
        key.chmod(0o400)
        urls["directory"] = f"file://{folder}/tier"
        cases = [
            (f"{kind}, {format_bytes(size_bytes)}, {seal}", size_bytes, TierConfig.at(url, **more))
            for kind, url in urls.items()
            for size_bytes in SIZES
            for seal, setting in SEALS.items()
            for more in [{setting: str(key)} if setting else {}]
        ]
        for number in range(options.rounds + 1):
            for case, size_bytes, config in cases:
                with asyncio.Runner(loop_factory=new_event_loop) as runner:
                    figures = runner.run(measure(config, size_bytes, options.total_mib * MIB))
                if number:  # the first round warms up
                    samples.setdefault(case, []).append(figures)
    rows: list[tuple[str, ...]] = [
        ("best of the rounds", "write GB/s", "CPU s/GiB", "read GB/s", "CPU s/GiB")
    ]
    for case, found in samples.items():
        write, write_cpu, read, read_cpu = zip(*found, strict=True)
        best = max(write) / 1e9, min(write_cpu), max(read) / 1e9, min(read_cpu)
        rows.append((case, *(f"{each:.3g}" for each in best)))
    shown = {"rounds": options.rounds, "total_mib": options.total_mib}
    report = Report(str(__doc__), [table(rows)], {"samples": samples}, shown, machine)
    publish(report, options)
    return 0
