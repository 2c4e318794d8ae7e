"""Engines without vLLM: the real slots of the scheduler side, and copies that take a while."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from safe_offload.node import pools
from safe_offload.node.locks import LOTS, NAPS
from safe_offload.node.pools import RankFile, Wanted, open_rank
from safe_offload.node.table import Table
from safe_offload.observe.counters import Counters
from safe_offload.scheduler.cache.directory import Directory
from safe_offload.scheduler.cache.leases import LeaseBook, LeaseKind
from safe_offload.scheduler.cache.slots import SlotPool
from safe_offload.scheduler.eviction.policy import Lru
from safe_offload.scheduler.features.node import STALLED_AFTER_S
from safe_offload.scheduler.node.lots import NodeLots

SLOT_WORDS = 32
PROMPTS, PROMPT_BLOCKS = 24, 12


def wanted(num_slots: int, **changes: Any) -> Wanted:
    """A pool of one rank whose slots have `SLOT_WORDS` words."""
    fields: dict[str, Any] = {
        "name": "pool",
        "about": "model",
        "rank": 0,
        "num_slots": num_slots,
        "size_of": lambda count: count * SLOT_WORDS * 8,
        "terms": b"terms",
        "hash_bytes": 32,
        "check": lambda size_bytes: None,
    }
    return Wanted(**{**fields, **changes})


def words_of(file: RankFile) -> Any:
    """The slots of a pool, shape (slots, SLOT_WORDS)."""
    return np.ndarray((file.num_slots, SLOT_WORDS), "u8", file.mapping)


def hash_of(prompt: int, block: int) -> bytes:
    return prompt.to_bytes(4, "little") + block.to_bytes(4, "little") + b"x" * 24


def word_of(block_hash: bytes) -> int:
    """What every word of a slot is that holds a block."""
    return int.from_bytes(block_hash[:8], "little") + 1


@contextmanager
def pools_in(folder: Path) -> Iterator[None]:
    """Meanwhile pools are below a folder of the test's."""
    with mock.patch.object(pools, "BASE", folder):
        yield


class Engine:
    """The scheduler side of one engine, in this process; `close` is its death.

    `tokens`: of the processes that copy for it; without any it opens the memory itself.
    """

    def __init__(
        self,
        num_slots: int,
        num_groups: int = 1,
        tokens: Sequence[int] = (),
        grace_s: float = 0.0,  # see `Table.join`
    ) -> None:
        self.file = None if tokens else open_rank(wanted(num_slots))
        table = Table(str(pools.user_folder() / "pool" / pools.TABLE))
        table.join([self.file.token] if self.file is not None else tokens, grace_s)
        directory = Directory(num_slots, num_groups)
        policy = Lru(num_slots, directory.hashes)
        self.counters = Counters()
        self.slots = SlotPool(num_slots, directory, policy, self.counters, awaits_source=True)
        self.leases = LeaseBook(self.slots)
        self.slots.open(num_slots)
        self.lots = NodeLots(self.slots, table, self.counters)
        self.slots.use_source(self.lots)
        self.table = table
        self.lots.sync()

    def begin(self, *hashes: bytes, group: int = 0) -> Any:
        """Begin to store blocks; return the lease."""
        lease = self.leases.grant(LeaseKind.STORE, len(hashes))
        assert lease is not None
        assert len(lease.slots) == len(hashes)
        self.slots.directory.begin_store(lease.slots, group, hashes, {})
        return lease

    def end(self, lease: Any) -> list[int]:
        """The bytes are there: let others find them."""
        assert self.file is not None
        words = words_of(self.file)
        for slot in lease.slots:
            words[slot] = word_of(self.slots.directory.hashes[slot])
        return self.publish(lease)

    def publish(self, lease: Any) -> list[int]:
        """Let others find what was stored, and let it go."""
        slots = list(lease.slots)
        self.slots.directory.publish(slots)
        lease.release()
        return slots

    def store(self, *hashes: bytes, group: int = 0) -> list[int]:
        return self.end(self.begin(*hashes, group=group))

    def find(self, *hashes: bytes, group: int = 0) -> list[int]:
        self.lots.sync()
        return self.slots.directory.find_run(group, hashes)

    def hit(self, *hashes: bytes) -> Any:
        """Lease what is found of some blocks; None if it was lost."""
        num_lost = self.lots.num_lost
        lease = self.leases.lease(LeaseKind.MATCH, self.find(*hashes))
        if self.lots.num_lost == num_lost:
            return lease
        lease.release()
        return None

    def close(self) -> None:
        self.table.close()
        if self.file is not None:
            self.file.locks.close()

    def check(self) -> None:
        self.leases.check_invariants()


# ---- engines of processes, which can be killed ---------------------------------------------------


