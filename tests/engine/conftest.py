"""What the tests with a real engine share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from safe_offload.commands.bench.tiny_models import ModelKind, write_tiny_model
from tests.engine.engines import Report, make_job, num_pool_blocks, run

GetModel = Callable[[ModelKind], Path]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> GetModel:
    """The folder of a tiny model, written when it is first asked for."""
    folder = tmp_path_factory.mktemp("models")

    def get(kind: ModelKind) -> Path:
        return folder / kind if (folder / kind).exists() else write_tiny_model(kind, folder / kind)

    return get


@pytest.fixture(scope="session")
def plain_llama(model: GetModel, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A, B, C, A, B, C answered by an engine without connector, in a pool of 1.6 prompts."""
    job = make_job(model("llama"), num_blocks=num_pool_blocks("llama"))
    (report,) = run(tmp_path_factory.mktemp("plain"), job)
    return report
