"""The `safe-offload` command: reads the arguments and calls the subcommand.

Nothing heavy is imported for `--help` and `--version`: most subcommands need torch or vLLM, which
take seconds to import and print lines of their own.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, Final

from safe_offload import __version__
from safe_offload.config.printing import printable
from safe_offload.errors import SafeOffloadError

_ERROR_LENGTH_MAX: Final = 4000
_INTERRUPTED: Final = 130  # as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 for success, 1 for a failure or a finding, 130 after Ctrl-C."""
    return run(make_parser(), argv)


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Call the subcommand; return its exit status."""
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except SafeOffloadError as error:
        print(f"{parser.prog}: {printable(str(error), _ERROR_LENGTH_MAX)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: ended by Ctrl-C.", file=sys.stderr)
        return _INTERRUPTED
    return status


class Subcommand(argparse.ArgumentParser):
    """A group of subcommands, or a subcommand that is imported when it is chosen.

    Its module defines `add_arguments` and `run_command`; its docstring is the help.
    """

    def __init__(self, *, module: str = "", **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._module = module

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See ArgumentParser; called once, with the arguments after the subcommand's name."""
        if self._module:
            module = importlib.import_module(self._module)
            self.description = module.__doc__
            module.add_arguments(self)
            self.set_defaults(run=module.run_command)
        parsed, rest = super().parse_known_args(args, namespace)
        if rest and hasattr(parsed, "rest"):  # the subcommand takes unknown arguments
            parsed.rest = rest
            return parsed, []
        return parsed, rest


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="safe-offload", description="Tools for vLLM's SafeCPUOffloadConnector."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Subcommand)
    for name, module, what in (
        ("config", "config", "list the settings; validate a configuration"),
        ("doctor", "doctor.command", "find problems on this machine"),
        ("cache", "cache.command", "list, verify and delete objects of a tier"),
    ):
        commands.add_parser(name, help=what, module=f"safe_offload.commands.{module}")
    bench = commands.add_parser("bench", help="run a benchmark")
    benchmarks = bench.add_subparsers(required=True, metavar="BENCHMARK")
    benchmarks.add_parser(
        "engine",
        help="time to first token of a real vLLM engine, with and without the connector",
        module="safe_offload.commands.bench.engine",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
