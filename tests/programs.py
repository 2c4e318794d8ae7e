"""Programs that tests start."""

import functools
import shutil
import sys
from pathlib import Path


@functools.cache
def find_program(name: str) -> str | None:
    """Return the path of a program: beside the interpreter (`make servers`), or on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)
