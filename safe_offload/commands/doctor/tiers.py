"""Tries each tier: the diagnosis of its place, its bandwidth, and the safety of its settings.

Objects are written to a namespace of their own, and deleted again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from safe_offload.config.tier_url import BUCKETS, FILE, MOONCAKE, SERVERS, Location
from safe_offload.config.tiers import (
    BucketConfig,
    FileConfig,
    MooncakeConfig,
    TierConfig,
    ValkeyConfig,
)
from safe_offload.config.units import MIB
from safe_offload.errors import SafeOffloadError
from safe_offload.findings import Finding, Severity, info, refusal, warning
from safe_offload.tiers.base import PlaceError, Result
from safe_offload.tiers.choice import open_store, open_tier
from safe_offload.tiers.files.diagnosis import existing
from safe_offload.tiers.naming import namespace_folder
from safe_offload.tiers.seals.keys import open_seal
from safe_offload.tiers.store import trial_facts, trial_names
from safe_offload.tiers.valkey.diagnosis import TRIAL_TTL_S
from safe_offload.tiers.valkey.login import LoginError, read_password

OBJECT_BYTES: Final = 2 * MIB
ANSWER_S: Final = 5.0
RATE_S_MAX: Final = 10.0
"""Of writing and of reading; objects not begun by then are left out."""
TRIAL_S: Final = 60.0
"""Of the whole trial of a tier."""
SEGMENT_BYTES: Final = 128 * MIB
"""The memory that the trial gives to a place to which engines give some."""
_IDS: Final = {
    FILE: "tiers.directory",
    **dict.fromkeys(SERVERS, "tiers.server"),
    **dict.fromkeys(BUCKETS, "tiers.bucket"),
}
_EXAMPLES: Final = frozenset(
    ("changeme", "password", "secret", "yourpassword", "foobared", "admin", "redis", "valkey")
)
"""Passwords of examples, their letters only."""


def check_tier(config: TierConfig, token_bytes: int = 0) -> Iterator[Finding]:
    """Try a tier and judge its settings; a token takes `token_bytes`, 0 if that is unknown.

    The trial is left behind if it hangs: a directory may block its thread for ever.
    """
    yield from check_safety(config)
    try:
        open_seal(config)
    except SafeOffloadError as refused_keys:
        keys = "random keys that only the engines' user can read"
        yield refusal("tiers.key", str(refused_keys), keys, "name another file")
        config = dataclasses.replace(config, hmac_key_file=None, encryption_key_file=None)
    found: list[Finding] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            found.extend(asyncio.run(_try(config, token_bytes)))
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, name="safe-offload-doctor", daemon=True)
    thread.start()
    thread.join(TRIAL_S)
    label = config.location.label
    if thread.is_alive():
        problems.append(PlaceError("it hangs", "Check its server or mount", is_down=True))
    if not problems:
        yield from found
        return
    problem = problems[0]
    if isinstance(problem, PlaceError):
        message = problem.line_for(label)
    elif isinstance(problem, SafeOffloadError):
        message = str(problem)
    else:
        raise problem
    id = _IDS.get(config.location.scheme, "tiers.place")
    refused = refusal(id, message, "a reachable and usable place", "check its log and the network")
    if isinstance(problem, PlaceError) and problem.is_down:
        said = f"{refused.found}; engines start without it, and use it when it answers"
        refused = warning(id, said, refused.expected, refused.fix)
    yield refused


async def _try(config: TierConfig, token_bytes: int) -> list[Finding]:
    config = dataclasses.replace(config, timeout_s=ANSWER_S)
    takes_memory = False
    if isinstance(config, MooncakeConfig) and (config.segment_bytes or config.config_file):
        takes_memory, config = True, dataclasses.replace(config, segment_bytes=SEGMENT_BYTES)
    store = open_store(config, OBJECT_BYTES if takes_memory else 0)
    try:
        found = await store.diagnose()
    finally:
        await store.close()
    access = [each.severity for each in found if each.id == "tiers.access"]
    is_usable = all(each.severity is not Severity.ERROR for each in found)
    if is_usable and access in ([], [Severity.OK]):
        found.append(await _rates(config, token_bytes))
    return found


async def _rates(config: TierConfig, token_bytes: int) -> Finding:
    id, label = "tiers.rate", config.location.label
    with contextlib.ExitStack() as stack:
        if isinstance(config, FileConfig):
            nearest = existing(Path(config.location.path))
            trial = tempfile.TemporaryDirectory(prefix="safe-offload-doctor-", dir=nearest)
            path = f"{stack.enter_context(trial)}/tier"
            location = Location(FILE, path)
            config = dataclasses.replace(config, location=location, capacity_bytes=None)
        write = read = 0.0
        if isinstance(config, ValkeyConfig):  # objects expire if doctor is killed
            write, read = await measure(dataclasses.replace(config, ttl_s=TRIAL_TTL_S))
        if not (write and read):  # also of a user who may not set a time to live
            write, read = await measure(config)
    if not (write and read):
        return warning(
            id,
            f"{label}: no object could be written and read back",
            "a place with a few MiB free that responds",
            "free some space, or see the other findings of this tier",
        )
    found = f"{label}: objects are written at {write / 1e9:.2g} GB/s and read at {read / 1e9:.2g}"
    tokens = f", {read / token_bytes:.0f} tokens a second" if token_bytes else ""
    return info(id, f"{found} GB/s{tokens}")


async def measure(config: TierConfig) -> tuple[float, float]:
    """Return the bytes a second of writing and of reading; nothing is left there."""
    tier, namespace_of = open_tier(config, OBJECT_BYTES, trial_facts())
    names = trial_names(namespace_of(""))
    memory = memoryview(mmap.mmap(-1, len(names) * OBJECT_BYTES))
    memory[:] = os.urandom(memory.nbytes)
    starts = range(0, memory.nbytes, OBJECT_BYTES)
    slots = [(memory[start : start + OBJECT_BYTES],) for start in starts]
    rates = []
    try:
        for move in (tier.spill, tier.fetch):
            start_s = time.monotonic()
            task = asyncio.create_task(move(names, slots))
            await asyncio.wait([task], timeout=RATE_S_MAX)
            task.cancel()  # objects not begun; it returns normally
            num_done = (await task).count(Result.DONE)
            rates.append(num_done * OBJECT_BYTES / (time.monotonic() - start_s))
    finally:
        await tier.close()
        store = open_store(config)
        with contextlib.suppress(Exception):
            await store.delete([store.key_of(name) for name in names])
            await store.forget([namespace_folder(names[0].namespace)])
        await store.close()
    return rates[0], rates[1]


# ---- settings ---------------------------------------------------------------------------------


def check_safety(config: TierConfig) -> Iterator[Finding]:
    """Find what others could do to a tier, by its settings alone; see docs/guides/security.md."""
    place = config.location
    label = place.label
    if place.scheme == FILE:
        return
    yield from _password(config)
    endpoint = urlsplit("")
    if isinstance(config, BucketConfig | MooncakeConfig):
        endpoint = urlsplit(config.endpoint or "")
    is_here = bool(place.path) or _is_here(place.host)
    if place.scheme in SERVERS:
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
    if not config.has_key and not is_here:
        yield warning(
            "tiers.key",
            f"objects of {label} are not sealed: anyone who can write there can change answers",
            "a sealing key",
            "`openssl rand -hex 32 > hmac.key`, and name the file in "
            '"hmac_key_file" (or "encryption_key_file") of all tiers of all engines that share',
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
    with contextlib.suppress(LoginError):  # the trial reports it
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


def check_user(*, is_root: bool) -> Iterator[Finding]:
    """Find whether an engine with tiers would run as root."""
    if is_root:
        yield warning(
            "tiers.user",
            "this is root: an engine running as root has full rights on the machine or container",
            "a dedicated user for the engine, who can read its secrets",
            "run vLLM as another user; examples/kubernetes/deployment.yaml shows how",
        )
