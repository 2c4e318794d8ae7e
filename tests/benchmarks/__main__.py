"""Benchmarks for developers: `python -m tests.benchmarks NAME`.

See docs/benchmarks/method.md; `safe-offload bench` is for users.
"""

import argparse
import sys
from collections.abc import Sequence

from safe_offload.commands.cli import Subcommand, run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that was chosen; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmarks = parser.add_subparsers(required=True, metavar="BENCHMARK", parser_class=Subcommand)
    for name, what in (
        ("agents", "recorded coding agents on vLLM servers, with and without the connector"),
        ("serve", "`vllm bench serve`: no connector, ours, and a KV pool that holds everything"),
        ("agents_engine", "`agents` in engines without servers, for a machine without a network"),
        ("engine", "`safe-offload bench engine` with a tiny model"),
        ("tiers_engine", "engines with a tier: TTFT recomputed, from the GPU, host and tier"),
        ("transfer", "copy bandwidth relative to the hardware limit"),
        ("scheduler", "time of a connector's hooks inside vLLM's scheduler"),
        ("growth", "growth of hook times with requests, blocks, pins, tenants, and so on"),
        ("copies", "`transfer`, plus vLLM's own copies and latencies"),
        ("connectors", "no connector, ours and vLLM's own, in turns on one model"),
        ("breakdown", "latency breakdown of a hit, from its arrival to its first token"),
        ("beside", "slowdown of forward passes by loads and stores, by kernel and copy engines"),
        ("link", "bandwidth of one large copy, by kind of page-locked memory"),
        ("node", "two servers with one host cache: hits on the neighbor's blocks and on own ones"),
        ("one_memory", "two processes that page-lock and copy the same host memory"),
        ("layouts", "contiguous blocks: gain for copies, cost for the forward pass"),
        ("large_host", "millions of slots: startup time, Python bytes per slot, step time"),
        ("hits", "TTFT of a hit: loaded, recomputed, and as min_load_tokens=auto decides"),
        ("shared", "many simultaneous requests with one prefix: how often it is loaded"),
        ("storing", "cost of storing for requests without hits"),
        ("preemption", "tokens recomputed after preemptions, with and without the connector"),
        ("slow_tier", "whether a slow or dead tier delays any request, on virtual time"),
        ("fleet", "two engines with a failing server or a bad network: correct, and never late"),
        ("tier_writes", "write policies of a tier: blocks written against hits"),
        ("tenants", "hit rates of chats beside a flood, with and without quotas"),
        ("held", "bytes stored for a prompt, relative to those that attention reads"),
        ("policies", "hit rates of the eviction policies, and their cost"),
    ):
        benchmarks.add_parser(name, help=what, module=f"tests.benchmarks.{name}")
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
