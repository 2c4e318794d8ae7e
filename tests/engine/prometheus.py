"""A real Prometheus that scrapes a server once a second."""

import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.engine.http_server import HANG_S, hold_port
from tests.programs import find_program

EXAMPLES = Path(__file__).parents[2] / "examples" / "observability"


class Prometheus:
    """What a running Prometheus answers."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of its API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30.0) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> list[float]:
        """Return the values of an expression now; those that are not numbers are left out."""
        values = (
            float(series["value"][1]) for series in self.get("query", query=expression)["result"]
        )
        return [value for value in values if not math.isnan(value)]

    def names(self) -> set[str]:
        """Return the names of all series."""
        return set(self.get("label/__name__/values"))

    def wait_for(
        self, is_met: Callable[[], bool], what: str, found: Callable[[], object] | None = None
    ) -> None:
        """Poll a condition; Prometheus itself may not answer yet."""
        deadline_s = time.monotonic() + HANG_S
        while True:
            with suppress(OSError):
                if is_met():
                    return
            assert time.monotonic() < deadline_s, (what, found and found())
            time.sleep(0.2)


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[Prometheus]:
    """Run the example's configuration against a server, with an interval of a second."""
    program = find_program("prometheus")
    assert program is not None
    text = (EXAMPLES / "prometheus.yml").read_text()
    text, num_targets = re.subn("localhost:8000", target, text)
    text, num_intervals = re.subn(r"(scrape|evaluation)_interval: \w+", r"\1_interval: 1s", text)
    assert (num_targets, num_intervals) == (1, 2)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(EXAMPLES / "alerts.yaml", folder)
    holder, port = hold_port()
    address = f"127.0.0.1:{port}"
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(HANG_S)
        holder.close()


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Yield every query of the dashboard, with the title of its panel."""
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def as_asked(expression: str, interval: str = "5m") -> str:
    """Return a query of the dashboard as Grafana would ask it, for everything there is."""
    expression = re.sub(r"\$(__rate_interval|__range)", interval, expression)
    return re.sub(r'"\$\w+"', '".*"', expression)


def without_comparisons(expression: str) -> str:
    """Return an alert's expression as it would be if everything were above its limits."""
    return re.sub(r"\s*(?:==|!=|[<>]=?)\s*[\d.]+", "", expression)
