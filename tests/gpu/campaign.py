"""Everything to measure on a GPU, by what it proves a minute: `make gpu-campaign`.

Each step is a command in a process of its own. What fails, hangs or takes the GPU with it is noted
and does not keep the others from running. None begins that does not fit into what is left of the
budget. Results lie in a folder: called again, here or on another machine, the campaign goes on with
what is missing, and writes one Markdown file of it all.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safe_offload.commands.bench.report import describe_machine, table
from tests.gpu.steps import (
    BUDGET_S,
    FIGURES,
    ROOT,
    UNPACKED_S,
    Step,
    first_steps,
    make_steps,
    more_steps,
)

REPORT, RESULT, LOG = "report.md", "result.json", "log.txt"
OURS, PEERS = "ours", ("SCO", "OC")
AHEAD = 0.98
"""A peer's median below this share of ours is ahead; what is closer is noise."""
PASSED = "passed"
Say = Callable[[str], None]
STOP_S = 15.0
"""How long a step that was interrupted may take to end its engines; kept free in the budget."""
TRIES_MAX = 2
"""Of a step that fails, or that is cut off."""
POLL_S = 0.2
PROBE_TIMEOUT_S = 120.0
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
"""A step ends with the campaign. Source: Linux, prctl(2), sys/prctl.h."""
REPORT_CHARS_MAX = 60_000
"""GitHub takes 65,536 characters as the text of an issue."""
TAIL_CHARS_MAX = 4_000
FENCE = "`" * 8
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
    num_gpus: int = 0


class Budget:
    """What is left of some seconds, from now on."""

    def __init__(self, budget_s: float) -> None:
        self._end_s = time.monotonic() + budget_s

    def left_s(self) -> float:
        return self._end_s - time.monotonic()


@dataclass(frozen=True)
class Result:
    """What became of a step.

    Attributes:
        verdict: "passed", or why not.
        text: what it printed for readers: its tables, or how many tests passed.
        facts: of the machine that it ran on.
    """

    name: str
    verdict: str
    duration_s: float = 0.0
    tries: int = 0
    text: str = ""
    command: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.verdict == PASSED or self.tries >= TRIES_MAX


