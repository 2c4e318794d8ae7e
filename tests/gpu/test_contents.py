"""Right bytes at every forward, on a GPU: many steps in flight, streams held up at random."""

import functools

import pytest

from safe_offload.worker.copies.base import CopyPath
from safe_offload.worker.copies.gpu import GpuBackend
from tests.counts import num_failed
from tests.gpu.torch_gpu import TorchMachine
from tests.simulator.findings import Finding
from tests.worker.tensor_core import TensorCore, run_random_requests
from tests.worker.test_contents import GPU, HYBRID, MAMBA, ZEROED

SHAPES = {"plain": GPU, "hybrid": HYBRID, "zeroed": ZEROED, "states": MAMBA}
PATHS = [CopyPath.BATCH, CopyPath.KERNEL]


class SlowMachine(TorchMachine):
    """Its streams are held up for longer than the steps that follow take."""

    delay_factor = 30.0


def run(
    shape_name: str, path: CopyPath, seed: int, machine: type[TorchMachine] = TorchMachine
) -> dict[str, int]:
    """A random run; returns the connector's counts."""
    make_machine = functools.partial(machine, path=path)
    core = TensorCore(SHAPES[shape_name], seed, make_machine)
    try:
        run_random_requests(core, seed, num_requests=100)
        return core.counts
    finally:
        core.close()


@pytest.mark.parametrize("path", PATHS, ids=[path.value for path in PATHS])
@pytest.mark.parametrize("shape_name", SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_every_word_that_attention_reads_is_the_one_that_was_computed(shape_name, path, seed):
    counts = run(shape_name, path, seed)
    assert counts["loaded_blocks"] > 0
    assert num_failed(counts, "load") == counts["contained_errors"] == 0


def test_without_fences_torn_words_are_found(monkeypatch):
    """The test above can fail; at its speed a GPU has copied before the next step writes."""
    monkeypatch.setattr(GpuBackend, "fence", lambda self, completion, timeout_s: True)

    def run_many() -> None:
        for seed in range(60):
            run("plain", CopyPath.BATCH, seed, SlowMachine)

    with pytest.raises(Finding, match="I6"):
        run_many()
