"""Host memory of a rank that several engines of the machine share, and that outlives them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from safe_offload.config.units import format_bytes
from safe_offload.errors import ConfigError, SharingError
from safe_offload.node.locks import TESTS
from safe_offload.node.pools import RankFile, Wanted, open_rank, user_folder, wait_for
from safe_offload.node.table import reserved_slots
from safe_offload.protocol import PoolFacts
from safe_offload.worker.memory.host_memory import HostMemory

logger = logging.getLogger(f"vllm.{__name__}")

TEST_TIMEOUT_S = 60.0
"""How long an engine waits for the self-tests of others."""


class PoolMemory:
    """One rank's part of a pool, for as long as this engine uses it.

    By `facts`, the scheduler side finds the pool. After the slots, `host` has a `checksum_table`.
    """

    def __init__(self, file: RankFile, folder: str, rank: int) -> None:
        self._file = file
        self._rank = rank
        self.num_slots = file.num_slots
        self.facts = PoolFacts((folder, file.pool_id), file.token)
        self.host = HostMemory(file.mapping)

    def keep_after_death(self, grace_s: float) -> None:
        """Protect this engine's lots for `grace_s` after its death; see `node/table.py`."""
        self.facts = replace(self.facts, grace_s=grace_s)

    @contextmanager
    def tests(self, index: int) -> Iterator[range]:
        """Yield reserved slots, in which no other rank or engine tests meanwhile.

        `index` is of this rank among those that share the memory. StalledError: another process
        holds the slots for too long.
        """
        place, folder = TESTS + self._rank + index, self.facts.place[0]
        wait_for(self._file.locks, place, f"testing copies in {folder}", TEST_TIMEOUT_S)
        try:
            yield range(reserved_slots(self.num_slots))
        finally:
            self._file.locks.give(place)

    def close(self) -> None:
        """Release the locks: no copy of this rank touches the memory any more."""
        self._file.locks.close()


def open_pool(wanted: Wanted) -> PoolMemory:
    """Open this rank's part of the pool; create missing files.

    ConfigError: it cannot be used or created. StalledError: its creator makes no progress.
    """
    begin_s = time.monotonic()
    try:
        file = open_rank(wanted)
    except SharingError as error:
        raise ConfigError(f'"share": "node": the host cache cannot be shared: {error}.') from error
    folder = user_folder() / wanted.name
    logger.info(
        "The shared host cache %s %s: %s for rank %d, in %.1f s.",
        folder,
        "was created" if file.is_new else "was found",
        format_bytes(len(file.mapping)),
        wanted.rank,
        time.monotonic() - begin_s,
    )
    if file.num_slots != wanted.num_slots:
        logger.warning(
            "The shared host cache has %d slots, set by its first engine; this engine is "
            "configured for %d. To resize it, stop all its engines and run: safe-offload cache rm "
            "node %s",
            file.num_slots,
            wanted.num_slots,
            wanted.name,
        )
    return PoolMemory(file, str(folder), wanted.rank)