class Results:
    """The folder: for each step its result, its log and what else it left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, step: Step) -> Path:
        return self.folder / step.name

    def read(self, step: Step) -> Result:
        """Return the last result; one that was begun and has none was cut off."""
        try:
            read = json.loads((self.of(step) / RESULT).read_text())
        except FileNotFoundError:
            return Result(step.name, "not run yet")
        return Result(**read)

    def write(self, step: Step, result: Result) -> None:
        """Write all of it or nothing: the machine may go at any moment."""
        text = json.dumps(asdict(result), indent=1) + "\n"
        self.of(step).mkdir(parents=True, exist_ok=True)
        part = self.of(step) / f"{RESULT}.part"
        part.write_text(text)
        part.replace(self.of(step) / RESULT)


def run(
    steps: Sequence[Step], facts: Facts, results: Results, budget: Budget, say: Say, *, small: bool
) -> None:
    """Run what is missing and fits, those first that were tried least; report after each."""
    waiting = [step for step in steps if not results.read(step).is_over]
    for step in [step for step in waiting if step.why_left_out(facts.num_gpus, small=small)]:
        reason = f"left out ({step.why_left_out(facts.num_gpus, small=small)})"
        say(f"{step.name}: {reason}")
        if not results.read(step).tries:
            results.write(step, replace(results.read(step), verdict=reason))
        waiting.remove(step)
    for step in sorted(waiting, key=lambda step: results.read(step).tries):
        left_s = budget.left_s() - STOP_S
        if step.estimate_s > left_s:
            say(f"{step.name}: does not fit ({step.estimate_s:.0f} s, {left_s:.0f} s are left)")
            continue
        say(f"{step.name} (about {step.estimate_s:.0f} s) ...")
        result = run_step(step, facts, results, left_s, small=small)
        say(f"{step.name}: {result.verdict}, {result.duration_s:.0f} s")
        (results.folder / REPORT).write_text(render(steps, results), encoding="utf-8")


def run_step(
    step: Step, facts: Facts, results: Results, timeout_s: float, *, small: bool
) -> Result:
    """Run one command, its output to the log; end it and what it started when its time is up."""
    folder = results.of(step)
    folder.mkdir(parents=True, exist_ok=True)
    words = step.small if small else step.command
    command = tuple(word.replace("{folder}", str(folder)) for word in words)
    tries = results.read(step).tries + 1
    result = Result(step.name, "cut off (its machine went)", 0.0, tries, "", command, facts.rows)
    results.write(step, result)
    begin_s = time.monotonic()
    log = folder / LOG
    with log.open("wb") as output:
        how: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "cwd": ROOT}
        how |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
        how |= {"preexec_fn": functools.partial(LIBC.prctl, PR_SET_PDEATHSIG, signal.SIGKILL)}
        try:
            with ended(subprocess.Popen(command, **how)) as process:
                status = process.wait(timeout_s)
            verdict = f"FAILED ({_describe(status)})" if status else PASSED
        except OSError as error:
            verdict = f"FAILED (could not be started: {error})"
        except subprocess.TimeoutExpired:
            verdict = f"cut off (did not end within {timeout_s:.0f} s)"
    if verdict == PASSED and "skipped" in (counts := counts_of(log)) and "passed" not in counts:
        verdict = "FAILED (every test was skipped)"
    duration_s = time.monotonic() - begin_s
    result = replace(result, verdict=verdict, duration_s=duration_s, text=text_of(folder))
    results.write(step, result)
    return result


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
    return Facts(rows, no_gpu, len(torch.get("gpus", ())))


def ask_torch(command: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return what torch knows, and why there is no GPU to use ("" if there is one)."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"No GPU can be used: torch did not find out within {PROBE_TIMEOUT_S:g} s"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {}, f"No GPU can be used: torch does not answer ({last})"
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return found, "" if found["gpus"] else f"No GPU: torch {found['torch']} sees none"


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End the process if the block does not end well."""
    try:
        yield process
    except BaseException:
        end(process)
        raise


def end(process: subprocess.Popen[bytes], patience_s: float = STOP_S) -> None:
    """Interrupt a step, so that it ends its engines; then end by force whatever is left of it."""
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


def list_steps(python: str) -> str:
    """Return what each step is expected to take, those of the first call with their sum."""
    sum_s: float = UNPACKED_S
    rows = [["", "s", "until then"], ["unpacked, facts", str(UNPACKED_S), str(UNPACKED_S)]]
    for step in first_steps(python):
        sum_s += step.estimate_s
        rows.append([step.name, f"{step.estimate_s:.0f}", f"{sum_s:.0f}"])
    rows += [[step.name, f"{step.estimate_s:.0f}", ""] for step in more_steps(python)]
    return table(rows)


# ---- the text ------------------------------------------------------------------------------------


def render(steps: Sequence[Step], results: Results) -> str:
    """Return the whole report: what ran where, the tables, and the ends of logs of what failed."""
    found = [results.read(step) for step in steps]
    machines = list({tuple(one.facts.items()): one.facts for one in found if one.facts}.values())
    num_passed = sum(one.verdict == PASSED for one in found)
    lines = ["# safe_offload on a GPU", "", f"{num_passed} of {len(steps)} steps passed.", ""]
    for number, facts in enumerate(machines, 1):
        lines += [f"| machine {number} | |", "|---|---|"]
        lines += [*(f"| {name} | {_cell(value)} |" for name, value in facts.items()), ""]
    lines += ["| step | result | time | machine |", "|---|---|---|---|"]
    for one in found:
        place = str(machines.index(one.facts) + 1) if one.facts else ""
        row = (one.name, one.verdict, f"{one.duration_s:.0f} s", place)
        lines.append(f"| {' | '.join(map(_cell, row))} |")
    ahead = [f"- {row}" for row in peers_ahead(read_figures(results.folder))]
    lines += ["", f"Rows in which another connector is ahead: {len(ahead)}.", *ahead]
    for one in found:
        if one.text:
            command = shlex.join(one.command).replace(str(results.folder), "FOLDER")
            lines += ["", f"## {one.name}", "", f"    {command}", "", f"```text\n{one.text}\n```"]
    for step in steps:
        if results.read(step).verdict.startswith("FAILED"):
            log = read_end(results.of(step) / LOG).splitlines()
            tail = "\n".join(line for line in log if not GOOD_TEST.match(line))[-TAIL_CHARS_MAX:]
            lines += ["", f"## {step.name}: end of its log", "", f"{FENCE}text\n{tail}\n{FENCE}"]
    return hide_secrets("\n".join(lines))[:REPORT_CHARS_MAX] + "\n"


