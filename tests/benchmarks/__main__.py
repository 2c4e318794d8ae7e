"""Measure what only developers measure: `python -m tests.benchmarks NAME`.

docs/benchmarks/method.md says how; `safe-offload bench` is for users.
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
        ("agents", "recorded coding agents against vLLM servers, with and without us"),
        ("serve", "`vllm bench serve`: without us, with us, and with a KV pool that holds all"),
        ("agents_engine", "the same in engines without servers, for a machine without a network"),
        ("engine", "`safe-offload bench engine` with a tiny model"),
        ("tiers_engine", "engines that use a tier: computed, from the GPU, the host, the tier"),
        ("transfer", "rate of the copies, against what the hardware gives"),
        ("scheduler", "time of a connector's hooks inside vLLM's scheduler"),
        ("growth", "how hook times grow with requests, blocks, pins, tenants, and so on"),
        ("copies", "`transfer` with vLLM's own copies and with latencies"),
        ("connectors", "no connector, ours and vLLM's own, in turns on one model"),
        ("breakdown", "where the time of a hit goes, from its arrival to its first token"),
        ("beside", "what loads and stores, by kernel and by copy engines, cost the forward"),
        ("link", "what one large copy reaches, by kind of page-locked memory, for some seconds"),
        ("node", "two servers with one host cache: a hit of the neighbour's over one of its own"),
        ("one_memory", "two processes that page-lock and copy one host memory"),
        ("layouts", "blocks in one piece: what it brings copies, what it costs the forward"),
        ("large_host", "millions of slots: start, bytes of Python a slot, a step's time"),
        ("hits", "time to first token of a hit, loaded, computed, and by the rule"),
        ("shared", "many requests at once with one prefix: how often it is loaded"),
        ("storing", "what storing costs requests that never come back"),
        ("preemption", "tokens computed again after preemptions, with and without us"),
        ("slow_tier", "whether a slow or dead tier makes any request later, on virtual time"),
        ("fleet", "two engines and a server that fails, or a bad network: right, and never late"),
        ("tier_writes", "what a tier is given by its `store`: blocks written against hits"),
        ("tenants", "hit rates of those that chat beside a flood, with quotas and without"),
        ("held", "bytes that the host holds of a prompt, over those that attention reads"),
        ("policies", "hit rates of the eviction policies, and what they cost"),
    ):
        benchmarks.add_parser(name, help=what, module=f"tests.benchmarks.{name}")
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
