"""`safe-offload top` over a server of HTTP that says what the connector's metrics say."""

import contextlib
import functools
import io
import os
import select
import socket
import subprocess
import sys
import termios
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live

from safe_offload.commands import top
from safe_offload.commands.cli import main
from safe_offload.commands.doctor.command import read_rest
from safe_offload.commands.doctor.memory import check_hits
from safe_offload.commands.top import PREFIX, Figures, TopError, metrics_url, read, worth
from safe_offload.connector import SafeCPUOffloadConnector
from safe_offload.findings import Severity
from safe_offload.observe.counters import (
    COUNTERS,
    FAILED_LOADS,
    HISTOGRAMS,
    LOAD_S,
    LOAD_WAIT_S,
    TIER_SERIES,
    Count,
    of_tenant,
)
from safe_offload.observe.metrics import GAUGES, OffloadPromMetrics, OffloadStats
from safe_offload.protocol import FailureReason
from tests.simulator.vllm_setup import EngineShape, make_config


class Server:
    """Real metrics of the connector, of two engines, and a server that shows them.

    `status`: of every answer; `text`: answered instead of the metrics, if not None.
    """

    def __init__(self) -> None:
        self.status, self.text = 200, None
        self.start_metrics()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.paths.append(self.path)
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(outer.body())

            def log_message(self, *_: Any) -> None:
                pass

        self.paths: list[str] = []
        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def start_metrics(self, **extra: Any) -> None:
        self._registry = CollectorRegistry()
        prompt = Counter(top.PROMPT_TOKENS, "Prompt tokens.", ["engine"], registry=self._registry)
        self.prompt_tokens = prompt.labels("0")
        kinds = {
            kind: functools.partial(kind, registry=self._registry)
            for kind in (Counter, Gauge, Histogram)
        }
        values: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
        self.metrics: OffloadPromMetrics = SafeCPUOffloadConnector.build_prom_metrics(
            make_config(EngineShape(extra=extra)), kinds, ["model_name", "engine"], values
        )

    def observe(
        self, counts: dict[str, int], engine: int = 0, info: Any = None, **gauges: float
    ) -> None:
        observed = {str(LOAD_S): {5: (2, 0.004)}, str(LOAD_WAIT_S): {9: (1, 0.09)}}
        stats = OffloadStats.of(counts, gauges, observed, info)
        self.metrics.observe(stats.data, engine)

    def body(self) -> bytes:
        return generate_latest(self._registry) if self.text is None else self.text.encode()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


TIERS = [{"url": "file:///mnt/near", "capacity": "1GiB"}, {"url": "file:///mnt/far"}]


@pytest.fixture
def server():
    server = Server()
    yield server
    server.stop()


