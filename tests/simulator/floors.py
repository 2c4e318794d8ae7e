"""What the runs of each profile must earn, of the first seeds together; see `earnings.py`.

Three quarters of what they earned when the floor was set. It is low where that is what the profile
is about: a host pool that is too small, copies that fail, blocks that are overwritten too early.
"""

from __future__ import annotations

from tests.simulator.earnings import Floor
from tests.simulator.models import MODELS

FLOOR_SEEDS = 5
"""Fewer say too little."""
SWARM_SEEDS, MODEL_SEEDS = 100, 40
"""The same, where each seed is another profile, or serves a model in another way. In `all-faults`
seeds differ as much: a rank that dies early leaves little to earn."""


def num_floor_seeds(profile: str) -> int:
    """How many seeds the floor of a profile is for, at least."""
    if profile in MODELS or profile == "all-faults":
        return MODEL_SEEDS
    return SWARM_SEEDS if profile == "swarm" else FLOOR_SEEDS


FLOORS = {
    "plain": Floor(stored=0.83, loaded=0.75, hit=0.53),
    "late-copies": Floor(stored=0.86, loaded=0.75, hit=0.48),
    "hybrid-gpu": Floor(stored=2.88, loaded=0.75, hit=0.47),
    "one-process": Floor(stored=1.7, loaded=0.6, hit=0.38),
    "spoilt": Floor(stored=0.89, loaded=0.75, hit=0.48),
    "in-step": Floor(stored=0.75, loaded=0.75, hit=0.75),
    "in-step-faults": Floor(stored=0.33, loaded=0.70, hit=0.22),
    "in-step-fails": Floor(stored=0.80, loaded=0.50, hit=0.45),
    "in-step-busy": Floor(stored=0.64, loaded=0.62, hit=0.55),
    "mla-shared": Floor(stored=0.88, loaded=0.75, hit=0.43),
    "mamba-gpu": Floor(stored=1.34, loaded=0.75, hit=0.42),
    "host-pressure": Floor(stored=1.07, loaded=0.75, hit=0.16),
    "foreign-ids": Floor(stored=0.70, loaded=0.66, hit=0.54),
    "repeats": Floor(stored=1.50, loaded=0.75, hit=0.50),
    "hybrid-pressure": Floor(stored=1.44, loaded=0.75, hit=0.14),
    "lazy-pressure": Floor(stored=1.55, loaded=0.75, hit=0.54),
    "lazy-priority": Floor(stored=1.77, loaded=0.75, hit=0.63),
    "failing": Floor(stored=0.85, loaded=0.73, hit=0.45),
    "flips": Floor(stored=0.97, loaded=0.57, hit=0.21),
    "loads-fail": Floor(stored=0.92, loaded=0.13, hit=0.40),
    "all-faults": Floor(stored=0.68, loaded=0.60, hit=0.14),
    "shared-stalls": Floor(stored=1.57, loaded=0.75, hit=0.39),
    "shared-sparse": Floor(stored=1.42, loaded=0.73, hit=0.14),
    "resets": Floor(stored=0.18, loaded=0.75, hit=0.14),
    "mamba-large-lazy": Floor(stored=0.48, loaded=0.75, hit=0.39),
    "overdue": Floor(stored=0.82, loaded=0.60, hit=0.41),
    "remote-first": Floor(stored=1.60, loaded=0.75, hit=0.25),
    "remote-last": Floor(stored=0.75, loaded=0.74, hit=0.52),
    "tenants": Floor(stored=0.82, loaded=0.75, hit=0.32),
    "tenants-lazy": Floor(stored=1.63, loaded=0.73, hit=0.16),
    "twin-windows": Floor(stored=1.2, loaded=0.75, hit=0.3),
    "twin-states": Floor(stored=0.8, loaded=0.75, hit=0.18),
    "tiers-tenants": Floor(stored=0.73, loaded=0.75, hit=0.62, fetched=0.05),
    "tiers": Floor(stored=0.73, loaded=0.75, hit=0.74, fetched=0.13),
    "tiers-hybrid-lazy": Floor(stored=1.57, loaded=0.75, hit=0.50, fetched=0.19),
    "tiers-faults": Floor(stored=0.85, loaded=0.74, hit=0.38, fetched=0.02),
    "tiers-shared": Floor(stored=0.66, loaded=0.75, hit=1.11, fetched=0.12, shared=0.13),
    "tiers-far": Floor(stored=0.64, loaded=0.73, hit=1.29, fetched=0.12, shared=0.06),
    "node": Floor(stored=0.5, loaded=0.74, hit=0.9, shared=0.1),
    "node-hybrid": Floor(stored=0.9, loaded=0.7, hit=0.6, shared=0.1),
    "node-tiers": Floor(stored=0.5, loaded=0.74, hit=0.9, fetched=0.07, shared=0.1),
    "node-pins": Floor(stored=0.5, loaded=0.74, hit=0.6, shared=0.08),
    "pins": Floor(stored=0.5, loaded=0.75, hit=0.3),
    "pins-lazy": Floor(stored=0.5, loaded=0.5, hit=0.2),
    # Over seeds 150 to 229 GPU and host hit 11,392 tokens, vLLM's own cache in a pool without end
    # 11,264, of the 27,895 that it had computed before: it keeps few of its windows.
    "deepseek-v4": Floor(stored=0.11, loaded=0.75, hit=0.02),
    "deepseek-v4.1": Floor(stored=0.43, loaded=0.70, hit=0.13),
    "kimi-k3": Floor(stored=1.23, loaded=0.73, hit=0.16),
    "minimax-m3": Floor(stored=0.56, loaded=0.67, hit=0.11),
    "qwen3.5": Floor(stored=1.07, loaded=0.73, hit=0.15),
    "glm-5": Floor(stored=0.54, loaded=0.68, hit=0.09),
    "glm-5.3-flash": Floor(stored=1.58, loaded=0.73, hit=0.18),
    "gpt-oss": Floor(stored=1.03, loaded=0.71, hit=0.18),
    "swarm": Floor(stored=0.52, loaded=0.71, hit=0.10),
}
