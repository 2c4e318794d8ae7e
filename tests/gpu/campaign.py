"""Everything to measure on a GPU, by what it proves a minute: `make gpu-campaign`.

Each step is a command in a process of its own. What fails, hangs or takes the GPU with it is noted
and does not keep the others from running. None begins that does not fit into what is left of the
budget. Results lie in a folder: called again, the campaign goes on with what is missing, and writes
one Markdown file of it all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.report import describe_machine, table
from tests.gpu import pictures
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

REPORT, RESULT, LOG = "report.md", "result.txt", "log.txt"
OURS, PEERS = "ours", ("SCO", "OC")
AHEAD = 0.98
"""A peer's median below this share of ours is ahead; what is closer is noise."""
PASSED = "passed"
STOP_S = 15.0
"""How long a step that was interrupted may take to end its engines; kept free in the budget."""
PROBE_TIMEOUT_S = 120.0
REPORT_CHARS_MAX = 60_000
"""GitHub takes 65,536 characters as the text of an issue."""
TAIL_CHARS_MAX = 4_000
FENCE = "`" * 8
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


def verdict_of(folder: Path, step: Step) -> str:
    """Return what became of a step; one that was cut off has no result."""
    try:
        return (folder / step.name / RESULT).read_text()
    except FileNotFoundError:
        return "not run yet"


def run(
    steps: Sequence[Step], folder: Path, end_s: float, num_gpus: int, *, small: bool = False
) -> None:
    """Run the steps that have no result and fit, and report after each.

    `end_s`: when all of it ends, by the monotonic clock.
    """
    for step in steps:
        left_s = end_s - time.monotonic() - STOP_S
        reason = step.why_left_out(num_gpus, small=small)
        if verdict_of(folder, step) != "not run yet":
            continue
        if reason or step.estimate_s > left_s:
            print(f"{step.name}: left out ({reason or f'{left_s:.0f} s are left'})", flush=True)
            continue
        print(f"{step.name} (about {step.estimate_s:.0f} s) ...", flush=True)
        print(f"{step.name}: {run_step(step, folder / step.name, left_s, small)}", flush=True)


def run_step(step: Step, folder: Path, timeout_s: float, small: bool) -> str:
    """Run one command, its output to the log; end it and what it started when its time is up."""
    folder.mkdir(parents=True, exist_ok=True)
    command = command_of(step, folder, small)
    with (folder / LOG).open("wb") as log:
        how: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": ROOT}
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **how)
        except OSError as error:
            verdict = f"FAILED (could not be started: {error})"
        else:
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return f"cut off (did not end within {timeout_s:.0f} s)"
            finally:
                end(process)
            name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            verdict = f"FAILED ({name})" if status else PASSED
    counts = counts_of(folder / LOG)
    if verdict == PASSED and "skipped" in counts and "passed" not in counts:
        verdict = "FAILED (every test was skipped)"
    (folder / RESULT).write_text(verdict)
    return verdict


def command_of(step: Step, folder: Path, small: bool) -> tuple[str, ...]:
    words = step.small if small else step.command
    return tuple(word.replace("{folder}", str(folder)) for word in words)


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a step, so that it ends its engines; then end by force whatever is left of it."""
    if process.poll() is not None:
        return
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.kill()
    process.wait()
    psutil.wait_procs(started, STOP_S)


def find_facts() -> tuple[dict[str, str], list[str]]:
    """Return the machine and its software by name, and its GPUs."""
    torch, no_gpu = ask_torch((sys.executable, "-c", ASK_TORCH))
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
    return rows, torch.get("gpus", [])


def ask_torch(command: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return what torch knows, and why there is no GPU to use ("" if there is one).

    In a process of its own, which may hang or die over a driver.
    """
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


def render(steps: Sequence[Step], folder: Path, facts: Mapping[str, str]) -> str:
    """Return the whole report: the machine, the tables, and the ends of logs of what failed."""
    verdicts = {step: verdict_of(folder, step) for step in steps}
    num_passed = sum(verdict == PASSED for verdict in verdicts.values())
    lines = ["# safe_offload on a GPU", "", f"{num_passed} of {len(steps)} steps passed.", ""]
    rows = {"": "", "---": "---", **facts, **{step.name: v for step, v in verdicts.items()}}
    lines += [f"| {name} | {' '.join(value.split())} |" for name, value in rows.items()]
    ahead = [f"- {row}" for row in peers_ahead(read_figures(folder))]
    lines += ["", f"Rows in which another connector is ahead: {len(ahead)}.", *ahead]
    for step, verdict in verdicts.items():
        if text := text_of(folder / step.name):
            command = shlex.join(command_of(step, Path("FOLDER"), small=False))
            lines += ["", f"## {step.name}", "", f"    {command}", "", f"```text\n{text}\n```"]
        if verdict.startswith("FAILED"):
            log = read_log(folder / step.name / LOG).splitlines()
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
    return str((COUNTS.findall(read_log(log)) or [""])[-1])


def hide_secrets(text: str) -> str:
    """Return a text without the values of what looks like a secret, and without home's name."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= SECRET_CHARS_MIN:
            text = text.replace(value, "***")
    home = os.environ.get("HOME", "")
    return text.replace(home, "~") if len(home) > 1 else text


def read_log(log: Path) -> str:
    """Return a log without colours; empty if there is none."""
    if not log.exists():
        return ""
    return ESCAPES.sub("", log.read_text(errors="replace")).strip()


def _output_of(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


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
    end_s = time.monotonic() + arguments.budget_s
    facts, gpus = find_facts()
    print(facts["GPU"], flush=True)
    if not gpus and not arguments.small:
        print("Nothing was run.")
        return 1
    steps, folder = make_steps(sys.executable), arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for step in sorted(
        steps, key=lambda step: (folder / step.name / LOG).exists()
    ):  # cut off: last
        if not arguments.steps or step.name in arguments.steps:
            run([step], folder, end_s, len(gpus), small=arguments.small)
            (folder / REPORT).write_text(render(steps, folder, facts), encoding="utf-8")
    where = ", ".join(gpus) or f"tiny models on vLLM's CPU engine, {facts['CPU']}"
    print(*pictures.draw(read_figures(folder), where, folder), folder / REPORT, sep="\n")
    return int(any(verdict_of(folder, step).startswith("FAILED") for step in steps))


if __name__ == "__main__":
    sys.exit(main())
