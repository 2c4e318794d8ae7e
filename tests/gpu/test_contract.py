"""The GPU backend on a GPU: the contract on every copy path."""

import pytest

from safe_offload.protocol import MemoryKind
from safe_offload.worker.copies.base import CopyPath
from tests.gpu.torch_gpu import TorchSubject
from tests.worker.copies.contract import BackendContract


@pytest.fixture
def make_torch_subject():
    subjects: list[TorchSubject] = []

    def make(*arguments: object, **options: object) -> TorchSubject:
        subjects.append(TorchSubject(*arguments, **options))
        return subjects[-1]

    yield make
    for subject in subjects:
        subject.end()


class Contract(BackendContract):
    path: CopyPath | None = None

    @pytest.fixture
    def make_subject(self, make_torch_subject):
        return lambda geometry, num_slots: make_torch_subject(geometry, num_slots, self.path)


class TestChosenByLength(Contract):
    path = None


class TestBatchedCopies(Contract):
    path = CopyPath.BATCH


class TestRowKernel(Contract):
    path = CopyPath.KERNEL


class TestCopiesOneByOne(Contract):
    path = CopyPath.EACH


del Contract, BackendContract  # only what inherits from them is a test


def test_a_gpu_has_what_the_fast_paths_need(make_torch_subject):
    """Otherwise the classes above test a fallback; what is missing is in the log."""
    from tests.worker.copies.contract import GEOMETRIES

    subject = make_torch_subject(GEOMETRIES["layers outermost"], 31)
    assert subject.backend.paths == tuple(CopyPath)
    assert subject.backend.memory.kind is not MemoryKind.PAGEABLE
