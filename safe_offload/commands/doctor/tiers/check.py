"""Each tier on trial: a directory, a server or a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from safe_offload.commands.doctor.findings import Finding
from safe_offload.commands.doctor.tiers.directory import (
    DirectoryTrial,
    check_directory,
    try_directory,
)
from safe_offload.commands.doctor.tiers.place import PlaceTrial, check_place, try_place
from safe_offload.commands.doctor.tiers.rates import TierTrial, check_rates, in_time
from safe_offload.commands.doctor.tiers.safety import check_safety
from safe_offload.commands.doctor.tiers.server import ServerTrial, check_server, try_server
from safe_offload.config.tier_url import FILE, SERVERS
from safe_offload.config.tiers import TierConfig

_OTHERS: tuple[Any, ...] = (try_place, PlaceTrial, check_place)
_KINDS: dict[str, tuple[Any, ...]] = {
    FILE: (try_directory, DirectoryTrial, check_directory),
    **dict.fromkeys(SERVERS, (try_server, ServerTrial, check_server)),
}
"""Kinds of which more is known than whether their verbs work: what tries, found, and judges."""


def check_tier(config: TierConfig, token_bytes: int = 0) -> Iterator[Finding]:
    """Try a tier, and judge what was found; a token takes `token_bytes`, 0 if that is unknown."""
    yield from check_safety(config)
    try_out, trial, _ = _KINDS.get(config.location.scheme, _OTHERS)
    yield from judge(config, in_time(config, try_out, trial), token_bytes)


def judge(config: TierConfig, trial: TierTrial, token_bytes: int) -> Iterator[Finding]:
    """Judge what the trial of a tier found; see `check_tier`."""
    _, _, check = _KINDS.get(config.location.scheme, _OTHERS)
    yield from check(config, trial)
    if not trial.problem:
        yield check_rates(trial, token_bytes)
