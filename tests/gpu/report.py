"""What a run on a GPU has to tell, as one Markdown file for an issue: `make gpu-report MODEL=…`.

The GPU tests file by file, the copies, and `bench engine` and `layouts` on the model, each in a
process of its own with a limit of time: what fails, hangs or takes the GPU with it is reported and
does not keep the others from running. The same where torch, vLLM or the GPU itself is missing.
"""

import argparse
import datetime
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safe_offload.commands.bench.report import describe_machine

REPORT = "report.md"
ROOT = Path(__file__).parents[2]
STOP_S = 90.0
"""How long a part that was interrupted may take to end its engines."""
POLL_S = 0.2
PROBE_TIMEOUT_S = 120.0
REPORT_CHARS_MAX = 60_000
"""GitHub takes 65,536 characters as the text of an issue."""
TAIL_CHARS_MIN, TAIL_CHARS_MAX = 300, 6_000
READ_CHARS_MAX = 4 << 20
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
SECRET_CHARS_MIN = 6
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
GOOD_TEST = re.compile(r"\S+\.py::.* (PASSED|SKIPPED)\b")
COUNTS = re.compile(r"^=+ (.*\b(?:passed|failed|skipped|error).*) in [\d.]+s", re.MULTILINE)

ASK_TORCH = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
found["gpus"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
print(json.dumps(found))
"""
ASK_DRIVER = ("nvidia-smi", "--format=csv,noheader", "--query-gpu=name,driver_version,"
              "pcie.link.gen.max,pcie.link.width.max,memory.used")  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """The machine and its software, by name; and why no GPU can be measured, "" if one can."""

    rows: dict[str, str]
    no_gpu: str


@dataclass(frozen=True)
class Part:
    """One command."""

    name: str
    command: tuple[str, ...]
    timeout_s: float
    needs_gpu: bool = False  # it would measure something else without one, so it is not started
    logs: Path | None = None  # folder for logs of its engines


@dataclass(frozen=True)
class Result:
    """What became of a part: "passed", or why not; its logs, its own first."""

    part: Part
    verdict: str = "not run (its turn has not come)"
    duration_s: float = 0.0
    logs: tuple[Path, ...] = ()


def find_gpu_tests() -> list[Path]:
    """Return the files that have tests of a GPU; each is run alone, as a device may be lost."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marker = "pytest.mark." + "gpu"
    return [file for file in files if file.parent.name == "gpu" or marker in file.read_text()]


def make_parts(folder: Path, model: str, engine_args: Sequence[str], scale: float) -> list[Part]:
    """Return what a report is made of.

    `folder`: takes what the parts write; `model`: for `bench engine` and `layouts`; `engine_args`:
    more arguments of both; `scale`: of the limits of time.
    """
    python, parts = sys.executable, []
    for file in find_gpu_tests():
        relative = str(file.relative_to(ROOT))
        # signal: a test that hangs in Python fails alone; the limit of the part is for the rest.
        pytest = ("-m", "pytest", "-m", "gpu", "-v", "-rs", "-o", "timeout_method=signal")
        command = (python, *pytest, "-p", "no:cacheprovider", relative)
        parts.append(Part(relative, command, 900 * scale))
    bench = (python, "-m", "tests.benchmarks")
    figures = ("--json", str(folder / "copies.json"))
    copies = (*bench, "copies", "--device", "cuda", "--quick", *figures)
    parts.append(Part("copies", copies, 1200 * scale, needs_gpu=True))
    commands = {
        "bench engine": (python, "-m", "safe_offload.commands.cli", "bench", "engine"),
        "layouts": (*bench, "layouts", "--device", "cuda", "--answer-tokens", "64"),
    }
    for name, command in commands.items():
        stem, logs = name.replace(" ", "-"), folder / f"{name.replace(' ', '-')}-logs"
        out = ("--json", str(folder / f"{stem}.json"), "--logs", str(logs))
        options = ("--model", model, "--rounds", "3", *out, *engine_args)
        parts.append(Part(name, (*command, *options), 3600 * scale, needs_gpu=True, logs=logs))
    return parts


def find_facts(python: str) -> Facts:
    """Ask the system, and torch in a process of its own, which may hang or die over a driver."""
    torch, no_gpu = ask_torch((python, "-c", ASK_TORCH))
    machine = describe_machine()
    rows = {
        "Commit": machine["commit"],
        "Date": machine["date"],
        "GPU": no_gpu or ", ".join(torch["gpus"]),
        "Driver": _output_of(ASK_DRIVER) or "none found",
        "CUDA / HIP": str(torch.get("cuda") or torch.get("hip") or "none"),
        "Packages": ", ".join(" ".join(item) for item in machine["versions"].items()),
        "CPU": f"{machine['cpu']}, {machine['cores']} cores",
        "System": f"{machine['system']}, Python {machine['python']}",
    }
    return Facts(rows, no_gpu)


def ask_torch(command: Sequence[str]) -> tuple[dict[str, object], str]:
    """Return what torch knows, and why there is no GPU to use ("" if there is one)."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"No GPU can be used: torch did not find out within {PROBE_TIMEOUT_S:g} s"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {}, f"No GPU can be used: torch cannot be asked ({last})"
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return found, "" if found["gpus"] else f"No GPU: torch {found['torch']} sees none"


def run(
    parts: Sequence[Part], facts: Facts, folder: Path, say: Callable[[str], None]
) -> list[Result]:
    """Run the parts one after the other, and write the report after each; return the results.

    So there is one even if the machine goes down in the middle.
    """
    results = [Result(part) for part in parts]
    for place, part in enumerate(parts):
        if part.needs_gpu and facts.no_gpu:
            results[place] = Result(part, f"not run ({facts.no_gpu})")
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
            return Result(part, f"FAILED (could not be started: {error})")
        try:
            status = process.wait(part.timeout_s)
            verdict = f"FAILED ({_describe(status)})" if status else "passed"
        except subprocess.TimeoutExpired:
            end(process)
            verdict = f"FAILED (did not end within {part.timeout_s:g} s)"
        except BaseException:
            end(process)
            raise
    if verdict == "passed" and "skipped" in (counts := counts_of(log)) and "passed" not in counts:
        verdict = "not run (every test was skipped)"
    engines = sorted(part.logs.glob("*.log")) if part.logs else []
    return Result(part, verdict, time.monotonic() - start_s, (log, *engines))


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


# ---- the text ------------------------------------------------------------------------------------


def render(facts: Facts, results: Sequence[Result]) -> str:
    """Return the whole report; the ends of the logs share what room is left."""
    num_passed = sum(result.verdict == "passed" for result in results)
    lines = [
        f"# GPU report of safe_offload: {facts.rows['GPU']}",
        "",
        f"{num_passed} of {len(results)} parts passed.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in facts.rows.items()),
        "",
        "| part | result | tests | time |",
        "|---|---|---|---|",
    ]
    for result in results:
        counts = counts_of(result.logs[0]) if result.logs else ""
        row = (result.part.name, result.verdict, counts, f"{result.duration_s:.0f} s")
        lines.append(f"| {' | '.join(map(_cell, row))} |")
    lines.append(_fold("commands", "\n".join(shlex.join(r.part.command) for r in results)))
    text = hide_secrets("\n".join(lines))[: REPORT_CHARS_MAX - 2000]
    logs = [(result, log) for result in results for log in result.logs]
    room = (REPORT_CHARS_MAX - len(text)) // max(len(logs), 1) - 200
    room = max(TAIL_CHARS_MIN, min(TAIL_CHARS_MAX, room))
    for result, log in logs:
        told = (line for line in read_end(log).splitlines() if not GOOD_TEST.match(line))
        tail = hide_secrets("\n".join(told))
        block = _fold(f"{result.part.name}: end of {log.name}", tail[-room:])
        if len(text) + len(block) < REPORT_CHARS_MAX:
            text += "\n" + block
    return text + "\n"


def counts_of(log: Path) -> str:
    """Return how many tests passed, failed and were skipped, as pytest's last line has it."""
    return (COUNTS.findall(read_end(log)) or [""])[-1]


def hide_secrets(text: str) -> str:
    """Return a text without the values of what looks like a secret, and without home's name."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= SECRET_CHARS_MIN:
            text = text.replace(value, "***")
    home = os.environ.get("HOME", "")
    return text.replace(home, "~") if len(home) > 1 else text


def read_end(log: Path) -> str:
    """Return the end of a log, without colours."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - READ_CHARS_MAX))
            return ESCAPES.sub("", file.read().decode(errors="replace")).strip()
    except OSError as error:
        return str(error)


def _fold(title: str, text: str) -> str:
    """Return a text that is shown on a click, in a fence that nothing in it can close."""
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    title = title.replace("<", "&lt;")
    return f"<details><summary>{title}</summary>\n\n{fence}text\n{text}\n{fence}\n</details>"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:500]


def _output_of(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


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
    print(facts.rows["GPU"], flush=True)
    parts = make_parts(folder, arguments.model, arguments.engine_args, arguments.time_scale)
    results = run(parts, facts, folder, functools.partial(print, flush=True))
    num_passed = sum(result.verdict == "passed" for result in results)
    print(f"{num_passed} of {len(parts)} parts passed. Please attach this file to an issue:")
    print(folder / REPORT)
    return 0 if num_passed == len(parts) else 1


if __name__ == "__main__":
    sys.exit(main())
