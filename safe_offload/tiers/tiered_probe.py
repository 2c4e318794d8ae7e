"""One probe of several tiers, concurrent but for a head start of the nearer ones.

Far tiers are slow, and each request to an object store costs money. So the next tier is probed only
when a nearer one lacks a block, or has not answered within its head start.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safe_offload.tiers.guarded_tier import GuardedTier

HEAD_START_S = 0.02
"""Long enough for a tier on this machine, or near it, to answer for 5,600 blocks."""
WAIT_SHARE = 2
"""Once a block is found, the probe waits for other tiers at most this part of their `wait_s`, which
leaves time to fetch it."""


class TieredProbe:
    """Finds which blocks are in which tier (`Presence.tiers`); it belongs to the loop's thread.

    `guarded_tiers` are nearest first, `keys` the group and hash of each block. `late` holds the
    tasks that outlive this probe, until they end.
    """

    def __init__(
        self,
        guarded_tiers: Sequence[GuardedTier],
        keys: Sequence[tuple[int, bytes]],
        generation: str,
        late: set[asyncio.Task[None]],
    ) -> None:
        self._guarded_tiers = guarded_tiers
        self._keys = keys
        self._generation = generation
        self._late = late
        self._probing: dict[asyncio.Task[None], int] = {}
        self._answered_s: dict[int, float] = {}
        self._begin_s = 0.0
        self.tiers = bytearray(len(keys))

    def __repr__(self) -> str:
        return f"<TieredProbe for {len(self._keys)} keys, {len(self._probing)} tiers are probed>"

    async def run(self) -> None:
        """Probe; return when all blocks are found, or no other answer is worth waiting for."""
        if len(self._guarded_tiers) == 1:
            await self._probe_tier(1)
            return
        loop = asyncio.get_running_loop()
        self._begin_s = loop.time()
        try:
            for number in range(1, len(self._guarded_tiers) + 1):
                if not self._missing():
                    return
                task = loop.create_task(self._probe_tier(number))
                self._probing[task] = number
                if number < len(self._guarded_tiers):
                    await asyncio.wait({task}, timeout=HEAD_START_S)
                    self._take_answers()
            while self._probing and self._missing():
                left_s = self._until_s() - loop.time()
                if left_s <= 0:
                    return
                timeout_s, first = left_s if left_s < math.inf else None, asyncio.FIRST_COMPLETED
                await asyncio.wait(self._probing, timeout=timeout_s, return_when=first)
                self._take_answers()
        except asyncio.CancelledError:
            for task in self._probing:
                task.cancel()
            raise
        finally:
            self._release()

    def _missing(self) -> list[int]:
        return [place for place, number in enumerate(self.tiers) if not number]

    async def _probe_tier(self, number: int) -> None:
        guarded, places = self._guarded_tiers[number - 1], self._missing()
        names = guarded.names([self._keys[place] for place in places], self._generation)
        found = await guarded.probe(names)
        if found is None:
            return
        self._answered_s[number] = asyncio.get_running_loop().time() - self._begin_s
        for place, is_there in zip(places, found, strict=True):
            if is_there and not 0 < self.tiers[place] < number:
                self.tiers[place] = number

    def _take_answers(self) -> None:
        """Forget the tasks that have ended; raise what one of them raised."""
        for task in [task for task in self._probing if task.done()]:
            del self._probing[task]
            task.result()

    def _until_s(self) -> float:
        """Return until when to wait for the tiers that have not answered."""
        if not any(self.tiers):
            return math.inf  # each has a deadline of its own
        numbers = self._probing.values()
        wait_s = (
            max(self._guarded_tiers[number - 1].config.wait_s for number in numbers) / WAIT_SHARE
        )
        beyond = [s for number, s in self._answered_s.items() if number > max(numbers)]
        if beyond:  # a nearer tier that is later than that gets as long again
            wait_s = min(wait_s, 2 * min(beyond))
        return self._begin_s + wait_s

    def _release(self) -> None:
        """Cancel probes that are not needed, and let the others go on.

        They are judged at their own deadlines; otherwise a tier that hangs would go unnoticed.
        """
        is_all_found = not self._missing()
        farthest = max(self.tiers, default=0)
        for task, number in self._probing.items():
            if is_all_found and number > farthest:
                task.cancel()
            self._late.add(task)
            task.add_done_callback(self._late.discard)
