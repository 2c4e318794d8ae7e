"""A hit from Mooncake's machines beside one from a Valkey server, each behind a link of its own.

One vLLM server writes prompts to both; two others, which have never seen them, read them in turns,
each from one. Links are network namespaces and `tc`'s tbf, which need root; what is behind them
sends with cubic, Linux's default. The first prompt of each is left out. Master and servers have no
link.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.tiny_models import write_tiny_model
from safe_offload.commands.bench.report import table
from tests.engine.engines import connector, make_prompts
from tests.engine.http_server import HttpServer
from tests.mooncake_server import IS_UP, SEGMENT, Master
from tests.valkey_server import LOCALHOST, free_port, valkey_binary

BLOCK_TOKENS, NUM_LAYERS = 128, 16
PATIENCE = {"wait_s": 60.0, "timeout_s": 30.0}
COUNTERS = ("tier_wait_seconds_sum", "fetch_seconds_sum", "tier_read_bytes_total")


@contextlib.contextmanager
def machine(number: int, rate: str) -> Iterator[tuple[list[str], str]]:
    """Give what runs a command behind a link, and its address there."""
    name, here, there = f"so{number}", f"10.99.{number}.1", f"10.99.{number}.2"
    ip(f"netns add {name}")
    try:
        ip(f"link add {name} type veth peer name eth0 netns {name}")
        ip(f"addr add {here}/24 dev {name}")
        ip(f"link set {name} up")
        ip(f"-n {name} addr add {there}/24 dev eth0")
        ip(f"-n {name} link set eth0 up")
        ip(f"-n {name} link set lo up")
        ip(f"-n {name} route add default via {here}")
        cubic = ["sysctl", "-qw", "net.ipv4.tcp_congestion_control=cubic"]
        subprocess.run(["ip", "netns", "exec", name, *cubic], check=True)
        limit = f"qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 100ms"
        subprocess.run(["tc", "-n", name, *limit.split()], check=True)
        yield ["ip", "netns", "exec", name], there
    finally:
        ip(f"netns del {name}")


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


@contextlib.contextmanager
def program(command: list[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a program meanwhile."""
    process = subprocess.Popen(command, text=True, **more)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return what the hits of each tier took, and read."""
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        master = stack.enter_context(Master(root, address="0.0.0.0"))
        for number in range(1, options.machines + 1):
            run, address = stack.enter_context(machine(number, options.rate))
            size_bytes = str(options.gibibytes * (1 << 30) // options.machines)
            code = SEGMENT.replace(LOCALHOST, address)
            link = f"10.99.{number}.1:{master.port}"
            segment = program(
                [*run, sys.executable, "-c", code, link, size_bytes], stdout=subprocess.PIPE
            )
            said = stack.enter_context(segment).stdout
            assert said is not None
            assert said.readline().strip() == IS_UP
        run, address = stack.enter_context(machine(0, options.rate))
        port = str(free_port())
        arguments = ["--bind", address, "--port", port, "--save", "", "--protected-mode", "no"]
        valkey = program([*run, valkey_binary(), *arguments], stdout=subprocess.DEVNULL)
        stack.enter_context(valkey)
        tiers = {
            "Mooncake": {"url": master.url, **PATIENCE},
            "Valkey": {"url": f"redis://{address}:{port}", **PATIENCE},
        }
        return serve(root, tiers, options)


def serve(
    root: Path, tiers: dict[str, dict[str, Any]], options: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Write with one server, and read with one for each tier."""
    prompts = make_prompts(options.tokens, "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: options.prompts])
    model = write_tiny_model("llama", root / "model", num_layers=NUM_LAYERS)
    num_blocks = -(-options.tokens // BLOCK_TOKENS)

    def server(name: str, *places: dict[str, Any]) -> HttpServer:
        config = connector(num_blocks * len(prompts) + 10, tiers=[*places], check_invariants=False)
        return HttpServer(
            model,
            root / name,
            num_blocks=num_blocks * 2,
            max_model_len=options.tokens + 100,
            arguments=("--block-size", str(BLOCK_TOKENS)),
            config=config,
        )

    os.environ["VLLM_HOST_IP"] = LOCALHOST
    with server("writer", *tiers.values()) as writer:
        writer.wait_until_healthy()
        answers = {name: writer.ask(prompt, 4) for name, prompt in prompts.items()}
        num_objects = len(tiers) * len(prompts) * ((options.tokens - 1) // BLOCK_TOKENS)
        writer.wait_for(lambda: writer.count("tier_written_objects") >= num_objects, "written")
    found: dict[str, list[dict[str, float]]] = {tier: [] for tier in tiers}
    with contextlib.ExitStack() as stack:
        readers = [(tier, stack.enter_context(server(tier, at))) for tier, at in tiers.items()]
        for _, reader in readers:
            reader.wait_until_healthy()
        for turn, (name, prompt) in enumerate(prompts.items()):
            for tier, reader in readers if turn % 2 else reversed(readers):
                before, begin_s = reader.metrics(), time.perf_counter()
                assert reader.ask(prompt, 4) == answers[name]
                answer_s, after = time.perf_counter() - begin_s, reader.metrics()
                metrics = [f"vllm:safe_offload_{counter}" for counter in COUNTERS]
                took = {key: after.get(key, 0.0) - before.get(key, 0.0) for key in metrics}
                found[tier].append(dict(zip(COUNTERS, took.values(), strict=True)))
                found[tier][-1]["answer"] = answer_s
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--machines", type=int, default=8, help="that give Mooncake memory (%(default)s)")
    add("--rate", default="1gbit", help="of each link, as tc writes it (%(default)s)")
    add("--prompts", type=int, default=10)
    add("--tokens", type=int, default=4000, help="of a prompt (%(default)s)")
    add("--gibibytes", type=int, default=1, help="of Mooncake's memory (%(default)s)")


def run_command(options: argparse.Namespace) -> int:
    """Print the table."""
    head = "tier", "MB", "hit's wait s", "of it fetch s", "answer s", "waits"
    rows: list[tuple[str, ...]] = [head]
    for tier, hits in measure(options).items():
        wait_s, fetch_s, size_bytes, answer_s = (
            statistics.median(hit[key] for hit in hits[1:]) for key in (*COUNTERS, "answer")
        )
        waits = " ".join(f"{hit[COUNTERS[0]]:.2f}" for hit in hits[1:])
        cells = (f"{wait_s:.3f}", f"{fetch_s:.3f}", f"{answer_s:.3f}", waits)
        rows.append((tier, f"{size_bytes / 1e6:.1f}", *cells))
    print(table(rows, num_left=1))
    return 0
