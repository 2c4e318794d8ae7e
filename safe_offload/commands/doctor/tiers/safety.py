"""What a tier lacks of what docs/guides/security.md asks for; nothing is tried here."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from safe_offload.commands.doctor.findings import Finding, warning
from safe_offload.config.tier_url import FILE, MOONCAKE
from safe_offload.config.tiers import BucketConfig, MooncakeConfig, TierConfig, ValkeyConfig
from safe_offload.tiers.valkey.login import LoginError, read_password

_EXAMPLES: Final = frozenset(
    ("changeme", "password", "secret", "yourpassword", "foobared", "admin", "redis", "valkey")
)
"""Passwords of examples, without what is no letter."""


def check_safety(config: TierConfig) -> Iterator[Finding]:
    """Find what others could do to a tier, by its settings alone."""
    place = config.location
    if place.scheme == FILE:
        return
    label = place.label
    yield from _password(config)
    endpoint = urlsplit("")
    if isinstance(config, BucketConfig | MooncakeConfig):
        endpoint = urlsplit(config.endpoint or "")
    is_here = bool(place.path) or _is_here(place.host)
    if place.scheme in ("redis", "rediss", "unix"):
        is_plain = place.scheme == "redis" and not is_here
        fix = 'give the server a certificate, use rediss://, and set "ca_file" to its CA'
    else:
        is_here = False  # its operator can write to it
        is_plain = endpoint.scheme.lower() == "http" and not _is_here(endpoint.hostname or "")
        is_plain &= place.scheme != MOONCAKE  # which has no TLS
        fix = 'use https:// in "endpoint"'
    if is_plain:
        yield warning(
            "tiers.tls",
            f"{label} is used without TLS: anyone on its network can read and alter traffic",
            "TLS between machines",
            fix,
        )
    if config.hmac_key_file is None and not is_here:
        yield warning(
            "tiers.key",
            f"objects of {label} are not sealed: anyone who can write there can change answers",
            "a sealing key",
            "`openssl rand -hex 32 > hmac.key`, and name the file in "
            '"hmac_key_file" of all tiers of all engines that share',
        )


def check_user(*, is_root: bool) -> Iterator[Finding]:
    """Find whether an engine with tiers would run as root."""
    if is_root:
        yield warning(
            "tiers.user",
            "this is root: an engine running as root has full rights on the machine or container",
            "a dedicated user for the engine, who can read its secrets",
            "run vLLM as another user; examples/kubernetes/deployment.yaml shows how",
        )


def _password(config: TierConfig) -> Iterator[Finding]:
    label = config.location.label
    if config.location.password:
        yield warning(
            "tiers.password",
            f"the url of {label} contains a password, which vLLM logs",
            "a password in a file",
            'put it into a file, and write "password_file": "/run/secrets/valkey" beside the url',
        )
    password = ""
    with contextlib.suppress(LoginError):  # logging in says so
        password = read_password(config) if isinstance(config, ValkeyConfig) else ""
    if "".join(filter(str.isalpha, password)).lower() in _EXAMPLES:
        yield warning(
            "tiers.example",
            f"the password of {label} is a well-known example",
            "a random password",
            "create one with `openssl rand -hex 32`, for the server and its engines",
        )


def _is_here(host: str) -> bool:
    """Return whether a host is this machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
