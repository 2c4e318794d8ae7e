"""The `safe-offload` command: reads arguments and makes one call for each subcommand."""

import argparse
import sys
from collections.abc import Sequence

from safe_offload.bench import engine, policies, preemption, scheduler, shared, transfer
from safe_offload.errors import SafeOffloadError
from safe_offload.sim import command as sim


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status.

    Args:
        argv: the arguments without the program's name, `sys.argv[1:]` if not given.

    Returns:
        0 if all is well, 1 if what was asked for failed or showed a defect.
    """
    arguments = _make_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except SafeOffloadError as error:
        print(f"safe-offload: {error}", file=sys.stderr)
        return 1
    return status


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="safe-offload", description="Tools around vLLM's SafeCPUOffloadConnector."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bench = commands.add_parser("bench", help="measure")
    benchmarks = bench.add_subparsers(required=True, metavar="BENCHMARK")
    for name, module, what in (
        ("engine", engine, "time to first token in a real vLLM engine, with and without us"),
        ("scheduler", scheduler, "time of a connector's hooks inside vLLM's scheduler"),
        ("shared", shared, "many requests at once with one prefix: how often it is loaded"),
        ("preemption", preemption, "tokens computed again after preemptions, with and without us"),
        ("policies", policies, "hit rates of the eviction policies, and what they cost"),
        ("transfer", transfer, "rate of the copies, against what the hardware gives"),
    ):
        benchmark = benchmarks.add_parser(
            name,
            help=what,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(benchmark)
        benchmark.set_defaults(run=module.run_command)
    simulator = commands.add_parser(
        "sim",
        help="test this connector on vLLM's real scheduler, over simulated workers",
        description=sim.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sim.add_arguments(simulator)
    simulator.set_defaults(run=sim.run_command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
