"""Is a request ever answered wrongly, not at all, or late because of a server or the network?

Two engines in two processes share one Valkey server that fails in some way, at the start or in the
middle of their requests. vLLM's schedulers, our connector, tiers, server, sockets and the clock are
real; the model is a stand-in that takes the time it is told to take (fleet_engine.py). The turns of
conversations go to either engine, one by one on each, and each is held against computing it.

The network's troubles are made by a proxy (tests/network.py). A loss of 30 % is what TCP makes of
one: a time-out of 200 ms that doubles, for each segment of 64 KiB that is lost. Engines that do not
need the proxy are on the server's own port.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redis import Redis

from safe_offload.commands.bench.engine_process import EngineOptions, EngineProcess
from safe_offload.commands.bench.report import (
    Report,
    add_output_arguments,
    describe_machine,
    publish,
    table,
)
from tests.benchmarks.fleet_engine import (
    LONGEST,
    TOKENS_PER_S,
    Sample,
    close_engine,
    open_engine,
    run_engine,
    serve_all,
)
from tests.benchmarks.slow_tier import ALLOWED_S, ALLOWED_SHARE
from tests.network import Proxy, Weather
from tests.valkey_server import Certificates, Server

NUM_ENGINES = 2
NUM_REQUESTS = 1_000
SHORTEST = 100
TURN_TOKENS = (30, 400)
NUM_CONVERSATIONS = 30
"""At a time; one that is as long as prompts may be ends, and another begins."""
VOCABULARY = 50
SEED = 1
MIDDLE_S = 1.0
"""After half of the requests, so that the trouble comes while something is under way."""
START_TIMEOUT_S, ROW_TIMEOUT_S = 300.0, 1800.0
PASSWORD = "a word of the tests"
OTHER_PASSWORD = "another one"
TIMEOUT_S = 1.0
"""`timeout_s` of the tier: the default of 5 s would make the table five times as long."""
STARVED_S = 0.005
START, MIDDLE = "at start", "in the middle"


class Site:
    """A server, the way to it, and what engines are told of it.

    `folder`: for its files; `way`: how engines reach the server, see `Trouble`.
    """

    def __init__(self, folder: Path, way: str) -> None:
        self._stack = contextlib.ExitStack()
        self.server = self._stack.enter_context(Server(folder / "server"))
        with self.server.client() as client:
            client.config_set("requirepass", PASSWORD)
        password = folder / "password"
        password.write_text(PASSWORD)
        host, port, scheme = "127.0.0.1", self.server.port, "redis"
        self.tier: dict[str, Any] = {"password_file": str(password), "timeout_s": TIMEOUT_S}
        self._proxy: Proxy | None = None
        if way in (PROXY, TLS):
            fair = Weather()
            if way == TLS:
                right = Certificates(folder / "right")
                other = Certificates(folder / "other", "elsewhere.example")
                trusted = folder / "trusted"
                trusted.write_text(right.ca.read_text() + other.ca.read_text())
                self.tier["ca_file"] = str(trusted)
                self.other_certificate = str(other.cert), str(other.key)
                fair = Weather(certificate=(str(right.cert), str(right.key)))
                host, scheme = "localhost", "rediss"
            self._proxy = self._stack.enter_context(Proxy(("127.0.0.1", port), fair))
            port = self._proxy.port
        self.tier["url"] = f"{scheme}://{host}:{port}"
        self.tiers = [] if way == ALONE else [self.tier]

    @property
    def proxy(self) -> Proxy:
        """The way to the server, if it is not direct."""
        assert self._proxy is not None
        return self._proxy

    @contextlib.contextmanager
    def administrator(self) -> Iterator[Any]:
        """Yield a client with all rights."""
        with Redis(unix_socket_path=str(self.server.socket), password=PASSWORD) as client:
            yield client

    def close(self) -> None:
        self._stack.close()


def _fill(site: Site) -> None:
    with site.administrator() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", client.info("memory")["used_memory"])


def _change_password(site: Site) -> None:
    with site.administrator() as client:
        client.config_set("requirepass", OTHER_PASSWORD)
        client.execute_command("CLIENT", "KILL", "TYPE", "normal")


def _change_certificate(site: Site) -> None:
    site.proxy.become(Weather(certificate=site.other_certificate))
    site.proxy.cut()


def _become(weather: Weather) -> Callable[[Site], None]:
    return lambda site: site.proxy.become(weather)


DIRECT, PROXY, TLS, ALONE = "direct", "proxy", "TLS", "alone"


@dataclass(frozen=True, slots=True)
class Trouble:
    """What happens."""

    begin: Callable[[Site], None]  # makes it
    # `DIRECT` to the server, through the `PROXY`, or that with `TLS`; `ALONE` without it.
    way: str = DIRECT


TROUBLES: dict[str, Trouble] = {
    "no tier": Trouble(lambda site: None, ALONE),
    "no trouble": Trouble(lambda site: None),
    "server killed": Trouble(lambda site: site.server.kill()),
    "server stopped": Trouble(lambda site: site.server.stop()),
    "server full": Trouble(_fill),
    "wrong password": Trouble(_change_password),
    "TLS name mismatch": Trouble(_change_certificate, TLS),
    "30 % loss": Trouble(_become(Weather(loss=0.3)), PROXY),
    "200 ms latency": Trouble(_become(Weather(latency_s=0.2)), PROXY),
    "10 MB/s": Trouble(_become(Weather(bytes_per_s=10e6)), PROXY),
    "network stalls": Trouble(_become(Weather(is_stalled=True)), PROXY),
    "connections cut": Trouble(lambda site: site.proxy.cut(), PROXY),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What became of the requests of all engines."""

    trouble: str
    moment: str
    begun_s: float  # when the trouble had begun
    samples: tuple[list[Sample], ...]  # of each engine
    # Of each engine, when its tier was first left alone, for reading and writing.
    opened_s: tuple[dict[str, float], ...]
    log_lines: tuple[str, ...]  # about the tier, without repetitions

    @property
    def all_samples(self) -> list[Sample]:
        return [one for samples in self.samples for one in samples]

    @property
    def troubled(self) -> list[Sample]:
        """Requests that came when the trouble had begun."""
        return [one for one in self.all_samples if one.begin_s >= self.begun_s]

    @property
    def guarded(self) -> list[Sample]:
        """Of `troubled`, those after a breaker of their engine had opened.

        If none has, all but the first of a new engine, which knows neither itself nor its tier.
        """
        return [
            one
            for samples, opened in zip(self.samples, self.opened_s, strict=True)
            for one in samples[0 if opened else 1 :]
            if one.begin_s >= max(self.begun_s, min(opened.values(), default=0.0))
        ]

    @property
    def is_kept(self) -> bool:
        """Return whether all were answered, rightly, and none was late once a breaker was open."""
        return all(one.is_right for one in self.all_samples) and not _late(self.guarded)


