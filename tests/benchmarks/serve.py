"""`vllm bench serve`, vLLM's own client, against servers without the connector, with it, the limit.

The servers are those of `agents`: tiny models on the CPU, a KV pool that is too small and one that
holds all. Prompts begin with one of some prefixes (`prefix_repetition`), or are those of users who
take turns (`turns`), each the one before and more. With --virtual the same prompts come to vLLM's
scheduler on virtual time, and there the ideal connector, whose loads take no time, says what the
smaller pool costs.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from examples.tiny_models import ANSWER_BYTES, write_tiny_model
from safe_offload.commands.bench.engine_process import Turns
from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
)
from safe_offload.errors import ConfigError, SafeOffloadError
from tests.benchmarks.agents_report import TIMES, TTFT, Found, Run, make_sections, to_figures
from tests.benchmarks.agents_servers import Kind, Sizes, read_counters, server_sets, started

CLIENT = """
import argparse, asyncio
from vllm.benchmarks.serve import add_cli_args, main_async
parser = argparse.ArgumentParser()
add_cli_args(parser)
asyncio.run(main_async(parser.parse_args()))
"""
"""What `vllm bench serve` does, which does not start without the package vllm itself."""
METRICS = dict(zip(TIMES, ("ttft", "tpot", "e2el"), strict=True))
STATISTICS = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", default=["llama", "gemma3"], choices=["llama", "gemma3", "mamba"])
    add("--datasets", nargs="+", default=["prefix_repetition", "turns"], metavar="NAME")
    add("--prefixes", type=int, default=6, help="or users who take turns (%(default)s)")
    add("--prefix-tokens", type=int, default=3000, help="(%(default)s)")
    add("--suffix-tokens", type=int, default=100, help="of each prompt (%(default)s)")
    add("--prompts", type=int, default=48, help="in a round (%(default)s)")
    add("--answer-tokens", type=int, default=16, help="(%(default)s)")
    add("--at-once", type=int, default=6, help="prompts under way (%(default)s)")
    add("--pool-prefixes", type=float, default=4.5, help="that the pool holds (%(default)s)")
    add("--rounds", type=int, default=3, help="after one that warms up (%(default)s)")
    add("--extra", type=json.loads, default={}, metavar="JSON", help="more settings of ours")
    add("--virtual", action="store_true", help="on virtual time: no client, no servers, no noise")
    add("--logs", type=Path, metavar="FOLDER", help="keep logs and results here")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks serve`."""
    machine = describe_machine()
    sections: list[str] = []
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="safe-offload-serve-") as temporary:
        folder = arguments.logs or Path(temporary)
        for model in arguments.models:
            run = simulate if arguments.virtual else measure
            for dataset, servers in run(cast(Kind, model), arguments, folder / model).items():
                found: Found = {arguments.at_once: servers}
                _, ours, *limits = servers
                sections += make_sections(f"{model}, {dataset}", found, ours, limits, [TTFT])
                figures[f"{model}, {dataset}"] = to_figures(found)
    how = "virtual time" if arguments.virtual else "vllm bench serve"
    method = f"{how}. The servers take turns. Median (lowest to highest) of the rounds."
    options = {name: str(value) for name, value in vars(arguments).items() if name != "run"}
    publish(Report(method, sections, figures, options, machine), arguments)
    return 0


Servers = dict[str, list[Run]]


def measure(kind: Kind, arguments: argparse.Namespace, folder: Path) -> dict[str, Servers]:
    """Return the runs by dataset and server."""
    if kind == "mamba":
        raise ConfigError("--models mamba: there is no tiny model of it; add --virtual")
    folder.mkdir(parents=True)
    turns, sizes = Turns(), _sizes(arguments)
    model = write_tiny_model(kind, folder / "model")
    sets = server_sets(kind, sizes, arguments.extra)
    with ExitStack() as on:
        print(f"{kind}: starting the servers ...")
        urls = on.enter_context(started(sets, model, sizes, folder))
        found: dict[str, Servers] = {one: {url: [] for url in urls} for one in arguments.datasets}
        for round_index in range(arguments.rounds + 1):
            for dataset, runs in found.items():
                file = folder / f"{dataset}-{round_index}.jsonl"
                prompts = draw(dataset, arguments, round_index)
                file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
                for name in list(urls)[:: 1 if round_index % 2 else -1]:
                    result = folder / f"{dataset}-{round_index}-{name.replace(' ', '-')}.json"
                    words = command(urls[name], dataset, arguments, file, result)
                    turns.begin(name)
                    run = run_client([*words, "--tokenizer", str(model)], urls[name], result)
                    turns.end(name)
                    label = f"{kind}, {dataset}, round {round_index}, {name}"
                    print(f"{label}: {run.throughput:.2f} requests/s", flush=True)
                    if round_index:
                        runs[name].append(run)
    return found


