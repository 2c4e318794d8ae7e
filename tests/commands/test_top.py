"""`safe-offload top` over a server of HTTP that says what the connector's metrics say."""

import functools
import io
import os
import subprocess
import sys
import termios
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from rich.live import Live

from safe_offload.commands import top
from safe_offload.commands.cli import main
from safe_offload.commands.doctor.command import read_rest
from safe_offload.commands.doctor.findings import Severity
from safe_offload.commands.doctor.memory import check_hits
from safe_offload.commands.top import PREFIX, TopError, Watch, metrics_url, worth
from safe_offload.connector import SafeCPUOffloadConnector
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
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


def test_one_frame_answers_the_four_questions(server, capsys):
    server.prompt_tokens.inc(4000)
    for engine in (0, 1):
        server.observe(
            {
                Count.LOADED_TOKENS: 500,
                Count.SAVED_SECONDS: 5,
                Count.LOAD_BYTES: 3 << 20,
                Count.EVICTED_BLOCKS_HIT: 4,
                Count.EVICTED_AGE_SECONDS: 120,
                str(FAILED_LOADS[FailureReason.TIMED_OUT]): 2,
            },
            engine,
            {"version": "0.1.0", "memory": "pageable"},
            slots=1000,
            used_slots=250,
            capacity_bytes=1 << 30,
            estimated_hits_present=0.2,
            estimated_hits_double=0.28,
        )
    text = shown(server, capsys)
    for question in list(top.QUESTIONS)[:4]:
        assert question in text
    assert "tier" not in text
    assert "safe-offload 0.1.0" in text
    assert "prompt tokens from the host 25.0 %" in text
    assert "tokens from the host 1,000 0/s" in text
    assert "computing saved, at least 10 s" in text
    assert "a request waits for a load 90 ms" in text
    assert "state working" in text
    assert "load timed_out 4" in text
    assert "slots in use 500 of 2,000 25.0 %" in text
    assert "hits with double memory 1.4 times 28.0 %" in text
    assert "quadruple" not in text, "it is not known"
    assert "blocks evicted after a hit 8" in text
    assert "age of what is evicted 30 s" in text
    assert "host memory 2.00 GiB pageable" in text
    assert "bytes of loads 6.00 MiB" in text
    assert "a load copies 2 ms" in text


def test_tiers_have_rows_of_their_own(server, capsys):
    server.start_metrics(tiers=TIERS)
    near, far = TIER_SERIES[:2]
    for engine in (0, 1):  # which share the directories
        counts = {str(near.read_bytes): 3 << 20, str(near.misses["absent"]): 2}
        counts |= {str(far.written_bytes): 5 << 20, str(far.dropped_spills["full"]): 4}
        gauges = {str(near.stored_bytes): 256 << 20, str(near.capacity_bytes): 1 << 30}
        gauges |= {str(far.is_out["write"]): 1}
        server.metrics.observe(OffloadStats.of(counts, gauges, {}, None).data, engine)
    text = shown(server, capsys)
    assert "tier 1 working holds 256.00 MiB of 1.00 GiB 25.0 % read 6.00 MiB" in text
    assert "blocks missed 4 0/s absent 4" in text
    assert "tier 2 LEFT ALONE, not written: the log says why holds 0 bytes -" in text
    assert "written 10.00 MiB" in text
    assert "blocks not written 8 0/s full 8" in text


def test_tenants_have_rows_of_their_own(server, capsys, tmp_path):
    server.start_metrics(tenants=str(tmp_path))
    for engine in (0, 1):
        gauges = {of_tenant("used_bytes", "chat"): 3 << 20, of_tenant("used_bytes", "rest"): 0}
        gauges |= {of_tenant("guaranteed_bytes", "chat"): 2 << 20}
        counts = {of_tenant("hit_tokens", "chat"): 500, of_tenant("evicted_blocks", "rest"): 4}
        server.metrics.observe(OffloadStats.of(counts, gauges, {}, None).data, engine)
    text = shown(server, capsys)
    assert "chat 6.00 MiB, 4.00 MiB guaranteed hit tokens 1,000 0/s missed tokens 0 0/s" in text
    assert "rest 0 bytes, 0 bytes guaranteed" in text
    assert "evicted blocks 8" in text


def test_what_is_pinned_has_a_row(server, capsys):
    server.observe({}, slots=100, pins=3, pinned_slots=40)
    assert "slots pinned 40, 3 prompts 40" in shown(server, capsys)


def test_a_connector_that_has_given_up_is_said_to_be_so(server, capsys):
    server.observe({Count.CONTAINED_ERRORS: 1}, is_disabled=1)
    text = shown(server, capsys)
    assert "SWITCHED OFF" in text
    assert "errors contained 1" in text


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
    read = top.Reading.total

    def total(self: Any, name: str, **labels: str) -> float:
        asked.add(name)
        return read(self, name, **labels)

    monkeypatch.setattr(top.Reading, "total", total)
    server.start_metrics(tiers=TIERS)
    view = top.View(top.read(f"{server.url}/metrics"), None)
    view = top.View(view.now, view.now)
    for ask in top.QUESTIONS.values():
        ask(view)
    known = {name for name, _ in view.now.samples}
    assert {name if name == top.PROMPT_TOKENS else PREFIX + name for name in asked} <= known
    assert len(asked) > 20
    assert len(known) > len(COUNTERS) / 2 + len(GAUGES) + len(HISTOGRAMS) / 2


