"""Each tier on trial: a directory, a server or a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from safe_offload.commands.doctor.findings import Finding
from safe_offload.commands.doctor.tiers.directory import check_directory, try_directory
from safe_offload.commands.doctor.tiers.safety import check_safety
from safe_offload.config.tier_url import FILE, SERVERS
from safe_offload.config.tiers import TierConfig


def check_tier(
    config: TierConfig,
    measured: list[Any],
    token_bytes: int = 0,
    compute_tokens_per_s: int = 0,
) -> Iterator[Finding]:
    """Try a tier, and judge what was found.

    Args:
        config: of the tier.
        measured: what was found is added to it.
        token_bytes: of all ranks; 0 if the model is not known.
        compute_tokens_per_s: what this machine computes at most; 0 if unknown.
    """
    yield from check_safety(config)
    scheme = config.location.scheme
    against = token_bytes, compute_tokens_per_s
    if scheme == FILE:
        directory = try_directory(config)
        measured.append(asdict(directory))
        yield from check_directory(config, directory, *against)
    elif scheme in SERVERS:
        from safe_offload.commands.doctor.tiers.server import check_server, try_server

        server = try_server(config)
        measured.append(asdict(server))
        yield from check_server(config, server, *against)
    else:
        from safe_offload.commands.doctor.tiers.bucket import check_bucket, try_bucket

        bucket = try_bucket(config)
        measured.append(asdict(bucket))
        yield from check_bucket(config, bucket, *against)
