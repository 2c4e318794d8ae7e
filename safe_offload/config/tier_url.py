"""The url of a tier: its place and its login. A password is never shown."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from safe_offload.config.printing import shown, without_secrets
from safe_offload.config.settings import WrongError, problem_of_path

FILE: Final = "file"
SERVERS: Final = ("redis", "rediss", "unix")
BUCKETS: Final = ("s3", "gs", "az")
MOONCAKE: Final = "mooncake"
URL_KEY: Final = "url"
URL_FORMS: Final = (
    "file:///DIRECTORY, redis://HOST or rediss://HOST (TLS; also valkey:// and valkeys://), "
    "unix:///SOCKET, s3://BUCKET, gs://BUCKET, az://CONTAINER or mooncake://HOST"
)
PATH_LENGTH_SHOWN: Final = 100
DEFAULT_PORT: Final = 6379
MASTER_PORT: Final = 50051
DATABASE_MAX: Final = 16383

_HOST: Final = re.compile(r"[A-Za-z0-9._:-]{1,255}", re.ASCII)
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
_PREFIX: Final = re.compile(r"[A-Za-z0-9._/=-]{0,512}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a tier."""

    scheme: str  # one of `KINDS`
    # Of the directory or the socket, absolute; the prefix in a bucket, without a slash at either
    # end; empty for a server.
    path: str = ""
    host: str = ""  # name or address of a server, or a bucket
    port: int = 0
    database: int = 0
    user: str = field(default="", repr=False, compare=False)  # empty for the server's default user
    password: str = field(default="", repr=False, compare=False)  # of the url; empty if it has none

    @property
    def label(self) -> str:
        """Return the url without user and password."""
        database = f"/{self.database}" if self.database else ""
        if self.scheme in ("redis", "rediss", MOONCAKE):
            host = f"[{self.host}]" if ":" in self.host else self.host
            return f"{self.scheme}://{host}:{self.port}{database}"
        if self.host:
            return f"{self.scheme}://{self.host}/{self.path}".rstrip("/")
        query = f"?db={self.database}" if self.database else ""
        return f"{self.scheme}://{self.path}{query}"


def fix_with(path: str) -> str:
    """Return the fix with the likely path; empty if it may not be printed."""
    can_be_shown = len(path) <= PATH_LENGTH_SHOWN and path == without_secrets(path)
    is_good = can_be_shown and not problem_of_path(path)
    return f'write "{URL_KEY}": "file://{path}"' if is_good else ""


def read_file(scheme: str, rest: str) -> Location:
    """Read the url of a directory."""
    machine, slash, written = rest.partition("/")
    path = unquote(slash + written)
    if machine in (".", "..", "~"):
        meant = os.path.abspath(os.path.expanduser(unquote(rest)))
        raise WrongError("the path is not absolute", fix_with(meant))
    if machine not in ("", "localhost"):
        fix = fix_with(f"/{rest}")
        what = shown(machine) if fix else "something"
        raise WrongError(f"{what} takes the place of a host name; write three slashes", fix)
    if "?" in written or "#" in written:
        raise WrongError('a path with "?" or "#" must be written with %3F or %23')
    if problem := problem_of_path(path):
        raise WrongError(problem)
    return Location(scheme, os.path.normpath(path))


def read_server(scheme: str, rest: str) -> Location:
    """Read the url of a Valkey or Redis server."""
    url = urlsplit(f"{scheme}://{rest}")
    host = _host(url, "it has no host name")
    database = _database(url.path.strip("/"), "the path is not a database number")
    _require_no_query(url)
    return Location(scheme, "", host, url.port or DEFAULT_PORT, database, *_login(url))


def read_socket(scheme: str, rest: str) -> Location:
    """Read the url of a socket of a Valkey or Redis server."""
    url = urlsplit(f"{scheme}://{rest}")
    path = unquote(url.path)
    name, _, number = url.query.partition("=")
    if "@" in url.path:
        raise WrongError('write "/" in a user or password as %2F, and "@" in a path as %40')
    if url.hostname:
        raise WrongError("something takes the place of a host name; write three slashes")
    problem = "only a database number may follow the path, as in ?db=1"
    if (url.query and name != "db") or url.fragment:
        raise WrongError(problem)
    database = _database(number, problem)
    if wrong_path := problem_of_path(path):
        raise WrongError(wrong_path)
    return Location(scheme, os.path.normpath(path), "", 0, database, *_login(url))


def read_bucket(scheme: str, rest: str) -> Location:
    """Read the url of a bucket."""
    url = urlsplit(f"{scheme}://{rest}")
    bucket, prefix = url.netloc, url.path.strip("/")
    if "@" in bucket:
        raise WrongError(
            "credentials are not allowed here: use the environment or the machine's role"
        )
    if not _BUCKET.fullmatch(bucket):
        raise WrongError("it has no bucket name")
    if not _PREFIX.fullmatch(prefix) or ".." in prefix or "//" in prefix:
        raise WrongError("the prefix may contain only letters, digits and . _ / = -")
    _require_no_query(url)
    return Location(scheme, prefix, bucket)


def read_master(scheme: str, rest: str) -> Location:
    """Read the url of a master of Mooncake Store."""
    url = urlsplit(f"{scheme}://{rest}")
    if "@" in url.netloc or url.path.strip("/"):
        raise WrongError("a machine and a port are all that it may have")
    host = _host(url, "it names no machine")
    _require_no_query(url)
    return Location(scheme, host=host, port=url.port or MASTER_PORT)


def _host(url: SplitResult, problem: str) -> str:
    host = url.hostname or ""
    if not _HOST.fullmatch(host):
        raise WrongError(problem)
    return host


def _login(url: SplitResult) -> tuple[str, str]:
    return unquote(url.username or ""), unquote(url.password or "")


def _database(number: str, problem: str) -> int:
    if not re.fullmatch("[0-9]{0,5}", number) or int(number or 0) > DATABASE_MAX:
        raise WrongError(problem)
    return int(number or 0)


def _require_no_query(url: SplitResult) -> None:
    if url.query or url.fragment:
        raise WrongError('"?" and "#" are not allowed: use settings of the tier instead')
