"""What lies in a pool's table is not trusted: any bit of it may have changed."""

import contextlib
import itertools
import signal
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from safe_offload.commands.cache.pools import run_on_pools
from safe_offload.errors import SharingError
from safe_offload.node import table as table_module
from safe_offload.node.pools import user_folder
from safe_offload.node.table import ENGINES_MAX, HEADER_BYTES
from safe_offload.scheduler.cache.leases import LeaseKind
from tests.node.engines import Engine, hash_of, pools_in, word_of, words_of

SLOTS = 16
"""In lots of one, and the first belongs to nobody."""
A, B, C = (hash_of(9, number) for number in range(3))
PROMPTS = [
    [(group, hash_of(prompt, i)) for i in range(group, 3)] for prompt in (1, 2) for group in (0, 1)
]
ROW_WORDS = 4 + table_module.TOKENS_MAX
SCENE_S = 20.0
"""So long, on the slowest machine, a call has not ended that never will."""


@pytest.fixture
def start(start_engine):
    return partial(start_engine, SLOTS, num_groups=2)


def places():
    """Every byte of the table that the scene's engines use, by what lies there."""
    at = HEADER_BYTES
    yield from (("header", byte) for byte in range(64))
    lots = words = 8 * SLOTS
    of_row = [*range(8 * 8), *range(8 * (ROW_WORDS - 1), 8 * ROW_WORDS)]  # the tokens of most
    in_rows = [8 * ROW_WORDS * row + byte for row in range(4) for byte in of_row]
    for name, size, used in (
        ("engines", 8 * ENGINES_MAX * ROW_WORDS, in_rows),
        ("owners", lots, None),
        ("versions", lots, None),
        ("words", words, None),
        ("generations", words, None),
        ("checks", words, None),
        ("hashes", 32 * SLOTS, None),
        ("bad", SLOTS, None),
        ("touched", SLOTS, None),
        ("marks", ENGINES_MAX * SLOTS, [*range(4 * SLOTS)]),
    ):
        yield from ((name, at + byte) for byte in used or range(size))
        at += -(-size // 64) * 64


def store(engine, words, keys):
    """Store blocks of one prompt as far as there is room, each with words of its own."""
    lease = engine.leases.grant(LeaseKind.STORE, len(keys))
    if lease is not None:
        table = engine.slots.directory.tables[keys[0][0]]
        new = [block_hash for _, block_hash in keys if block_hash not in table][: len(lease.slots)]
        lease.keep(LeaseKind.STORE, lease.slots[: len(new)])
        engine.slots.directory.begin_store(lease.slots, keys[0][0], new, {})
        for slot, block_hash in zip(lease.slots, new, strict=True):
            words[slot] = word_of(block_hash) + (keys[0][0] << 40)
        engine.publish(lease)


def work(engine, words, now_s):
    """Do what the hooks of a few steps do; return how many wrong blocks were found."""
    num_wrong = 0
    if not engine.lots.wake():
        return 0
    engine.table.bury(now_s)
    engine.lots.sync()
    engine.lots.balance()
    for keys in PROMPTS:
        group, hashes = keys[0][0], [block_hash for _, block_hash in keys]
        num_lost = engine.lots.num_lost
        lease = engine.leases.lease(LeaseKind.MATCH, engine.slots.directory.find_run(group, hashes))
        if num_lost == engine.lots.num_lost:
            for slot, block_hash in zip(lease.slots, hashes, strict=False):
                num_wrong += int((words[slot] != word_of(block_hash) + (group << 40)).any())
        lease.release()
    store(engine, words, [(0, hash_of(int(now_s * 10), i)) for i in range(4)])
    engine.table.nap()
    return num_wrong


def scene(flip):
    """Two engines work, a bit flips, both work on, and a third comes; return wrong blocks."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, pools_in(Path(folder)):
        one, other = Engine(SLOTS, num_groups=2), Engine(SLOTS, num_groups=2)
        words = words_of(one.file)
        for keys in PROMPTS:
            store(one, words, keys)
        store(other, words, [(1, A), (1, B)])
        flip(one.table._mapping)
        num_wrong, third = 0, None
        for now_s in (100.0, 102.0, 103.0):
            num_wrong += work(other, words, now_s) + work(one, words, now_s + 0.1)
        with contextlib.suppress(SharingError):  # of a header that says something else
            third = Engine(SLOTS, num_groups=2)
            num_wrong += work(third, words, 104.0)
        run_on_pools(Namespace(action=_ls, all=False, namespace=None, dry_run=False))
        for engine in (one, other, third):
            if engine is not None:
                engine.close()
        run_on_pools(Namespace(action=_rm, all=True, namespace=None, dry_run=False))
        assert not [*user_folder().glob("*/*")]
    return num_wrong


def _ls():
    pass


def _rm():
    pass


def flip_each(bits):
    """Play the scene with each of some bits; return what went wrong."""
    found = []

    def give_up(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        for (name, byte), bit in bits:

            def flip(memory, byte=byte, bit=bit):
                memory[byte] ^= 1 << bit

            signal.setitimer(signal.ITIMER_REAL, SCENE_S)
            try:
                if num_wrong := scene(flip):
                    found.append((name, byte, bit, f"{num_wrong} wrong blocks"))
            except Exception as error:
                found.append((name, byte, bit, repr(error)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return found


ALL_BITS = [*itertools.product(places(), range(8))]


def test_a_bit_that_flips_in_the_table_stops_no_engine_and_gives_no_wrong_block():
    assert flip_each(ALL_BITS[::97]) == []


@pytest.mark.nightly
def test_no_bit_that_flips_in_the_table_stops_an_engine_or_gives_a_wrong_block():
    assert flip_each(ALL_BITS) == []


def test_a_token_that_cannot_be_makes_no_living_engine_a_dead_one(start):
    one, other = start(), start()
    one.store(A)
    row = one.table._engines[one.table.engine]
    for damaged in (row[4] ^ np.uint64(1 << 63), np.uint64(1), ~np.uint64(0)):
        row[4] = damaged
        assert other.table.bury(100.0) == 0
    one.table.bury(200.0)
    assert row[4] == one.table._tokens[0]
    assert one.table.num_damaged == 1


def test_an_engine_whose_place_another_has_by_now_leaves_the_pool(start):
    one, _other = start(), start()
    one.table.nap()
    one.table._engines[one.table.engine] = 0
    third = start()
    assert third.table.engine == one.table.engine
    third.table.nap()
    assert not one.lots.wake()
    assert one.table.lost
    assert third.lots.wake()
    one.lots.sync()
    third.check()


def test_who_gets_its_place_back_from_a_dead_engine_has_nothing_of_what_that_had(start):
    one, other = start(), start()
    one.store(A)
    foreign = other.store(B)
    one.table.nap()
    one.table._engines[one.table.engine] = 0
    third = start()
    assert third.table.engine == one.table.engine
    third.store(C)
    assert third.hit(B).slots == foreign
    third.close()
    assert one.lots.wake()
    one.check()
    assert one.find(A), "free lots keep what they hold"
    assert one.find(C), "this one, too"
    assert other.table.guests_at(np.array(foreign)).tolist() == []
    assert one.store(hash_of(9, 9))
    one.check()


def test_a_lot_that_the_table_gives_away_is_taken_back(start):
    one = start()
    slots = one.store(A)
    lot = one.table.own_lots()[0]
    one.table.owners[lot] = 0
    assert one.find(A) == slots
    one.check()


def test_a_lot_that_another_claimed_meanwhile_is_given_up(start):
    one, other = start(), start()
    one.store(A)
    lease = one.begin(B)
    lost = one.table.own_lots()
    one.table.owners[lost] = 0
    theirs = other.leases.grant(LeaseKind.STORE, SLOTS)
    assert len(theirs.slots) == SLOTS - 1
    one.lots.sync()
    assert one.lots.num_own == 0
    one.publish(lease)
    one.check()
    other.check()
    assert other.find(B) == []


def test_a_block_under_a_damaged_word_is_not_found_and_counts(start):
    one, other = start(), start()
    (slot,) = one.store(A)
    one.table.words[slot] ^= np.uint64(1 << 8)  # the group
    assert other.find(A) == other.find(A, group=1) == []
    assert other.table.num_damaged == 1
