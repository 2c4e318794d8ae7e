"""What the runs of each profile must earn, of the first seeds together; see `earnings.py`.

Three quarters of what they earned when the floor was set. It is low where that is what the profile
is about: a host pool that is too small, copies that fail, blocks that are overwritten too early.
"""

from __future__ import annotations

from tests.simulator.earnings import Floor

FLOOR_SEEDS = 5
"""Fewer say too little."""
SWARM_SEEDS = 100
"""The same, where each seed is another profile."""


def num_floor_seeds(profile: str) -> int:
    """How many seeds the floor of a profile is for, at least."""
    return SWARM_SEEDS if profile == "swarm" else FLOOR_SEEDS


FLOORS = {
    "plain": Floor(stored=0.83, loaded=0.75, hit=0.53),
    "late-copies": Floor(stored=0.86, loaded=0.75, hit=0.48),
    "async": Floor(stored=0.87, loaded=0.75, hit=0.48),
    "streams": Floor(stored=0.87, loaded=0.75, hit=0.48),
    "gpu": Floor(stored=0.87, loaded=0.75, hit=0.47),
    "zeroed": Floor(stored=2.08, loaded=0.75, hit=0.30),
    "zeroed-early": Floor(stored=2.37, loaded=0.75, hit=0.18),
    "hybrid": Floor(stored=1.86, loaded=0.75, hit=0.51),
    "hybrid-gpu": Floor(stored=2.88, loaded=0.75, hit=0.47),
    "sparse-windows": Floor(stored=1.12, loaded=0.75, hit=0.48),
    "sparse-windows-lazy": Floor(stored=1.11, loaded=0.75, hit=0.40),
    "chunked": Floor(stored=1.84, loaded=0.75, hit=0.35),
    "mla": Floor(stored=0.87, loaded=0.75, hit=0.48),
    "mla-shared": Floor(stored=0.88, loaded=0.75, hit=0.43),
    "mla-shared-failing": Floor(stored=0.94, loaded=0.65, hit=0.19),
    "block-sizes": Floor(stored=1.22, loaded=0.75, hit=0.51),
    "mamba": Floor(stored=1.56, loaded=0.75, hit=0.39),
    "mamba-gpu": Floor(stored=1.34, loaded=0.75, hit=0.42),
    "mamba-v2": Floor(stored=1.56, loaded=0.75, hit=0.35),
    "mamba-large": Floor(stored=0.53, loaded=0.75, hit=0.27),
    "mamba-large-lazy": Floor(stored=0.48, loaded=0.75, hit=0.39),
    "drafts": Floor(stored=0.81, loaded=0.75, hit=0.42),
    "drafts-gpu": Floor(stored=0.88, loaded=0.75, hit=0.45),
    "tensor-parallel": Floor(stored=0.85, loaded=0.75, hit=0.49),
    "pipeline": Floor(stored=0.78, loaded=0.75, hit=0.60),
    "four-stages": Floor(stored=0.80, loaded=0.75, hit=0.28),
    "pipeline-drafts": Floor(stored=0.77, loaded=0.75, hit=0.59),
    "pipeline-drafts-failing": Floor(stored=0.77, loaded=0.72, hit=0.51),
    "priority": Floor(stored=0.84, loaded=0.75, hit=0.62),
    "preemption": Floor(stored=0.76, loaded=0.75, hit=0.69),
    "back-to-back": Floor(stored=0.75, loaded=0.75, hit=0.75),
    "tiny-host": Floor(stored=0.39, loaded=0.75, hit=0.03),
    "host-pressure": Floor(stored=1.07, loaded=0.75, hit=0.16),
    "uneven": Floor(stored=0.91, loaded=0.75, hit=0.08),
    "warming": Floor(stored=0.95, loaded=0.75, hit=0.23),
    "foreign-ids": Floor(stored=0.70, loaded=0.66, hit=0.54),
    "foreign-ids-queue": Floor(stored=0.70, loaded=0.70, hit=0.66),
    "repeats": Floor(stored=1.50, loaded=0.75, hit=0.50),
    "hybrid-pressure": Floor(stored=1.65, loaded=0.75, hit=0.11),
    "tight-flight": Floor(stored=0.71, loaded=0.75, hit=0.50),
    "lazy": Floor(stored=0.85, loaded=0.75, hit=0.45),
    "lazy-pressure": Floor(stored=1.58, loaded=0.75, hit=0.57),
    "lazy-priority": Floor(stored=1.77, loaded=0.75, hit=0.63),
    "aborts": Floor(stored=0.87, loaded=0.75, hit=0.55),
    "resets": Floor(stored=0.73, loaded=0.75, hit=0.51),
    "salts": Floor(stored=0.93, loaded=0.75, hit=0.30),
    "failing": Floor(stored=0.85, loaded=0.73, hit=0.45),
    "dying": Floor(stored=0.66, loaded=0.71, hit=0.39),
    "overdue": Floor(stored=0.82, loaded=0.60, hit=0.41),
    "overdue-gpu": Floor(stored=0.85, loaded=0.74, hit=0.55),
    "flips": Floor(stored=0.97, loaded=0.57, hit=0.21),
    "loads-fail": Floor(stored=0.92, loaded=0.13, hit=0.40),
    "broken": Floor(stored=0.54, loaded=0.57, hit=0.32),
    "all-faults": Floor(stored=1.00, loaded=0.69, hit=0.24),
    "all-faults-plain": Floor(stored=0.44, loaded=0.71, hit=0.31),
    "shared": Floor(stored=0.72, loaded=0.75, hit=0.60),
    "shared-stalls": Floor(stored=1.57, loaded=0.75, hit=0.39),
    "costs": Floor(stored=0.74, loaded=0.75, hit=0.28),
    "swarm": Floor(stored=0.79, loaded=0.74, hit=0.15),
}
