"""Pages that say the same thing say it alike: figures, what stays, what has to be written."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safe_offload.config.transfer_config import CONNECTOR_NAME
from safe_offload.node import pools

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


def paragraphs(path: Path) -> list[str]:
    """Paragraphs, items of lists and rows of a page; lines of a manifest."""
    text = path.read_text()
    return (
        re.split(r"\n\s*\n|\n(?=- |\d+\. |\|)", text) if path.suffix == ".md" else text.split("\n")
    )


# ---- figures ------------------------------------------------------------------------------------


def ratios() -> dict[str, tuple[float, float]]:
    """The lowest and highest of each column of the table of docs/benchmarks.md."""
    table = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Scheduler")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    head, *body = rows[: next(i for i, row in enumerate(rows) if row[0] == "documents") + 1]
    columns = zip(*(row[1:] for row in body), strict=True)
    numbers = ([float(n) for cell in column for n in cell.split(", ")] for column in columns)
    return {name: (min(n), max(n)) for name, n in zip(head[1:], map(list, numbers), strict=True)}


TOLD = {
    "eager / Simple": r"([\d.]+) to ([\d.]+)(?:\]\([^)]*\))? of (?:the time of )?`Simple",
    "eager / Offloading": r"([\d.]+) to ([\d.]+) of\s+`OffloadingConnector`'s",
    "lazy / Simple lazy": r"\(([\d.]+) to ([\d.]+) with `lazy_offload`\)",
}


@pytest.mark.parametrize(
    ("page", "column"),
    [
        *(("README.md", column) for column in TOLD),
        *(("docs/index.md", column) for column in TOLD),
        ("docs/architecture.md", "eager / Simple"),
    ],
)
def test_the_time_in_the_scheduler_is_that_of_the_table(page, column):
    ((low, high),) = re.findall(TOLD[column], (ROOT / page).read_text())
    assert (float(low), float(high)) == tuple(
        round(number, len(told.partition(".")[2]))
        for number, told in zip(ratios()[column], (low, high), strict=True)
    )


# ---- what stays, and where the pool is ----------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_who_says_where_the_pool_is_not_or_what_stays_knows_the_shared_one(page):
    for paragraph in paragraphs(page):
        says_where = re.search(r"\bpools? (is|stays?|lies?)\b", paragraph)
        says_all_goes = re.search(r"nothing (stays behind|to clean up)|y has no name", paragraph)
        if (says_where and str(pools.BASE) in paragraph) or says_all_goes:
            assert re.search(r"\bshared?\b", paragraph) or page.name == "node.md", paragraph


def test_who_switches_it_off_is_told_what_stays_and_how_it_goes():
    page = (ROOT / "docs" / "operate" / "runbook.md").read_text()
    section = page.partition("## Switch it off\n")[2].partition("\n## ")[0]
    for word in (str(pools.BASE), "safe-offload cache rm node --all", "safe-offload cache rm DIR"):
        assert word in section


# ---- what has to be written ----------------------------------------------------------------------


def configurations(text: str) -> Iterator[dict[str, Any]]:
    """Every JSON object of a page that names a connector, the outermost of each."""
    decoder, end = json.JSONDecoder(), 0
    for found in re.finditer(r"\{", text):
        if found.start() >= end:
            try:
                value, end = decoder.raw_decode(text, found.start())
            except json.JSONDecodeError:
                continue
            if "kv_connector" in value:
                yield value


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_writes_a_role_that_is_filled_in(page):
    for config in configurations(page.read_text()):
        children = config.get("kv_connector_extra_config", {}).get("connectors", [])
        for one in (config, *children):
            assert one["kv_connector"] != CONNECTOR_NAME or "kv_role" not in one, one


def test_configurations_are_found():
    node = (ROOT / "docs" / "guides" / "node.md").read_text()
    (config,) = configurations(node)
    assert config["kv_connector_extra_config"]["share"] == "node"


# ---- how a page looks ----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_prose_is_shown_as_code(page):
    """A line that is indented by four behind a blank one is code: such a block has no loose end."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for block in re.findall(r"\n\n((?: {4}[^\n]*\n)+)(?=\S)", text):
        raise AssertionError(f"what follows is cut off from {block!r}")