def shown(server: Server, capsys: pytest.CaptureFixture[str]) -> str:
    """What one frame shows, its words separated by single blanks."""
    assert main(["top", server.url, "--once", "--interval", "0.01"]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture(autouse=True)
def one_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")


NEAR, FAR = TIER_SERIES[:2]
FRAMES: dict[str, tuple[dict[str, Any], dict[Any, int], dict[str, float], list[str]]] = {
    "the four questions": (
        {},
        {
            Count.LOADED_TOKENS: 500,
            Count.SAVED_SECONDS: 5,
            Count.LOAD_BYTES: 3 << 20,
            Count.EVICTED_BLOCKS_HIT: 4,
            Count.EVICTED_AGE_SECONDS: 120,
            str(FAILED_LOADS[FailureReason.TIMED_OUT]): 2,
        },
        {
            "slots": 1000,
            "used_slots": 250,
            "capacity_bytes": 1 << 30,
            "estimated_hits_present": 0.2,
            "estimated_hits_double": 0.28,
        },
        [
            *("Is it worth it?", "Is it healthy?", "Is it large enough?", "What does it cost?"),
            *("safe-offload 0.1.0", "prompt tokens from host 25.0 %", "state: working"),
            *("tokens from the host 1,000 0/s", "time saved, at least 10 s", "load timed_out 4"),
            *("mean wait for a load 90 ms", "slots in use 500 of 2,000 25.0 %"),
            *("hits, memory doubled 1.4 times 28.0 %", "evicted after a hit 8"),
            *("age of evicted blocks 30 s", "host memory 2.00 GiB pageable"),
            *("bytes of loads 6.00 MiB", "mean load time 2 ms"),
            *("!times four", "!tier", "!borrowed", "!pinned", "!quota"),
        ],
    ),
    "pins": (
        {},
        {},
        {"slots": 200, "pins": 3, "pinned_slots": 40},
        ["slots pinned by 6 prompts 80 of 400 20.0 %"],
    ),
    "a connector that gave up": (
        {},
        {Count.CONTAINED_ERRORS: 1},
        {"is_disabled": 1},
        ["SWITCHED OFF", "errors contained 2"],
    ),
    "tiers that both engines share": (
        {"tiers": TIERS},
        {
            str(NEAR.read_bytes): 3 << 20,
            str(NEAR.misses["absent"]): 2,
            str(FAR.written_bytes): 5 << 20,
            str(FAR.dropped_spills["full"]): 4,
        },
        {
            str(NEAR.stored_bytes): 256 << 20,
            str(NEAR.capacity_bytes): 1 << 30,
            str(FAR.is_out["write"]): 1,
        },
        [
            "tier 1: working holds 256.00 MiB of 1.00 GiB 25.0 % read 6.00 MiB",
            "blocks missed 4 0/s absent 4",
            "tier 2: CIRCUIT OPEN, not written holds unknown read 0 bytes",
            "written 10.00 MiB",
            "blocks not written 8 0/s full 8",
        ],
    ),
    "tenants": (
        {"tenants": "/none/tenants.json"},
        {of_tenant("hit_tokens", "chat"): 500, of_tenant("evicted_blocks", "rest"): 4},
        {
            of_tenant("used_bytes", "chat"): 3 << 20,
            of_tenant("used_bytes", "rest"): 0,
            of_tenant("guaranteed_bytes", "chat"): 2 << 20,
        },
        [
            "chat 6.00 MiB quota 4.00 MiB hit tokens 1,000 0/s missed tokens 0 0/s",
            "rest 0 bytes quota 0 bytes",
            "evicted blocks 8",
        ],
    ),
    "a pool that both engines share": (
        {},
        {Count.BORROWED_BLOCKS: 7, Count.LOST_BLOCKS: 2},
        {
            "pool_engines": 3,
            "slots": 1000,
            "used_slots": 600,
            "own_slots": 300,
            "capacity_bytes": 1 << 30,
        },
        [
            *("engines sharing it 3", "slots of this server 600 of 1,000 60.0 %"),
            *("blocks borrowed 14 0/s blocks lost 4 0/s", "slots in use 600 of 1,000 60.0 %"),
            "host memory 1.00 GiB",
        ],
    ),
}


@pytest.mark.parametrize("what", FRAMES)
def test_one_frame_shows(server, capsys, what):
    extra, counts, gauges, expected = FRAMES[what]
    server.start_metrics(**extra)
    server.prompt_tokens.inc(4000)
    for engine in (0, 1):
        server.observe(counts, engine, {"version": "0.1.0", "memory": "pageable"}, **gauges)
    text = shown(server, capsys)
    for words in expected:
        assert (words.removeprefix("!") in text) != words.startswith("!"), words


def test_what_a_server_says_is_shown_escaped_and_not_as_markup(server, capsys):
    hostile = rb"\x1b]0;owned\x07[red]x[/blue]".decode("unicode_escape") * 100
    server.text = (
        f'vllm:safe_offload_tier_stored_bytes{{tier="{hostile}"}} 1\n'
        f'vllm:safe_offload_info{{version="{hostile}"}} 1\n'
    )
    assert main(["top", server.url, "--once", "--interval", "0.01"]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    assert r"\x1b" in out
    assert "[red]x" in out
    assert out.count("owned") < 30
    server.text = f"{hostile} {hostile}\n"
    assert main(["top", server.url, "--once"]) == 1
    assert capsys.readouterr().err.removesuffix("\n").isprintable()


def test_no_secret_in_the_address_is_shown(server, capsys):
    secret = "hunter2"
    server.observe({})
    address = f"{server.url}/metrics?token={secret}"
    assert main(["top", address, "--once", "--interval", "0.01"]) == 0
    server.stop()
    assert main(["top", address, "--once"]) == 1
    assert main(["top", f"http://me:{secret}@127.0.0.1:1", "--once"]) == 1
    assert main(["top", f"ftp://me:{secret}@127.0.0.1", "--once"]) == 1
    assert secret not in "".join(capsys.readouterr())


def test_every_metric_that_is_shown_exists(server, monkeypatch):
    asked: set[str] = set()
    values = top.Reading.values

    def remember(self: Any, name: str, **labels: str) -> list[float]:
        asked.add(name if name == top.PROMPT_TOKENS else PREFIX + name)
        return values(self, name, **labels)

    monkeypatch.setattr(top.Reading, "values", remember)
    server.start_metrics(tiers=TIERS)
    now = read(f"{server.url}/metrics")
    for section in top.SECTIONS:
        list(section(Figures(now, now)))
    known = {name for name, *_ in now.samples}
    assert asked <= known
    assert len(asked) > 20
    assert len(known) > len(COUNTERS) / 2 + len(GAUGES) + len(HISTOGRAMS) / 2


def test_rates_are_those_between_two_readings_of_one_process(server):
    before = read(f"{server.url}/metrics")
    server.observe({Count.LOADED_TOKENS: 700})
    server.prompt_tokens.inc(1400)
    now = read(f"{server.url}/metrics")
    figures = Figures(now, before)
    assert figures.growth("loaded_tokens_total") == 700
    share, tokens, *_ = worth(figures)
    assert share == ("prompt tokens from host", "50.0 %", "50.0 %")
    assert tokens[2] == f"{700 / (now.at_s - before.at_s):,.0f}/s"
    server.start_metrics()  # the process is another one: it counts from 0
    restarted = Figures(read(f"{server.url}/metrics"), now)
    assert [*worth(restarted)][:2] == [
        ("prompt tokens from host", "-", "-"),
        ("tokens from the host", "0", "-"),
    ]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000/", "http://host:8000/metrics"),
        ("host:8000", "http://host:8000/metrics"),
        ("https://host/vllm/metrics", "https://host/vllm/metrics"),
        *(("ftp://host", None), ("http://", None), ("http:///metrics", None)),
    ],
)
def test_the_address_may_be_written_as_one_is_used_to(url, expected):
    refused = pytest.raises(TopError, match="Fix: write http://HOST:PORT")
    with contextlib.nullcontext() if expected else refused:
        assert metrics_url(url) == expected


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("<html>hello</html>", 200, "does not answer with metrics"),
        ("up 1\n", 200, "has no vLLM metrics"),
        ("vllm:num_requests_running 0\n", 200, "a vLLM server without SafeCPUOffloadConnector"),
        (None, 404, "answers 404 Not Found. Fix: "),
        (None, None, "Connection refused. Fix: check host and port"),
    ],
)
def test_a_server_without_our_metrics(server, capsys, text, status, message):
    server.text, server.status = text, status
    if status is None:
        server.stop()
    assert main(["top", server.url, "--once"]) == 1
    assert main(["top", server.url, "--interval", "0"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "expected more than 0 and at most" in captured.err


@pytest.mark.parametrize(
    ("limit", "value", "pause_s", "message"),
    [
        ("RESPONSE_BYTES_MAX", 1 << 20, 0.0, r"answers with more than 1\.00 MiB\. Fix: "),
        ("RESPONSE_S", 0.5, 0.02, r"no whole answer within 0\.5 s\. Fix: "),
    ],
)
def test_an_answer_that_never_ends_is_given_up(monkeypatch, limit, value, pause_s, message):
    """By its length; or by a time in which no single piece is late."""
    monkeypatch.setattr(top, limit, value)
    sent: list[int] = []

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError), listening.accept()[0] as client:
            client.recv(4096)
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                sent.append(client.send(b"a" * 4096))
                time.sleep(pause_s)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        with pytest.raises(TopError, match=message):
            read(f"http://127.0.0.1:{listening.getsockname()[1]}/metrics")
        thread.join()
    assert sum(sent) < 64 << 20, "more is under way than is read"


# ---- terminals of all sizes -------------------------------------------------------------------


def fill(server: Server, tmp_path: Path) -> None:
    """All that there may be, with large numbers."""
    server.start_metrics(tiers=TIERS, tenants=str(tmp_path / "tenants.json"))
    named = dict.fromkeys(COUNTERS, 10**9 + 7)
    gauges: dict[str, float] = dict.fromkeys(GAUGES, 1234567.0)
    for tier in TIER_SERIES[:2]:
        named |= dict.fromkeys(tier.counters, 10**9)
    gauges |= {str(TIER_SERIES[0].stored_bytes): 987 << 30}
    gauges |= {str(TIER_SERIES[0].capacity_bytes): 1 << 40}
    gauges |= {str(TIER_SERIES[1].is_out[name]): 1 for name in ("read", "write")}
    for label in ("chat-of-the-engineering-department-in-the-north", "批处理", "rest"):
        gauges |= {of_tenant("used_bytes", label): 3 << 30}
    counts = {str(name): number for name, number in named.items()}
    server.observe(counts, info={"version": "0.1.0", "memory": "being page-locked"}, **gauges)


@pytest.mark.parametrize("width", [90, 200, 60, 30])
def test_no_figure_is_cut_off(server, tmp_path, width):
    fill(server, tmp_path)
    now = read(f"{server.url}/metrics")
    console = Console(width=width, file=io.StringIO(), markup=False, highlight=False)
    console.print(top.frame("http://host", now, now, width))
    text = console.file.getvalue()
    assert "…" not in text
    assert all(cell_len(line.rstrip()) <= width for line in text.splitlines())
    if width == 90:
        lines = [" ".join(line.split()) for line in text.splitlines()]
        for section in top.SECTIONS:
            assert section.__doc__ in lines
            for row in section(Figures(now, now)):
                assert " ".join(" ".join(row).split()) in lines


def test_an_interrupt_of_the_first_frame_leaves_the_terminal_as_it_was(server, capsys, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("FORCE_COLOR", "1")  # `rich` takes it for a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Live, "refresh", interrupt)
    assert main(["top", server.url]) == 0
    out = capsys.readouterr().out
    for on, off in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):  # screen, cursor
        assert 0 <= out.index(on) < out.index(off)


def test_a_server_that_goes_away_is_reported_beside_the_last_figures(server):
    server.observe({Count.LOADED_TOKENS: 700})
    with on_terminal(server, 120, 24, "0.2") as (ours, _, child):
        read_until(ours, "700", "right column: now")
        server.status = 503
        read_until(ours, "NO ANSWER", "answers 503", "700")
        server.status = 200
        read_until(ours, "right column: now")
        os.write(ours, b"q")
        assert end_of(child, ours) == 0


ON_ITS_TERMINAL = """
import fcntl, sys, termios
from safe_offload.commands.cli import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(main(sys.argv[1:]))
"""


@contextlib.contextmanager
def on_terminal(server: Server, width: int, height: int, interval_s: str) -> Iterator[Any]:
    """Run the command on a terminal; yield both ends of it, and the process."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (height, width))
    child = subprocess.Popen(
        [sys.executable, "-c", ON_ITS_TERMINAL, "top", server.url, "--interval", interval_s],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        | {"TERM": "xterm"},
    )
    try:
        yield ours, theirs, child
    finally:
        child.kill()
        child.wait()
        os.close(ours)
        os.close(theirs)


def read_until(terminal: int, *words: str) -> str:
    """Return what is written until all words have come."""
    text = b""
    while not all(word.encode() in text for word in words):
        text += os.read(terminal, 65536)
    return text.decode(errors="replace")


def end_of(child: subprocess.Popen[bytes], terminal: int) -> int:
    """Return its status; whoever writes to a terminal that nobody reads waits for ever."""
    while (status := child.poll()) is None:
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 65536)
    return status


# An interrupt that comes right before the wait for a key is seen when the wait is over.
@pytest.mark.parametrize(("key", "interval_s"), [(b"q", "86400"), (b"Q", "86400"), (b"\x03", "1")])
def test_keys_scroll_and_end_it_and_the_terminal_is_as_it_was(server, tmp_path, key, interval_s):
    fill(server, tmp_path)
    with on_terminal(server, 60, 24, interval_s) as (ours, theirs, child):
        before = termios.tcgetattr(theirs)
        text = read_until(ours, "0 lines above")
        assert "mean wait for tiers" not in text
        for keys, expected in (
            (b"j", "1 lines above"),
            (b"\x1b[B\x1b[Bjk", "3 lines above"),
            (b"\x1b[A\x1b[6~", "24 lines above"),
            (b"  b", "46 lines above"),
            (b"\x1b[5~", "24 lines above"),
            (b"G", " 0 below"),
            (b"\x1b[Fk", " 1 below"),
            (b"gk\x1b[5~x\x1b[99;5u", "0 lines above"),
        ):
            os.write(ours, keys)
            read_until(ours, expected)
        termios.tcsetwinsize(theirs, (500, 60))
        read_until(ours, "Is it worth it?", "mean wait for tiers", "0 lines above, 0 below")
        os.write(ours, b"x" + key)
        assert end_of(child, ours) == 0
        assert termios.tcgetattr(theirs) == before


def test_doctor_says_what_a_running_server_would_hit_with_more_memory(server):
    server.observe({})
    (nothing,) = check_hits(server.url)
    assert "the estimated hit rate is 0" in nothing.found
    rates = {"half": 0.1, "present": 0.2, "double": 0.28, "quadruple": 0.3, "everything": 0.31}
    server.observe({}, **{f"estimated_hits_{size}": rate for size, rate in rates.items()})
    (found,) = check_hits(server.url)
    assert (found.id, found.severity) == ("memory.hits", Severity.INFO)
    assert found.found == (
        "estimated block hit rate with this host memory 20%, "
        "half of it 10%, twice 28%, four times 30%, unlimited memory 31%"
    )
    server.status = 404
    (problem,) = check_hits(server.url)
    assert problem.severity is Severity.ERROR
    assert "answers 404" in problem.found
    assert problem.fix


def test_doctor_reads_the_address_among_vllms_arguments():
    arguments = Namespace(rest=["serve", "m", "--url", "http://a:1"], json=False, url="")
    assert read_rest(arguments) == ["m"]
    assert arguments.url == "http://a:1"


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e308", "-1e308", "9" * 400])
def test_numbers_that_are_none_are_shown_as_nothing(server, capsys, value):
    """Whatever answers there."""
    everything = (line.rpartition(" ") for line in server.body().decode().splitlines())
    server.text = "".join(
        f"{name} {number}\n" if name.startswith("#") else f"{name} {value}\n"
        for name, _, number in everything
    )
    text = shown(server, capsys)
    assert not {"nan", "inf"} & {*text.lower().replace("(", " ").split()}
