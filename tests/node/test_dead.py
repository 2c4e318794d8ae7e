"""Engines that are killed while a device still has copies of theirs to make."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safe_offload.config.options import OffloadConfig
from safe_offload.errors import SharingError
from safe_offload.node import table as table_module
from safe_offload.node.table import reserved_slots
from safe_offload.scheduler.cache.leases import LeaseKind
from safe_offload.worker.opening import GRACE_MIN_S, grace_s
from tests.node.engines import SLOT_WORDS, Engine, pools_in, words_of

SLOTS = 256
USABLE = SLOTS - reserved_slots(SLOTS)
SLOT_BYTES = 8 * SLOT_WORDS
CONFIG = OffloadConfig.from_extra_config({"max_inflight_bytes": 4096}, world_size=1)
BACKLOG = CONFIG.store_bytes_max // SLOT_BYTES
"""Slots that the device has been given when its engine is killed, as many as it may be."""


def _store(pipe: Any, own_grace_s: float) -> None:
    """Have all lots, begin to store, and wait for the end."""
    engine = Engine(SLOTS, grace_s=own_grace_s)
    lease = engine.leases.grant(LeaseKind.STORE, USABLE)
    pipe.send(lease.slots[:BACKLOG])
    pipe.recv()


def kill_with_backlog(own_grace_s: float) -> list[int]:
    """Let an engine be killed; return the slots that its device has still to write."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_store, args=(theirs, own_grace_s))
    process.start()
    slots: list[int] = ours.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return slots


@pytest.mark.parametrize("slots_per_s", [100.0, 2.0, 0.5])
@pytest.mark.parametrize("damaged", [False, True], ids=["as it says", "what it says is lost"])
def test_what_a_device_still_writes_is_nobody_elses(
    tmp_path: Path, slots_per_s: float, damaged: bool
) -> None:
    """It begins when the engine is dead and takes twice as long as it was measured at."""
    own_grace_s = grace_s("cuda", CONFIG, SLOT_BYTES, slots_per_s * SLOT_BYTES)
    with pools_in(tmp_path):
        heir = Engine(SLOTS, grace_s=own_grace_s if damaged else GRACE_MIN_S)
        backlog = kill_with_backlog(own_grace_s)
        if damaged:
            heir.table._engines[1 - heir.table.engine][table_module._GRACE_MS] = 0
        assert heir.file is not None
        words = words_of(heir.file)
        granted: list[int] = []
        now_s = num_written = 0.0
        while len(granted) < USABLE and now_s < 1000.0:
            due = int(min(len(backlog), now_s * slots_per_s / 2))
            words[backlog[int(num_written) : due]] = 7
            num_written = due
            heir.table.bury(now_s)
            new = heir.slots.grant(USABLE)
            words[new] = 1
            granted += new
            now_s += 1.0
        assert sorted(granted) == [*range(SLOTS - USABLE, SLOTS)]
        assert (words[granted] == 1).all()
        assert now_s >= GRACE_MIN_S
        heir.close()


def test_a_grace_that_cannot_be_ends(tmp_path: Path) -> None:
    with pools_in(tmp_path):
        heir = Engine(SLOTS)
        kill_with_backlog(0.0)
        heir.table._engines[1 - heir.table.engine][table_module._GRACE_MS] = ~np.uint64(0)
        assert heir.table.bury(0.0) == 0
        assert heir.table.bury(table_module.GRACE_MAX_S) == 1
        heir.close()


def test_the_place_of_a_dead_engine_is_not_taken_before_its_grace_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "ENGINES_MAX", 2)
    with pools_in(tmp_path):
        other = Engine(SLOTS, grace_s=GRACE_MIN_S)
        assert kill_with_backlog(GRACE_MIN_S)
        with pytest.raises(SharingError, match="just ended"):
            Engine(SLOTS, grace_s=GRACE_MIN_S)
        assert other.table.bury(0.0) == 0
        assert other.table.bury(GRACE_MIN_S) == 1
        third = Engine(SLOTS, grace_s=GRACE_MIN_S)
        third.close()
        fourth = Engine(SLOTS, grace_s=GRACE_MIN_S)
        assert fourth.table.engine == third.table.engine, "which had no lots"
        for engine in (other, fourth):
            engine.close()


def test_how_long_a_device_may_take_follows_from_what_it_may_have_and_its_rate() -> None:
    tiers = OffloadConfig.from_extra_config({"tiers": [{"url": "file:///kv"}]}, world_size=1)
    usual = OffloadConfig()
    assert grace_s("cpu", usual, 1 << 20, 1e9) == 0.0, "its threads are gone"
    assert grace_s("cpu", tiers, 1 << 20, 1e10) == GRACE_MIN_S
    assert grace_s("cuda", usual, 1 << 20, 50e9) == GRACE_MIN_S
    assert grace_s("cuda", usual, 1 << 20, 1e8) == 4 * usual.store_bytes_max / 1e8
    assert grace_s("cuda", usual, 1 << 40, None) == 4 * (1 << 40) / 1e9
