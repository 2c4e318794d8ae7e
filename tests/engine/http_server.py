"""A vLLM API server for a test, in a process group that ends with the test, however it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from safe_offload.start import last_words

LOG_TAIL_LINES = 60

# Leads the process group. Its standard input is a pipe that only the test holds, so the end of the
# test closes it, also when the test's process is killed; then the whole group is killed.
_GUARD = """
import os, signal, subprocess, sys, threading

def kill_group():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)

server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, lambda *_: server.terminate())
threading.Thread(target=kill_group, daemon=True).start()
os._exit(server.wait())
"""


class HttpServer:
    """`python -m vllm.entrypoints.openai.api_server` on a free port of the loopback interface.

    A context manager: entering starts the server (it does not wait), leaving ends it and every
    process that it started.

    Args:
        model: folder of the model; served under the name `model`.
        arguments: further arguments of the server.
        folder: the server runs in it, and its output goes to `server.log` there.
        environment: more variables for the server.
    """

    def __init__(
        self,
        model: Path,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._environment = dict(environment or {})
        self._log_path = folder / "server.log"
        self._port = find_free_port()
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", "model"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--uvicorn-log-level", "warning"),
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_folder: str | None = None

    def __enter__(self) -> HttpServer:
        self.start()
        return self

    def start(self) -> None:
        """Start the server; `wait_until_healthy` waits for it."""
        # vLLM leaves its sockets behind. A path of a socket is short, one of a test is long.
        self._socket_folder = tempfile.mkdtemp(prefix="vllm-")
        inherited = dict(os.environ)
        inherited.pop(last_words.VARIABLE, None)  # the test itself may have configured an engine
        environment = inherited | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Bound to cores of its own choice it starves beside another server.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_RPC_BASE_PATH": self._socket_folder,
            **self._environment,
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _GUARD, *self._command],
                # `python -m` looks for packages in its working directory first.
                cwd=self._folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Root of the server's addresses."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def group_id(self) -> int:
        """Of the process group that all its processes are in."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the server's own process is alive."""
        return self._process is not None and self._process.poll() is None

    def is_healthy(self) -> bool:
        """Whether the server says that it and its engine are well."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30.0) as response:
                return bool(response.status == 200)
        except OSError:  # nobody listens, or the answer is an error
            return False

    def wait_until_healthy(self, timeout_s: float = 240.0) -> None:
        """Return when the server answers; fail with the end of its log if it does not."""
        self.wait_for(self.is_healthy, "the server to start", timeout_s)

    def wait_for(self, is_met: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Poll a condition; fail if the server dies or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while not is_met():
            assert self.is_running, f"waited for {what}: the server died\n{self.log_tail()}"
            assert time.monotonic() < deadline_s, (
                f"waited {timeout_s:.0f} s for {what}\n{self.log_tail()}"
            )
            time.sleep(0.1)

    def metrics(self) -> dict[str, float]:
        """What /metrics says now: each sample's values summed over its labels."""
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(self.metrics_text()):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def metrics_text(self) -> str:
        """What /metrics says now."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30.0) as response:
            text: str = response.read().decode()
        return text

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """POST; return the answer, and raise if it is an error."""
        with self.open(path, body) as response:
            text = response.read()
        return json.loads(text) if text else None

    def open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """POST; return the answer, to be read and closed, and raise if it is an error."""
        data = json.dumps(body or {}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=120.0)
        assert response.status == 200
        return response

    def log(self) -> str:
        """What the server has written so far."""
        return self._log_path.read_text(errors="replace")

    def log_tail(self) -> str:
        """The last lines of the log, for a failure message."""
        return "\n".join(("The end of its log:", *self.log().splitlines()[-LOG_TAIL_LINES:]))

    def process_ids(self) -> list[int]:
        """The server's processes, its workers included."""
        assert self._process is not None
        group = self._process.pid
        return [pid for pid in _all_process_ids() if _group_of(pid) == group]

    def kill(self) -> None:
        """SIGKILL to every process of the server at once; it may be started again."""
        process, self._process = self._process, None
        assert process is not None
        assert process.stdin is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()

    def terminate(self) -> None:
        """SIGTERM to the server's own process, as Kubernetes sends it; returns at once."""
        assert self._process is not None
        self._process.terminate()

    def wait_for_end(self, timeout_s: float = 120.0) -> None:
        """Return when the server's own process has ended; fail if it does not."""
        assert self._process is not None
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end\n{self.log_tail()}") from None

    def stop(self, timeout_s: float = 20.0) -> None:
        """End the server politely, then kill its group; a second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
        assert self._socket_folder is not None
        shutil.rmtree(self._socket_folder, ignore_errors=True)


def _all_process_ids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
