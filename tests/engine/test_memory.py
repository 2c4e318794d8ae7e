"""What the connector takes of the host's memory, and that it gives it back.

One engine with the connector answers prompts that are 1.01 times what the host pool of 256 MiB
holds, and one without some of them. The engines run in their children's own processes, so that each
child's resident memory is that of scheduler and worker together.
"""

from dataclasses import dataclass, replace

import pytest

from tests.engine.engines import Report, connector, make_job, make_prompts, run

NUM_SLOTS = 8192
SLOT_BYTES = 32 * 1024  # 32 tokens, 2 layers, keys and values, 2 heads of 32 floats
POOL_BYTES = NUM_SLOTS * SLOT_BYTES
NUM_TOKENS = 2000
NUM_PROMPTS = 134  # of 62 full blocks each
NUM_PLAIN_PROMPTS = 8
"""Of the engine without the connector, which keeps nothing of any."""

SCHEDULER_BYTES_PER_SLOT_MAX = 400


@dataclass(frozen=True)
class Measured:
    """Reports of children/memory.py."""

    ours: Report
    plain: Report


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory):
    """Both engines, having answered their prompts."""
    prompts = make_prompts(NUM_TOKENS, [f"prompt {index}" for index in range(NUM_PROMPTS)])
    jobs = []
    # Without check_invariants, which looks at every slot in every step.
    ours = connector(NUM_SLOTS, check_invariants=False)
    for config, count in ((ours, NUM_PROMPTS), (None, NUM_PLAIN_PROMPTS)):
        job = make_job(model("llama"), kv_transfer_config=config)
        jobs.append(replace(job, prompts=prompts, turns=(*prompts,)[:count], num_answer_tokens=2))
    return Measured(*run(tmp_path_factory.mktemp("memory"), *jobs, child="memory"))


def test_resident_memory_grows_by_the_host_pool_and_at_most_five_percent(measured):
    """Every slot is in use and every page of the pool resident; compared with no connector."""
    ours = measured.ours.data
    assert ours["pool_bytes"] == POOL_BYTES
    assert ours["num_held_slots"] == ours["num_slots"] == NUM_SLOTS
    assert ours["pool_mapped_bytes"] == [POOL_BYTES, POOL_BYTES]
    growth_bytes = ours["resident_bytes"] - measured.plain.data["resident_bytes"]
    assert growth_bytes <= 1.05 * POOL_BYTES


def test_the_scheduler_side_needs_at_most_400_bytes_a_slot(measured):
    """With all slots in use, idle, and at its largest after any step of one more request.

    Method: `sys.getsizeof` of every object that can be reached from the planner, each once, divided
    by the number of slots. That counts the planner's fixed part, leases, requests and stores in
    flight, and of vLLM's index over the slots its hash table with the hashes. It leaves out vLLM's
    own objects: one `KVCacheBlock` for each slot, the requests, the GPU's block tables and the
    configuration (children/memory.py, `scheduler_bytes`).
    """
    ours = measured.ours.data
    idle, running = ours["scheduler_bytes"], ours["running"]["scheduler_bytes"]
    assert ours["running"]["leased_slots"] > 0
    assert idle > 0
    assert max(idle, running) <= SCHEDULER_BYTES_PER_SLOT_MAX * NUM_SLOTS


def test_an_engine_that_is_deleted_leaves_no_thread_and_no_host_memory(measured):
    """The pool's addresses are unmapped, and its pages are back with the system."""
    ours = measured.ours.data
    assert "safe-offload-loop" in ours["threads"]
    assert ours["threads_after"] == []
    assert ours["pool_mapped_bytes_after"] == [0, 0]
    assert ours["resident_bytes"] - ours["resident_bytes_after"] >= 0.95 * POOL_BYTES
