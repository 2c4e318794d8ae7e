"""Lets pages of the site link to files outside docs/, such as examples.

The file is copied into the site, below source/, and the link leads there. A link to a file that
does not exist stays as it is, and MkDocs reports it.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

LINK = re.compile(r"(?<=\]\()((?:\.\./)+[^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add each file outside docs/ that a page links to."""
    for page in files.documentation_pages():
        for link in LINK.findall(page.content_string):
            path = _outside(page.src_uri, link, config)
            uri = f"source/{path}"
            if path and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(_root(config) / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point the links of a page to what `on_files` has added."""

    def point(match: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, match[1], config)
        folder = posixpath.dirname(page.file.src_uri)
        return posixpath.relpath(f"source/{path}", folder or ".") if path else match[1]

    return LINK.sub(point, markdown)


def _root(config: Any) -> Path:
    return Path(config.docs_dir).resolve().parent


def _outside(page: str, link: str, config: Any) -> str:
    """Return the path in the repository of a file outside docs/; nothing for any other link."""
    docs = Path(config.docs_dir).resolve()
    target = Path(os.path.normpath(docs / posixpath.dirname(page) / link))
    if target.is_relative_to(docs) or not target.is_file():
        return ""
    return target.relative_to(_root(config)).as_posix()
