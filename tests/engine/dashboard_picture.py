"""Draw the panels of the dashboard from what a real Prometheus has scraped of a real server.

    python -m tests.engine.dashboard_picture docs/operate/dashboard.png

It serves a tiny model on the CPU for a few minutes: users come back with longer prompts, and the
host pool, with a tier below it, is smaller than what they have. The figures are those of that toy,
not of a GPU.
"""

import argparse
import json
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from examples.tiny_models import write_tiny_model
from tests.engine.engines import connector
from tests.engine.http_server import HttpServer
from tests.engine.prometheus import EXAMPLES, Prometheus, as_asked, prometheus
from tests.engine.test_observability import SERVER as OBSERVED

SERVER = OBSERVED | {"max_model_len": 2048, "num_blocks": 200}
NUM_SLOTS, TIER_CAPACITY = 600, "64MiB"
NUM_USERS, NUM_FIRST_TOKENS, NUM_TURN_TOKENS, NUM_TURNS = 16, 640, 160, 7
INTERVAL_S = 20
"""Rates are over this many seconds."""
UNIT_IN = 0.21
"""Inches of a unit of Grafana's grid, upwards."""


def serve(server: HttpServer, duration_s: float) -> None:
    """Serve users whose prompts grow with each turn, and now and then a new one in the place."""
    rng = random.Random(1)
    users = [_tokens(rng, NUM_FIRST_TOKENS) for _ in range(NUM_USERS)]
    begin_s, has_reset = time.monotonic(), False

    def turn(index: int) -> None:
        server.ask(users[index], 8)
        users[index] = users[index] + _tokens(rng, NUM_TURN_TOKENS)
        if len(users[index]) > NUM_FIRST_TOKENS + NUM_TURNS * NUM_TURN_TOKENS:
            users[index] = _tokens(rng, NUM_FIRST_TOKENS)

    with ThreadPoolExecutor(2) as clients:
        while (passed_s := time.monotonic() - begin_s) < duration_s:
            # Two thirds of the turns are of the first six, who come back while they are remembered.
            chosen = [rng.randrange(6 if rng.random() < 0.67 else NUM_USERS) for _ in range(2)]
            list(clients.map(turn, dict.fromkeys(chosen)))
            if passed_s > 0.6 * duration_s and not has_reset:
                has_reset = True
                server.post("/reset_prefix_cache?reset_external=true")


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


def draw(found: Prometheus, begin_s: float, end_s: float, path: Path) -> None:
    """Draw every panel where it lies in Grafana's grid."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    panels = json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) + 1
    figure = pyplot.figure(figsize=(15, height * UNIT_IN))
    for panel in panels:
        place = panel["gridPos"]
        left, top = place["x"] / 24, 1 - (place["y"] + 1) / height
        if panel["type"] == "row":
            figure.text(0.01, top, panel["title"], fontsize=13, weight="bold")
            continue
        bottom, h = top - place["h"] / height, place["h"] / height
        margin_x, low = 0.045, 0.012 if panel["type"] == "stat" else 0.032
        axes = figure.add_axes(
            (left + margin_x, bottom + low, place["w"] / 24 - margin_x - 0.01, h - low - 0.02)
        )
        axes.set_title(panel["title"], fontsize=9, loc="left")
        unit = panel["fieldConfig"]["defaults"]["unit"]
        if panel["type"] == "stat":
            _draw_stat(axes, found, panel, unit)
        else:
            _draw_lines(axes, found, panel, unit, (begin_s, end_s))
    figure.savefig(path, dpi=72)
    with Image.open(path) as image:  # a few colors do, and take a third of the bytes
        few = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=48)
    few.save(path, optimize=True)


def _draw_stat(axes: Any, found: Prometheus, panel: dict[str, Any], unit: str) -> None:
    values = found.query(as_asked(panel["targets"][0]["expr"]))
    axes.text(0.5, 0.45, _text(values[0], unit), fontsize=20, ha="center", va="center")
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_lines(
    axes: Any, found: Prometheus, panel: dict[str, Any], unit: str, span: tuple[float, float]
) -> None:
    begin_s, end_s = span
    for target in panel["targets"]:
        expression = as_asked(target["expr"], f"{INTERVAL_S}s")
        answer = found.get(
            "query_range", query=expression, start=str(begin_s), end=str(end_s), step="2"
        )
        for series in answer["result"]:
            label = target["legendFormat"]
            for name, value in series["metric"].items():
                label = label.replace(f"{{{{{name}}}}}", value)
            times = [point[0] - begin_s for point in series["values"]]
            values = [float(point[1]) for point in series["values"]]
            if len(answer["result"]) <= 4 or any(values):
                axes.plot(times, values, linewidth=1.2, label=label)
    axes.set_xlim(0, end_s - begin_s)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: _text(value, unit))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=7, loc="upper left", framealpha=0.6)
    else:
        axes.text(0.5, 0.5, "all 0", transform=axes.transAxes, ha="center", color="gray")


def _text(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if 0 < value < 1 else f"{value:.3g} s"
    if unit in ("bytes", "Bps"):
        size, prefix = next(
            (value / 1024**k, p)
            for k, p in ((3, "GiB"), (2, "MiB"), (1, "KiB"), (0, "B"))
            if value >= 1024**k or not k
        )
        return f"{size:.3g} {prefix}" + ("/s" if unit == "Bps" else "")
    return f"{value / 1000:.3g} k" if value >= 1000 else f"{value:.3g}"


def main() -> None:
    """Serve, scrape, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, help="of load (%(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_model("llama", folder / "model")
        tiers = [{"url": f"file://{folder / 'tier'}", "capacity": TIER_CAPACITY}]
        config = connector(NUM_SLOTS, tiers=tiers)
        del config["kv_connector_extra_config"]["min_load_tokens"]  # what pays is measured
        with HttpServer(model, folder / "server", config=config, **SERVER) as server:
            server.wait_until_healthy()
            with prometheus(server.url.removeprefix("http://"), folder / "prometheus") as found:
                found.wait_for(lambda: bool(found.query("vllm:safe_offload_slots")), "a scrape")
                begin_s = time.time()
                serve(server, arguments.seconds)
                time.sleep(2.0)
                draw(found, begin_s, time.time(), arguments.path)


if __name__ == "__main__":
    main()
