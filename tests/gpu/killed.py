"""Kill a campaign on the CPU in the middle of each step, once each, and let it go on.

    python -m tests.gpu.killed --folder FOLDER

Only the campaign itself is killed: that all it has started ends by itself is looked at, too. What
was killed comes last when it goes on, and has to pass then. Prints what became of each step.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.gpu.campaign import LOG, PASSED, Results, descendants, read_end, start_time_of
from tests.gpu.steps import ROOT, Step, make_steps

MIDDLE = re.compile(r"ready after|round \d|\d of \d")
SHORT_S, LONG_S = 8.0, 40.0
"""How long the middle is waited for: in steps that only collect tests, and in others, at most.
Steps that take 10 s in all are killed with `--latest-s 5`."""
BUDGET_S, POLL_S, ENDS_S = 36_000, 0.2, 120.0


def main() -> int:
    """Kill, go on, and tell; return 0 if every step that can run has passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.killed", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the results")
    parser.add_argument("--steps", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--latest-s", type=float, default=LONG_S, help="(%(default)s)")
    arguments = parser.parse_args()
    results = Results(arguments.folder.resolve())
    steps = make_steps(sys.executable)
    steps = [step for step in steps if step.name in (arguments.steps or [step.name])]
    command = [sys.executable, "-m", "tests.gpu.campaign", "--small", "--budget-s", str(BUDGET_S)]
    command += ["--folder", str(results.folder), "--steps", *(step.name for step in steps)]
    killed: dict[str, str] = {}
    while True:
        campaign = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        left_over = [one for one in steps if one.name not in killed]
        step = wait_for_middle(campaign, results, left_over, arguments.latest_s)
        if step is None:
            break
        started = descendants(campaign.pid)
        campaign.kill()
        campaign.wait()
        left, end_s = dict(started), time.monotonic() + ENDS_S
        while left and time.monotonic() < end_s:
            time.sleep(POLL_S)
            left = {pid: begun for pid, begun in left.items() if start_time_of(pid) == begun}
        killed[step.name] = f"killed with {len(started)} processes, {len(left)} of them left"
        print(f"{step.name}: {killed[step.name]}", flush=True)
    found = [results.read(step) for step in steps]
    for one in found:
        told = f"{one.verdict}, {one.duration_s:.0f} s" if one.tries else one.verdict
        print(f"{one.name}: {killed.get(one.name, 'not killed')}; then {told}")
    return int(any(one.tries and one.verdict != PASSED for one in found))


def wait_for_middle(
    campaign: subprocess.Popen[bytes], results: Results, steps: list[Step], latest_s: float
) -> Step | None:
    """Return a step that runs for the first time, when it is half-way; None at the end of all."""
    begin_s: dict[str, float] = {}
    while campaign.poll() is None:
        time.sleep(POLL_S)
        for step in steps:
            result = results.read(step)
            if not result.verdict.startswith("cut off") or result.tries != 1:
                continue
            since_s = time.monotonic() - begin_s.setdefault(step.name, time.monotonic())
            is_middle = MIDDLE.search(read_end(results.of(step) / LOG))
            if since_s > (SHORT_S if "--collect-only" in step.small else latest_s) or is_middle:
                return step
    return None


if __name__ == "__main__":
    sys.exit(main())
