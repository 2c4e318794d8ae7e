"""Files of a pool: what an engine that is killed leaves behind."""

import multiprocessing
import os
import signal

import pytest

from safe_offload.node import table as table_module
from safe_offload.node.pools import open_rank, user_folder
from tests.node.engines import pools_in, wanted
from tests.tiers.files.mounts import mounted

SLOT_BYTES = 40 << 10
NUM_SLOTS = 1000
"""Of a pool that takes over half of the folder."""


def big(name):
    return wanted(NUM_SLOTS, name=name, size_of=lambda count: count * SLOT_BYTES)


def make_and_be_killed(name):
    """Be killed when all memory of the pool is taken, before it can be found."""
    write = os.pwrite

    def be_killed(fd, data, at):
        if os.fstat(fd).st_size > NUM_SLOTS * SLOT_BYTES:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(fd, data, at)

    os.pwrite = be_killed
    open_rank(big(name))


@pytest.mark.parametrize("later", ["pool", "another"])
def test_what_an_engine_took_that_was_killed_is_room_for_the_next(tmp_path, later):
    with mounted(tmp_path / "shm", size_bytes=64 << 20) as folder, pools_in(folder):
        process = multiprocessing.get_context("fork").Process(
            target=make_and_be_killed, args=["pool"]
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        left = user_folder() / "pool" / table_module.NEW
        assert left.stat().st_blocks * 512 > NUM_SLOTS * SLOT_BYTES
        file = open_rank(big(later))
        assert file.is_new
        assert not left.exists()
        file.locks.close()
        file.mapping.close()
