"""Which tier brings KV cache sooner than a GPU computes it, by model and by link; nothing is run.

A rank of a model computes `MEASURED_TOKENS_PER_S` on one H100: measured for 8B (docs/benchmarks/
gpu.md), and for the others by their active parameters, attention left out. A tier brings what its
client moves (measured, `RATES`), but no more than the link of a rank carries. The table is that of
docs/guides/fleets.md.
"""

import argparse
from dataclasses import dataclass

MEASURED_TOKENS_PER_S = 32_700.0
MEASURED_PARAMETERS = 8.0e9
LINKS_GBIT = (1, 10, 25, 100, 400)
LINK_SHARE = 0.9
"""Of a link, what headers and pauses leave."""


@dataclass(frozen=True, slots=True)
class Model:
    """What its ranks compute and keep of a token, and the links that its bytes come over."""

    active_parameters: float
    token_bytes: float
    ranks: int = 1
    links: int = 1

    @property
    def bytes_per_s(self) -> float:
        """What each link has to bring to be as fast as computing."""
        tokens_per_s = MEASURED_TOKENS_PER_S * MEASURED_PARAMETERS / self.active_parameters
        return tokens_per_s * self.ranks * self.token_bytes / self.links


MODELS = {
    "1B": Model(1.24e9, 32 << 10),
    "8B": Model(8.0e9, 128 << 10),
    "70B, 4 GPUs, a link each": Model(70.6e9, 320 << 10, ranks=4, links=4),
    # All ranks hold the same bytes, of which one copy is brought.
    "MLA, 37B active, 8 GPUs, one link": Model(37e9, 68.6 * 1024, ranks=8),
}
DIRECTORY_BYTES_PER_S = 1.9e9
"""One drive, whatever the link."""
RATES = {
    "bucket": 0.5e9,
    "Valkey": 2.0e9,
    "Mooncake": 2.5e9,  # over TCP
    "RDMA": float("inf"),  # Mooncake over RDMA; not measured: the link's rate
}
"""Bytes a second and rank that the client of a tier moves."""


def cell(model: Model, rates: dict[str, float]) -> str:
    """Return the tiers that pay, and how many times as fast they are as computing."""
    gains = {tier: rate / model.bytes_per_s for tier, rate in rates.items()}
    return ", ".join(f"{tier} {gain:.1f}" for tier, gain in gains.items() if gain > 1) or "-"


def rows() -> list[str]:
    """Return the table in Markdown."""
    links = [
        {tier: min(rate, link * 1e9 / 8 * LINK_SHARE) for tier, rate in RATES.items()}
        for link in LINKS_GBIT
    ]
    found = [["model", "GB/s", "one drive", *(f"{link} Gb/s" for link in LINKS_GBIT)]]
    found.append(["---"] * len(found[0]))
    for name, model in MODELS.items():
        cells = [cell(model, {"directory": DIRECTORY_BYTES_PER_S})]
        cells += [cell(model, rates) for rates in links]
        found.append([name, f"{model.bytes_per_s / 1e9:.1f}", *cells])
    return [
        "|" + "|".join(f" {each} " for each in row).replace(" --- ", "---") + "|" for row in found
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run_command(arguments: argparse.Namespace) -> int:
    """Print the table."""
    print("\n".join(rows()))
    return 0
