"""A long run of a real server, with aborts, resets and failing copies: it must not grow.

    make soak                          # twenty minutes
    python -m tests.engine.soak --minutes 3 --json soak.json
    python -m tests.engine.soak --plain     # without the connector: what grows there is vLLM's

Prints, each half minute, the resident memory, threads and open files of the server's processes, and
at the end how they have changed since the pools were full. Exit status 1 if a request was not
answered, an answer is wrong, memory grew by more than 2 %, or threads or files by any.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.tiny_models import write_tiny_model
from tests.engine.clients import (
    Ask,
    Expected,
    Reply,
    ask_all,
    ask_baseline,
    first_difference,
    is_a_tie,
)
from tests.engine.engines import connector
from tests.engine.http_server import HttpServer

FAULTS = {"fail": 0.02, "stall": 0.01, "stall_s": 0.5, "seed": 1}
NUM_PROMPTS = 60
NUM_ANSWER_TOKENS = 40
NUM_REQUESTS_PER_WAVE = 60
NUM_IN_FLIGHT = 12
WARM_UP_SHARE = 0.25
"""Of the time: until then pools fill and allocators settle."""
GROWTH_MAX = 0.02
SAMPLE_S = 30.0

SERVER: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 12,
    "arguments": ("--enable-chunked-prefill", "--max-num-batched-tokens", "256"),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server's processes hold at one time."""

    time_s: float
    resident_bytes: int
    num_threads: int
    num_files: int
    num_requests: int


def look_at(group_id: int, time_s: float, num_requests: int) -> Sample:
    """Add up over all processes of a process group."""
    resident_bytes = num_threads = num_files = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The group is the third field behind the name, which may hold spaces.
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) != group_id:
                continue
            status = dict(
                line.split(":", 1) for line in (folder / "status").read_text().splitlines()
            )
            resident_bytes += int(status.get("VmRSS", "0 kB").split()[0]) * 1024
            num_threads += int(status["Threads"])
            num_files += len(list((folder / "fd").iterdir()))
        except (OSError, ValueError):  # it has ended
            continue
    return Sample(time_s, resident_bytes, num_threads, num_files, num_requests)


def make_prompts(rng: random.Random) -> list[list[int]]:
    """Prompts with shared beginnings."""
    prefixes = [rng.choices(range(256), k=rng.randint(96, 256)) for _ in range(8)]
    return [
        [*rng.choice(prefixes), *rng.choices(range(256), k=rng.randint(8, 96))]
        for _ in range(NUM_PROMPTS)
    ]


def make_wave(rng: random.Random) -> list[Ask]:
    """Requests, a quarter of them cut off at some moment."""
    asks = []
    for number in range(NUM_REQUESTS_PER_WAVE):
        moment = rng.random()
        cut_off_tokens = rng.randrange(NUM_ANSWER_TOKENS) if moment < 0.15 else None
        cut_off_s = rng.uniform(0.0, 1.0) if 0.15 <= moment < 0.25 else None
        prompt_idx = rng.randrange(NUM_PROMPTS)
        asks.append(Ask(number, prompt_idx, NUM_ANSWER_TOKENS, cut_off_tokens, cut_off_s))
    return asks


def problems_of(replies: list[Reply], expected: list[Expected]) -> list[str]:
    """Requests without an answer, and answers that are wrong."""
    found = []
    for reply in replies:
        answer = expected[reply.ask.prompt_idx]
        position = first_difference(answer, reply.tokens)
        if reply.error is not None or not (reply.is_complete or reply.ask.is_cut_off):
            found.append(f"not answered: {reply}")
        elif position is not None and not is_a_tie(answer, reply.tokens, position):
            found.append(f"wrong from token {position} on: {reply}")
    return found


def reset(server: HttpServer, *, with_host: bool) -> None:
    """Empty the GPU's prefix cache, and the host's."""
    server.post("/reset_prefix_cache" + ("?reset_external=true" if with_host else ""))


def soak(
    minutes: float, folder: Path, *, is_plain: bool
) -> tuple[list[Sample], list[str], dict[str, float]]:
    """Run a server for so long; returns samples, problems and the connector's counters."""
    rng = random.Random(3)
    model = write_tiny_model("gemma3", folder / "model", sliding_window=96)
    prompts = make_prompts(rng)
    with HttpServer(model, folder / "baseline", num_blocks=2000, **SERVER) as baseline:
        baseline.wait_until_healthy()
        expected = asyncio.run(ask_baseline(baseline, prompts, NUM_ANSWER_TOKENS))
    config = connector(
        300, transfer_timeout_s=0.25, verify="load", check_invariants=False, self_test="off"
    )  # the faults are for copies of requests
    environment = {
        "COPY_FAULTS": json.dumps(FAULTS),
        "VLLM_SERVER_DEV_MODE": "1",  # offers /reset_prefix_cache
    }
    samples: list[Sample] = []
    problems: list[str] = []
    with HttpServer(
        model,
        folder / "server",
        num_blocks=80,
        config=None if is_plain else config,
        environment=environment,
        **SERVER,
    ) as server:
        server.wait_until_healthy()
        start_s, num_requests, num_waves = time.monotonic(), 0, 0
        while not problems and (now_s := time.monotonic() - start_s) < 60.0 * minutes:
            if not samples or now_s - samples[-1].time_s >= SAMPLE_S:
                samples.append(look_at(server.group_id, now_s, num_requests))
                print(describe(samples[-1]), flush=True)
            replies = asyncio.run(ask_all(server, prompts, make_wave(rng), NUM_IN_FLIGHT))
            problems += problems_of(replies, expected)
            num_requests += len(replies)
            num_waves += 1
            if num_waves % 5 == 0:
                reset(server, with_host=not is_plain and num_waves % 10 == 0)
        server.wait_until_drained()
        samples.append(look_at(server.group_id, time.monotonic() - start_s, num_requests))
        metrics = server.metrics()
        if not server.is_healthy():
            problems.append("the server is not healthy")
    prefix = "vllm:safe_offload_"
    counts = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix) and v}
    return samples, problems, {k: v for k, v in counts.items() if not k.endswith("_created")}


def growth_of(samples: list[Sample]) -> tuple[float, int, int]:
    """Share by which memory, numbers by which threads and files have grown since the warm-up."""
    warm = [s for s in samples if s.time_s >= WARM_UP_SHARE * samples[-1].time_s]
    first, last = warm[0], warm[-1]
    return (
        last.resident_bytes / first.resident_bytes - 1.0,
        last.num_threads - first.num_threads,
        last.num_files - first.num_files,
    )


def describe(sample: Sample) -> str:
    """One line."""
    return (
        f"{sample.time_s:7.0f} s  {sample.num_requests:6d} requests  "
        f"{sample.resident_bytes / 2**20:8.1f} MiB  {sample.num_threads:4d} threads  "
        f"{sample.num_files:4d} files"
    )


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples, problems, counts = soak(arguments.minutes, Path(folder), is_plain=arguments.plain)
    memory, num_threads, num_files = growth_of(samples)
    print(describe(samples[-1]))
    print(
        f"since the warm-up: memory {memory:+.2%}, threads {num_threads:+d}, files {num_files:+d}"
    )
    print(counts)
    if arguments.json is not None:
        report = {"samples": [asdict(sample) for sample in samples], "counts": counts}
        arguments.json.write_text(json.dumps(report, indent=1))
    for problem in problems[:3]:
        print(problem)
    is_flat = memory <= GROWTH_MAX and num_threads <= 0 and num_files <= 0
    return 0 if is_flat and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
