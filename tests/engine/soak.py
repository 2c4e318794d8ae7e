"""A long run of a real server, with aborts, resets and failing copies: it must not grow.

    make soak                          # twenty minutes
    python -m tests.engine.soak --minutes 3
    python -m tests.engine.soak --plain     # without the connector: what grows there is vLLM's

The storms are those of test_abort_storm.py, one after another. Prints, each half minute, the
resident memory, threads and open files of the server's processes, and at the end how they have
changed since the pools were full. Exit status 1 if a request was not answered, an answer is wrong,
memory grew by more than 2 %, or threads or files by any.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.engine.clients import Expected, Reply, ask_all, first_difference, is_a_tie
from tests.engine.engines import connector
from tests.engine.http_server import HttpServer
from tests.engine.test_abort_storm import (
    COPY_FAULTS,
    NUM_GPU_BLOCKS,
    NUM_HOST_SLOTS,
    NUM_IN_FLIGHT,
    SERVER,
    baseline_of,
    draw_of,
    make_asks,
    make_prompts,
)

KIND = "gemma3"
WARM_UP_SHARE = 0.25
"""Of the time: until then pools fill and allocators settle."""
GROWTH_MAX = 0.02
SAMPLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server's processes hold at one time."""

    time_s: float
    resident_bytes: int = 0
    num_threads: int = 0
    num_files: int = 0

    def __str__(self) -> str:
        size = f"{self.resident_bytes / 2**20:8.1f} MiB"
        return (
            f"{self.time_s:7.0f} s  {size}  {self.num_threads:4d} threads  {self.num_files} files"
        )


def look_at(server: HttpServer, time_s: float) -> Sample:
    """Add up over all processes of a server."""
    resident_bytes = num_threads = num_files = 0
    for process_id in server.process_ids():
        folder = Path(f"/proc/{process_id}")
        try:
            lines = (folder / "status").read_text().splitlines()
            status = dict(line.split(":", 1) for line in lines)
            num_files += len(list((folder / "fd").iterdir()))
        except OSError:  # it has ended
            continue
        resident_bytes += int(status.get("VmRSS", "0 kB").split()[0]) * 1024
        num_threads += int(status["Threads"])
    return Sample(time_s, resident_bytes, num_threads, num_files)


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


def soak(minutes: float, folder: Path, *, is_plain: bool) -> tuple[list[Sample], list[str]]:
    """Run a server for so long; return samples and problems."""
    rng = draw_of(KIND)
    model, expected = baseline_of(KIND, folder)
    prompts = make_prompts(rng)
    # The faults are for copies of requests.
    config = connector(
        NUM_HOST_SLOTS[KIND],
        transfer_timeout_s=0.25,
        verify="load",
        check_invariants=False,
        self_test="off",
    )
    environment = {"COPY_FAULTS": json.dumps(COPY_FAULTS), "VLLM_SERVER_DEV_MODE": "1"}
    samples: list[Sample] = []
    problems: list[str] = []
    with HttpServer(
        model,
        folder / "server",
        num_blocks=NUM_GPU_BLOCKS[KIND],
        config=None if is_plain else config,
        environment=environment,
        **SERVER,
    ) as server:
        server.wait_until_healthy()
        start_s, num_waves = time.monotonic(), 0
        while not problems and (now_s := time.monotonic() - start_s) < 60.0 * minutes:
            if not samples or now_s - samples[-1].time_s >= SAMPLE_S:
                samples.append(look_at(server, now_s))
                print(samples[-1], flush=True)
            replies = asyncio.run(ask_all(server, prompts, make_asks(rng), NUM_IN_FLIGHT))
            problems += problems_of(replies, expected)
            num_waves += 1
            if num_waves % 5 == 0:
                with_host = not is_plain and num_waves % 10 == 0
                server.post("/reset_prefix_cache" + "?reset_external=true" * with_host)
        server.wait_until_drained()
        samples.append(look_at(server, time.monotonic() - start_s))
        print(samples[-1], f"{num_waves} storms")
        if not server.is_healthy():
            problems.append("the server is not healthy")
    return samples, problems


def main() -> int:
    """Run, print, judge."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--plain", action="store_true", help="without the connector")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples, problems = soak(arguments.minutes, Path(folder), is_plain=arguments.plain)
    last = samples[-1]
    first = next(one for one in samples if one.time_s >= WARM_UP_SHARE * last.time_s)
    memory = last.resident_bytes / first.resident_bytes - 1.0
    num_threads, num_files = (
        last.num_threads - first.num_threads,
        last.num_files - first.num_files,
    )
    print(f"since then: memory {memory:+.2%}, threads {num_threads:+d}, files {num_files:+d}")
    print(*problems[:3], sep="\n")
    return int(memory > GROWTH_MAX or num_threads > 0 or num_files > 0 or bool(problems))


if __name__ == "__main__":
    sys.exit(main())
