"""For whom the blocks of the GPU were allocated."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safe_offload.scheduler.blocks import BlockSet
    from safe_offload.scheduler.requests import RequestState


class BlockSalts:
    """The salt of the request for which each GPU block was allocated last.

    Its state: the salts of blocks before the step that is planned, and those of this step.

    Bound: an entry for each block of the GPU.

    Args:
        number_of: which tenant a salt is of.
        boundary_group_ids: groups of which what is stored in a step was computed for those for whom
            it is allocated in this step.
    """

    def __init__(
        self, number_of: Callable[[str | None], int], boundary_group_ids: tuple[int, ...]
    ) -> None:
        self._number_of = number_of
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

    def split(self, blocks: BlockSet) -> Iterator[tuple[BlockSet, str | None]]:
        """Yield runs of blocks that were allocated for one salt, with it."""
        salts: Mapping[int, str | None] = self._salts
        if blocks.group_idx in self._boundary_group_ids:
            salts = ChainMap(self._new_salts, self._salts)
        start = 0
        for salt, run in groupby(salts.get(block.block_id) for block in blocks.blocks):
            end = start + len(list(run))
            yield blocks.part(range(start, end)), salt
            start = end

    def are_of_one(self, owners: list[tuple[RequestState, int]]) -> bool:
        """Return whether requests are of one tenant."""
        return len({self._number_of(owner.request.cache_salt) for owner, _ in owners}) == 1
