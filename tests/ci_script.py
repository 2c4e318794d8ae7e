"""The programs of .ci, as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / ".ci"


def load(name: str) -> ModuleType:
    """Return `.ci/NAME.py`, which no package has."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
