"""The bucket of a tier as obstore opens it, and the meaning of its errors.

Credentials come from where the cloud's own tools find them: the environment, the role of the
machine or pod, and for S3 the files of `aws configure`, if boto3 is installed.

obstore's texts are never shown: they contain urls that may be signed, and text of the server.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from safe_offload.config.tiers import BucketConfig
from safe_offload.errors import ConfigError
from safe_offload.tiers.base import PlaceError

Store = Any
"""A store of obstore's."""

# Variables that obstore reads by itself, before the role of the machine.
_GIVEN_TO_S3: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_FILES_OF_AWS: Final = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}
_ENDPOINT_KEYS: Final = {"s3": "endpoint", "gs": "base_url", "az": "endpoint"}
_SEEK: Final = {
    "s3": "the variables AWS_…, the role of the machine, or ~/.aws (read if boto3 is installed).",
    "gs": "the variables GOOGLE_…, or the role of the machine.",
    "az": "the variables AZURE_…, with AZURE_STORAGE_ACCOUNT_NAME, or the role of the machine.",
}
_STATUS: Final = re.compile(r"status code: ([1-5]\d\d)\b")
_CODE: Final = re.compile(
    r"<Code>([A-Za-z0-9]{1,64})</Code>|\"reason\": ?\"([A-Za-z0-9]{1,64})\""
    r"|\(code: ([A-Za-z0-9]{1,64})\)"  # of one object of those that one request deletes
)
_TEXT_MAX: Final = 1 << 16


class Problem(enum.Enum):
    """Why a request failed."""

    NOT_FOUND = "there is no such object"
    NO_BUCKET = "there is no such bucket"
    NOWHERE = "there is no such bucket, or no credentials were found"
    EXISTS = "there is such an object"
    DENIED = "access denied"
    FULL = "the store is full"
    UNSUPPORTED = "the store does not support this request"
    OTHER = "the request failed"


class StoreError(PlaceError):
    """A request failed. The error has no cause: its text might contain secrets.

    `action` is the verb of the request, such as "read"; `absent`, the meaning of NOT_FOUND for it.
    """

    def __init__(
        self,
        action: str,
        error: BaseException,
        scheme: str,
        absent: Problem = Problem.NOT_FOUND,
    ) -> None:
        self.action = action
        self.kind = problem_of(error)
        if self.kind is Problem.NOT_FOUND:
            self.kind = absent
        is_down = self.kind is Problem.OTHER
        text = f"{self.kind.value} ({shown(error)})"
        super().__init__(text, fix_for(self.kind, scheme), is_down=is_down)


_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted")
_FULL: Final = ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageFull")
_OF_STATUS: Final = {
    401: Problem.DENIED,
    403: Problem.DENIED,
    404: Problem.NOWHERE,  # of a listing, or of the server of credentials
    409: Problem.EXISTS,
    412: Problem.EXISTS,
    501: Problem.UNSUPPORTED,
    507: Problem.FULL,
}
_OF_TYPE: Final = {
    "AlreadyExistsError": Problem.EXISTS,
    "PreconditionError": Problem.EXISTS,
    "NotSupportedError": Problem.UNSUPPORTED,
    "PermissionDeniedError": Problem.DENIED,
    "UnauthenticatedError": Problem.DENIED,
    "FileNotFoundError": Problem.NOT_FOUND,
}


def open_store(config: BucketConfig, environment: Mapping[str, str] = os.environ) -> Store:
    """Return the bucket of a tier as obstore knows it; nothing is requested from it yet.

    `environment` is searched for credentials; obstore reads that of the process. ConfigError:
    obstore is missing or rejects its settings, or boto3 does not find the named profile.
    """
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise ConfigError(
            f'"{config.location.label}" needs obstore ({type(error).__name__}). Fix: pip install '
            "'safe-offload[s3]'."
        ) from None
    scheme = config.location.scheme
    settings: dict[str, Any] = {}
    if scheme == "s3":
        settings["disable_bulk_delete"] = True  # one object at a time, as every store knows it
    provider = _provider_of_files(config, environment) if scheme == "s3" else None
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=config.timeout_s),
        "connect_timeout": timedelta(seconds=config.timeout_s),
    }
    if config.endpoint is not None:
        settings[_ENDPOINT_KEYS[scheme]] = config.endpoint
        if config.endpoint.lower().startswith("http://"):
            client["allow_http"] = True
    retries = {"max_retries": 0, "retry_timeout": timedelta(seconds=config.timeout_s)}
    try:
        return from_url(
            config.location.label,
            config=settings,
            client_options=client,
            retry_config=retries,
            credential_provider=provider,
        )
    except Exception as error:
        raise ConfigError(
            f'"{config.location.label}" cannot be opened with the settings and credentials that '
            f"were found ({type(error).__name__}). Fix: check {_SEEK[scheme]}"
        ) from None


def _provider_of_files(config: BucketConfig, environment: Mapping[str, str]) -> Any:
    """Return a reader of the credentials of `aws configure`; None if it is not needed."""
    if any(environment.get(variable) for variable in _GIVEN_TO_S3):
        return None
    profile = environment.get("AWS_PROFILE")
    has_file = any(
        Path(environment.get(variable) or path).expanduser().is_file()
        for variable, path in _FILES_OF_AWS.items()
    )
    if not (profile or has_file):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except Exception as error:
        if not profile:
            return None  # the role of the machine may do
        raise ConfigError(
            f'for "{config.location.label}" AWS_PROFILE is set, and boto3 finds no credentials '
            f"({type(error).__name__}). Fix: pip install boto3, correct AWS_PROFILE, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        ) from None


def problem_of(error: BaseException) -> Problem:
    """Return why a request failed."""
    status, code = _answer_of(error)
    if code in _NO_BUCKET:
        return Problem.NO_BUCKET
    if code in _FULL:
        return Problem.FULL
    if code == "AccessDenied":
        return Problem.DENIED
    by_type = _OF_TYPE.get(type(error).__name__)
    return by_type or _OF_STATUS.get(status or 0, Problem.OTHER)


def fix_for(problem: Problem, scheme: str) -> str:
    """Return the fix for a problem, as a sentence without its full stop."""
    seek = _SEEK[scheme].removesuffix(".")
    if problem is Problem.DENIED:
        return f"Allow reads, writes and deletes below the tier's url; check {seek}"
    if problem is Problem.NO_BUCKET:
        return "Create the bucket, or correct the tier's url"
    if problem is Problem.NOWHERE:
        return f"Create the bucket, correct the tier's url, or check {seek}"
    if problem is Problem.FULL:
        return "Raise the quota, or add a lifecycle rule that expires old objects"
    return (
        f"Check the tier's endpoint and region, the network, and, if it has no credentials, {seek}"
    )


def shown(error: BaseException) -> str:
    """Return the parts of an error that may be shown: type, status and code of the answer."""
    status, code = _answer_of(error)
    parts = [type(error).__name__]
    if status:
        parts.append(f"status {status}")
    if code:
        parts.append(code)
    return ", ".join(parts)


def _answer_of(error: BaseException) -> tuple[int | None, str]:
    """Return the HTTP status in an error and the code of the store, if there are any."""
    text = str(error)[:_TEXT_MAX]
    status, code = _STATUS.search(text), _CODE.search(text)
    return int(status[1]) if status else None, (code[1] or code[2] or code[3] if code else "")
