"""Tests of this folder need a GPU that torch can use: `make test-gpu`."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them where there is no GPU."""
    skip = pytest.mark.skip(reason="needs a GPU that torch can use")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)
