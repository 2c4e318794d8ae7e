"""Connections to Valkey and Redis servers: made and logged in by redis-py, read by `Wire`.

redis-py connects, with TLS and keep-alive, and says AUTH and SELECT. Where its parser would stand,
ours does, so that what a server answers is limited from the first byte. Then the connection is
`Wire`'s alone.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safe_offload.errors import ConfigError
from safe_offload.tier_config import TierConfig
from safe_offload.worker.tiers.valkey.replies import Problem, WireError
from safe_offload.worker.tiers.valkey.wire import Wire

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

CLIENT_NAME: Final = "safe-offload"

# Of redis-py's connections, which have no public way to their transport.
_FIELDS: Final = {"_reader", "_writer"}
_INSTALL: Final = "pip install 'safe-offload[redis]'"
_PASSWORD_BYTES_MAX: Final = 4096
_REFUSED_LOGIN: Final = ("WRONGPASS", "NOAUTH", "NOPERM")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: a machine and its port, or the path of a socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class LoginError(ConnectionError):
    """A server cannot be used. Its text names the fix and has no secret."""


def require_client() -> None:
    """Raise a ConfigError if there is no redis-py, or one that connections cannot be had from."""
    try:
        import redis
        from redis.asyncio.connection import AbstractConnection, RedisSSLContext
    except ImportError as error:
        raise ConfigError(
            f"a tier on a Valkey or Redis server needs redis-py ({error}). Fix: {_INSTALL}"
        ) from None
    is_known = (
        _FIELDS.issubset(dir(AbstractConnection))
        and "context" in dir(RedisSSLContext)
        and "_wrap_socket_with_ssl" in dir(redis.SSLConnection)  # for `safe-offload cache`
    )
    if not is_known:
        raise ConfigError(
            f"a tier on a Valkey or Redis server does not know redis-py {redis.__version__}. "
            f"Fix: {_INSTALL}"
        )


class Login:
    """Makes connections to the servers of a tier.

    Args:
        config: of the tier.

    Raises:
        ConfigError: there is no redis-py that fits, or a file of certificates cannot be used.
    """

    def __init__(self, config: TierConfig) -> None:
        require_client()
        self._config = config
        self._tls = tls_context(config)

    @property
    def home(self) -> Address:
        """Return the address that the user has named."""
        location = self._config.location
        if location.scheme == "unix":
            return Address(path=location.path)
        return Address(location.host, location.port)

    async def connect(self, address: Address) -> Wire:
        """Return a connection that is logged in.

        Raises:
            LoginError: there is none.
        """
        password = await self._password()
        wire = Wire()
        handshake = _Handshake(wire)
        connection = self._connection(address, password, handshake)
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await connection.connect()  # type: ignore[no-untyped-call]
                handshake.part()
                set_name = command(b"CLIENT", b"SETNAME", CLIENT_NAME.encode())
                (named,) = await wire.ask_lines([set_name], 1)
                if isinstance(named, Problem) and named.code == "NOAUTH":
                    handshake.problem = named
                    raise ConnectionRefusedError
        except BaseException as error:
            handshake.on_disconnect()
            if not isinstance(error, Exception):
                raise
            raise LoginError(_explain(error, handshake.problem, address, self._tls)) from None
        return wire

    async def _password(self) -> str:
        path = self._config.password_file
        if path is None:
            return self._config.location.password
        try:
            return await asyncio.to_thread(_read_password, Path(path))
        except (OSError, ValueError) as error:
            raise LoginError(
                f'the "password_file" {path} cannot be read: {_reason(error)}. Let the user that '
                "runs vLLM read it"
            ) from None

    def _connection(
        self, address: Address, password: str, handshake: _Handshake
    ) -> AbstractConnection:
        from redis.asyncio import Connection, SSLConnection, UnixDomainSocketConnection

        values: dict[str, Any] = {
            "db": self._config.location.database,
            "username": self._config.location.user or None,
            "password": password or None,
            "socket_timeout": None,  # wait_for of Python 3.11 may swallow that we are cancelled
            "socket_connect_timeout": self._config.timeout_s,
            "protocol": 2,
            "parser_class": lambda socket_read_size: handshake,
        }
        if address.path:
            return UnixDomainSocketConnection(path=address.path, **values)
        values |= {"host": address.host, "port": address.port, "socket_keepalive": True}
        if self._tls is None:
            return Connection(**values)
        connection = SSLConnection(**values)
        connection.ssl_context.context = self._tls  # which trusts "ca_file" alone
        return connection


class _Handshake:
    """Stands in the place of redis-py's parser until a connection is logged in."""

    EXCEPTION_CLASSES: Final[dict[str, type[Exception]]] = {}

    def __init__(self, wire: Wire) -> None:
        self.problem: Problem | None = None
        """The last error that the server answered."""
        self._wire = wire
        self._connection: Any = None

    def on_connect(self, connection: Any) -> None:
        """There is a connection, on which nothing has been said."""
        if self._connection is not None:
            return  # redis-py greets a socket of this machine twice
        self._connection = connection
        transport = connection._writer.transport
        transport.pause_reading()
        transport.set_protocol(self._wire)
        self._wire.connection_made(transport)
        transport.resume_reading()

    def on_disconnect(self) -> None:
        """The connection did not come about. redis-py is kept from waiting for its end."""
        self._wire.abort()
        if self._connection is not None:
            self._connection._reader = self._connection._writer = None

    async def can_read(self, *args: object, **values: object) -> bool:
        """See redis-py's parsers."""
        return False

    can_read_destructive = can_read

    async def read_response(self, *args: object, **values: object) -> Any:
        """Return the next reply; an error is returned, not raised, as redis-py's parsers do."""
        from redis.exceptions import ResponseError

        reply = await self._wire.ask_tree(())
        if isinstance(reply, Problem):
            self.problem = reply
            return ResponseError(reply.code)
        return reply

    def part(self) -> None:
        """Part redis-py from the connection, which is the wire's alone from now on."""
        writer = self._connection._writer
        self._connection._reader = self._connection._writer = None
        self._wire.be_strict(writer)  # which would close the connection if it were deleted


