"""A synchronous client of the Valkey or Redis server of a tier, for the tools around it.

The tier itself needs no package; here redis-py does all. No error of it is shown as it is: an
answer of a server may hold anything.

Source: redis-py 6.4 to 8.1, redis/connection.py, redis/cluster.py and redis/exceptions.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from safe_offload.commands.cache.store import CacheError
from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError
from safe_offload.tiers.valkey.commands import DELETING, LOOKING, SELECT, SLOTS, allowing, words_of
from safe_offload.tiers.valkey.login import LoginError, read_password, tls_context
from safe_offload.tiers.valkey.names import ALL_KEYS

if TYPE_CHECKING:
    from redis import Connection, Redis

CONNECT_S: Final = 3.0
_CODE_LETTERS_MAX: Final = 20
_INSTALL: Final = "pip install 'safe-offload[redis]'"


class Server:
    """One server, or all primaries of a cluster.

    Args:
        config: of the tier.
        timeout_s: of one answer.

    Attributes:
        label: of the tier; no secret is in it.
        nodes: clients of all nodes that have keys.
        keeps_use: asking for a key does not make it one that was used lately.
        tells_nodes: this user may ask whether it is a cluster; it is taken for none otherwise.

    Raises:
        CacheError: it cannot be used, with the fix.
        ConfigError: the package redis or the certificates cannot be used.
    """

    def __init__(self, config: TierConfig, timeout_s: float) -> None:
        _require_client()
        import redis

        self.label = config.location.label
        options = _options(config, timeout_s)
        self._cluster: Any = None
        self.keeps_use = self.tells_nodes = True
        with self.errors():
            options["redis_connect_func"] = self._log_in
            client = redis.Redis(connection_pool=redis.ConnectionPool(**options))
            self.nodes: list[Redis] = [client]
            self._try_login(client)
            if self._is_cluster(client):
                self.close()
                for key in ("db", "host", "port", "path"):
                    options.pop(key, None)
                options["redis_connect_func"] = self._ask_not_to_count  # it logs in itself
                # With a url it makes connections of the class that it is given.
                home = dataclasses.replace(config.location, scheme="redis", database=0)
                options["url"] = None if home.path else home.label
                self._cluster = redis.RedisCluster(require_full_coverage=False, **options)
                primaries = self._cluster.get_primaries()
                self.nodes = [self._cluster.get_redis_connection(node) for node in primaries]

    @property
    def is_cluster(self) -> bool:
        """Return whether keys are spread over several nodes."""
        return self._cluster is not None

    def node_of(self, key: str) -> Redis:
        """Return the client of the node that has a key."""
        if self._cluster is None:
            return self.nodes[0]
        node: Redis = self._cluster.get_redis_connection(self._cluster.get_node_from_key(key))
        return node

    def close(self) -> None:
        """Close all connections."""
        if self._cluster is not None:
            self._cluster.close()
        for node in self.nodes:
            node.close()
            node.connection_pool.disconnect()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what goes wrong inside into a CacheError that says what to do."""
        from redis import exceptions

        try:
            yield
        except (exceptions.RedisError, exceptions.RedisClusterException) as error:
            raise CacheError(f"{self.label} {_problem_of(error)}") from error

    def _try_login(self, client: Redis) -> None:
        """Connect: what is refused then, to one with the right password, is the database."""
        from redis.exceptions import NoPermissionError

        try:
            client.connection_pool.release(client.connection_pool.get_connection())
        except NoPermissionError as error:
            raise CacheError(
                f"{self.label} does not let this user choose a database. Fix: give the user "
                f"{allowing([SELECT])}, or remove the number from the url."
            ) from error

    def _is_cluster(self, client: Any) -> bool:
        """Return whether a server is a node of a cluster."""
        from redis.exceptions import NoPermissionError, ResponseError

        try:
            client.execute_command(*words_of(SLOTS))
        except NoPermissionError:
            self.tells_nodes = False
        except ResponseError:
            return False
        return self.tells_nodes

    def _log_in(self, connection: Any) -> None:
        connection.on_connect()
        self._ask_not_to_count(connection)

    def _ask_not_to_count(self, connection: Any) -> None:
        """Ask not to be counted as a use of keys: Valkey 7.2, Redis 7.2 and later."""
        from redis.exceptions import ResponseError

        connection.send_command("CLIENT", "NO-TOUCH", "ON")
        try:
            connection.read_response()
        except ResponseError:
            self.keeps_use = False


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


