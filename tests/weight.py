"""What there is to read, against the most that `.ci/weight.json` allows: `python -m tests.weight`.

Who needs more raises a number there, in the commit that gives the reason.
"""

import io
import json
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / ".ci/weight.json"
CATALOGUES = [ROOT / "tests/mutants/catalogue.txt"]


def main() -> int:
    """Print the weight; return 1 if something is over its limit."""
    limits = json.loads(LIMITS.read_text())
    is_over = False
    for what, number in weigh().items():
        limit = limits.get(what)
        over = limit is not None and number > limit
        is_over |= over
        most = "" if limit is None else f"  (at most {limit:,}{': TOO MUCH' if over else ''})"
        print(f"{number:8,}  {what}{most}")
    folders = Counter(str(file.parent.relative_to(ROOT)) for file in _files("safe_offload"))
    crowded = {folder: count for folder, count in folders.items() if count > 13}
    print(f"{len(folders):8,}  folders of the package; over 12 modules: {crowded or 'none'}")
    return int(is_over)


def weigh() -> dict[str, int]:
    """Return lines of code and words of documentation."""
    words = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {
        "lines of the package": sum(map(_num_lines, _files("safe_offload"))),
        "lines of the package without comments and docstrings": sum(
            map(_num_code_lines, _files("safe_offload"))
        ),
        "lines of tests": sum(map(_num_lines, [*_files("tests"), *CATALOGUES])),
        "words of docs": sum(len(page.read_text().split()) for page in words),
    }


def _files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def _num_code_lines(file: Path) -> int:
    """Lines with something else on them than a comment or a string that is a statement."""
    lines: set[int] = set()
    begins = True
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            begins = True
        elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            if not (begins and token.type == tokenize.STRING):
                lines.update(range(token.start[0], token.end[0] + 1))
            begins = False
    return len(lines)


if __name__ == "__main__":
    sys.exit(main())
