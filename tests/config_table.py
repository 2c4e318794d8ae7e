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
HEAD = "| key | default | what it does |\n|---|---|---|\n"
SHORT = {
    "an integer from ": "",
    "a number from ": "",
    "seconds, more than 0 and ": "",
    "http:// or https://, a host name and optionally a port": "http(s)://HOST[:PORT]",
}
"""What a table says shorter than a message."""
BELOW = ("a size, ", "a string", "true or false", "the absolute path of ", "a list of mappings")
"""How the allowed values begin that are explained below the first table, or by a link."""
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
        rows += f"| `{row.key}` | {default} | {row.help}{_allowed(row)} |\n"
    return rows


def _allowed(row: Setting) -> str:
    """Return a sentence with the allowed values, if neither the page nor `help` names them all."""
    allowed = row.kind.allowed
    choices = re.findall(r'"([^"]+)"', allowed)
    is_named = [f"`{choice}`" in row.help or choice == row.default for choice in choices]
    if allowed.startswith(BELOW) or (choices and all(is_named)):
        return ""
    for long, short in SHORT.items():
        allowed = allowed.replace(long, short)
    allowed = re.sub(r'"[^"]+"', lambda quoted: f"`{quoted[0]}`", allowed)
    return f" Allowed: {allowed}."


if __name__ == "__main__":
    PAGE.write_text(write(PAGE.read_text()))
