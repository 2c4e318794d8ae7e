"""Connections to Valkey and Redis servers, logged in.

Each command of the login has a reply of one line; any other reply ends the connection, so an
untrusted server costs no more here than anywhere else (`Wire`).

Source: https://valkey.io/commands/auth/, client-setname and select.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from dataclasses import dataclass
from typing import Final

from safe_offload.config.files import read_file
from safe_offload.config.printing import printable, secret_file
from safe_offload.config.tiers import ValkeyConfig, ValkeyTlsConfig
from safe_offload.errors import ConfigError
from safe_offload.tiers.base import PlaceError
from safe_offload.tiers.valkey.commands import SELECT, SETNAME, allowing, words_of
from safe_offload.tiers.valkey.replies import ErrorReply, WireError
from safe_offload.tiers.valkey.wire import Wire

CLIENT_NAME: Final = "safe-offload"

_PASSWORD_BYTES_MAX: Final = 4096
_REFUSED_LOGIN: Final = ("WRONGPASS", "NOAUTH")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server: a host and its port, or the path of a socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{printable(self.host)}:{self.port}"


class LoginError(PlaceError):
    """A server cannot be used."""


class _RefusedError(Exception):
    """The server has refused a command of the login."""

    def __init__(self, problem: ErrorReply) -> None:
        super().__init__(problem.code)
        self.problem = problem


class Login:
    """Connects to the servers of a tier, as `name` in CLIENT LIST, if it is not empty.

    ConfigError: a file of certificates cannot be used.
    """

    def __init__(self, config: ValkeyConfig, name: str = CLIENT_NAME) -> None:
        self._config = config
        self.name = name
        self._tls = tls_context(config)

    @property
    def home(self) -> Address:
        """Return the address that the user has named."""
        location = self._config.location
        if location.scheme == "unix":
            return Address(path=location.path)
        return Address(location.host, location.port)

    @property
    def has_tls(self) -> bool:
        """Return whether connections have TLS."""
        return self._tls is not None

    async def connect(self, address: Address) -> Wire:
        """Return a connection that is logged in, or raise LoginError."""
        password = self._config.location.password
        if self._config.password_file is not None:
            password = await asyncio.to_thread(read_password, self._config)
        wire = Wire()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._open(wire, address)
                await self._greet(wire, password)
        except BaseException as error:
            wire.abort()
            if not isinstance(error, Exception):
                raise
            raise explained(error, address, has_tls=self.has_tls) from None
        return wire

    async def _open(self, wire: Wire, address: Address) -> None:
        loop = asyncio.get_running_loop()
        if address.path:
            await loop.create_unix_connection(lambda: wire, address.path)
            return
        transport, _ = await loop.create_connection(
            lambda: wire, address.host, address.port, ssl=self._tls
        )
        with contextlib.suppress(OSError):  # the connection is lost: the greeting fails
            found = transport.get_extra_info("socket")
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    async def _greet(self, wire: Wire, password: str) -> None:
        """Authenticate, and select the database.

        _RefusedError: the server refuses a command. WireError: it does not speak the protocol.
        """
        place = self._config.location
        words = [word.encode() for word in (place.user, password) if word or place.user]
        asked = [command(b"AUTH", *words)] if words else []
        if place.database:
            asked.append(command(*words_of(SELECT), b"%d" % place.database))
        num_required = len(asked)
        if self.name:
            asked.append(command(*words_of(SETNAME), self.name.encode()))
        for number, answer in enumerate(await wire.request_lines(asked, len(asked))):
            is_required = number < num_required  # it may go without a name
            if isinstance(answer, ErrorReply) and (is_required or answer.code == "NOAUTH"):
                raise _RefusedError(answer)
            if is_required and answer != b"OK":
                raise WireError("the server did not answer OK")


def command(*words: bytes) -> bytes:
    """Return a command as it is sent."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def read_password(config: ValkeyConfig) -> str:
    """Return the password, from the file if there is one; empty for none.

    LoginError: the file cannot be read, is too long, or is not text.
    """
    path = config.password_file
    if path is None:
        return config.location.password
    try:
        found, _ = read_file(path, _PASSWORD_BYTES_MAX + 1)
        if len(found) > _PASSWORD_BYTES_MAX:
            raise OSError(errno.EFBIG, f"it is longer than {_PASSWORD_BYTES_MAX} bytes")
        return found.decode().rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise LoginError(
            f'the "password_file" {secret_file(path)} cannot be read: {_reason(error)}',
            "Make it readable for vLLM's user",
        ) from None


def tls_context(config: ValkeyConfig) -> ssl.SSLContext | None:
    """Return the context that checks certificates, and always their names; None without TLS.

    ConfigError: a file of certificates cannot be used.
    """
    if not isinstance(config, ValkeyTlsConfig):
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
                f'"cert_file" {config.cert_file} and "key_file" {secret_file(config.key_file)} '
                f"cannot be used: {_reason(error)}. Fix: name a certificate and its key, without a "
                "password, in PEM form, that this user can read."
            ) from None
    return context


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    if isinstance(error, UnicodeError):
        return "it is not text"
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__


def explained(error: Exception, server: object, *, has_tls: bool) -> LoginError:
    """Return why a server cannot be used, and the fix; never what the server wrote."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return LoginError(
            f"the certificate of {server} was rejected: {error.verify_message.rstrip('.')}",
            'Use the host name of its certificate in the url, and set "ca_file" to the CA that '
            "signed it",
        )
    if isinstance(error, ssl.SSLError):
        problem = f"TLS with {server} failed: {_reason(error)}"
        return LoginError(problem, "Is it a TLS port?")
    if isinstance(error, _RefusedError):
        return refused(error.problem, server)
    if isinstance(error, WireError):
        problem = f"{server} does not answer as a Valkey or Redis server: {error}"
        return LoginError(
            problem, "" if has_tls else "If it requires TLS, write rediss:// in the url"
        )
    if isinstance(error, TimeoutError):
        hint = ", and whether this port speaks TLS" if has_tls else ""
        fix = f"Check the network, whether the server hangs{hint}"
        return LoginError(f"{server} does not answer", fix, is_down=True)
    what = (isinstance(error, OSError) and error.strerror) or type(error).__name__
    return LoginError(
        f"cannot connect to {server}: {what}",
        "Check the url, the network, and whether the server runs",
        is_down=True,
    )


def refused(problem: ErrorReply, server: object) -> LoginError:
    """Return the meaning of an error reply to the login, and the fix."""
    code, text = problem.code, problem.text
    if code == "NOPERM":  # AUTH is always allowed
        return LoginError(
            f"{server} does not allow this user to select a database (NOPERM)",
            f"Give the user {allowing([SELECT])}, or remove the number from the url",
        )
    if code in _REFUSED_LOGIN or "AUTH" in text or "password" in text:
        return LoginError(
            f"{server} rejected the user or the password ({code})",
            'Check the user in the url, and the password in it or in "password_file"',
        )
    if "DB index" in text or "SELECT" in text:
        return LoginError(
            f"{server} has no such database ({code})", "Remove its number from the url"
        )
    return LoginError(f"{server} rejected the connection: {code}")
