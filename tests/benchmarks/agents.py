"""Recorded coding agents against running servers of vLLM's: without the connector, and with it.

The client is aiperf (`make aiperf`), which replays conversations: each user sends the next prompt
some time after the answer to the one before. Ours are the conversations, scaled to the machine, and
the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from safe_offload.commands.bench.engine_process import Turns
from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
)
from safe_offload.errors import ConfigError, SafeOffloadError
from tests.benchmarks import agents_traces
from tests.benchmarks.agents_report import (
    Found,
    Run,
    make_sections,
    read_counters,
    read_run,
    to_figures,
)
from tests.benchmarks.agents_traces import Conversation

AIPERF = Path(".venv-aiperf/bin/aiperf")
USER_EVERY_S = 7.0
"""One user after another begins, before times are divided."""
SPARE = 2
"""Conversations for each user, as some end soon."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--traces", type=Path, required=True, metavar="PATH", help="folder in aiperf's weka_trace")
    add("--users", type=_numbers, default=[4, 16, 64], metavar="N,…", help="at once (4,16,64)")
    add("--scale", type=int, default=32, help="divides lengths and times (%(default)s)")
    add("--turns", type=int, default=12, help="requests of a conversation (%(default)s)")
    add("--max-context", type=int, default=128_000, help="tokens, before scaling (%(default)s)")
    add("--rounds", type=int, default=3, help="after one that warms up (%(default)s)")
    add("--seed", default="0", help="draws the conversations (%(default)s)")
    add("--url", nargs="+", required=True, metavar="NAME=URL", help="servers, plain one first")
    add("--tokenizer", help="of the servers' model: a name or a folder (the model's name)")
    add("--aiperf", type=Path, default=AIPERF, metavar="FILE", help="(%(default)s)")
    add("--logs", type=Path, metavar="FOLDER", help="keep logs and aiperf's results here")
    add_output_arguments(parser)


def _numbers(text: str) -> list[int]:
    return sorted(map(int, text.split(",")))


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks agents`."""
    machine = describe_machine()
    if not arguments.aiperf.is_file():
        raise ConfigError(f"--aiperf {arguments.aiperf}: there is no such file; run `make aiperf`")
    recorded = agents_traces.read(arguments.traces)
    with tempfile.TemporaryDirectory(prefix="safe-offload-agents-") as temporary:
        found, names = measure(recorded, arguments, arguments.logs or Path(temporary))
    ours, *limits = names[1:] or names
    sections = make_sections("running servers", found, ours, limits)
    options = {name: str(value) for name, value in vars(arguments).items() if name != "run"}
    publish(Report(_describe(arguments), sections, to_figures(found), options, machine), arguments)
    return 0


def _describe(arguments: argparse.Namespace) -> str:
    return (
        f"Recorded agents, contexts and times divided by {arguments.scale}, replayed by aiperf, "
        f"after a warm-up round;\n{arguments.turns} requests a user and round, {arguments.rounds} "
        "rounds, other conversations in each.\nThe servers take turns. Median (lowest to highest) "
        "of the rounds."
    )


def measure(
    recorded: Sequence[Conversation], arguments: argparse.Namespace, folder: Path
) -> tuple[Found, list[str]]:
    """Return the runs by users and server, and the servers' names."""
    turns, aiperf = Turns(), Aiperf(arguments)
    urls = dict(one.split("=", 1) for one in arguments.url)
    found: Found = {users: {name: [] for name in urls} for users in arguments.users}
    for round_index in range(arguments.rounds + 1):
        for users in arguments.users if round_index else arguments.users[:1]:
            where = folder / f"{round_index}-{users}"
            seed = f"{arguments.seed}/{round_index}/{users}"
            agents_traces.write(draw(recorded, arguments, users, seed), where / "traces", seed)
            for name in list(urls)[:: 1 if round_index % 2 else -1]:
                turns.begin(name)
                run = aiperf.run(urls[name], users, where / "traces", where / name)
                turns.end(name)
                label = f"round {round_index}, {users} users, {name}"
                print(f"{label}: {run.throughput:.2f} requests/s", flush=True)
                if round_index:
                    found[users][name].append(run)
    return found, list(urls)


def draw(
    recorded: Sequence[Conversation], arguments: argparse.Namespace, users: int, seed: str
) -> list[Conversation]:
    number, longest = SPARE * users, arguments.max_context
    chosen = agents_traces.choose(recorded, number, longest, arguments.turns, seed)
    return [agents_traces.scale(one, arguments.scale) for one in chosen]


class Aiperf:
    """The client. `arguments`: of the command."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments

    def run(self, url: str, users: int, traces: Path, results: Path) -> Run:
        """Let some users replay a folder; return what they had."""
        command = self.command(url, users, traces, results)
        # Offline, it takes no folder for a tokenizer.
        environment = {k: v for k, v in os.environ.items() if not k.endswith("_OFFLINE")}
        results.mkdir(parents=True)
        before = read_counters(url)
        with (results / "aiperf.log").open("w") as log:
            done = subprocess.run(command, env=environment, stdout=log, stderr=log)
        after = read_counters(url)
        if done.returncode:
            end = (results / "aiperf.log").read_text()[-2000:]
            raise SafeOffloadError(f"aiperf ended with status {done.returncode}:\n{end}")
        return read_run(results, before, after)

    def command(self, url: str, users: int, traces: Path, results: Path) -> list[str]:
        """Return aiperf's command line."""
        arguments = self._arguments
        model = _model_name(url)
        options = {
            "model": model,
            "tokenizer": arguments.tokenizer or model,
            "url": url,
            "endpoint-type": "chat",
            "custom-dataset-type": "weka_trace",
            "input-file": traces,
            "concurrency": users,
            "concurrency-ramp-duration": max(0.1, users * USER_EVERY_S / arguments.scale),
            "request-count": users * arguments.turns,
            "random-seed": 0,
            "output-artifact-dir": results,
            "extra-inputs": json.dumps({"ignore_eos": True, "temperature": 0}),
            "ui": "none",
        }
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        flags = ["streaming", "use-think-time-only", "use-server-token-count"]
        flags += ["no-gpu-telemetry", "no-server-metrics"]
        return [str(arguments.aiperf), "profile", *words, *(f"--{one}" for one in flags)]


def _model_name(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30.0) as response:
        name: str = json.load(response)["data"][0]["id"]
        return name
