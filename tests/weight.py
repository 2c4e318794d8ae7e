"""What there is to read, against `.ci/weight.json`: `python -m tests.weight`.

A number there is an upper limit, and at most `SLACK` above the count: a commit that deletes more
than that lowers it, so that the limit only goes up with a reason, in the commit that needs it.
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
SLACK = 300


def main() -> int:
    """Print the weight; return 1 if a limit is exceeded, or is to be lowered."""
    limits = json.loads(LIMITS.read_text())
    has_failed = False
    for what, count in weigh().items():
        verdict = judge(count, limits[what]) if what in limits else ""
        has_failed |= bool(verdict)
        limit = f"  (at most {limits[what]:,}{verdict})" if what in limits else ""
        print(f"{count:8,}  {what}{limit}")
    folders = Counter(str(file.parent.relative_to(ROOT)) for file in _files("safe_offload"))
    crowded = {folder: count for folder, count in folders.items() if count > 13}
    print(f"{len(folders):8,}  folders of the package; over 12 modules: {crowded or 'none'}")
    return int(has_failed)


def judge(count: int, limit: int) -> str:
    """Return what is wrong with a limit, as the end of a line; "" if nothing is."""
    if count > limit:
        return ": EXCEEDED"
    return f": lower it to {count} in {LIMITS.name}" if limit - count > SLACK else ""


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
