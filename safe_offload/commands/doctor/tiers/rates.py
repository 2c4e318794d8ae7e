"""Whether a tier takes and gives back objects, and how fast."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

from safe_offload.commands.doctor.findings import Finding, info, refusal, warning
from safe_offload.config.tiers import TierConfig
from safe_offload.config.units import MIB
from safe_offload.errors import SafeOffloadError
from safe_offload.tiers.base import Name, PlaceError, Result, Tier
from safe_offload.tiers.choice import open_store, open_tier
from safe_offload.tiers.naming import namespace_folder

NUM_OBJECTS: Final = 16
OBJECT_BYTES: Final = 2 * MIB
RATE_S_MAX: Final = 10.0
"""Of writing and of reading; what is not begun by then is left out."""
TRIAL_S: Final = 60.0
"""All that is tried of a tier over the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTrial:
    """What the trial of a tier found, whatever its kind.

    Attributes:
        problem: why nothing could be tried; empty if it could.
        is_down: the tier does not answer, and may later.
        write_bytes_per_s, read_bytes_per_s: of objects; 0 if none was written or read.
        with_rates: what a tier is that has them.
    """

    with_rates: ClassVar[str]
    label: str
    problem: str = ""
    is_down: bool = False
    write_bytes_per_s: float = 0.0
    read_bytes_per_s: float = 0.0

    @property
    def only_reads(self) -> bool:
        """Return whether nothing may be written, as somebody has decided."""
        return False


Trial = TypeVar("Trial", bound=TierTrial)


def trial_facts() -> dict[str, str]:
    """Return what makes a namespace that no engine uses."""
    return {"model": "safe-offload doctor", "trial": secrets.token_hex(8)}


def trial_names(namespace: bytes) -> list[Name]:
    """Return the names of the objects that are written, to be deleted again."""
    return [Name(namespace, 0, index.to_bytes(32, "big")) for index in range(NUM_OBJECTS)]


async def try_rates(config: TierConfig) -> tuple[float, float]:
    """Return bytes a second of writing and of reading; nothing is left there."""
    tier, namespace_of = open_tier(config, OBJECT_BYTES, trial_facts())
    space = namespace_of("")
    try:
        return await rates_of(tier, space)
    finally:
        store = open_store(config)
        with contextlib.suppress(Exception):
            await store.delete([store.key_of(name) for name in trial_names(space)])
            await store.forget([namespace_folder(space)])
        await store.close()


async def rates_of(tier: Tier, namespace: bytes) -> tuple[float, float]:
    """Return bytes a second of writing and of reading; the tier is closed.

    Args:
        tier: has slots of OBJECT_BYTES.
        namespace: that no engine uses.
    """
    memory = memoryview(mmap.mmap(-1, NUM_OBJECTS * OBJECT_BYTES))
    memory[:] = os.urandom(memory.nbytes)
    starts = range(0, memory.nbytes, OBJECT_BYTES)
    slots = [(memory[start : start + OBJECT_BYTES],) for start in starts]
    names = trial_names(namespace)
    rates = []
    try:
        for move in (tier.spill, tier.fetch):
            start_s = time.monotonic()
            task = asyncio.create_task(move(names, slots))
            await asyncio.wait([task], timeout=RATE_S_MAX)
            task.cancel()  # what has not begun; it returns normally
            num_done = (await task).count(Result.DONE)
            rates.append(num_done * OBJECT_BYTES / (time.monotonic() - start_s))
    finally:
        await tier.close()
    return rates[0], rates[1]


def in_time(
    config: TierConfig,
    work: Callable[[TierConfig], Coroutine[Any, Any, Trial]],
    kind: type[Trial],
) -> Trial:
    """Return what a trial finds; it is left behind if it takes longer than TRIAL_S.

    Raises:
        Exception: of the work, if it is none of ours.
    """
    label = config.location.label
    found: list[Trial] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            found.append(asyncio.run(work(config)))
        except PlaceError as error:
            problem = error.said_of(label)
            found.append(kind(label=label, problem=problem, is_down=error.is_down))
        except SafeOffloadError as error:
            found.append(kind(label=label, problem=str(error)))
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, name="safe-offload-doctor", daemon=True)
    thread.start()
    thread.join(TRIAL_S)
    if problems:
        raise problems[0]
    if found:
        return found[0]
    return kind(label=label, problem=f"{label} hangs", is_down=True)


def unusable(id: str, trial: TierTrial, expected: str, otherwise: str) -> Finding:
    """Return the finding of a tier that could not be tried; `otherwise` if it has no fix."""
    found = refusal(id, trial.problem, expected, otherwise)
    if not trial.is_down:
        return found
    said = f"{found.found}; engines start without it, and use it when it answers"
    return warning(id, said, expected, found.fix)


def check_rates(trial: TierTrial, token_bytes: int) -> Finding:
    """Judge the rates of a tier; `token_bytes` of all ranks, 0 if the model is not known."""
    id, label = "tiers.rate", trial.label
    if trial.only_reads:
        return info(id, f"{label}: not measured, because it is read-only")
    write, read = trial.write_bytes_per_s / 1e9, trial.read_bytes_per_s / 1e9
    if not (write and read):
        return warning(
            id,
            f"{label}: no object could be written and read back",
            trial.with_rates,
            "see the other findings of this tier",
        )
    found = f"{label}: objects are written at {write:.2g} GB/s and read at {read:.2g} GB/s"
    if token_bytes:
        found += f", {trial.read_bytes_per_s / token_bytes:.0f} tokens a second"
    return info(id, found)
