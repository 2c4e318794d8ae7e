"""Which slot of a pool holds what, and which engine may overwrite it.

All engines of a machine map this table, and each may be killed at any instruction. So all locks are
the kernel's (`locks.py`), and each word has one writer:

- *Lots* are runs of slots. An engine overwrites slots of its own lots only. A free lot keeps what
  it holds, and an engine that needs room claims it.
- A slot's *word* says whether it holds a block that can be found. Its owner writes hash and
  generation first, the word last; it takes the word back before it overwrites anything.
- A *guest mark* of an engine at a slot keeps all others from overwriting it. The guest marks, then
  reads the word again; the owner takes the word back, then reads the marks. A fence stands between
  the two on both sides, so at least one of them sees the other.
- A *check* beside each slot covers its word. Any process that maps the memory, or the hardware, may
  damage it: readers ignore an invalid entry.
- An engine *naps* when it leases and writes nothing. Then others may free lots that it has beyond
  its share. One that has died is found by its tokens: the kernel unlocks them as the last of its
  processes ends.
- Copies of threads have ended by then, but those of a device may continue: the kernel closes a
  process's files in no promised order, and the drivers of all engines pin the same pages. So each
  engine declares how long its devices take for all that may be in flight, its *grace*, and keeps
  its lots for so long after its death.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from safe_offload.errors import SharingError
from safe_offload.node.locks import LOTS, NAPS, Locks, fence, is_token

MAGIC: Final = b"safe_offload node 3\n"
HEADER_BYTES: Final = 4096
NEW: Final = "new"
"""The name of a file while it is created."""
ENGINES_MAX: Final = 32
TOKENS_MAX: Final = 120
LOT_SLOTS_MAX: Final = 64
LOTS_MIN: Final = 64
"""A small pool has smaller lots, so that several engines get some."""
TEST_SLOTS_MAX: Final = 32
GRACE_MAX_S: Final = 300.0
"""An entry above it is damaged."""

_HEADER: Final = struct.Struct("32s16sQQ")
_REGISTERED, _NAPS, _WANTS, _GRACE_MS, _TOKENS = range(5)
_FILLED: Final = 1
_YES: Final = 0xFF
"""Still true when one of its bits flips."""

Slots = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


class Table:
    """The table of one pool, mapped by one engine (or only for reading: `engine` is -1).

    Bound: `ENGINES_MAX` entries.
    """

    def __init__(self, path: str) -> None:
        self.locks = Locks(path)
        size_bytes = os.fstat(self.locks.fd).st_size
        if size_bytes < HEADER_BYTES:
            raise SharingError(f"{path} is not the table of a pool")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._mapping = mmap.mmap(fd, size_bytes)  # keeps a copy of the descriptor: without locks
        os.close(fd)
        magic, self.pool_id, self.num_slots, self.hash_bytes = _HEADER.unpack_from(self._mapping)
        if not magic.startswith(MAGIC) or size_bytes != _size_of(self.num_slots, self.hash_bytes):
            raise SharingError(f"{path} has another version, or is truncated")
        self.lot_slots = lot_slots_of(self.num_slots)
        self.num_lots = -(-self.num_slots // self.lot_slots)
        self._at = HEADER_BYTES
        self._engines = self._array("u8", ENGINES_MAX, _TOKENS + TOKENS_MAX)
        self.owners = self._array("u8", self.num_lots)  # by lot, an engine + 1; 0 for none
        # By lot; changes after each change in the lot.
        self.versions = self._array("u8", self.num_lots)
        # `words`, `hashes`, `generations`: by slot; written by the owner.
        self.words = self._array("u8", self.num_slots)
        self.generations = self._array("u8", self.num_slots)
        # By slot; of slot, word, generation and hash.
        self.checks = self._array("u8", self.num_slots)
        self.hashes = self._array("u1", self.num_slots, self.hash_bytes)
        # By slot, not 0 if the memory under it is not to be trusted; any engine writes it.
        self.bad = self._array("u1", self.num_slots)
        # By slot, 1 if an engine that does not own it has used it; any engine writes it.
        self.touched = self._array("u1", self.num_slots)
        self.marks = self._array("u1", ENGINES_MAX, self.num_slots)  # by engine and slot
        self.engine = -1
        self.is_awake = False
        self.num_damaged = 0  # impossible entries that this engine has seen
        self.lost = ""  # why this engine no longer uses the table; empty if it does
        self._factors = _odd_numbers(3 + self.hash_bytes)
        self._grace_ms = 0
        self._tokens = np.zeros(TOKENS_MAX, np.uint64)
        self._seen_dead: dict[int, float] = {}

    @staticmethod
    def make(path: Path, num_slots: int, hash_bytes: int, pool_id: bytes) -> None:
        """Make an empty table."""
        head = _HEADER.pack(MAGIC, pool_id, num_slots, hash_bytes)
        owners_at = HEADER_BYTES + _aligned(8 * ENGINES_MAX * (_TOKENS + TOKENS_MAX))
        reserved = b"\xff" * 8 * (reserved_slots(num_slots) // lot_slots_of(num_slots))
        make_file(path, _size_of(num_slots, hash_bytes), {0: head, owners_at: reserved})

    def _array(self, kind: str, *shape: int) -> npt.NDArray[Any]:
        array = np.ndarray(shape, kind, self._mapping, self._at)
        self._at += _aligned(array.nbytes)
        return array

    def __repr__(self) -> str:
        return f"<Table of {self.num_slots} slots, engine {self.engine}>"

    def close(self) -> None:
        """Release all locks of this engine; others take over its lots when its workers end."""
        self.locks.close()

    # ---- engines -------------------------------------------------------------------------------

    def join(self, tokens: Sequence[int], grace_s: float = 0.0) -> None:
        """Become one of the engines.

        Args:
            tokens: that its workers hold.
            grace_s: how long after its death a device may still write what it was given.

        Raises:
            SharingError: there are too many already.
        """
        self._grace_ms = int(1000 * min(grace_s, GRACE_MAX_S))
        tokens = [self.locks.new_token(), *tokens]
        taken = self.engines
        for engine in (*(e for e in range(ENGINES_MAX) if e not in taken), *taken):
            if self._lives(engine) or not self.locks.take(NAPS + engine):
                continue
            # Another was faster, and naps; or nobody knows how long this one has been dead.
            if self._lives(engine) or (self._grace_s(engine) and engine + 1 in self.owners):
                self.locks.give(NAPS + engine)
                continue
            self._bury(engine)
            self._tokens[: len(tokens)] = tokens
            self._write_row(engine)
            self.engine, self.is_awake = engine, True
            return
        raise SharingError(f"{ENGINES_MAX} engines use it already, or have just ended")

    def wake(self) -> bool:
        """Keep the lots of this engine until `nap`; False if another is freeing some now."""
        if not self.is_awake and not self.lost and self.locks.take(NAPS + self.engine):
            if self._mend_row():
                self._engines[self.engine][_NAPS] = 0
                self.is_awake = True
            else:
                self.lost = "its table was damaged, and another engine has taken this one's place"
                self.locks.give(NAPS + self.engine)
        return self.is_awake

    def _mend_row(self) -> bool:
        """Repair a damaged row of this engine, whose nap is held; False if another has taken it.

        That engine has left lots and marks meanwhile, so all that the place has is freed.
        """
        row = self._engines[self.engine]
        if row[_REGISTERED] == 1 and bool((row[_TOKENS:] == self._tokens).all()):
            return True
        self.num_damaged += 1
        others = set(self._tokens_of(self.engine)).difference(_listed(self._tokens))
        if any(map(self.locks.is_taken, others)):
            return False
        if not self.is_awake:
            self._bury(self.engine)
        self._write_row(self.engine)
        return True

    def _write_row(self, engine: int) -> None:
        row = self._engines[engine]
        row[_TOKENS:] = self._tokens
        row[_GRACE_MS] = self._grace_ms
        row[_REGISTERED] = 1

    def nap(self) -> None:
        """Let others free surplus lots; nothing is leased, written or granted before `wake`."""
        if self.is_awake:
            self.is_awake = False
            self.want(is_short=False)
            self._engines[self.engine][_NAPS] = 1
            fence()
            self.locks.give(NAPS + self.engine)

    def want(self, *, is_short: bool) -> None:
        """Tell others whether this engine has too few lots."""
        self._engines[self.engine][_WANTS] = is_short

    @property
    def is_wanted(self) -> bool:
        """Whether another engine has too few lots."""
        return bool(self._engines[:, _WANTS].any()) and not self._engines[self.engine][_WANTS]

    @property
    def engines(self) -> list[int]:
        """All engines that have joined, including dead ones that are not buried yet."""
        return _listed(np.flatnonzero(self._engines[:, _REGISTERED]))

    @property
    def living(self) -> list[int]:
        """Those with a living process."""
        return [engine for engine in self.engines if self._lives(engine)]

    def fair_share(self) -> int:
        """Return how many lots each engine should have."""
        num_lots: int = self.num_lots - reserved_slots(self.num_slots) // self.lot_slots
        return max(1, num_lots // max(1, len(self.engines)))

    def _lives(self, engine: int) -> bool:
        tokens = self._tokens_of(engine)
        return engine == self.engine or any(map(self.locks.is_taken, tokens))

    def _tokens_of(self, engine: int) -> list[int]:
        return list(filter(is_token, self._engines[engine][_TOKENS:].tolist()))

    def bury(self, now_s: float) -> int:
        """Free the lots and marks of dead engines; return how many were dead."""
        num_dead = 0
        if self.is_awake:
            self._mend_row()
        for engine in self.engines:
            if self._lives(engine):
                self._seen_dead.pop(engine, None)
            elif now_s - self._seen_dead.setdefault(engine, now_s) >= self._grace_s(engine):
                del self._seen_dead[engine]
                if self.locks.take(NAPS + engine):
                    if not self._lives(engine):
                        self._bury(engine)
                        num_dead += 1
                    self.locks.give(NAPS + engine)
        return num_dead

    def _grace_s(self, engine: int) -> float:
        """Return how long a dead engine keeps its lots, not less than this one would."""
        return min(max(self._grace_ms, int(self._engines[engine][_GRACE_MS])) / 1000, GRACE_MAX_S)

    def _bury(self, engine: int) -> None:
        """Free the lots and marks of an engine whose nap lock is held; unregister it last."""
        self.marks[engine] = 0
        self.owners[self.owners == engine + 1] = 0
        fence()
        self._engines[engine] = 0

    # ---- lots ----------------------------------------------------------------------------------

    def range_of(self, lot: int) -> range:
        """Return the slots of a lot."""
        start = lot * self.lot_slots
        return range(start, min(start + self.lot_slots, self.num_slots))

    def own_lots(self) -> list[int]:
        """Return the lots of this engine."""
        return _listed(np.flatnonzero(self.owners == self.engine + 1))

    def free_lots(self, num_ready: int) -> list[int]:
        """Return lots without an owner in the first slots, those with the fewest blocks first."""
        free = np.flatnonzero(self.owners[: num_ready // self.lot_slots] == 0)
        if num_ready == self.num_slots and self.num_slots % self.lot_slots:
            last = self.num_lots - 1
            free = np.append(free, [last] if not self.owners[last] else []).astype(np.int64)
        if not len(free):
            return []
        filled = np.add.reduceat(self.words & _FILLED, np.arange(0, self.num_slots, self.lot_slots))
        return _listed(free[np.argsort(filled[free], kind="stable")])

    def claim(self, lot: int) -> bool:
        """Take a free lot; False if another engine was faster."""
        if self.owners[lot] or not self.locks.take(LOTS + lot):
            return False
        if not self.owners[lot]:
            self.owners[lot] = self.engine + 1
        self.locks.give(LOTS + lot)
        return bool(self.owners[lot] == self.engine + 1)

    def reclaim(self, lot: int) -> bool:
        """Take back a lot that a damaged table assigns to none; False if another has it."""
        self.num_damaged += 1
        if not self.locks.take(LOTS + lot):
            return False
        if int(self.owners[lot]) - 1 not in self.engines:
            self.owners[lot] = self.engine + 1
        self.locks.give(LOTS + lot)
        return bool(self.owners[lot] == self.engine + 1)

    def give(self, lot: int) -> None:
        """Free a lot of this engine; it keeps its contents."""
        self.versions[lot] += np.uint64(1)
        fence()
        self.owners[lot] = 0

    def free_napping(self) -> int:
        """Free the surplus lots of napping engines; return how many."""
        num_freed, share = 0, self.fair_share()
        for engine in self.engines:
            if engine == self.engine or not self._engines[engine][_NAPS]:
                continue
            if self.locks.take(NAPS + engine):
                if self._engines[engine][_NAPS]:
                    beyond = np.flatnonzero(self.owners == engine + 1)[share:]
                    self.owners[beyond] = 0
                    num_freed += len(beyond)
                self.locks.give(NAPS + engine)
        return num_freed

    # ---- slots of this engine's lots -----------------------------------------------------------

    def retract(self, slots: Slots) -> Slots:
        """Unpublish slots, except those that guests read; return these.

        They stay published, so that every engine finds what one has pinned. A guest that arrives
        meanwhile keeps its slot.
        """
        is_held = self._are_held(slots)
        free = slots[~is_held]
        words = self.words[free]
        self.words[free] = (words >> np.uint64(32) << np.uint64(32)) + np.uint64(1 << 32)
        self._changed(free)
        held: Slots = np.concatenate((slots[is_held], self.guests_at(free)))
        return held

    def guests_at(self, slots: Slots) -> Slots:
        """Return the slots that must not be overwritten, or retracted, yet."""
        fence()
        held: Slots = slots[self._are_held(slots)]
        return held

    def _are_held(self, slots: Slots) -> npt.NDArray[np.bool_]:
        is_held: npt.NDArray[np.bool_] = self.marks[:, slots].any(axis=0) | (self.bad[slots] != 0)
        return is_held

    def publish(
        self, slots: Slots, groups: Sequence[int], hashes: Sequence[bytes], generations: list[int]
    ) -> None:
        """Publish retracted slots; those whose hash or group does not fit are left out."""
        bits = np.zeros(len(slots), np.uint64)
        for place, (slot, block_hash) in enumerate(zip(slots.tolist(), hashes, strict=True)):
            num_bytes = len(block_hash)
            if num_bytes <= self.hash_bytes and groups[place] < 256:
                self.hashes[slot, :num_bytes] = np.frombuffer(block_hash, np.uint8)
                bits[place] = num_bytes << 16 | groups[place] << 8 | _FILLED  # see `read`
        self.generations[slots] = generations
        self.touched[slots] = 0
        words = (self.words[slots] >> np.uint64(32) << np.uint64(32)) + bits
        self.checks[slots] = self._check(slots, words, self.generations[slots], self.hashes[slots])
        fence()
        self.words[slots] = words
        self._changed(slots)

    def _check(self, slots: Slots, words: Words, generations: Words, hashes: Bytes) -> Words:
        """Return a checksum that detects every single-bit flip: a sum of odd multiples."""
        slot, word, generation, *_ = self._factors
        in_hash: Words = hashes.astype(np.uint64) @ self._factors[3:]
        checks: Words = slots.astype(np.uint64) * slot + words * word + generations * generation
        return checks + in_hash

    def _changed(self, slots: Slots) -> None:
        fence()
        self.versions[np.unique(slots // self.lot_slots)] += np.uint64(1)

    # ---- any slot ------------------------------------------------------------------------------

    def read(self, slots: Slots) -> list[tuple[int, int, int, int, bytes]]:
        """Return slot, word, generation, group and hash of filled slots; count damaged ones."""
        words = self.words[slots]
        slots = slots[is_filled := (words & _FILLED != 0) & (self.bad[slots] == 0)]
        if not len(slots):
            return []
        words = words[is_filled]
        fence()
        generations, rows, checks = self.generations[slots], self.hashes[slots], self.checks[slots]
        fence()
        is_whole = self.words[slots] == words
        is_right = checks == self._check(slots, words, generations, rows)
        self.num_damaged += int(np.count_nonzero(is_whole & ~is_right))
        hashes, is_it = rows.tobytes(), (is_whole & is_right).tolist()
        found = zip(slots.tolist(), words.tolist(), generations.tolist(), is_it, strict=True)
        return [
            (slot, word, generation, word >> 8 & 0xFF, hashes[at : at + (word >> 16 & 0xFFFF)])
            for at, (slot, word, generation, is_it) in zip(
                count(0, self.hash_bytes), found, strict=False
            )
            if is_it
        ]

    def visit(self, slots: Slots, words: Words) -> Slots:
        """Mark slots against overwriting until `leave`; return those without their old `words`."""
        self.marks[self.engine, slots] = _YES
        fence()
        is_lost = (self.words[slots] != words) | (self.bad[slots] != 0)
        lost: Slots = slots[is_lost]
        self.marks[self.engine, lost] = 0
        self.touched[slots] = 1
        return lost

    def mark(self, slots: Slots) -> None:
        """Mark leased slots of a lot that this engine is about to give."""
        self.marks[self.engine, slots] = _YES

    def leave(self, slots: Slots) -> None:
        """Remove the marks of slots, so that they may be overwritten."""
        fence()  # what was read of them has been read
        self.marks[self.engine, slots] = 0

    def condemn(self, slots: Slots) -> None:
        """Exclude slots from all further use, by any engine."""
        self.bad[slots] = _YES


def make_file(path: Path, size_bytes: int, content: Mapping[int, bytes]) -> None:
    """Create a file, named once all memory is allocated; `content` by offset, the rest zeros."""
    new = path.with_name(NEW)
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(fd, size_bytes)  # first: others see how much will be taken
        os.posix_fallocate(fd, 0, size_bytes)
        for at, data in content.items():
            os.pwrite(fd, data, at)
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _odd_numbers(count: int) -> Words:
    return np.frombuffer(hashlib.shake_128(MAGIC).digest(8 * count), "<u8") | np.uint64(1)


def _listed(numbers: npt.NDArray[Any]) -> list[int]:
    listed: list[int] = numbers.tolist()
    return listed


def lot_slots_of(num_slots: int) -> int:
    """Return how many slots a lot has."""
    return max(1, min(LOT_SLOTS_MAX, num_slots // LOTS_MIN))


def reserved_slots(num_slots: int) -> int:
    """Return how many of the first slots are reserved for the self-tests of all engines."""
    lot_slots = lot_slots_of(num_slots)
    return max(1, min(TEST_SLOTS_MAX, num_slots // 16) // lot_slots) * lot_slots


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // 64) * 64


def _size_of(num_slots: int, hash_bytes: int) -> int:
    """Return the size of a table; in the order of `Table`'s arrays."""
    num_lots = -(-num_slots // lot_slots_of(num_slots))
    arrays = (
        *(8 * ENGINES_MAX * (_TOKENS + TOKENS_MAX), 8 * num_lots, 8 * num_lots),
        *(8 * num_slots, 8 * num_slots, 8 * num_slots, hash_bytes * num_slots),
        *(num_slots, num_slots, ENGINES_MAX * num_slots),
    )
    return HEADER_BYTES + sum(map(_aligned, arrays))
