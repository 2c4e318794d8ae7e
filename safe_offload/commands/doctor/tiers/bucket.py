"""A bucket of an object store on trial: whether it can be used, and how fast.

What is written is written to a namespace of its own, and deleted again.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from safe_offload.commands.doctor.findings import Finding, error, ok
from safe_offload.commands.doctor.tiers.rates import (
    TierTrial,
    in_time,
    trial_names,
    try_rates,
    unusable,
)
from safe_offload.config.tiers import TierConfig
from safe_offload.tiers import naming
from safe_offload.tiers.objects.store import Problem, fix_for, open_store, problem_of, shown

ANSWER_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTrial(TierTrial):
    """What the trial of a bucket found: what cannot be done, why, and what to do about it."""

    with_rates = "a readable and writable bucket"
    denied: Mapping[str, str] = field(default_factory=dict)
    fix: str = ""


def try_bucket(config: TierConfig) -> BucketTrial:
    """Try the bucket of a tier; it takes a minute at most."""
    return in_time(config.location.label, lambda: _try(config), BucketTrial)


def _try(config: TierConfig) -> BucketTrial:
    label = config.location.label
    store = open_store(dataclasses.replace(config, timeout_s=ANSWER_S))
    denied, problem = _denied(store)
    fix = "" if problem is None else fix_for(problem, config.location.scheme)
    if len(denied) == len(_ACTIONS):
        reason = next(iter(denied.values()))
        is_down = problem is Problem.OTHER
        return BucketTrial(label=label, problem=f"{label}: {reason}. {fix}", is_down=is_down)
    rates = 0.0, 0.0
    if not {"write", "read", "delete"} & set(denied):
        rates = _rates(config, store)
    return BucketTrial(
        label=label,
        denied=denied,
        fix=fix,
        write_bytes_per_s=rates[0],
        read_bytes_per_s=rates[1],
    )


_PROBE: Final = "safe-offload-doctor"
_ACTIONS: Final = ("list", "write", "read", "delete")
_OF_ALL: Final = (Problem.NO_BUCKET, Problem.NOWHERE, Problem.OTHER)
"""Problems that every action would meet."""


def _denied(store: Any) -> tuple[dict[str, str], Problem | None]:
    """Return what cannot be done and why, and the first problem."""
    import obstore

    path = f"{_PROBE}-{secrets.token_hex(8)}"
    work = {
        "list": lambda: obstore.list_with_delimiter(store, _PROBE),
        "write": lambda: obstore.put(store, path, b"x", use_multipart=False),
        "read": lambda: obstore.get(store, path).bytes(),
        "delete": lambda: obstore.delete(store, path),
    }
    denied: dict[str, str] = {}
    first = None
    for action in _ACTIONS:
        try:
            work[action]()
        except Exception as failed:
            problem = problem_of(failed)
            if problem is Problem.NOT_FOUND:
                if action in ("read", "delete") and "write" in denied:
                    continue  # which is an answer
                problem = Problem.NO_BUCKET
            denied[action] = f"{problem.value} ({shown(failed)})"
            first = first or problem
            if problem in _OF_ALL:
                return dict.fromkeys(_ACTIONS, denied[action]), problem
    return denied, first


def _rates(config: TierConfig, store: Any) -> tuple[float, float]:
    import obstore

    def paths(space: bytes) -> Iterator[str]:
        names = ["/".join(naming.path_of(name)) for name in trial_names(space)]
        for path in (*names, naming.DESCRIPTION_FILE):
            yield f"{naming.namespace_folder(space)}/{path}"

    return try_rates(config, paths, lambda path: obstore.delete(store, path))


def check_bucket(config: TierConfig, trial: BucketTrial) -> Iterator[Finding]:
    """Judge what was found."""
    label = trial.label
    if trial.problem:
        expected = "a reachable and usable bucket"
        yield unusable("tiers.bucket", trial, expected, "check the endpoint and network")
        return
    yield ok("tiers.bucket", f"{label} can be reached")
    if trial.denied:
        denied = "; ".join(f"{action}: {why}" for action, why in trial.denied.items())
        fix = trial.fix.removeprefix("Fix: ").removesuffix(".")
        yield error("tiers.access", f"{label} refuses: {denied}", "all four actions", fix)
    else:
        yield ok("tiers.access", f"{label} can be listed, written, read and deleted from")
