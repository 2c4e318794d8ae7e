"""The tables of settings in docs/configuration.md, written from the settings themselves.

python -m tests.config_table
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from safe_offload.config.options import SETTINGS
from safe_offload.config.settings import Setting
from safe_offload.config.tiers import COMMON, OWN, URL

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = "| key | default | allowed | what it does |\n|---|---|---|---|\n"
SHORT = {
    ', such as "64GiB";': ",",  # explained below the table
    "an integer from ": "",
    "a number from ": "",
    "true or false": "boolean",
    "the absolute path of a file": "an absolute path",
    "the absolute path of a directory": "an absolute path",
}
"""What a table says shorter than a message."""
TABLE = re.compile(rf"^{re.escape(HEAD)}(?:\|.*\n)*", re.MULTILINE)


def tables() -> list[str]:
    """Return the tables as Markdown: of all settings, of those of a tier, and of each kind."""
    of_tiers = [URL, *COMMON.values()], *(rows.values() for rows in OWN.values())
    return [_table(SETTINGS.values()), *map(_table, of_tiers)]


def write(page: str) -> str:
    """Return the page with its tables written again."""
    texts = iter(tables())
    return TABLE.sub(lambda _: next(texts), page)


def _table(settings: Iterable[Setting]) -> str:
    rows = HEAD
    for row in settings:
        default = "" if row.default is None else f"`{json.dumps(row.default)}`"
        allowed = row.kind.allowed
        for long, short in SHORT.items():
            allowed = allowed.replace(long, short)
        allowed = re.sub(r'"[^"]+"', lambda quoted: f"`{quoted[0]}`", allowed)
        rows += f"| `{row.key}` | {default} | {allowed} | {row.help} |\n"
    return rows


if __name__ == "__main__":
    PAGE.write_text(write(PAGE.read_text()))
