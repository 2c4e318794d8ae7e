"""A synchronous client of the Valkey or Redis servers of a tier, for the tools around it.

The tier's own connection logs in first and says which servers there are; redis-py does the rest. No
error of either is shown as it is: an answer of a server may hold anything.

Source: redis-py 6.4 to 8.1, redis/connection.py and redis/exceptions.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from safe_offload.commands.cache.store import CacheError
from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError
from safe_offload.tiers.valkey.commands import DELETING, LOOKING, allowing
from safe_offload.tiers.valkey.login import (
    Address,
    Login,
    LoginError,
    explained,
    read_password,
    tls_context,
)
from safe_offload.tiers.valkey.names import ALL_KEYS
from safe_offload.tiers.valkey.replies import WireError
from safe_offload.tiers.valkey.servers import Servers

if TYPE_CHECKING:
    from redis import Connection, Redis

CONNECT_S: Final = 3.0
_CODE_LETTERS_MAX: Final = 20
_INSTALL: Final = "pip install 'safe-offload[redis]'"


class Server:
    """One server, or all primaries of a cluster.

    Attributes:
        label: of the tier; no secret is in it.
        nodes: clients of all nodes that have keys.
        keeps_use: asking for a key does not make it one that was used lately.

    Raises:
        CacheError: it cannot be used, with the fix.
        ConfigError: the package redis or the certificates cannot be used.
    """

    def __init__(self, config: TierConfig, timeout_s: float) -> None:
        _require_client()
        self.label = config.location.label
        self.keeps_use = True
        self._has_tls = config.location.scheme == "rediss"
        with self.errors():
            config = dataclasses.replace(config, timeout_s=timeout_s)
            self._servers = asyncio.run(_find(config))
            self._options = _options(config) | {"redis_connect_func": self._log_in}
        self._clients = {where: self._client_at(where) for where in self._servers.addresses}
        self.nodes = list(self._clients.values())

    @property
    def is_cluster(self) -> bool:
        """Return whether keys are spread over several nodes."""
        return self._servers.is_cluster

    def node_of(self, key: str) -> Redis:
        """Return the client of the node that has a key."""
        owner = self._servers.owner(key.encode())
        if owner is None:
            raise CacheError(
                f"{self.label} is a cluster in which no node has a part of the keys. Fix: look "
                "whether all slots have a node."
            )
        return self._clients[owner.address]

    def close(self) -> None:
        """Close all connections."""
        for node in self.nodes:
            node.close()
            node.connection_pool.disconnect()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what goes wrong inside into a CacheError that says what to do."""
        from redis.exceptions import RedisError

        try:
            yield
        except LoginError as error:
            raise _cache_error(self.label, error) from error
        except RedisError as error:
            raise self._cache_error_of(error) from error

    def _client_at(self, where: Address) -> Redis:
        from redis import ConnectionPool, Redis, UnixDomainSocketConnection

        place = {"host": where.host, "port": where.port}
        if where.path:
            place = {"path": where.path, "connection_class": UnixDomainSocketConnection}
        return Redis(connection_pool=ConnectionPool(**self._options | place))

    def _log_in(self, connection: Any) -> None:
        """Log in, and ask not to be counted as a use of keys: Valkey and Redis from 7.2 on."""
        from redis.exceptions import ResponseError

        connection.on_connect()
        connection.send_command("CLIENT", "NO-TOUCH", "ON")
        try:
            connection.read_response()
        except ResponseError:
            self.keeps_use = False

    def _cache_error_of(self, error: Exception) -> CacheError:
        """Return what is wrong and the fix, without a word of the server's beside its code."""
        causes = list(_causes_of(error))
        if (cause := next((one for one in causes if isinstance(one, OSError)), None)) is not None:
            return _cache_error(self.label, explained(cause, self.label, has_tls=self._has_tls))
        code = code_of(error)
        if code == "NOPERM":
            problem = "does not allow this user what is needed"
            fix = (
                f"log in as one whose ACL has ~{ALL_KEYS} {allowing(LOOKING)}, and "
                f"{allowing(DELETING)} to delete"
            )
        elif code == "LOADING":
            problem, fix = "is still loading its data", "try again when it has"
        elif code in ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"):
            problem = f"is a cluster that is changing ({code})"
            fix = "try again when it has settled"
        elif code:
            problem, fix = f"answers with an error ({code})", "look at the log of the server"
        else:
            problem, fix = "has closed the connection", "look whether it is up, and at its log"
        return CacheError(f"{self.label} {problem}. Fix: {fix}.")


async def _find(config: TierConfig) -> Servers:
    """Return which servers have which keys."""
    login = Login(config, name="")
    servers = Servers(login, 1)
    try:
        async with asyncio.timeout(config.timeout_s):
            await servers.refresh(servers.version)
    except (TimeoutError, WireError) as error:
        raise explained(error, login.home, has_tls=login.has_tls) from None
    finally:
        servers.close()
    return servers


def _cache_error(label: str, error: LoginError) -> CacheError:
    fix = error.fix or "Look at the log of the server"
    return CacheError(f"{label}: {error.problem}. Fix: {fix[0].lower()}{fix[1:]}.")


def _require_client() -> None:
    """Raise a ConfigError if there is no redis-py, or one whose TLS cannot be ours."""
    try:
        import redis
    except ImportError as error:
        raise ConfigError(
            f"looking into a Valkey or Redis server needs redis-py ({error}). Fix: {_INSTALL}"
        ) from None
    if "_wrap_socket_with_ssl" not in dir(redis.SSLConnection):
        raise ConfigError(f"redis-py {redis.__version__} is not known. Fix: {_INSTALL}")


def _options(config: TierConfig) -> dict[str, Any]:
    """Return what pools of connections are made with, wherever they lead."""
    from redis import Connection
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    place, tls = config.location, tls_context(config)
    return {
        "db": place.database,
        "username": place.user or None,
        "password": read_password(config) or None,
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": config.timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "connection_class": Connection if tls is None else _tls_connection(tls),
    }


def _tls_connection(context: ssl.SSLContext) -> type[Connection]:
    """Return connections with TLS; those of redis-py trust the system's authorities as well."""
    from redis import SSLConnection

    class TlsConnection(SSLConnection):
        def _wrap_socket_with_ssl(self, sock: Any) -> ssl.SSLSocket:
            return context.wrap_socket(sock, server_hostname=self.host)

    return TlsConnection


def _causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it comes from."""
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def code_of(error: Exception) -> str:
    """Return the first word of an error that a server has answered; empty if it is none."""
    from redis.exceptions import ResponseError

    by_type = {
        "AskError": "ASK",
        "BusyLoadingError": "LOADING",
        "ClusterDownError": "CLUSTERDOWN",
        "MasterDownError": "MASTERDOWN",
        "MovedError": "MOVED",
        "NoPermissionError": "NOPERM",
        "OutOfMemoryError": "OOM",
        "ReadOnlyError": "READONLY",
        "TryAgainError": "TRYAGAIN",
    }  # redis-py cuts these words off
    word = str(error).partition(" ")[0][:_CODE_LETTERS_MAX]
    is_word = word.isascii() and word.isalpha() and word.isupper()
    otherwise = (word if is_word else "ERR") if isinstance(error, ResponseError) else ""
    return by_type.get(type(error).__name__, otherwise)
