"""Random workloads on vLLM's real Scheduler, every word that attention reads checked."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.rig import Options, Rig

PROFILES: dict[str, dict[str, object]] = {
    "plain": {},
    "late-copies": {"copy_steps": 4},
    "async": {"is_async": True, "copy_steps": 2},
    "hybrid": {"groups": ("window:8", "full"), "num_blocks": 60, "copy_steps": 3},
    "odd-window": {"groups": ("full", "window:10", "window:5"), "num_blocks": 80, "copy_steps": 3},
    "chunked": {"groups": ("chunk:16", "full"), "num_blocks": 60, "copy_steps": 2},
    "two-ranks": {"num_ranks": 2, "copy_steps": 4},
    "tiny-host": {"num_slots": 9, "copy_steps": 3},
    "failing": {"failure_rate": 0.2, "copy_steps": 3, "num_ranks": 2},
    "async-hybrid-failing": {
        "is_async": True,
        "groups": ("window:8", "full"),
        "num_blocks": 60,
        "failure_rate": 0.1,
        "copy_steps": 4,
    },
    "zeroed-early": {
        "zeroes_early": True,
        "groups": ("full", "full"),
        "num_blocks": 50,
        "copy_steps": 4,
    },
    "lazy": {"extra": {"lazy_offload": True}, "copy_steps": 3},
}


def run(options: Options, num_requests: int = 24, resets: bool = True) -> Rig:
    """Send requests with shared prefixes, abort some, reset at times, run until idle."""
    rig = Rig(options)
    rng = random.Random(options.seed)
    stems = [rig.prompt(rng.randrange(8, 60), 1000 + i) for i in range(4)]
    wanted: dict[str, tuple[int, int]] = {}
    waiting = [f"r{i}" for i in range(num_requests)]
    for _ in range(1500):
        while waiting and rng.random() < 0.5:
            request_id = waiting.pop()
            prompt = rng.choice(stems)[: rng.randrange(4, 60)]
            prompt = prompt + rig.prompt(rng.randrange(1, 12), rng.randrange(6))
            wanted[request_id] = (len(prompt), rng.randrange(1, 24))
            rig.add(request_id, prompt, wanted[request_id][1])
        if not waiting and not rig.scheduler.has_requests():
            break
        if rig.scheduler.has_requests():
            rig.step()
        if rig.scheduler.requests and rng.random() < 0.08:
            request_id = rng.choice(list(rig.scheduler.requests))
            wanted.pop(request_id, None)
            rig.abort(request_id)
        if resets and rng.random() < 0.01:
            rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.drain()
    for request_id, (num_prompt, max_tokens) in wanted.items():
        rig.check_tokens(request_id, num_prompt, max_tokens)
    rig.check_idle()
    return rig


@pytest.mark.parametrize("profile", PROFILES)
def test_random_runs_read_only_what_was_computed(profile: str) -> None:
    totals: dict[str, int] = {}
    for seed in range(6):
        rig = run(Options(seed=seed, **PROFILES[profile]))
        for name, number in rig.counts.items():
            totals[name] = totals.get(name, 0) + number
    assert totals.get("contained_errors", 0) == 0
    assert totals["stored_blocks"] > 0
    assert totals["loaded_blocks"] > 0, totals
