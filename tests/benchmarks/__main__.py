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
        ("agents_engine", "recorded coding agents on engines with and without the connectors"),
        ("engine", "`safe-offload bench engine` with a tiny model"),
        ("scheduler", "time of a connector's hooks inside vLLM's scheduler"),
        ("copies", "copy bandwidth relative to the hardware limit, beside vLLM's own copies"),
        ("connectors", "no connector, ours and vLLM's own, in turns on one model"),
        ("seals", "rates and CPU time of tiers: plain, sealed with a key, encrypted"),
        ("breakdown", "latency breakdown of a hit, from its arrival to its first token"),
    ):
        benchmarks.add_parser(name, help=what, module=f"tests.benchmarks.{name}")
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
