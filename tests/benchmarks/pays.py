"""Which tier brings KV cache sooner than a GPU computes it, by model and by link; nothing is run.

A rank of a model computes `tokens_per_s` on one H100: measured for 8B (docs/benchmarks/gpu.md), and
for the others by their active parameters, attention left out. A tier brings what its client moves
(measured, `RATES`), but no more than the link of a rank carries.
"""

import argparse
from dataclasses import dataclass

from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
    table,
)

MEASURED_TOKENS_PER_S = 32_700.0
MEASURED_PARAMETERS = 8.0e9
LINKS_GBIT = (1, 10, 25, 100, 400)
LINK_SHARE = 0.9
"""Of a link, what headers and pauses leave."""


@dataclass(frozen=True, slots=True)
class Model:
    """What one rank of it computes and keeps of a token: tensor-parallel ranks share both."""

    active_parameters: float
    token_bytes: float
    ranks: int = 1

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together."""
        return MEASURED_TOKENS_PER_S * MEASURED_PARAMETERS / self.active_parameters * self.ranks

    @property
    def bytes_per_s(self) -> float:
        """What each rank has to get of a tier so that bringing is as fast as computing."""
        return self.tokens_per_s * self.token_bytes


MODELS = {
    "1B": Model(1.24e9, 32 << 10),
    "8B": Model(8.0e9, 128 << 10),
    "70B, 4 GPUs": Model(70.6e9, (320 << 10) / 4, ranks=4),
    # All ranks hold the same bytes: one copy is brought, over one link.
    "MLA (37B active), 8 GPUs": Model(37e9, 68.6 * 1024, ranks=8),
}
RATES = {
    "directory": 1.9e9,  # docs/guides/fleets.md: one drive
    "bucket": 0.5e9,
    "Valkey": 2.0e9,
    "Mooncake (TCP)": 2.5e9,
    "Mooncake (RDMA)": float("inf"),  # not measured: the link's rate
}
"""Bytes a second and rank that the client of a tier moves."""


def rate_over(tier: str, link_gbit: float) -> float:
    """Return what a tier brings over a link; a directory is on this machine."""
    if tier == "directory":
        return RATES[tier]
    return min(RATES[tier], link_gbit * 1e9 / 8 * LINK_SHARE)


def gain(model: Model, tier: str, link_gbit: float) -> float:
    """Return how many times as fast a prompt is brought as computed."""
    return rate_over(tier, link_gbit) / model.bytes_per_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks pays`."""
    machine = describe_machine()
    head = [f"{link} Gb/s" for link in LINKS_GBIT]
    rows = [["model", "needs GB/s", "directory", *head]]
    for name, model in MODELS.items():
        cells = [cell(model, link) for link in LINKS_GBIT]
        directory = f"{gain(model, 'directory', 0):.1f}"
        rows.append([name, f"{model.bytes_per_s / 1e9:.1f}", directory, *cells])
    lines = [table(rows, num_left=1)]
    figures = {
        name: {f"{tier} {link}": gain(model, tier, link) for tier in RATES for link in LINKS_GBIT}
        for name, model in MODELS.items()
    }
    method = (
        "Tiers that bring a prompt sooner than it is computed, and how many times as fast. "
        "Elsewhere the connector computes."
    )
    publish(Report(method, lines, figures, {"links": list(LINKS_GBIT)}, machine), arguments)
    return 0


def cell(model: Model, link_gbit: float) -> str:
    """Return the tiers over a link that pay, with their gains."""
    gains = {tier: gain(model, tier, link_gbit) for tier in RATES if tier != "directory"}
    return ", ".join(f"{tier} {each:.1f}" for tier, each in gains.items() if each > 1) or "-"
