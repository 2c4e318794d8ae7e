"""What the figures of several steps say together: where a peer is ahead."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.gpu.steps import FIGURES

OURS, PEERS = "ours", ("SCO", "OC")
AHEAD = 0.98
"""A peer's median below this share of ours is ahead; what is closer is noise."""

Steps = Mapping[str, Any]
"""The figures of each step that has some; of a part of it under its name and that of the part."""


def files_of(step: str, folder: Path) -> list[Path]:
    """Return the files with figures of a step: of the whole, and of its parts."""
    stem, _, ending = FIGURES.partition(".")
    return sorted(folder.glob(f"{step}/{stem}*.{ending}"), key=lambda file: file.stem)


def read(folder: Path) -> Steps:
    stem, _, _ = FIGURES.partition(".")
    files = files_of("*", folder)
    return {f"{f.parent.name}{f.stem.removeprefix(stem)}": json.loads(f.read_text()) for f in files}


def peers_ahead(steps: Steps) -> Iterator[str]:
    """Yield every row of seconds in which a peer is ahead of us, with both medians."""
    for step, figures in steps.items():
        samples = figures.get("samples", ())
        if not isinstance(samples, dict) or OURS not in samples:
            continue
        for name, own in samples[OURS].items():
            if all(value == int(value) for value in own):
                continue  # a count
            for peer in PEERS:
                theirs = samples.get(peer, {}).get(name)
                if theirs and statistics.median(theirs) < AHEAD * statistics.median(own):
                    medians = (
                        f"{statistics.median(theirs):.4f} s, ours {statistics.median(own):.4f} s"
                    )
                    yield f"{step}, {name}: {peer} {medians}"
