"""A pool that several engines share, with a real table; engines die between any two writes."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from safe_offload.node import pools, table
from safe_offload.node.pools import RankFile, Wanted, open_rank
from safe_offload.protocol import PoolFacts
from safe_offload.scheduler.features import node as node_part

if TYPE_CHECKING:
    from tests.simulator.checkers.ledger import Ledger
    from tests.simulator.engine_core import EngineCore
    from tests.simulator.words import Sequel

Host = tuple[list[list[int | None]], npt.NDArray[np.uint64]]
GRACE_S = 0.05
LOOK_S = 0.02


class Killed(BaseException):
    """The process of an engine ends here; nothing may catch it."""


class RankPool:
    """What a rank knows of the pool; see `PoolMemory`."""

    def __init__(self, file: RankFile, folder: str) -> None:
        self._file = file
        self.facts = PoolFacts((folder, file.pool_id), file.token, GRACE_S)

    def close(self) -> None:
        self._file.locks.close()


class Node:
    """The machine: what its engines share, and what checkers must know of all of them."""

    def __init__(self) -> None:
        self.hosts: dict[int, Host] = {}
        self.prefixes: dict[bytes, tuple[Sequel, int]] = {}
        self.ledgers: list[Ledger] = []
        self.open_requests: list[Any] = []
        """Of all engines: what they have computed may be stored."""
        self._watchers: list[tuple[EngineCore, Callable[[Iterable[int]], Any]]] = []
        self.mortal: EngineCore | None = None
        """Whose turn it is."""
        self._folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self._stack = contextlib.ExitStack()
        for where, name, value in (
            (pools, "BASE", self._folder),
            (node_part, "LOOK_S", LOOK_S),
            (table, "fence", self._fence),
        ):
            self._stack.enter_context(patch.object(where, name, value))

    def open(self, rank: int, num_slots: int) -> RankPool:
        wanted = Wanted(
            "pool", "model", rank, num_slots, lambda count: count, b"", 64, lambda size: None
        )
        return RankPool(open_rank(wanted), str(pools.user_folder() / "pool"))

    def close(self) -> None:
        self._stack.close()
        shutil.rmtree(self._folder)

    def watch(self, core: EngineCore, see: Callable[[Iterable[int]], Any]) -> None:
        """Call `see` with the slots that another engine is about to write."""
        self._watchers.append((core, see))

    def written(self, core: EngineCore, slots: Iterable[int]) -> None:
        for other, see in self._watchers:
            if other is not core:
                see(slots)

    def ledgers_of_others(self, ledger: Ledger) -> Iterator[Ledger]:
        return (other for other in self.ledgers if other is not ledger)

    def _fence(self) -> None:
        """Between any two writes that others may see: here a process may end."""
        core = self.mortal
        if core is not None and core.num_fences_left > 0:
            core.num_fences_left -= 1
            if not core.num_fences_left:
                raise Killed
