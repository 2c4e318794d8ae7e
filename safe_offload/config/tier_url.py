"""The url of a tier: where it is, and as whom it is used.

What a url may have beside the place is little: the rest are settings of the tier. A password is
never shown: neither in a message about the url nor in what a tier is called.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, unquote

from safe_offload.config.printing import shown, without_secrets

FILE: Final = "file"
SERVERS: Final = ("redis", "rediss", "unix")
"""Schemes of a Valkey or Redis server: plain, with TLS, and on a socket of this machine."""
BUCKETS: Final = ("s3", "gs", "az")
"""Schemes of an object store."""
MOONCAKE: Final = "mooncake"
"""The scheme of a master of Mooncake Store."""
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
    """Where a tier is.

    Attributes:
        scheme: one of `KINDS`.
        path: of the directory or the socket, absolute; below which names a bucket is used, without
            a slash at either end; empty for a server.
        host: name or address of a server, or a bucket.
        port: of a server.
        database: number of a server's database.
        user: to log in as; empty for the server's default user.
        password: to log in with, as the url has it; empty if it has none.
    """

    scheme: str
    path: str = ""
    host: str = ""
    port: int = 0
    database: int = 0
    user: str = field(default="", repr=False, compare=False)
    password: str = field(default="", repr=False, compare=False)

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


def problem_of_path(path: str) -> str:
    """Return what is wrong with the path of a directory, or nothing."""
    if not path.startswith("/"):
        return "the path is not absolute"
    if not path.isprintable():
        return "the path contains unprintable characters"
    return "the root of a file system cannot be a tier" if not path.strip("/.") else ""


def can_be_shown(path: str) -> bool:
    """Return whether a path is short and without secrets."""
    return len(path) <= PATH_LENGTH_SHOWN and path == without_secrets(path)


def read_file(rest: str) -> tuple[Location, str, str]:
    """Return the location of a directory, what is wrong with it, and perhaps a fix."""
    machine, slash, written = rest.partition("/")
    path = unquote(slash + written)
    problem, fix = problem_of_path(path), ""
    if machine not in ("", "localhost"):
        what = shown(machine) if can_be_shown(rest) else "something"
        problem = f"{what} takes the place of a host name; write three slashes"
        if machine in (".", "..", "~"):
            problem = "the path is not absolute"
            path = os.path.abspath(os.path.expanduser(unquote(rest)))
            if not problem_of_path(path) and can_be_shown(path):
                fix = f'write "{URL_KEY}": "file://{path}"'
        elif not problem_of_path(f"/{machine}{path}") and can_be_shown(rest):
            fix = f'write "{URL_KEY}": "file:///{rest}"'
    elif "?" in written or "#" in written:
        problem = 'a path with "?" or "#" must be written with %3F or %23'
    return Location(FILE, os.path.normpath(path)), problem, fix


def read_server(scheme: str, url: SplitResult) -> tuple[Location, str]:
    """Read the url of a Valkey or Redis server."""
    host, path = url.hostname or "", url.path.strip("/")
    found = Location(
        scheme,
        host=host,
        port=url.port or DEFAULT_PORT,
        database=_database(path),
        user=unquote(url.username or ""),
        password=unquote(url.password or ""),
    )
    problem = ""
    if not _HOST.fullmatch(host):
        problem = "it has no host name"
    elif found.database < 0:
        problem = "the path is not a database number"
    return found, problem or _no_query(url)


def read_master(scheme: str, url: SplitResult) -> tuple[Location, str]:
    """Read the url of a master of Mooncake Store."""
    host = url.hostname or ""
    problem = "" if _HOST.fullmatch(host) else "it names no machine"
    if "@" in url.netloc or url.path.strip("/"):
        problem = "a machine and a port are all that it may have"
    return Location(scheme, host=host, port=url.port or MASTER_PORT), problem or _no_query(url)


def read_socket(scheme: str, url: SplitResult) -> tuple[Location, str]:
    """Read the url of a server's socket."""
    path = unquote(url.path)
    problem = problem_of_path(path)
    name, _, number = url.query.partition("=")
    database = _database(number)
    if "@" in url.path:
        problem = 'write "/" in a user or password as %2F, and "@" in a path as %40'
    elif url.hostname:
        problem = "something takes the place of a host name; write three slashes"
    elif (url.query and name != "db") or database < 0 or url.fragment:
        problem = "only a database number may follow the path, as in ?db=1"
    user, password = unquote(url.username or ""), unquote(url.password or "")
    return Location(
        scheme, os.path.normpath(path), "", 0, max(database, 0), user, password
    ), problem


def read_bucket(scheme: str, url: SplitResult) -> tuple[Location, str]:
    """Read the url of a bucket."""
    bucket, prefix = url.netloc, url.path.strip("/")
    problem = ""
    if "@" in bucket:
        problem = "credentials are not allowed here: use the environment or the machine's role"
    elif not _BUCKET.fullmatch(bucket):
        problem = "it has no bucket name"
    elif not _PREFIX.fullmatch(prefix) or ".." in prefix or "//" in prefix:
        problem = "the prefix may contain only letters, digits and . _ / = -"
    return Location(scheme, prefix, bucket), problem or _no_query(url)


def _database(number: str) -> int:
    """Return the number of a database, 0 if none is named, -1 if this is none."""
    if not number:
        return 0
    is_number = number.isascii() and number.isdigit() and len(number) <= 5
    return int(number) if is_number and int(number) <= DATABASE_MAX else -1


def _no_query(url: SplitResult) -> str:
    if url.query or url.fragment:
        return '"?" and "#" are not allowed: use settings of the tier instead'
    return ""
