"""The cache salts of the requests for which GPU blocks were allocated."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby


class BlockSalts:
    """The salt of the last request for which each GPU block was allocated.

    Blocks of `boundary_group_ids` are stored for the request of the step that allocates them.

    Bound: an entry for each block of the GPU.
    """

    def __init__(self, boundary_group_ids: tuple[int, ...]) -> None:
        self._boundary_group_ids = boundary_group_ids
        self._salts: dict[int, str | None] = {}
        self._new_salts: dict[int, str | None] = {}

    def begin_step(self) -> None:
        """A step is planned."""
        self._new_salts = {}

    def allocated(self, block_ids: Iterable[int], salt: str | None) -> None:
        """Blocks were allocated in the step that is planned."""
        self._new_salts.update(dict.fromkeys(block_ids, salt))

    def end_step(self) -> None:
        """The step is planned."""
        self._salts.update(self._new_salts)

    def runs(self, group_idx: int, block_ids: Sequence[int]) -> list[tuple[range, str | None]]:
        """Return runs of blocks with the same salt, as indices, with that salt."""
        salts: Mapping[int, str | None] = self._salts
        if group_idx in self._boundary_group_ids:
            salts = ChainMap(self._new_salts, self._salts)
        runs, start = [], 0
        for salt, run in groupby(map(salts.get, block_ids)):
            end = start + len(list(run))
            runs.append((range(start, end), salt))
            start = end
        return runs
