"""A vLLM API server for a test, in a process group that ends with the test, however it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from safe_offload.start.checks import CHECKED
from tests.fresh_process import ENVIRONMENT, start, start_engine
from tests.stopping import go_on, stop

LOG_TAIL_LINES = 60
HANG_S = 600.0
"""No wait of a busy machine takes so long."""
BLOCK_SIZE = 32
PREFIX = "vllm:safe_offload_"
PYTHON_ONLY = ("--uvicorn-log-level", "warning", "--skip-tokenizer-init")
RUST = "VLLM_USE_RUST_FRONTEND"
SERVE = """
import sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from safe_offload.compat.versions import make_serve_parser
ServeSubcommand.cmd(make_serve_parser().parse_args(sys.argv[1:]))
"""
"""What `vllm serve` does, which does not start without the package vllm itself."""


class HttpServer:
    """vLLM's API server on a free port of the loopback interface.

    A context manager: entering starts the server (it does not wait), leaving ends it and every
    process that it started. Its processes are forks of one that has imported vLLM. `config`: its
    `kv_transfer_config`; None for a server without connector; `is_command`: run `python -m
    vllm.entrypoints.openai.api_server`, as operators do; `rust`: program of vLLM's Rust frontend,
    which serves then in the place of Python.
    """

    def __init__(
        self,
        model: Path,  # folder of the model; served under the name `model`
        folder: Path,  # the server runs in it, and its output goes to `server.log` there
        *,
        num_blocks: int = 100,  # of the GPU's pool
        config: Mapping[str, Any] | None = None,
        max_model_len: int = 1024,
        max_num_seqs: int = 4,
        arguments: Sequence[str] = (),  # further arguments of the server
        environment: Mapping[str, str] | None = None,  # more variables for the server
        is_command: bool = False,
        rust: str | None = None,
    ) -> None:
        self._folder = folder
        self._environment = dict(environment or {})
        if rust is not None:
            is_command = True
            self._environment |= {RUST: "1", "VLLM_RUST_FRONTEND_PATH": rust}
        self._log_path = folder / "server.log"
        self._port_holder, self._port = hold_port()
        self._run, self._start = (_run_command, start) if is_command else (_run_fork, start_engine)
        self._arguments = [
            *("--model", str(model), "--served-model-name", "model"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *(PYTHON_ONLY if rust is None else ()),
            *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE)),
            *("--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)),
            *("--num-gpu-blocks-override", str(num_blocks)),
            *arguments,
        ]
        if config is not None:
            self._arguments += ["--kv-transfer-config", json.dumps(config)]
        self._process: Any = None
        # vLLM leaves its sockets behind. A path of a socket is short, one of a test is long.
        self._socket_folder = tempfile.mkdtemp(prefix="vllm-")

    def __enter__(self) -> HttpServer:
        self.start()
        return self

    def start(self) -> None:
        """Start the server; `wait_until_healthy` waits for it."""
        inherited = dict(os.environ)
        inherited.pop(CHECKED, None)  # the test itself may have configured an engine
        rpc = {"VLLM_RPC_BASE_PATH": self._socket_folder}
        for folder in (self._folder, Path(self._socket_folder)):
            folder.mkdir(parents=True, exist_ok=True)
        self._process = self._start(
            self._run,
            self._arguments,
            self._folder,
            log=self._log_path,
            environment={**inherited, **ENVIRONMENT, **rpc, **self._environment},
        )

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._port_holder.close()
        shutil.rmtree(self._socket_folder, ignore_errors=True)

    @property
    def url(self) -> str:
        """Root of the server's addresses."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def group_id(self) -> int:
        """Of the process group that all its processes are in."""
        return int(self._process.pid)

    @property
    def is_running(self) -> bool:
        """Whether the server's own process is alive."""
        return self._process is not None and self._process.exitcode is None

    def is_healthy(self) -> bool:
        """Whether the server says that it and its engine are well."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30.0) as response:
                return bool(response.status == 200)
        except OSError:  # it does not listen, or the answer is an error
            return False

    def wait_until_healthy(self) -> None:
        """Return when the server answers; fail with the end of its log if it does not."""
        self.wait_for(self.is_healthy, "the server to start")

    def wait_for(self, is_met: Callable[[], object], what: str) -> None:
        """Poll a condition; fail if the server dies or hangs."""
        deadline_s = time.monotonic() + HANG_S
        while not is_met():
            assert self.is_running, f"waited for {what}: the server died\n{self.log_tail()}"
            assert time.monotonic() < deadline_s, f"still no sign of {what}\n{self.log_tail()}"
            time.sleep(0.05)

    def wait_until_drained(self) -> None:
        """Wait until the engine has no request, or fail: then it lost one."""
        names = [f"vllm:num_requests_{name}" for name in ("running", "waiting")]

        def is_drained() -> bool:
            metrics = self.metrics()
            return not any(metrics[name] for name in names)

        self.wait_for(is_drained, "the end of all requests")

    def settle(self) -> None:
        """Wait until nothing is in flight, and the metrics say so."""
        names = ("stores_in_flight", "loads_in_flight")
        self.wait_for(lambda: not any(map(self.count, names)), "the end of all transfers")

    def metrics(self) -> dict[str, float]:
        """What /metrics says now: each sample's values summed over its labels."""
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(self.metrics_text()):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def metrics_text(self) -> str:
        """What /metrics says now."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=HANG_S) as response:
            text: str = response.read().decode()
        return text

    def count(self, name: str) -> float:
        """A counter or gauge of the connector, summed over its labels; 0 if there is none yet."""
        metrics = self.metrics()
        return metrics.get(f"{PREFIX}{name}_total", 0.0) or metrics.get(f"{PREFIX}{name}", 0.0)

    def ask(self, prompt: Sequence[int], num_tokens: int = 4, **more: Any) -> list[int]:
        """Return the greedy tokens that a prompt is answered with."""
        body = make_body(prompt, num_tokens) | more
        tokens: list[int] = self.post("/v1/completions", body)["choices"][0]["token_ids"]
        return tokens

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST; return the answer, and raise if it is an error."""
        with self.open(path, body) as response:
            text = response.read()
        return json.loads(text) if text else None

    def open(self, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        """POST; return the answer, to be read and closed, and raise if it is an error."""
        data = json.dumps(body or {}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=HANG_S)
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
        found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in found if _group_of(pid) == self.group_id]

    def kill(self) -> None:
        """SIGKILL to every process of the server at once; it may be started again."""
        os.killpg(self.group_id, signal.SIGKILL)
        self._process.join()
        self._process = None

    def pause(self) -> None:
        """SIGSTOP to every process of the server; returns when all have stopped."""
        stop(*self.process_ids())

    def resume(self) -> None:
        """Let a paused server go on."""
        go_on(*self.process_ids())

    def terminate(self) -> None:
        """SIGTERM to the server's own process, as Kubernetes sends it; returns at once."""
        self._process.terminate()

    def wait_for_end(self) -> None:
        """Return when the server's own process has ended; fail if it does not."""
        self._process.join(HANG_S)
        assert not self.is_running, f"the server did not end\n{self.log_tail()}"

    def stop(self, timeout_s: float = 20.0) -> None:
        """End the server politely, then kill its group; a second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        process.join(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def make_body(prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """Return a greedy request for exactly this many tokens, in token ids."""
    return {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }


def find_free_port() -> int:
    """Return a port that was free a moment ago."""
    holder, port = hold_port()
    holder.close()
    return port


def hold_port() -> tuple[socket.socket, int]:
    """Return a port that no other socket is given while this one is open; vLLM may bind it, too."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder, holder.getsockname()[1]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


# ---- in the server's own process, which leads the group ------------------------------------------


def _run_fork(arguments: list[str], folder: Path) -> None:
    _end_with_the_test()
    os.chdir(folder)
    sys.argv[1:] = arguments
    if "COPY_FAULTS" in os.environ:
        from tests.engine.faulty import break_copies

        break_copies(json.loads(os.environ["COPY_FAULTS"]))
    from vllm.entrypoints.launchers.api_server.entry import main

    main()


def _run_command(arguments: list[str], folder: Path) -> None:
    _end_with_the_test()
    # `python -m` looks for packages in its working directory first.
    module = ["-c", SERVE] if RUST in os.environ else ["-m", "vllm.entrypoints.openai.api_server"]
    command = [sys.executable, *module, *arguments]
    server = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    os._exit(server.wait())


def _end_with_the_test() -> None:
    """Let the whole group be killed when the test's process ends."""
    test = multiprocessing.parent_process()
    assert test is not None

    def wait_and_kill() -> None:
        multiprocessing.connection.wait([test.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait_and_kill, daemon=True).start()
