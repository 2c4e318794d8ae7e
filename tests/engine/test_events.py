"""KV events of a real engine, from vLLM's own publisher to a router over real ZeroMQ sockets."""

from __future__ import annotations

from examples.tiny_models import write_tiny_model
from tests.engine.engines import connector, make_job, run

NUM_BLOCKS, NUM_SLOTS = 60, 70
"""Both too small for the prompts of the storm: requests are preempted, and slots evicted."""


def test_replaying_the_events_gives_what_the_host_holds(tmp_path):
    """Two KV cache groups; aborts, evictions, resets of both caches and of the GPU's alone (I12).

    The router joins late and asks vLLM for what it has missed. `children/kv_events.py` compares.
    """
    model = write_tiny_model("gemma3", tmp_path / "model", sliding_window=96)
    job = make_job(
        model,
        num_blocks=NUM_BLOCKS,
        num_prompt_tokens=300,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        kv_transfer_config=connector(NUM_SLOTS),
    )
    (report,) = run(tmp_path, job, child="kv_events")
    found = report.data
    for what, num_held, num_told_wrongly, num_not_told in found["moments"]:
        assert (num_told_wrongly, num_not_told) == (0, 0), (what, num_held)
    assert found["num_double"] == 0
    held = {what: num_held for what, num_held, *_ in found["moments"]}
    assert held["after the storm"] > NUM_SLOTS // 2
    assert held["after a reset"] == 0
    assert held["after a reset of the GPU's cache alone"] > 0
    assert found["num_replayed"] > 0
    assert found["num_aborted"] > 10
    assert found["num_resets"] > 1
    assert found["num_stored"] > 2 * NUM_SLOTS, "hardly anything was evicted"
    assert found["num_removed"] > NUM_SLOTS
    assert report.count("loaded_blocks") > 0
    report.check_well()

    example = found["example"]
    assert (example["type"], example["medium"], example["locality"]) == (
        "BlockStored",
        "CPU",
        "LOCAL",
    )
    assert len(example["token_ids"]) == 2 * example["block_size"]
