"""Each tier on trial: a directory, a server or a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from safe_offload.commands.doctor.findings import Finding
from safe_offload.commands.doctor.tiers.bucket import check_bucket, try_bucket
from safe_offload.commands.doctor.tiers.directory import check_directory, try_directory
from safe_offload.commands.doctor.tiers.rates import TierTrial, check_rates
from safe_offload.commands.doctor.tiers.safety import check_safety
from safe_offload.commands.doctor.tiers.server import check_server, try_server
from safe_offload.config.tier_url import BUCKETS, FILE, SERVERS
from safe_offload.config.tiers import TierConfig

_KINDS: dict[str, tuple[Callable[[TierConfig], Any], Callable[..., Iterator[Finding]]]] = {
    FILE: (try_directory, check_directory),
    **dict.fromkeys(SERVERS, (try_server, check_server)),
    **dict.fromkeys(BUCKETS, (try_bucket, check_bucket)),
}


def check_tier(config: TierConfig, token_bytes: int = 0) -> Iterator[Finding]:
    """Try a tier, and judge what was found; a token takes `token_bytes`, 0 if that is unknown."""
    yield from check_safety(config)
    try_out, _ = _KINDS[config.location.scheme]
    yield from judge(config, try_out(config), token_bytes)


def judge(config: TierConfig, trial: TierTrial, token_bytes: int) -> Iterator[Finding]:
    """Judge what the trial of a tier found; see `check_tier`."""
    _, check = _KINDS[config.location.scheme]
    yield from check(config, trial)
    if not trial.problem:
        yield check_rates(trial, token_bytes)