def _late(samples: Sequence[Sample]) -> list[Sample]:
    return [one for one in samples if one.ratio > 1]


def make_prompts(number: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    conversations: list[list[int]] = [[] for _ in range(NUM_CONVERSATIONS)]
    prompts = []
    for _ in range(number):
        index = chance.randrange(NUM_CONVERSATIONS)
        length = chance.randint(*TURN_TOKENS) if conversations[index] else SHORTEST
        turn = [chance.randrange(VOCABULARY) for _ in range(length)]
        if len(conversations[index]) + length > LONGEST:
            conversations[index] = []
        conversations[index] = conversations[index] + turn
        prompts.append(conversations[index])
    return prompts


class Fleet:
    """Engines in processes of their own, which serve one row after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._logs = [folder / f"engine-{index}.log" for index in range(NUM_ENGINES)]
        self._engines = [
            self._stack.enter_context(
                EngineProcess(f"engine {index}", EngineOptions({}), log, run_engine)
            )
            for index, log in enumerate(self._logs)
        ]
        self._pool = self._stack.enter_context(ThreadPoolExecutor(NUM_ENGINES))
        for engine in self._engines:
            engine.receive(START_TIMEOUT_S)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, name: str, moment: str, prompts: Sequence[list[int]]) -> Row:
        """Serve all prompts, the trouble beginning before the first or in the middle."""
        trouble = TROUBLES[name]
        with tempfile.TemporaryDirectory(prefix="safe-offload-fleet-") as folder:
            site = Site(Path(folder), trouble.way)
            try:
                return self._run(site, name, moment, prompts)
            finally:
                site.close()

    def _run(self, site: Site, name: str, moment: str, prompts: Sequence[list[int]]) -> Row:
        begin = TROUBLES[name].begin
        heads = [log.stat().st_size for log in self._logs]
        if moment == START:
            begin(site)
        begun_s = max(self._all(open_engine, [site.tiers] * NUM_ENGINES))
        named = [(str(number), prompt) for number, prompt in enumerate(prompts)]
        half = len(named) // 2
        first = self._all(serve_all, [named[i:half:NUM_ENGINES] for i in range(NUM_ENGINES)])
        timer = threading.Timer(MIDDLE_S, begin, (site,))
        if moment == MIDDLE:
            timer.start()
        try:
            rest = [named[half + i :: NUM_ENGINES] for i in range(NUM_ENGINES)]
            second = self._all(serve_all, rest)
        finally:
            timer.cancel()
        if moment == MIDDLE:
            begun_s = min(one[0].begin_s for one in second) + MIDDLE_S
        opened_s = self._all(close_engine, [None] * NUM_ENGINES)
        samples = tuple(one + two for one, two in zip(first, second, strict=True))
        lines = self._lines(heads, re.sub(r"^.*://", "", site.tier["url"]))
        return Row(name, moment, begun_s, samples, tuple(opened_s), lines)

    def _all(self, function: Callable[[Any, Any], Any], questions: Sequence[Any]) -> list[Any]:
        """Call a function in each engine's process at once."""

        def call(engine: EngineProcess, question: Any) -> Any:
            return engine.call(function, question, ROW_TIMEOUT_S)

        return list(self._pool.map(call, self._engines, questions))

    def _lines(self, heads: Sequence[int], word: str) -> tuple[str, ...]:
        """Return the lines of the logs that name the server, without what is in front of them."""
        found: dict[str, None] = {}
        for log, head in zip(self._logs, heads, strict=True):
            with log.open("rb") as file:
                file.seek(head)
                text = file.read().decode(errors="replace")
            for line in text.splitlines():
                if word in line and ("WARNING" in line or "ERROR" in line):
                    found[line.partition("] ")[2]] = None
        return tuple(found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", nargs="+", choices=TROUBLES, default=list(TROUBLES), metavar="TROUBLE")
    add("--moments", nargs="+", choices=(START, MIDDLE), default=[START, MIDDLE], metavar="MOMENT")
    add("--requests", type=int, default=NUM_REQUESTS, help="of both engines (%(default)s)")
    add("--seed", type=int, default=SEED, help="draws the requests (%(default)s)")
    add_output_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run `python -m tests.benchmarks fleet`; return 1 if a promise was broken."""
    machine = describe_machine()
    prompts = make_prompts(arguments.requests, arguments.seed)
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="safe-offload-fleet-") as name,
        Fleet(Path(name)) as fleet,
    ):
        for trouble in arguments.rows:
            for moment in arguments.moments:
                rows.append(fleet.run(trouble, moment, prompts))
                print(*_row(rows[-1]), sep=" | ", flush=True)
    publish(make_report(rows, machine), arguments)
    return int(not all(row.is_kept for row in rows))


def make_report(rows: Sequence[Row], machine: dict[str, Any]) -> Report:
    heads = ["trouble", "when", "answered", "right", "hit", "late", "of", "late, guarded", "of"]
    heads += ["worst", "worst, guarded", "starved", "left alone after (read, write)", "log lines"]
    said = [f"{row.trouble}, {row.moment}: {line}" for row in rows for line in row.log_lines[:3]]
    return Report(
        method=(
            f"{NUM_ENGINES} engines, one Valkey server, turns of {NUM_CONVERSATIONS} conversations "
            f"of {SHORTEST} to {LONGEST} tokens, computed at {TOKENS_PER_S:,} tokens/s. Late: a "
            f"time to first token beyond {ALLOWED_SHARE} times computing and "
            f"{1000 * ALLOWED_S:.0f} ms,\nof the requests after the trouble began; guarded: of "
            "those after a breaker of their engine had\nfirst opened, or of all but the first of "
            "an engine where none opens. Worst: in terms of what is allowed. Time in which an "
            "engine's threads were ready\nand had no core is not counted; starved: requests with "
            f"more than {1000 * STARVED_S:.0f} ms of it."
        ),
        sections=[table([heads, *map(_row, rows)], num_left=2), "\n".join(said)],
        figures={
            "rows": [
                {
                    "trouble": row.trouble,
                    "moment": row.moment,
                    "begun_s": row.begun_s,
                    "opened_s": list(row.opened_s),
                    "log_lines": list(row.log_lines),
                    "samples": [[asdict(one) for one in samples] for samples in row.samples],
                }
                for row in rows
            ]
        },
        options={},
        machine=machine,
    )


def _row(row: Row) -> list[str]:
    everything, troubled, guarded = row.all_samples, row.troubled, row.guarded
    return [
        row.trouble,
        row.moment,
        f"{sum(not one.problem for one in everything)} of {len(everything)}",
        str(sum(one.is_right for one in everything)),
        str(sum(one.num_hit > 0 for one in troubled)),
        str(len(_late(troubled))),
        str(len(troubled)),
        str(len(_late(guarded))),
        str(len(guarded)),
        f"{max((one.ratio for one in troubled), default=0.0):.2f}",
        f"{max((one.ratio for one in guarded), default=0.0):.2f}",
        str(sum(one.starved_s > STARVED_S for one in troubled)),
        ", ".join(_opened_after(row, what) for what in ("read", "write")),
        str(len(row.log_lines)),
    ]


def _opened_after(row: Row, what: str) -> str:
    """Return the seconds until the last engine's breaker was open."""
    found = [opened[what] - row.begun_s for opened in row.opened_s if what in opened]
    return f"{max(found):.1f} s" if found else "-"
