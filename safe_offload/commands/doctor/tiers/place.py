"""A place of any kind on trial: whether each verb works there, and how fast.

What is written is written to a namespace of its own, and deleted again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from safe_offload.commands.doctor.findings import Finding, error, ok
from safe_offload.commands.doctor.tiers.rates import (
    OBJECT_BYTES,
    TierTrial,
    trial_facts,
    try_rates,
    unusable,
)
from safe_offload.config.tier_url import BUCKETS
from safe_offload.config.tiers import MooncakeConfig, TierConfig
from safe_offload.config.units import MIB
from safe_offload.tiers.base import PlaceError
from safe_offload.tiers.choice import open_store
from safe_offload.tiers.naming import namespace, namespace_folder
from safe_offload.tiers.store import Store

ANSWER_S: Final = 5.0
SEGMENT_BYTES: Final = 128 * MIB
"""What the trial of an engine that gives memory to the place gives instead."""
_ACTIONS: Final = ("list", "write", "read", "delete")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceTrial(TierTrial):
    """What the trial of a place found: what cannot be done, why, and what to do about it."""

    with_rates = "a place that can be read and written"
    denied: Mapping[str, str] = field(default_factory=dict)
    fix: str = ""


async def try_place(config: TierConfig) -> PlaceTrial:
    """Try the place of a tier."""
    label = config.location.label
    config = dataclasses.replace(config, timeout_s=ANSWER_S)
    gives = False
    if isinstance(config, MooncakeConfig) and (config.segment_bytes or config.config_file):
        gives, config = True, dataclasses.replace(config, segment_bytes=SEGMENT_BYTES)
    store = open_store(config, OBJECT_BYTES if gives else 0)
    try:
        denied = await _denied(store)
    finally:
        await store.close()
    first = next(iter(denied.values()), PlaceError(""))
    if first.is_down or len(denied) == len(_ACTIONS):
        raise first
    rates = 0.0, 0.0
    if not {"write", "read", "delete"} & set(denied):
        rates = await try_rates(config)
    return PlaceTrial(
        label=label,
        denied={action: refused.problem for action, refused in denied.items()},
        fix=first.fix,
        write_bytes_per_s=rates[0],
        read_bytes_per_s=rates[1],
    )


async def _denied(store: Store) -> dict[str, PlaceError]:
    """Return what cannot be done and why; nothing more is tried of a place that is down."""
    space = namespace(trial_facts())
    key = store.description_key(namespace_folder(space))
    work: dict[str, Callable[[], Awaitable[object]]] = {
        "list": lambda: anext(store.walk(namespace_folder(space)), None),
        "write": lambda: store.describe(space, b"x"),
        "read": lambda: store.read(key, 0, 1),
        "delete": lambda: store.delete([key]),
    }
    denied: dict[str, PlaceError] = {}
    for action in _ACTIONS:
        try:
            await work[action]()
        except FileNotFoundError:
            continue  # which is an answer
        except PlaceError as refused:
            denied[action] = refused
            if refused.is_down:
                break
        except OSError as refused:
            denied[action] = PlaceError(refused.strerror or str(refused))
    return denied


def check_place(config: TierConfig, trial: PlaceTrial) -> Iterator[Finding]:
    """Judge what was found."""
    label = trial.label
    id = "tiers.bucket" if config.location.scheme in BUCKETS else "tiers.place"
    if trial.problem:
        expected = "a reachable and usable place"
        yield unusable(id, trial, expected, "check the endpoint and network")
        return
    yield ok(id, f"{label} can be reached")
    if trial.denied:
        denied = "; ".join(f"{action}: {why}" for action, why in trial.denied.items())
        fix = trial.fix[:1].lower() + trial.fix[1:]
        yield error("tiers.access", f"{label} refuses: {denied}", "all four actions", fix)
    else:
        yield ok("tiers.access", f"{label} can be listed, written, read and deleted from")