def command(*words: bytes) -> bytes:
    """Return a command as it is sent."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def _read_password(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.read(_PASSWORD_BYTES_MAX).rstrip("\r\n")


def tls_context(config: TierConfig) -> ssl.SSLContext | None:
    """Return what certificates are checked with, and names always; None without TLS.

    Raises:
        ConfigError: a file of certificates cannot be used.
    """
    if config.location.scheme != "rediss":
        return None
    try:
        context = ssl.create_default_context(cafile=config.ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f'"ca_file" {config.ca_file} cannot be used: {_reason(error)}. Fix: name a file with '
            "certificates in PEM form that this user can read."
        ) from None
    if config.cert_file and config.key_file:
        try:
            context.load_cert_chain(config.cert_file, config.key_file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f'"cert_file" {config.cert_file} and "key_file" {config.key_file} cannot be used: '
                f"{_reason(error)}. Fix: name a certificate and its key, without a password, in "
                "PEM form, that this user can read."
            ) from None
    return context


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    if isinstance(error, UnicodeError):
        return "it is not text"
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__


def _explain(
    error: BaseException, problem: Problem | None, address: Address, tls: ssl.SSLContext | None
) -> str:
    """Return why there is no connection, and the fix; never what the server wrote."""
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            verdict = cause.verify_message.rstrip(".")
            return (
                f"the certificate of {address} is refused: {verdict}. Name the server in the url "
                'as its certificate does, and the authority that signed it in "ca_file"'
            )
        if isinstance(cause, ssl.SSLError):
            return f"{address} does not speak TLS with us: {_reason(cause)}. Is it a TLS port?"
    if problem is not None:
        return _explain_refusal(problem, address)
    for cause in causes:
        if isinstance(cause, WireError):
            hint = "" if tls else ". If it wants TLS, write rediss:// in the url"
            return f"{address} does not answer as a Valkey or Redis server: {cause}{hint}"
    if any(isinstance(cause, TimeoutError) for cause in causes):
        hint = ", and whether this port speaks TLS" if tls else ""
        return f"{address} does not answer. Check the network, whether the server hangs{hint}"
    system = next((c for c in causes if isinstance(c, OSError) and c.strerror), None)
    what = system.strerror if system is not None else type(error).__name__
    return (
        f"there is no connection to {address}: {what}. Check the url, the network, and whether the "
        "server runs"
    )


def _explain_refusal(problem: Problem, address: Address) -> str:
    if problem.code in _REFUSED_LOGIN or "AUTH" in problem.text or "password" in problem.text:
        return (
            f"{address} refuses the user or the password ({problem.code}). Check the user in the "
            'url, and the password in it or in "password_file"'
        )
    if "DB index" in problem.text or "SELECT" in problem.text:
        return f"{address} has no such database ({problem.code}). Remove its number from the url"
    return f"{address} refuses to be used: it answers {problem.code}"


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and what it came from."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes
