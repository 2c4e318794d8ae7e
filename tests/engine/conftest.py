"""What the tests with a real engine share."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.tiny_models import ModelKind, write_tiny_model
from tests.engine.engines import Report, make_job, run

GetModel = Callable[[ModelKind], Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder: they run real engines, and take as long as they take."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a tiny model, written when it is first asked for."""
    folder = tmp_path_factory.mktemp("models")

    def get(kind: ModelKind) -> Path:
        return folder / kind if (folder / kind).exists() else write_tiny_model(kind, folder / kind)

    return get


@pytest.fixture(scope="session")
def small_model() -> Path:
    """The folder of a real language model, which is downloaded once."""
    command = [sys.executable, "examples/small_model.py"]
    made = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(made.stderr.splitlines()[-1])
    return Path(made.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def plain_gemma3(model, tmp_path_factory) -> Report:
    """A, B, C, A, B, C answered by an engine without connector, in a pool of 1.6 prompts."""
    (report,) = run(tmp_path_factory.mktemp("gemma3"), make_job(model("gemma3")))
    assert [answer.num_cached for answer in report.answers] == [0] * 6
    assert len({tuple(tokens) for tokens in report.tokens[:3]}) == 3, "the prompts look alike"
    return report


MADE = re.compile(r"The shared host cache (\S+) was (created|found)")


class Pools:
    """The pools that the engines of a test have made, as their logs say."""

    def __init__(self) -> None:
        self.paths: set[Path] = set()

    def of(self, log: str) -> list[str]:
        """Note the pools in a log; return whether each was created or found."""
        found = MADE.findall(log)
        self.paths.update(Path(path) for path, _ in found)
        return [how for _, how in found]


@pytest.fixture
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    for path in made.paths:
        shutil.rmtree(path, ignore_errors=True)