def copier(num_slots: int, pipe: Any, other: Any) -> None:
    """Move words as it is told, each slot in two parts; end what it does when the other is dead."""
    other.close()
    file = open_rank(wanted(num_slots))
    words = words_of(file)
    pipe.send(file.token)
    chance = random.Random(os.getpid())
    while True:
        try:
            kind, slots, values = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        if kind == "store":
            for slot, value in zip(slots, values, strict=True):
                words[slot, : SLOT_WORDS // 2] = value
                time.sleep(chance.choice((0, 0, 0.0005)))
                words[slot, SLOT_WORDS // 2 :] = value
            answer = 0
        else:
            answer = 0
            for slot, value in zip(slots, values, strict=True):
                answer += int((words[slot] != value).sum())
                time.sleep(chance.choice((0, 0, 0.0005)))
                answer += int((words[slot] != value).sum())
        try:
            pipe.send(answer)
        except OSError:
            os._exit(0)


LOADS, FOREIGN, STORES, WRONG, LOST, STALLS, HIT_MS, STOPS = range(8)
"""What an engine counts, where it outlives the engine; when its last hit was, by the clock; and
whether it is to stop itself."""
TIMES, OCTAVE = 800, 32
"""Bins of the microseconds that requests take, and how many of them are a factor of two."""


def stop_when_asked(table: Table, counts: Any) -> None:
    """This process stops itself as soon as it has the place of another engine, if it is to."""
    take = table.locks.take

    def take_and_stop(place: int) -> bool:
        has_it = take(place)
        if counts[STOPS] and has_it and NAPS <= place < LOTS and place != NAPS + table.engine:
            counts[STOPS] = 0
            os.kill(os.getpid(), signal.SIGSTOP)
        return has_it

    table.locks.take = take_and_stop  # type: ignore[method-assign]


def begin_step(engine: Engine, counts: Any) -> None:
    """Wait until nobody has the place of an engine, then see what became of others."""
    begin_s = time.monotonic()
    if not engine.lots.wake():
        while not engine.lots.wake():
            time.sleep(0.001)
        counts[STALLS] += time.monotonic() - begin_s >= STALLED_AFTER_S
    engine.table.bury(time.monotonic())
    engine.lots.balance()


def serve(
    num_slots: int, seed: int, counts: Any, copier_pid: Any, times: Any, is_stormy: Any
) -> None:
    """An engine that loads what it finds and stores the rest, until it is killed."""
    context = multiprocessing.get_context("fork")
    pipe, other = context.Pipe()
    child = context.Process(target=copier, args=(num_slots, other, pipe))
    child.start()
    other.close()
    copier_pid.value = child.pid
    engine = Engine(num_slots, tokens=[pipe.recv()])
    stop_when_asked(engine.table, counts)
    chance = random.Random(seed)

    def copy(kind: str, slots: list[int]) -> int:
        hashes = engine.slots.directory.hashes
        pipe.send((kind, slots, [word_of(hashes[slot] or b"") for slot in slots]))
        return int(pipe.recv())

    while True:
        begin_s, of_times = time.monotonic(), TIMES * is_stormy.value
        begin_step(engine, counts)
        prompt = min(int(chance.expovariate(0.15)), PROMPTS - 1)
        hashes = [hash_of(prompt, block) for block in range(chance.randint(1, PROMPT_BLOCKS))]
        lease = engine.hit(*hashes)
        counts[LOST] = engine.lots.num_lost
        num_found = 0
        if lease is not None:
            num_found = len(lease.slots)
            if lease.slots:
                own = set(engine.table.own_lots())
                lot_slots = engine.table.lot_slots
                counts[FOREIGN] += sum(slot // lot_slots not in own for slot in lease.slots)
                counts[LOADS] += num_found
                counts[WRONG] += copy("load", lease.slots)
                counts[HIT_MS] = int(1e3 * time.monotonic())
        stored = engine.leases.grant(LeaseKind.STORE, len(hashes) - num_found)
        if stored is not None:
            table = engine.slots.directory.tables[0]
            new = [h for h in hashes[num_found:] if h not in table][: len(stored.slots)]
            stored.keep(LeaseKind.STORE, stored.slots[: len(new)])
            engine.slots.directory.begin_store(stored.slots, 0, new, {})
            copy("store", stored.slots)
            counts[STORES] += len(new)
            engine.publish(stored)
        if lease is not None:
            lease.release()
        taken_us = max(1.0, 1e6 * (time.monotonic() - begin_s))
        times[of_times + min(TIMES - 1, int(OCTAVE * math.log2(taken_us)))] += 1
        draw = chance.random()
        if draw < 0.05:
            engine.check()
        if draw < 0.01:
            engine.table.nap()
            time.sleep(chance.choice((0.01, 0.01, 0.1)))
