"""Recorded coding agents against vLLM's servers: without the connector, with it, and the limit.

The client is aiperf (`make aiperf`), which replays conversations: each user sends the next prompt
some time after the answer to the one before. Ours are the conversations, scaled to the machine, the
servers, and the table. The servers are vLLM's own, with tiny models on the CPU: the KV pool holds
the contexts of some users and the host those of some more; the limit has a pool that holds all. Or
they run already (--url), with any model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from examples.tiny_models import ModelKind, write_tiny_model
from safe_offload.commands.bench.engine_process import Turns
from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
)
from safe_offload.errors import ConfigError, SafeOffloadError
from tests.benchmarks import agents_traces
from tests.benchmarks.agents_report import Found, Run, make_sections, read_run, to_figures
from tests.benchmarks.agents_servers import (
    Kind,
    Sizes,
    read_counters,
    server_sets,
    started,
)
from tests.benchmarks.agents_traces import Conversation

AIPERF = Path(".venv-aiperf/bin/aiperf")
USER_EVERY_S = 7.0
"""One user after another begins, before times are divided."""
CHAT_TOKENS = 4
"""That the tiny models' chat template adds to a prompt with each request, and a few more."""
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
    add("--models", nargs="+", default=["llama", "gemma3"], choices=["llama", "gemma3"])
    add("--pool-users", type=float, default=4, help="whose contexts the pool holds (%(default)s)")
    add("--host-users", type=float, default=12, help="the same of the host (%(default)s)")
    add("--extra", type=json.loads, default={}, metavar="JSON", help="more settings of ours")
    add("--url", nargs="+", default=[], metavar="NAME=URL", help="running servers, plain one first")
    add("--tokenizer", help="of the running servers' model: a name or a folder (the model's name)")
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
    sections: list[str] = []
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="safe-offload-agents-") as temporary:
        folder = arguments.logs or Path(temporary)
        for model in arguments.models if not arguments.url else ["running servers"]:
            found, names = measure(model, recorded, arguments, folder / model)
            ours, *limits = names[1:] or names
            sections += make_sections(model, found, ours, limits)
            figures[model] = to_figures(found)
    options = {name: str(value) for name, value in vars(arguments).items() if name != "run"}
    publish(Report(_describe(arguments), sections, figures, options, machine), arguments)
    return 0


def _describe(arguments: argparse.Namespace) -> str:
    return (
        f"Recorded agents, contexts and times divided by {arguments.scale}, replayed by aiperf, "
        f"after a warm-up round;\n{arguments.turns} requests a user and round, {arguments.rounds} "
        "rounds, other conversations in each.\nThe servers take turns. Median (lowest to highest) "
        "of the rounds."
    )


def measure(
    model: str, recorded: Sequence[Conversation], arguments: argparse.Namespace, folder: Path
) -> tuple[Found, list[str]]:
    """Return the runs by users and server, and the servers' names."""
    folder.mkdir(parents=True)
    turns = Turns()
    with ExitStack() as on:
        if arguments.url:
            urls = dict(one.split("=", 1) for one in arguments.url)
            aiperf = Aiperf(arguments, None)
        else:
            sizes = _sizes(recorded, arguments)
            sets = server_sets(cast(Kind, model), sizes, arguments.extra)
            model_folder = write_tiny_model(cast(ModelKind, model), folder / "model")
            print(f"{model}: starting the servers ...")
            urls = on.enter_context(started(sets, model_folder, sizes, folder))
            aiperf = Aiperf(arguments, model_folder)
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
                    label = f"{model}, round {round_index}, {users} users, {name}"
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


def _sizes(recorded: Sequence[Conversation], arguments: argparse.Namespace) -> Sizes:
    most = arguments.users[-1]
    sample = draw(recorded, arguments, most, arguments.seed)
    return Sizes(
        context_tokens=agents_traces.mean_context(sample),
        context_tokens_max=arguments.max_context // arguments.scale + CHAT_TOKENS * arguments.turns,
        pool_users=arguments.pool_users,
        host_users=arguments.host_users,
        limit_users=4 * most,
        users=most,
    )


class Aiperf:
    """The client.

    Args:
        arguments: of the command.
        model_folder: of our own servers' model, which has its tokenizer; None for running servers.
    """

    def __init__(self, arguments: argparse.Namespace, model_folder: Path | None) -> None:
        self._arguments = arguments
        self._model_folder = model_folder

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
        is_ours = self._model_folder is not None
        model = "model" if is_ours else _model_name(url)
        options = {
            "model": model,
            "tokenizer": self._model_folder or arguments.tokenizer or model,
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
        # The machine that our own servers share with aiperf is small.
        options |= {"workers-max": 1, "record-processors": 1} if is_ours else {}
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        flags = ["streaming", "use-think-time-only", "use-server-token-count"]
        flags += ["no-gpu-telemetry", "no-server-metrics"]
        return [str(arguments.aiperf), "profile", *words, *(f"--{one}" for one in flags)]


def _model_name(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30.0) as response:
        name: str = json.load(response)["data"][0]["id"]
        return name
