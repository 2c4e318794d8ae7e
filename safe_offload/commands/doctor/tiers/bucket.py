"""A bucket of an object store on trial: whether it can be used, with what credentials, how fast.

What is written is written to a namespace of its own, and deleted again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from safe_offload.commands.doctor.findings import Finding, error, info, ok, refusal
from safe_offload.commands.doctor.tiers.rates import (
    TierTrial,
    in_time,
    milliseconds,
    round_trip,
    trial_names,
    try_rates,
)
from safe_offload.config.tiers import TierConfig
from safe_offload.tiers import naming
from safe_offload.tiers.objects.store import Problem, fix_for, open_store, problem_of, shown

ANSWER_S: Final = 5.0
NUM_LOOKS: Final = 9
KINDS: Final[Mapping[str, Mapping[str, str]]] = {
    "s3": {
        "AWS_ACCESS_KEY_ID": "an access key in the environment",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "the role of a pod (web identity)",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "the role of a container",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": "the role of a pod or container",
        "AWS_SKIP_SIGNATURE": "none, requests are not signed",
        "AWS_PROFILE": "a profile of the AWS tools",
        "~/.aws/credentials": "the files of the AWS tools",
        "~/.aws/config": "the files of the AWS tools",
    },
    "gs": {
        "GOOGLE_SERVICE_ACCOUNT": "the file of a service account",
        "GOOGLE_SERVICE_ACCOUNT_PATH": "the file of a service account",
        "GOOGLE_SERVICE_ACCOUNT_KEY": "the key of a service account in the environment",
        "GOOGLE_APPLICATION_CREDENTIALS": "the file of application default credentials",
        "GOOGLE_SKIP_SIGNATURE": "none, requests are not signed",
        "~/.config/gcloud/application_default_credentials.json": "those of gcloud",
    },
    "az": {
        "AZURE_STORAGE_ACCOUNT_KEY": "the key of the account in the environment",
        "AZURE_STORAGE_SAS_KEY": "a shared access signature in the environment",
        "AZURE_CLIENT_SECRET": "the secret of an application in the environment",
        "AZURE_FEDERATED_TOKEN_FILE": "the identity of a pod (workload identity)",
        "AZURE_SKIP_SIGNATURE": "none, requests are not signed",
    },
}
"""Variables and files that credentials come from, the first one that is there."""
_ROLE: Final = "those of the machine's role, if it has one"
_LIFECYCLE: Final = {
    "s3": "aws s3api put-bucket-lifecycle-configuration",
    "gs": "gcloud storage buckets update --lifecycle-file",
    "az": "az storage account management-policy create",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTrial(TierTrial):
    """What the trial of a bucket found.

    Attributes:
        credentials: which kind was found.
        denied: what cannot be done, and why.
        fix: what to do about it.
        latency_s: of one request.
    """

    with_rates = "a bucket that can be written and read"
    credentials: str = ""
    denied: Mapping[str, str] = field(default_factory=dict)
    fix: str = ""
    latency_s: float = 0.0


def try_bucket(config: TierConfig) -> BucketTrial:
    """Try the bucket of a tier; it takes a minute at most."""
    label = config.location.label
    credentials = credentials_of(config.location.scheme, os.environ)
    return in_time(
        label,
        lambda: _try(config, credentials),
        lambda problem: BucketTrial(label=label, problem=problem, credentials=credentials),
    )


def credentials_of(scheme: str, environment: Mapping[str, str]) -> str:
    """Return which kind of credentials a store's client finds; never a value of them."""
    for place, kind in KINDS[scheme].items():
        is_file = place.startswith("~")
        if Path(place).expanduser().is_file() if is_file else environment.get(place):
            is_read = "AWS tools" not in kind or importlib.util.find_spec("boto3")
            return kind if is_read else f"{kind}, which need boto3: it is not installed"
    return _ROLE


def _try(config: TierConfig, credentials: str) -> BucketTrial:
    label = config.location.label
    store = open_store(dataclasses.replace(config, timeout_s=ANSWER_S))
    denied, problem = _denied(store)
    fix = "" if problem is None else fix_for(problem, config.location.scheme)
    if len(denied) == len(_ACTIONS):
        reason = next(iter(denied.values()))
        return BucketTrial(
            label=label, problem=f"{label}: {reason}. {fix}", credentials=credentials
        )
    latency_s, rates = 0.0, (0.0, 0.0)
    if "read" not in denied:
        latency_s = round_trip(lambda: _look(store), NUM_LOOKS)
    if not {"write", "read", "delete"} & set(denied):
        rates = _rates(config, store)
    return BucketTrial(
        label=label,
        credentials=credentials,
        denied=denied,
        fix=fix,
        latency_s=latency_s,
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


def _look(store: Any) -> None:
    import obstore

    with contextlib.suppress(FileNotFoundError):
        obstore.head(store, _PROBE)


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
    yield info("tiers.credentials", f"credentials for {label}: {trial.credentials}")
    if trial.problem:
        expected = "a bucket that can be reached and used"
        yield refusal("tiers.bucket", trial.problem, expected, "look at the endpoint and network")
        return
    yield ok("tiers.bucket", f"{label} can be reached")
    if trial.denied:
        denied = "; ".join(f"{action}: {why}" for action, why in trial.denied.items())
        fix = trial.fix.removeprefix("Fix: ").removesuffix(".")
        yield error("tiers.access", f"{label} refuses: {denied}", "all four actions", fix)
    else:
        yield ok("tiers.access", f"{label} can be listed, written, read and deleted from")
    how = _LIFECYCLE[config.location.scheme]
    yield info(
        "tiers.lifecycle",
        f"whether {label} deletes what is old cannot be seen, and the tier deletes nothing: give "
        f"the bucket a lifecycle rule, such as one of 7 days ({how})",
    )
    if trial.latency_s:
        taken = milliseconds(trial.latency_s)
        yield info("tiers.latency", f"{label}: a request takes {taken}")
