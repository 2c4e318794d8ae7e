"""The GPU backend on a GPU: the contract on every copy path."""

import pytest

from safe_offload.protocol import MemoryKind
from safe_offload.worker.copies.base import CopyPath
from tests.gpu.torch_gpu import TorchSubject
from tests.worker.copies.contract import GEOMETRIES, BackendContract


@pytest.fixture
def make_torch_subject():
    subjects: list[TorchSubject] = []

    def make(*arguments: object) -> TorchSubject:
        subjects.append(TorchSubject(*arguments))
        return subjects[-1]

    yield make
    for subject in subjects:
        subject.end()


@pytest.mark.parametrize("path", [None, *CopyPath], ids=lambda path: path.value if path else "auto")
class TestOnEachPath(BackendContract):
    @pytest.fixture
    def make_subject(self, make_torch_subject, path):
        return lambda geometry, num_slots: make_torch_subject(geometry, num_slots, path)


def test_a_gpu_has_what_the_fast_paths_need(make_torch_subject):
    """Otherwise the class above tests a fallback; what is missing is in the log."""
    subject = make_torch_subject(GEOMETRIES["layers outermost"], 31)
    assert subject.backend.paths == tuple(CopyPath)
    assert subject.backend.memory.kind is not MemoryKind.PAGEABLE
