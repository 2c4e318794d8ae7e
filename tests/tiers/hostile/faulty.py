"""The Valkey tier with faults that the checks must find."""

import asyncio
import logging
import socket
from collections.abc import Collection, Sequence

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.choice import open_store
from safe_offload.tiers.seal import PLAIN, Seal
from safe_offload.tiers.sealed_tier import SealedTier
from tests.tiers.contract import bytes_of, put
from tests.tiers.hostile import fuzz
from tests.tiers.hostile.answers import EVIL, PASSWORD
from tests.tiers.hostile.fuzz import FACTS, PAUSE_JOBS_MAX
from tests.tiers.hostile.watch import do_job

logger = logging.getLogger("vllm.faulty")

TRUSTS = "serves what is not right"
RAISES = "lets errors out"
WRITES_LATE = "writes to a slot after it has returned"
HANGS = "does not end when it is cancelled"
TELLS = "logs a secret"
FORGES = "logs what a server says as it is"
FORGETS = "leaves its tasks behind"
LEAKS = "leaves its sockets behind"
HOARDS = "keeps what it has read"
BLOCKS = "holds up the event loop"
FAULTS = (TRUSTS, RAISES, WRITES_LATE, HANGS, TELLS, FORGES, FORGETS, LEAKS, HOARDS, BLOCKS)

NUM_COPIES = 2
"""Of all that is read when the server is good again it is too much: a busy machine may take the
first quarter, from which memory counts, for the whole."""


class Credulous(Seal):
    """Takes everything for right."""

    async def judge_async(self, *_: object) -> Result:
        """See `Seal.judge_async`."""
        return Result.DONE


class FaultyTier(SealedTier):
    """See above; `faults` are some of FAULTS."""

    def __init__(self, config: TierConfig, faults: Collection[str]) -> None:
        seal = Credulous() if TRUSTS in faults else PLAIN
        super().__init__(open_store(config, 1 << 20), FACTS, seal)
        self._faults = set(faults)
        self._kept: list[object] = []

    async def fetch(self, names: Sequence[Name], slots: Sequence[Buffers]) -> list[Result]:
        """See `Tier.fetch`."""
        faults = self._faults
        results = await super().fetch(names, slots)
        if WRITES_LATE in faults:
            asyncio.get_running_loop().call_later(0.05, put, slots[0], bytes_of(slots[0]))
        if HOARDS in faults:
            self._kept += [bytearray(bytes_of(slot)) for slot in slots for _ in range(NUM_COPIES)]
        if Result.CANCELLED in results and HANGS in faults:
            faults.discard(HANGS)  # once is enough
            await asyncio.sleep(fuzz.GRACE_S + 1)
        if Result.FAILED in results:
            self._fail()
        return results

    def _fail(self) -> None:
        faults = self._faults
        if TELLS in faults:
            logger.warning("It failed: the password is %s", PASSWORD)
        if FORGES in faults:
            logger.warning("It failed: %s", EVIL.decode())
        if FORGETS in faults:
            self._kept.append(asyncio.ensure_future(asyncio.sleep(3600)))
        if LEAKS in faults:
            self._kept.append(socket.socket())
            _leaked.append(self._kept[-1])
        if BLOCKS in faults:
            faults.discard(BLOCKS)
            for _ in range(2 * PAUSE_JOBS_MAX):
                do_job()
        if RAISES in faults:
            raise ValueError("what the server said")


_leaked: list[object] = []