def password_of(config: TierConfig) -> str:
    """Return what to log in with; empty for nothing.

    Raises:
        CacheError: the file cannot be read.
    """
    if config.password_file is None:
        return config.location.password
    try:
        return read_password(config.password_file)
    except LoginError as error:
        raise CacheError(f"{error}. Fix: give the path of a text file that it may read.") from None


def _options(config: TierConfig, timeout_s: float) -> dict[str, Any]:
    """Return what a pool of connections is made with."""
    from redis import Connection, UnixDomainSocketConnection
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    place = config.location
    options: dict[str, Any] = {
        "db": place.database,
        "username": place.user or None,
        "password": password_of(config) or None,
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if place.path:
        return options | {"connection_class": UnixDomainSocketConnection, "path": place.path}
    tls = tls_context(config)
    kind = Connection if tls is None else _tls_connection(tls)
    return options | {"connection_class": kind, "host": place.host, "port": place.port}


def _tls_connection(context: ssl.SSLContext) -> type[Connection]:
    """Return connections with TLS; those of redis-py trust the system's authorities as well."""
    from redis import SSLConnection

    class TlsConnection(SSLConnection):
        def _wrap_socket_with_ssl(self, sock: Any) -> ssl.SSLSocket:
            return context.wrap_socket(sock, server_hostname=self.host)

    return TlsConnection


def _problem_of(error: Exception) -> str:
    """Return what is wrong and the fix, without a word of the server's beside its code."""
    from redis import exceptions

    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    for one in causes:
        if isinstance(one, ssl.SSLCertVerificationError):
            verdict = one.verify_message.rstrip(".")
            return (
                f"shows a certificate that does not fit: {verdict}. Fix: give the "
                "certificates to trust in --ca-file, and the name in the certificate in the url."
            )
    if any(isinstance(one, exceptions.AuthenticationError) for one in causes):
        return (
            "refuses the login. Fix: give the password in --password-file, and the user in the "
            "url, as in redis://user@machine, if it is not the default user."
        )
    if any(isinstance(one, exceptions.NoPermissionError) for one in causes):
        return (
            f"does not allow this user what is needed. Fix: log in as one whose ACL has "
            f"~{ALL_KEYS} {allowing(LOOKING)}, and {allowing(DELETING)} to delete."
        )
    if isinstance(error, exceptions.BusyLoadingError):
        return "is still loading its data. Fix: try again when it has."
    if any(isinstance(one, exceptions.TimeoutError | TimeoutError) for one in causes):
        return (
            "gives no answer in time. Fix: look whether it is up, what it is busy with, and "
            "whether it wants TLS (rediss://) or has none (redis://)."
        )
    if any(isinstance(one, exceptions.ConnectionError | OSError) for one in causes):
        strerror = next((e.strerror for e in causes if isinstance(e, OSError) and e.strerror), "")
        reason = strerror or "the connection was lost"
        return (
            f"cannot be reached: {reason}. Fix: look whether it is up, at the machine and port in "
            "the url, and whether it wants TLS (rediss://)."
        )
    if isinstance(error, exceptions.RedisClusterException):
        return (
            "is a node of a cluster that cannot be used. Fix: look whether the addresses that its "
            "nodes announce can be reached from here, and whether all slots have a node."
        )
    code = code_of(error)
    if code in ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"):
        return f"is a cluster that is changing ({code}). Fix: try again when it has settled."
    return f"answers with an error ({code}). Fix: look at the log of the server."


def code_of(error: Exception) -> str:
    """Return the first word of an error that a server has answered."""
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
    otherwise = word if word.isascii() and word.isalpha() and word.isupper() else "ERR"
    return by_type.get(type(error).__name__, otherwise)
