"""Right bytes at every forward, over real copies and vLLM's real scheduler."""

import functools
from dataclasses import replace

import pytest

from safe_offload.worker.copies.base import CopyPath
from tests.counts import num_failed
from tests.simulator.engine_core import random_prompt
from tests.simulator.vllm_setup import EngineShape
from tests.worker.machines import CpuMachine, ThreadMachine
from tests.worker.tensor_core import TensorCore, run_random_requests

CPU = EngineShape(num_blocks=60, num_slots=90)
GPU = EngineShape(num_blocks=60, num_slots=90, is_async=True, is_v2=True)
HYBRID = EngineShape(
    groups=("full", "window:10", "window:5"),
    num_blocks=90,
    num_slots=160,
    is_async=True,
    tensor_ranks=2,
)
ZEROED = EngineShape(
    groups=("full", "full"), num_blocks=90, num_slots=120, is_async=True, is_zeroed=True
)
MAMBA = EngineShape(groups=("full", "mamba"), num_blocks=90, num_slots=120, is_v2=True)
KERNEL = functools.partial(ThreadMachine, path=CopyPath.KERNEL)

RUNS = {
    "cpu": (CPU, CpuMachine),
    "cpu hybrid": (HYBRID, CpuMachine),
    "streams": (GPU, ThreadMachine),
    "streams, hybrid, two ranks": (HYBRID, ThreadMachine),
    "streams, row kernel": (GPU, KERNEL),
    "streams, zeroed blocks": (ZEROED, ThreadMachine),
    "streams, states": (MAMBA, KERNEL),
}


def run(name: str, seed: int) -> dict[str, int]:
    """A random run; returns the connector's counts."""
    shape, make_machine = RUNS[name]
    core = TensorCore(shape, seed, make_machine)
    try:
        run_random_requests(core, seed)
        assert core.pool.get_num_free_blocks() == shape.num_blocks - 1
        assert core.connector.side.hits.slots.num_leased == 0
        return core.counts
    finally:
        core.close()


@pytest.mark.parametrize("name", RUNS)
def test_every_word_that_attention_reads_is_the_one_that_was_computed(name):
    counts = run(name, seed=1)
    assert counts["stored_blocks"] > 0
    assert counts["loaded_blocks"] > 0
    assert num_failed(counts, "load") == counts["contained_errors"] == 0


def test_two_engines_in_one_process_share_nothing():
    """Loops, threads, host memory, counters: each has its own, also when the other has ended."""
    shapes = CPU, replace(CPU, tensor_ranks=2, num_slots=120)
    cores = [TensorCore(shape, 1, CpuMachine) for shape in shapes]
    prompts = [random_prompt(60, seed) for seed in range(6)]
    try:
        for index, prompt in enumerate([*prompts, *prompts]):
            for core in cores:
                core.scheduler.reset_prefix_cache()  # the GPU's
                core.add(f"r{index}", prompt, 3)
            while any(core.has_work for core in cores):
                for core in cores:
                    core.step()
            for core in cores:
                assert core.answers[f"r{index}"] == core.runner.sequels[f"r{index}"].answer(3)
        first, second = (core.counts["loaded_blocks"] for core in cores)
        assert first > 0
        assert second > 0
        cores[0].close()
        cores[1].scheduler.reset_prefix_cache()
        cores[1].add("after", prompts[-1], 3)
        cores[1].drain(100_000)
        assert cores[1].counts["loaded_blocks"] > second
        assert cores[0].counts["loaded_blocks"] == first
    finally:
        for core in cores:
            core.close()
