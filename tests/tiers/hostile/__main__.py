"""Tiers on servers that answer badly: nothing but misses may come of it.

    python -m tests.tiers.hostile --answers 10000 --seed 1

A server is started that answers commands well for some of the time, else with whatever a broken or
malicious server can send: one by itself, then one of a cluster. Exit status 1 if a tier served a
wrong byte, hung, raised what it must not, wrote to a slot too late, kept memory, files or tasks,
let a secret or a forged line into the log, or did not come back to a server that was good again.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.tiers.hostile.answers import KINDS
from tests.tiers.hostile.fuzz import run
from tests.tiers.hostile.server import PROTOCOLS


def main() -> int:
    """Run what was asked for; return 1 if there are findings."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tiers.hostile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--protocol", choices=PROTOCOLS, action="append", help="default: all")
    parser.add_argument("--answers", type=int, default=10_000, help="of each protocol")
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    parser.add_argument("--only", choices=KINDS, action="append", default=[], metavar="KIND")
    parser.add_argument("--good", type=int, default=40, help="answers of 100 that are right")
    arguments = parser.parse_args()
    num_findings = 0
    for protocol in arguments.protocol or PROTOCOLS:
        print(f"--- {protocol}: {', '.join(arguments.only) or 'all kinds'}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            report = run(
                *(protocol, Path(folder), arguments.seed, arguments.answers),
                only=tuple(arguments.only),
                num_good_of_100=arguments.good,
            )
        print(report, flush=True)
        num_findings += len(report.findings)
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
