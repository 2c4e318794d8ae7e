"""What a run on a GPU has to tell, as one Markdown file for an issue: `make gpu-report MODEL=…`.

The GPU tests file by file, the copies, and `bench engine` and `layouts` on the model, each in a
process of its own with a limit of time: what fails, hangs or takes the GPU with it is reported and
does not keep the others from running. The same where torch, vLLM or the GPU itself is missing.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.report_facts import Facts, find_facts
from tests.gpu.report_tests import read_test_cases
from tests.gpu.report_text import Done, Result, render

REPORT = "report.md"
ROOT = Path(__file__).parents[2]
STOP_S = 90.0
"""How long a part that was interrupted may take to end its engines."""
POLL_S = 0.2


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        needs_gpu: it would measure something else without one, so it is not started.
        junit: where it writes the results of tests.
        figures: where it writes JSON.
        logs: folder for logs of its engines.
    """

    name: str
    command: tuple[str, ...]
    timeout_s: float
    needs_gpu: bool = False
    junit: Path | None = None
    figures: Path | None = None
    logs: Path | None = None


def find_gpu_tests() -> list[Path]:
    """Return the files that have tests of a GPU; each is run alone, as a device may be lost."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marker = "pytest.mark." + "gpu"
    return [file for file in files if file.parent.name == "gpu" or marker in file.read_text()]


def make_parts(folder: Path, model: str, engine_args: Sequence[str], scale: float) -> list[Part]:
    """Return what a report is made of.

    Args:
        folder: takes what the parts write.
        model: for `bench engine`.
        engine_args: more arguments of `bench engine`.
        scale: of the limits of time.
    """
    python, parts = sys.executable, []
    for file in find_gpu_tests():
        relative = str(file.relative_to(ROOT))
        junit = folder / f"{file.stem}.xml"
        # signal: a test that hangs in Python fails alone; the limit of the part is for the rest.
        pytest = ("-m", "pytest", "-m", "gpu", "-v", "-o", "timeout_method=signal")
        command = (python, *pytest, "-p", "no:cacheprovider", f"--junitxml={junit}", relative)
        parts.append(Part(relative, command, 900 * scale, junit=junit))
    bench = (python, "-m", "safe_offload.commands.cli", "bench")
    json = folder / "transfer.json"
    options = ("--device", "cuda", "--quick", "--json", str(json))
    copies = (python, "-m", "tests.benchmarks", "copies", *options)
    parts.append(Part("copies", copies, 1200 * scale, needs_gpu=True, figures=json))
    json, logs = folder / "engine.json", folder / "engine-logs"
    options = ("--rounds", "3", "--json", str(json), "--logs", str(logs))
    engine = (*bench, "engine", "--model", model, *options, *engine_args)
    limit_s = 3600 * scale
    parts.append(Part("bench engine", engine, limit_s, needs_gpu=True, figures=json, logs=logs))
    json, logs = folder / "layouts.json", folder / "layout-logs"
    options = ("--rounds", "3", "--answer-tokens", "64", "--json", str(json), "--logs", str(logs))
    layouts = (python, "-m", "tests.benchmarks", "layouts", "--model", model, *options)
    layouts = (*layouts, "--device", "cuda", *engine_args)
    return [*parts, Part("layouts", layouts, limit_s, needs_gpu=True, figures=json, logs=logs)]


def run(
    parts: Sequence[Part], facts: Facts, folder: Path, say: Callable[[str], None]
) -> list[Result]:
    """Run the parts one after the other, and write the report after each.

    So there is one even if the machine goes down in the middle.

    Args:
        parts: what to run.
        facts: of the machine.
        folder: takes logs and report.
        say: takes one line of progress.

    Returns:
        What became of each.
    """
    results = [Result(part.name, part.command) for part in parts]
    for place, part in enumerate(parts):
        if part.needs_gpu and facts.no_gpu:
            results[place] = Result(part.name, part.command, Done.NOT_RUN, facts.no_gpu)
        else:
            say(f"{part.name} (at most {part.timeout_s / 60:.0f} minutes) ...")
            results[place] = run_part(part, folder / f"{part.name.replace('/', '-')}.log")
        say(f"{part.name}: {results[place].verdict}")
        (folder / REPORT).write_text(render(facts, results), encoding="utf-8")
    return results


def run_part(part: Part, log: Path) -> Result:
    """Run one command, its output to the log; end it and what it started when its time is up."""
    start_s = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Result(part.name, part.command, Done.FAILED, f"could not be started: {error}")
        try:
            status = process.wait(part.timeout_s)
            done, reason = (Done.PASSED, "") if status == 0 else (Done.FAILED, _describe(status))
        except subprocess.TimeoutExpired:
            end(process)
            done, reason = Done.FAILED, f"did not end within {part.timeout_s:g} s"
        except BaseException:
            end(process)
            raise
    tests = read_test_cases(part.junit, log) if part.junit else []
    if done is Done.PASSED and tests and all(test.outcome == "skipped" for test in tests):
        done, reason = Done.NOT_RUN, f"every test was skipped: {tests[0].text}"
    return Result(
        name=part.name,
        command=part.command,
        done=done,
        reason=reason,
        duration_s=time.monotonic() - start_s,
        log=log,
        tests=tests,
        figures=part.figures,
        engine_logs=part.logs,
    )


def end(process: subprocess.Popen[bytes], patience_s: float = STOP_S) -> None:
    """Interrupt a part, so that it ends its engines; then end by force whatever is left of it."""
    started = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    deadline_s = time.monotonic() + patience_s
    while process.poll() is None and time.monotonic() < deadline_s:
        started |= descendants(process.pid)
        time.sleep(POLL_S)
    for pid, start_time in {process.pid: start_time_of(process.pid), **started}.items():
        if start_time is not None and start_time_of(pid) == start_time:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    process.wait()


def descendants(pid: int) -> dict[int, int | None]:
    """Return the processes below one, each with its start, as ids are used again."""
    found: dict[int, int | None] = {}
    left = [pid]
    while left:
        for file in Path(f"/proc/{left.pop()}/task").glob("*/children"):
            try:
                children = [int(word) for word in file.read_text().split()]
            except OSError:
                continue
            left += children
            found |= {child: start_time_of(child) for child in children}
    return found


def start_time_of(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None if it has gone.

    Source: proc_pid_stat(5), starttime, the twentieth after the name.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _describe(status: int) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"exit status {status}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; return 0 if all of it passed. The last line printed is the report's path."""
    parser = argparse.ArgumentParser(prog="make gpu-report", description=__doc__)
    parser.add_argument("--model", required=True, help="what vLLM takes as a model; twice on a GPU")
    parser.add_argument("--output", type=Path, default=ROOT / "gpu-report", help="a folder")
    parser.add_argument("--time-scale", type=float, default=1.0, help="of all limits of time")
    parser.add_argument("engine_args", nargs="*", help="more arguments of `bench engine`, after --")
    arguments = parser.parse_args(argv)
    now = datetime.datetime.now(datetime.UTC)
    folder = arguments.output.resolve() / now.strftime("%Y-%m-%d-%H%M%S")
    folder.mkdir(parents=True)
    facts = find_facts(sys.executable)
    print(facts.headline, flush=True)
    parts = make_parts(folder, arguments.model, arguments.engine_args, arguments.time_scale)
    results = run(parts, facts, folder, functools.partial(print, flush=True))
    num_passed = sum(result.done is Done.PASSED for result in results)
    print(f"{num_passed} of {len(parts)} parts passed. Please attach this file to an issue:")
    print(folder / REPORT)
    return 0 if num_passed == len(parts) else 1


if __name__ == "__main__":
    sys.exit(main())