def test_rates_are_those_between_two_readings(server):
    watch = Watch(metrics_url(server.url))
    watch.read()
    server.observe({Count.LOADED_TOKENS: 700})
    server.prompt_tokens.inc(1400)
    watch.read()
    assert watch.last is not None
    assert watch.before is not None
    view = top.View(watch.last, watch.before)
    assert view.grown("loaded_tokens_total") == 700
    assert view.rate("loaded_tokens_total") == pytest.approx(
        700 / (watch.last.at_s - watch.before.at_s)
    )
    assert worth(view)[0] == ("prompt tokens from the host", "50.0 %", "50.0 %")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000", "http://host:8000/metrics"),
        ("http://host:8000/", "http://host:8000/metrics"),
        ("host:8000", "http://host:8000/metrics"),
        ("https://host/vllm/metrics", "https://host/vllm/metrics"),
    ],
)
def test_the_address_may_be_written_as_one_is_used_to(url, expected):
    assert metrics_url(url) == expected


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http:///metrics"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(TopError, match="Fix: write http://HOST:PORT"):
        metrics_url(url)


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("<html>hello</html>", 200, "does not answer with metrics"),
        ("up 1\n", 200, "has no metrics of vLLM"),
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
    assert "expected more than 0 seconds" in captured.err


def test_a_server_that_goes_away_and_comes_back(server):
    watch = Watch(metrics_url(server.url))
    server.observe({Count.LOADED_TOKENS: 700})
    watch.read()
    server.status = 503
    watch.read()
    assert "answers 503" in watch.problem
    assert "has not answered for 0 s" in _text_of(watch)
    assert watch.last is not None
    assert watch.last.total("loaded_tokens_total") == 700
    server.status = 200
    server.start_metrics()  # the process is another one: it counts from 0
    watch.read()
    assert not watch.problem
    assert watch.before is None, "no rate across a restart"
    watch.read()
    assert watch.before is not None


def _text_of(watch: Watch) -> str:
    from rich.console import Console

    console: Any = Console(width=160, file=io.StringIO())
    console.print(top.frame(watch))
    return str(console.file.getvalue())


def test_the_live_view_ends_when_the_user_interrupts(server, capsys, monkeypatch):
    intervals = []

    def sleep(seconds: float) -> None:
        intervals.append(seconds)
        if len(intervals) == 3:
            raise KeyboardInterrupt

    monkeypatch.setenv("FORCE_COLOR", "1")  # what `rich` takes for a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(top.time, "sleep", sleep)
    assert main(["top", server.url, "--interval", "7"]) == 0
    assert intervals == [7, 7, 7]
    assert "Is it worth it?" in capsys.readouterr().out


def test_an_interrupt_of_the_first_frame_leaves_the_terminal_as_it_was(server, capsys, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Live, "refresh", interrupt)
    assert main(["top", server.url]) == 0
    out = capsys.readouterr().out
    for on, off in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):  # screen, cursor
        assert 0 <= out.index(on) < out.index(off)


ON_ITS_TERMINAL = """
import fcntl, sys, termios
from safe_offload.commands.cli import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(main(sys.argv[1:]))
"""


# An interrupt that comes right before the wait for a key is seen when the wait is over.
@pytest.mark.parametrize(
    ("key", "interval_s"), [(b"q", "100000"), (b"Q", "100000"), (b"\x03", "1")]
)
def test_the_live_view_ends_on_a_key_and_leaves_the_terminal_as_it_was(server, key, interval_s):
    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    child = subprocess.Popen(
        [sys.executable, "-c", ON_ITS_TERMINAL, "top", server.url, "--interval", interval_s],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    )
    try:
        shown = b""
        while b"worth it?" not in shown:
            shown += os.read(ours, 65536)
        os.write(ours, b"x" + key)
        assert child.wait() == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        child.kill()
        child.wait()
        os.close(ours)
        os.close(theirs)


def test_doctor_says_what_a_running_server_would_hit_with_more_memory(server):
    server.observe({})
    (nothing,) = check_hits(server.url)
    assert "nothing is estimated" in nothing.found
    rates = {"half": 0.1, "present": 0.2, "double": 0.28, "quadruple": 0.3, "everything": 0.31}
    server.observe({}, **{f"estimated_hits_{size}": rate for size, rate in rates.items()})
    (found,) = check_hits(server.url)
    assert (found.id, found.severity) == ("memory.hits", Severity.INFO)
    assert found.found == (
        "of the blocks asked for, this host memory would hold 20%, "
        "half of it 10%, twice 28%, four times 30%, memory for everything 31%"
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