def files_of(step: str, folder: Path) -> list[Path]:
    """Return the files with figures of a step: of the whole, and of its parts."""
    stem, _, ending = FIGURES.partition(".")
    return sorted(folder.glob(f"{step}/{stem}*.{ending}"), key=lambda file: file.stem)


def read_figures(folder: Path) -> dict[str, Any]:
    """Return the figures of each step; of a part of it under its name and that of the part."""
    stem, _, _ = FIGURES.partition(".")
    files = files_of("*", folder)
    return {f"{f.parent.name}{f.stem.removeprefix(stem)}": json.loads(f.read_text()) for f in files}


def peers_ahead(steps: Mapping[str, Any]) -> Iterator[str]:
    """Yield every row of seconds in which a peer is ahead of us, with both medians."""
    for step, figures in steps.items():
        samples = figures.get("samples", ())
        if not isinstance(samples, dict) or OURS not in samples:
            continue
        for name, own in samples[OURS].items():
            if all(value == int(value) for value in own):
                continue  # a count
            for peer in PEERS:
                theirs = samples.get(peer, {}).get(name)
                if theirs and statistics.median(theirs) < AHEAD * statistics.median(own):
                    medians = (
                        f"{statistics.median(theirs):.4f} s, ours {statistics.median(own):.4f} s"
                    )
                    yield f"{step}, {name}: {peer} {medians}"


def text_of(folder: Path) -> str:
    """Return what a benchmark found, as text, or the counts of tests."""
    texts = [json.loads(f.read_text()).get("text") for f in files_of(folder.name, folder.parent)]
    return "\n\n".join(filter(None, texts)) or counts_of(folder / LOG)


def counts_of(log: Path) -> str:
    """Return how many tests passed, failed and were skipped, as pytest's last line has it."""
    return str((COUNTS.findall(read_end(log)) or [""])[-1])


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
    """Run what fits; return 0 if nothing failed. The last line printed is the report's path."""
    parser = argparse.ArgumentParser(prog="make gpu-campaign", description=__doc__)
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help="all of it ends within this (%(default)s)"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "gpu-campaign", help="of the results")
    parser.add_argument("--steps", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--small", action="store_true", help="on the CPU, to try the steps")
    parser.add_argument("--list", action="store_true", help="print what steps are expected to take")
    arguments = parser.parse_args(argv)
    if arguments.list:
        print(list_steps(sys.executable))
        return 0
    budget = Budget(arguments.budget_s)
    facts = find_facts(sys.executable)
    if facts.no_gpu and not arguments.small:
        print(f"{facts.no_gpu}. Nothing was run.")
        return 1
    print(facts.rows["GPU"], flush=True)
    steps = make_steps(sys.executable)
    chosen = [step for step in steps if step.name in (arguments.steps or [step.name])]
    results = Results(arguments.folder.resolve())
    say = functools.partial(print, flush=True)
    run(chosen, facts, results, budget, say, small=arguments.small)
    (results.folder / REPORT).write_text(render(steps, results), encoding="utf-8")
    found = [results.read(step) for step in steps]
    print(f"{sum(one.verdict == PASSED for one in found)} of {len(steps)} steps passed:")
    print(results.folder / REPORT)
    return int(any(one.verdict.startswith("FAILED") for one in found))


if __name__ == "__main__":
    sys.exit(main())
