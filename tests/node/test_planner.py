"""What an engine of vLLM's scheduler says of a pool that is held up or damaged."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from safe_offload.node.locks import NAPS, Locks
from safe_offload.node.pools import TABLE, user_folder
from safe_offload.node.table import HEADER_BYTES, TOKENS_MAX, Table
from safe_offload.observe.counters import Count
from tests.scheduler.rig import Rig
from tests.simulator.node import Node

ROW_BYTES = 8 * (4 + TOKENS_MAX)


@pytest.fixture
def rig(node: Node) -> Iterator[Rig]:
    # A damaged table has other lots of this engine than it knows, until it looks.
    extra = {"share": "node", "check_invariants": False}
    rig = Rig(node=node, num_slots=80, num_blocks=26, extra=extra)
    yield rig
    assert rig.counts[Count.CONTAINED_ERRORS] == 0
    rig.close()


def table_path() -> Path:
    return user_folder() / "pool" / TABLE


def said(log: list[logging.LogRecord], words: str) -> list[str]:
    return [line.getMessage() for line in log if words in line.getMessage()]


def test_an_engine_that_is_kept_from_its_slots_computes_and_says_so(rig, package_log):
    prompt = rig.warm()
    table = rig.planner.hits.slots.source.table
    assert not table.is_awake
    held = Locks(str(table_path()))
    assert held.take(NAPS + table.engine)
    for number in range(2):
        assert rig.run_alone(f"beside {number}", prompt) == 0
        rig.forget_gpu_cache()
        rig.clock.now_s += 1.0
    assert rig.run_alone("later", prompt) == 0
    rig.forget_gpu_cache()
    held.close()
    assert rig.run_alone("again", prompt) > 0
    assert rig.counts[Count.POOL_STALLS] == 1
    assert len(said(package_log, "blocks this engine's access")) == 1
    assert len(said(package_log, "can be used again")) == 1


def test_a_damaged_table_is_said_once_and_each_entry_counted(rig, logged):
    prompt = rig.warm()
    table = rig.planner.hits.slots.source.table
    for number in range(2):
        rig.add(f"r{number}", prompt, 6)
        rig.step_until(lambda: table.is_awake)
        table.owners[table.own_lots()[0]] = 0
        rig.drain()
        rig.check_tokens(f"r{number}", 6)
    assert rig.counts[Count.DAMAGED_ENTRIES] == 2
    (line,) = said(logged, "is damaged: it has invalid entries")
    assert f"shared host cache {table_path().parent}" in line
    assert "`safe-offload cache rm node pool`" in line


def test_an_engine_whose_place_another_has_leaves_the_pool_and_says_why(rig, logged):
    prompt = rig.warm()
    engine = rig.planner.hits.slots.source.table.engine
    with table_path().open("r+b") as file:
        os.pwrite(file.fileno(), bytes(ROW_BYTES), HEADER_BYTES + ROW_BYTES * engine)
    other = Table(str(table_path()))
    other.join([])
    assert other.engine == engine
    other.nap()
    assert rig.run_alone("beside", prompt) == 0
    (line,) = said(logged, "can no longer copy")
    assert "its table was damaged, and another engine has taken this one's place" in line
    assert rig.planner.gauges()["is_disabled"] == 1
    other.close()


def test_an_engine_that_is_kept_from_its_slots_leaves_windows_to_vllm(node):
    """A prompt that leaves another where it computes moves no boundary that vLLM has found."""
    shape = {"groups": ("full", "window:10"), "retention_interval": 0, "max_batched_tokens": 32}
    rig = Rig(node=node, num_slots=400, num_blocks=200, extra={"share": "node"}, **shape)
    first, other = rig.prompt(200, 1), rig.prompt(500, 2)
    rig.run_alone("first", first)
    rig.run_alone("other", other)  # of the first, windows are lost
    held = Locks(str(table_path()))
    assert held.take(NAPS + rig.planner.hits.slots.source.table.engine)
    rig.add("second", [*first[:150], *rig.prompt(60, 3)])
    rig.step()
    rig.add("third", [*first[:142], 99])
    rig.drain()
    held.close()
    last = rig.make_request([*first[:150], 98], "last")
    assert rig.scheduler.kv_cache_manager.get_computed_blocks(last)[1] == 148
    rig.close()
