"""What the tests with a real engine share."""

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_models import ModelKind, write_tiny_model
from tests.engine.engines import (
    MLA,
    NUM_MLA_HIT_TOKENS,
    Report,
    make_job,
    num_pool_blocks,
    run,
)

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
def plain(model, tmp_path_factory):
    """A, B, C, A, B, C answered by an engine without connector, once for each kind of model.

    The pool has 1.6 prompts, so that all are computed. On a CPU vLLM computes a prompt from its
    start with one MLA kernel and the rest of a prompt behind a hit with another, and the two round
    differently: so what follows *any* hit, also one of the GPU's own cache, may differ from what
    follows a prompt computed from its start. That is why vLLM switches prefix caching off for MLA
    there (CpuPlatform.check_and_update_config, without AMX), which the child undoes. The engine of
    "deepseek" therefore has a pool that keeps all three prompts: its second round is hits of the
    GPU's own cache.
    """

    @functools.cache
    def get(kind: str) -> Report:
        settings: dict[str, Any] = {}
        if kind == "deepseek":
            num_blocks = num_pool_blocks(kind, MLA["num_prompt_tokens"], block_size=16)
            settings = MLA | {"num_blocks": 4 * num_blocks}
        (report,) = run(tmp_path_factory.mktemp(kind), make_job(model(kind), **settings))
        num_gpu = NUM_MLA_HIT_TOKENS if kind == "deepseek" else 0
        assert [answer.num_gpu for answer in report.answers] == [0] * 3 + [num_gpu] * 3
        assert [answer.num_cached for answer in report.answers] == [0] * 3 + [num_gpu] * 3
        assert len({tuple(tokens) for tokens in report.tokens[:3]}) == 3, "the prompts look alike"
        return report

    return get


@pytest.fixture(scope="session")
def plain_llama(plain):
    """The answers of the tiny llama."""
    return plain("llama")


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