def draw(dataset: str, arguments: argparse.Namespace, round_index: int) -> list[str]:
    """Return the prompts of a round, a character for each token."""
    generator = random.Random(f"{dataset}/{round_index}")

    def text(num_tokens: int) -> str:
        return bytes(generator.choices(ANSWER_BYTES, k=num_tokens)).decode()

    prefixes = [text(arguments.prefix_tokens) for _ in range(arguments.prefixes)]
    numbers = [index % arguments.prefixes for index in range(arguments.prompts)]
    if dataset != "turns":
        generator.shuffle(numbers)
        return [prefixes[number] + text(arguments.suffix_tokens) for number in numbers]
    prompts = []
    for number in numbers:
        prefixes[number] += text(arguments.suffix_tokens)
        prompts.append(prefixes[number])
    return prompts


def command(
    url: str, dataset: str, arguments: argparse.Namespace, file: Path, result: Path
) -> list[str]:
    """Return the arguments of `vllm bench serve`."""
    options: dict[str, object] = {
        "base-url": url,
        "model": "model",
        "num-prompts": arguments.prompts,
        "max-concurrency": arguments.at_once,
        "percentile-metrics": ",".join(METRICS.values()),
        "metric-percentiles": "50,90,99",
        "temperature": 0,
        "result-filename": result,
    }
    if dataset == "prefix_repetition":
        sizes = {
            "prefix-len": arguments.prefix_tokens,
            "suffix-len": arguments.suffix_tokens,
            "num-prefixes": arguments.prefixes,
            "output-len": arguments.answer_tokens,
        }
        options |= {f"prefix-repetition-{name}": size for name, size in sizes.items()}
        options |= {"dataset-name": dataset, "seed": file.stem.rpartition("-")[2]}
    else:
        options |= {"dataset-name": "custom", "dataset-path": file}
        options |= {"custom-output-len": arguments.answer_tokens}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    flags = ["save-result", "ignore-eos", "skip-chat-template", "disable-tqdm"]
    flags += ["disable-shuffle"] if dataset == "turns" else []
    return [*words, *(f"--{one}" for one in flags)]


def run_client(words: Sequence[str], url: str, result: Path) -> Run:
    before = read_counters(url)
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, *words], capture_output=True, text=True, check=False
    )
    if done.returncode or not result.is_file():
        raise SafeOffloadError(f"vllm bench serve failed:\n{done.stdout}{done.stderr}"[-4000:])
    after = read_counters(url)
    return read_result(json.loads(result.read_text()), before, after)


def read_result(
    found: Mapping[str, Any], before: Mapping[str, float], after: Mapping[str, float]
) -> Run:
    """Return what vLLM's client has measured (0.32.0)."""
    if found["completed"] != found["num_prompts"]:
        raise SafeOffloadError(f"vllm bench serve: {found['completed']} prompts were answered")
    times = {
        name: {what: found[f"{key}_{metric}_ms"] for what, key in STATISTICS.items()}
        for name, metric in METRICS.items()
    }
    counters = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return Run(found["completed"], found["request_throughput"], times, counters)


def simulate(kind: Kind, arguments: argparse.Namespace, _: Path) -> dict[str, Servers]:
    """Return the runs on virtual time."""
    from tests.benchmarks import agents_virtual  # needs vLLM
    from tests.benchmarks.shared import RETENTION_INTERVAL

    logging.disable(logging.CRITICAL)
    sizes, at_once = _sizes(arguments), arguments.at_once
    sets = agents_virtual.server_sets(kind, sizes)
    num_slots = sizes.num_blocks(kind, sizes.host_users)
    found: dict[str, Servers] = {one: {name: [] for name in sets} for one in arguments.datasets}
    for dataset, runs in found.items():
        for name, what in sets.items():
            how = num_slots, sizes.context_tokens_max, at_once, RETENTION_INTERVAL
            engine = agents_virtual.make_engine(kind, *what, *how)
            for round_index in range(arguments.rounds + 1):
                prompts = draw(dataset, arguments, round_index)
                asks = [
                    agents_virtual.Ask(list(prompt.encode()), arguments.answer_tokens)
                    for prompt in prompts
                ]
                users = [asks[user::at_once] for user in range(at_once)]
                runs[name].append(agents_virtual.replay(engine, users, 0.0))
            del runs[name][0]
    return found


def _sizes(arguments: argparse.Namespace) -> Sizes:
    num_turns = -(-arguments.prompts // arguments.prefixes)
    longest = arguments.prefix_tokens + num_turns * arguments.suffix_tokens
    everything = (arguments.rounds + 1) * len(arguments.datasets) * arguments.prefixes
    return Sizes(
        context_tokens=arguments.prefix_tokens + arguments.suffix_tokens,
        context_tokens_max=longest + arguments.answer_tokens,
        pool_users=arguments.pool_prefixes,
        host_users=2 * everything,
        limit_users=everything,
        users=arguments.at_once,
    )
