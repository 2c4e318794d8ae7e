"""`tier_writes`: what a tier is given, and what that is worth, by what is written to it.

A trace is replayed on a small model: a host that evicts what was released longest ago, and a tier
that evicts what was written or read longest ago. What a prompt finds in the tier is brought to the
host, and is not written again while the host has it.
"""

import argparse
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.policy_traces import GENERATORS, Prompt, Trace, make_trace, read_trace

KINDS = ("computed", "evicted", "hit")


@dataclass(slots=True)
class Totals:
    """Blocks of a replay."""

    asked: int = 0
    host: int = 0
    tier: int = 0
    written: int = 0


class Model:
    """A host of some slots, and a tier of some more."""

    def __init__(self, kind: str, num_slots: int, num_objects: int) -> None:
        self._kind = kind
        self._num_slots, self._num_objects = num_slots, num_objects
        self._host: OrderedDict[bytes, None] = OrderedDict()
        self._tier: OrderedDict[bytes, None] = OrderedDict()
        self._known: set[bytes] = set()  # of the host's, those that the tier has been given or has
        self.totals = Totals()

    def add(self, prompt: Prompt) -> None:
        totals = self.totals
        num_host = num_hit = 0
        for key in prompt:
            if key not in self._host and key not in self._tier:
                break
            num_hit += 1
            num_host += key in self._host
        totals.asked += len(prompt)
        totals.host += num_host
        totals.tier += num_hit - num_host
        for key in prompt[:num_hit]:
            if key in self._tier:
                self._tier.move_to_end(key)
            if key not in self._host:
                self._known.add(key)
        new = [key for key in prompt if key not in self._host]
        for key in reversed(prompt):  # the tail of a prefix is the first of it to go
            self._host[key] = None
            self._host.move_to_end(key)
        if self._kind == "computed":
            self._write(new)
        elif self._kind == "hit" and num_host:
            self._write(prompt[:num_hit])
        while len(self._host) > self._num_slots:
            key, _ = self._host.popitem(last=False)
            if self._kind == "evicted":
                self._write([key])
            self._known.discard(key)

    def _write(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._known:
                continue
            self._known.add(key)
            self.totals.written += key not in self._tier
            self._tier[key] = None
            self._tier.move_to_end(key)
        while len(self._tier) > self._num_objects:
            self._tier.popitem(last=False)


def replay(trace: Trace, kind: str, num_slots: int, factor: int) -> Totals:
    """Run all prompts, one after the other."""
    model = Model(kind, num_slots, factor * num_slots)
    for prompt in trace.prompts:
        model.add(prompt)
    return model.totals


def lines_of(trace: Trace, sizes: Sequence[float], factor: int) -> list[str]:
    """A line for each size of the host and each kind."""
    lines = [f"{trace.name}: {len(trace.prompts)} prompts, {trace.working_set} different blocks"]
    for size in sizes:
        num_slots = max(1, int(size * trace.working_set))
        for kind in KINDS:
            t = replay(trace, kind, num_slots, factor)
            lines.append(
                f"host {size:6.1%} of them, {kind:8}  written {t.written:7} blocks  "
                f"hits {(t.host + t.tier) / t.asked:.3f}, of the host alone {t.host / t.asked:.3f}"
            )
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m tests.benchmarks tier_writes`."""
    parser.add_argument("--file", type=Path, action="append", default=[], help="a trace to replay")
    parser.add_argument(
        "--traces",
        nargs="*",
        choices=list(GENERATORS),
        default=[],
        help="drawn ones; all, if there is no file",
    )
    parser.add_argument("--prompts", type=int, default=2000, help="of a drawn trace")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.01, 0.03, 0.1])
    parser.add_argument("--factor", type=int, default=10, help="tier, in times of the host")


def run_command(arguments: argparse.Namespace) -> int:
    """Run it."""
    if not arguments.file and not arguments.traces:
        arguments.traces = list(GENERATORS)
    traces = [read_trace(path) for path in arguments.file]
    traces += [make_trace(name, arguments.prompts) for name in arguments.traces]
    for trace in traces:
        print("\n".join(lines_of(trace, arguments.sizes, arguments.factor)))
    return 0
