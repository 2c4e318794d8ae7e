"""The table of settings in docs/configuration.md, written from the settings themselves.

python -m tests.config_table
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from safe_offload.config import SETTINGS

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = "| key | default | allowed | what it does |\n|---|---|---|---|\n"
TABLE = re.compile(rf"^{re.escape(HEAD)}(?:\|.*\n)*", re.MULTILINE)


def table() -> str:
    """Return the table as Markdown, a row for each setting."""
    rows = HEAD
    for row in SETTINGS.values():
        default = "" if row.default is None else f"`{json.dumps(row.default)}`"
        allowed = re.sub(r'"[^"]+"', lambda quoted: f"`{quoted[0]}`", row.kind.allowed)
        rows += f"| `{row.key}` | {default} | {allowed} | {row.help} |\n"
    return rows


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
