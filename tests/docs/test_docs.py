"""What the pages tell users to type and to open: commands that parse, links and source files.

`make site` checks the links between the pages of docs/; README.md is not one of them.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safe_offload.commands import cli
from tests.docs.messages import messages

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(
    r"(?:^(?: {4,}|\| )?|`)(safe-offload (?!\d)(?:[^\n`]*\\\n)*[^\n`|]*)", re.MULTILINE
)
TOLD = re.compile(r"safe-offload (?:cache|config|bench) [^.,;:)`\n]*[^.,;:)`\n ]")
"""What messages of the package tell users to run."""
WORDS = {"JSON": '{"kv_connector":"SafeCPUOffloadConnector"}', "…": "{}"}


def commands() -> Iterator[tuple[str, str]]:
    """Each `safe-offload` command of a page or a message, once."""
    seen = set()
    for page in PAGES:
        for match in COMMAND.finditer(page.read_text()):
            command = match[1].replace("\\\n", " ").split(" | ")[0].split(" > ")[0].strip()
            if command not in seen:
                seen.add(command)
                yield str(page.relative_to(ROOT)), command
    for message in messages():
        for command in TOLD.findall(message):
            if command not in seen:
                seen.add(command)
                yield "a message", command


def variants(command: str) -> list[list[str]]:
    """The command with its [optional parts] and without."""
    whole = command.replace("[", "").replace("]", "")
    bare = re.sub(r"\[[^]]*\]", "", command)
    split = (shlex.split(text, comments=True) for text in (whole, bare))
    return [[WORDS.get(word, word) for word in words[1:]] for words in split]


COMMANDS = list(commands())


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_of_the_docs_parses(page, command, monkeypatch):
    parsed: list[Any] = []
    real = cli.Subcommand.parse_known_args

    def parse(self: Any, args: Any = None, namespace: Any = None) -> Any:
        result = real(self, args, namespace)
        if self._module:
            assert result[1] == [], f"{page}: {command}: unknown {result[1]}"
            result[0].run = lambda _: 0
            parsed.append(self._module)
        return result

    monkeypatch.setattr(cli.Subcommand, "parse_known_args", parse)
    for arguments in variants(command):
        if {"--help", "--version"} & set(arguments):
            with pytest.raises(SystemExit) as ended:
                cli.main(arguments)
            assert ended.value.code == 0
        else:
            assert cli.main(arguments) == 0
            assert parsed


LINKS = re.findall(r"\]\(([^):]+)\)", PAGES[0].read_text())


@pytest.mark.parametrize("link", LINKS)
def test_a_link_of_the_readme_leads_somewhere(link):
    path, _, anchor = link.partition("#")
    target = ROOT / path
    assert target.is_file()
    if anchor:
        titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        assert anchor in slugs
