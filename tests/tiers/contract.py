"""What every tier has to do. `tests/tiers/test_*.py` run it on each of them.

A subclass says how its tier is made, and how the stored bytes of one object are read and changed
behind its back.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers import naming
from safe_offload.tiers.base import Buffers, Name, Result, Tier
from safe_offload.tiers.choice import open_store
from safe_offload.tiers.naming import HEADER_BYTES, namespace
from safe_offload.tiers.sealed_tier import SealedTier
from safe_offload.tiers.seals.encryption import Encryption
from safe_offload.tiers.seals.seal import PLAIN, Seal
from safe_offload.tiers.store import Store
from tests.worker.waiting import PATIENCE_S

KEY = bytes(range(32))
ENCRYPTION, OTHER = Encryption([KEY]), Encryption([KEY[::-1]])
FACTS: dict[str, object] = {"model": "a", "rank": 0}
SPACE = namespace(FACTS)
SLOT_BYTES = 1 << 20
"""Of the largest slot of most tests."""
BAD = (Result.CORRUPT, Result.FOREIGN, Result.UNDECRYPTABLE)

SHAPES = {
    "one-byte": (1,),
    "one-page": (4096,),
    "odd": (13, 4096, 1, 777),
    "sectors": (512, 1536, 4096),
    "64-buffers": (4096,) * 64,
    "1500-buffers": (512,) * 1500,
    "2-mib": (2 << 20,),
    "with-an-empty-one": (512, 0, 512),
}


def tier_at(
    config: TierConfig,
    slot_bytes: int = SLOT_BYTES,
    facts: dict[str, object] = FACTS,
    seal: Seal = PLAIN,
) -> SealedTier:
    return SealedTier(open_store(config, slot_bytes), facts, seal)


def name_of(number: int, group_idx: int = 0, space: bytes = SPACE) -> Name:
    return Name(space, group_idx, number.to_bytes(32, "big"))


def slot_of(lengths: Sequence[int], *, shift: int = 0, fill: bytes = b"") -> Buffers:
    """Buffers in one memory with gaps of a page, `shift` bytes after the start of a page."""
    import mmap

    memory = memoryview(mmap.mmap(-1, sum(length + 8192 for length in lengths) + 4096))
    start, buffers = shift, []
    for length in lengths:
        buffers.append(memory[start : start + length])
        start += (length + 8191) // 4096 * 4096
    slot = tuple(buffers)
    if fill:
        put(slot, fill)
    return slot


def put(slot: Buffers, data: bytes) -> None:
    start = 0
    for buffer in slot:
        buffer[:] = data[start : start + buffer.nbytes]
        start += buffer.nbytes


def bytes_of(slot: Buffers) -> bytes:
    return b"".join(slot)


def filled(lengths: Sequence[int], seed: int = 0, *, shift: int = 0) -> Buffers:
    return slot_of(lengths, shift=shift, fill=random.Random(seed).randbytes(sum(lengths)))


def sealed_by(seal: Seal, name: Name, slot: Buffers) -> bytes:
    """An object as it is stored."""
    header, body = seal.seal(name, slot)
    return header + bytes_of(body)


async def spill_one(tier: Tier, name: Name, slot: Buffers) -> Result:
    return (await tier.spill([name], [slot]))[0]


async def fetch_one(tier: Tier, name: Name, slot: Buffers) -> Result:
    return (await tier.fetch([name], [slot]))[0]


class TierContract:
    """Tests of any tier; `make` gives another tier over the same objects each time."""

    seal: Seal = PLAIN
    """Of its tiers."""
    num_forged = 100
    """Objects that somebody has made of others."""
    num_races = 20
    """Keys that several writers write at once."""
    cuts: tuple[int, ...] = (0, 1, 100, 4095, 4096, 4097, 8191)
    """Bytes that are left of an object."""

    # ---- what a subclass says -----------------------------------------------------------------

    @pytest.fixture
    def make_tier(self) -> Callable[[], Tier]:
        """How another tier over the same objects is made."""
        raise NotImplementedError

    def stored(self, make_tier: Any, name: Name) -> bytes:
        """The bytes of an object, with its header, as they are kept."""
        raise NotImplementedError

    def store(self, make_tier: Any, name: Name, data: bytes) -> None:
        """Put bytes in the place of an object."""
        raise NotImplementedError

    def delete(self, make_tier: Any, name: Name) -> None:
        """Delete an object, whether it is there or not."""
        raise NotImplementedError

    def place(self, make_tier: Any) -> Store:
        """The place of these tiers, as an operator opens it."""
        raise NotImplementedError

    # ---- tiers that are closed in the end ------------------------------------------------------

    @pytest.fixture
    async def make(self, make_tier: Callable[[], Tier]) -> AsyncIterator[Callable[[], Tier]]:
        tiers: list[Tier] = []

        def one_more() -> Tier:
            tiers.append(make_tier())
            return tiers[-1]

        yield one_more
        for tier in tiers:
            await asyncio.wait_for(tier.close(), PATIENCE_S)

    @pytest.fixture
    def tier(self, make: Callable[[], Tier]) -> Tier:
        return make()

    # ---- round trips --------------------------------------------------------------------------

    @pytest.mark.parametrize("shift", [0, 1])
    async def test_what_was_spilled_comes_back(self, make, shift):
        writer, reader = make(), make()
        for number, (shape, lengths) in enumerate(SHAPES.items()):
            source, target = filled(lengths, 1, shift=shift), slot_of(lengths, shift=shift)
            assert await spill_one(writer, name_of(number), source) is Result.DONE, shape
            assert await fetch_one(reader, name_of(number), target) is Result.DONE, shape
            assert bytes_of(target) == bytes_of(source), shape

    async def test_a_slot_of_other_buffers_gets_the_same_bytes(self, tier):
        source, target = filled((4096, 4096)), slot_of((100, 8000, 92), shift=3)
        await spill_one(tier, name_of(1), source)
        assert await fetch_one(tier, name_of(1), target) is Result.DONE
        assert bytes_of(target) == bytes_of(source)

    async def test_many_objects_come_back_in_the_order_of_their_names(self, tier):
        names = [name_of(number, number % 3) for number in range(100)]
        sources = [filled((1024, 3072), number) for number in range(100)]
        assert set(await tier.spill(names, sources)) == {Result.DONE}
        order = random.Random(0).sample(range(100), 100)
        targets = [slot_of((4096,)) for _ in order]
        assert set(await tier.fetch([names[i] for i in order], targets)) == {Result.DONE}
        assert [bytes_of(t) for t in targets] == [bytes_of(sources[i]) for i in order]

    async def test_nothing_is_asked_for(self, tier):
        assert await tier.probe([]) == await tier.fetch([], []) == await tier.spill([], []) == []

    # ---- what is there ------------------------------------------------------------------------

    async def test_a_probe_says_which_are_there(self, make):
        tier, names = make(), [name_of(number) for number in range(10)]
        assert await tier.probe(names) == [False] * 10
        await tier.spill(names[::2], [filled((512,))] * 5)
        assert await tier.probe(names) == [True, False] * 5
        assert await make().probe(names) == [True, False] * 5

    async def test_what_is_not_there_is_absent(self, tier):
        assert await fetch_one(tier, name_of(1), slot_of((512,))) is Result.ABSENT
        await spill_one(tier, name_of(1), filled((512,)))
        assert await fetch_one(tier, name_of(2), slot_of((512,))) is Result.ABSENT

    async def test_names_that_differ_in_one_part_are_other_objects(self, tier):
        """In the group, the key, the namespace."""
        await spill_one(tier, name_of(1), filled((512,)))
        for other in (name_of(1, 1), name_of(2), name_of(1, space=namespace(FACTS, "word"))):
            assert await tier.probe([other]) == [False]
            assert await fetch_one(tier, other, slot_of((512,))) is Result.ABSENT, other

    async def test_what_is_there_is_not_written_again(self, make):
        await spill_one(make(), name_of(1), filled((512,), 1))
        assert await spill_one(make(), name_of(1), filled((512,), 2)) is Result.PRESENT

    async def test_a_namespace_is_described_and_again_once_it_is_forgotten(
        self, make_tier, tier, monkeypatch
    ):
        monkeypatch.setattr(naming, "NAMESPACES_MAX", 1)
        place = self.place(make_tier)
        key = place.description_key(SPACE.hex())
        other = name_of(1, space=bytes(16))
        for names in ([name_of(1)], [other, name_of(2)]):
            for name in names:
                assert await spill_one(tier, name, filled((512,))) is Result.DONE
            stored = await place.read(key, 0, naming.DESCRIPTION_BYTES_MAX)
            described = self.seal.opened_description(SPACE, stored)
            assert described == naming.description(SPACE, FACTS)
            await place.delete([key])
        await place.close()

    # ---- at the same time ---------------------------------------------------------------------

    async def test_writers_of_one_key_leave_what_one_of_them_wrote(self, make_tier, make):
        tiers = [make() for _ in range(4)]
        sources = [filled((4096,) * 16, seed) for seed in range(4)]
        for number in range(self.num_races):
            name = name_of(number)
            results = await asyncio.gather(
                *(spill_one(tier, name, slot) for tier, slot in zip(tiers, sources, strict=True))
            )
            assert set(results) <= {Result.DONE, Result.PRESENT}
            target = slot_of((4096 * 16,))
            assert await fetch_one(tiers[0], name, target) is Result.DONE
            assert bytes_of(target) in [bytes_of(source) for source in sources]

    async def test_a_reader_sees_all_of_an_object_or_none_while_it_is_written_and_deleted(
        self, make_tier, make
    ):
        source, seen = filled((64 << 10,), 1), Counter[Result]()
        writer, reader = make(), make()

        async def write() -> None:
            for _ in range(100):
                assert await spill_one(writer, name_of(1), source) is Result.DONE
                await asyncio.to_thread(self.delete, make_tier, name_of(1))

        async def read() -> None:
            while not writing.done():
                target = slot_of((64 << 10,))
                result = await fetch_one(reader, name_of(1), target)
                seen[result] += 1
                if result is Result.DONE:
                    assert bytes_of(target) == bytes_of(source)

        writing = asyncio.ensure_future(write())
        await asyncio.gather(writing, read(), read())
        assert set(seen) <= {Result.DONE, Result.ABSENT}

    async def test_a_batch_that_is_cancelled_gives_up_what_was_not_begun(self, tier):
        names = [name_of(number) for number in range(300)]
        sources = [filled((8192,), number) for number in range(300)]
        spilling = asyncio.ensure_future(tier.spill(names, sources))
        await asyncio.sleep(0)
        spilling.cancel()
        spilled = await asyncio.wait_for(spilling, PATIENCE_S)
        assert set(spilled) <= {Result.DONE, Result.CANCELLED}
        assert Result.CANCELLED in spilled
        assert await tier.probe(names) == [result is Result.DONE for result in spilled]

        await tier.spill(names, sources)
        targets = [slot_of((8192,)) for _ in names]
        fetching = asyncio.ensure_future(tier.fetch(names, targets))
        await asyncio.sleep(0)
        fetching.cancel()
        await asyncio.sleep(0)
        fetching.cancel()  # twice is as once
        fetched = await asyncio.wait_for(fetching, PATIENCE_S)
        assert Result.CANCELLED in fetched
        for result, source, target in zip(fetched, sources, targets, strict=True):
            assert result is not Result.DONE or bytes_of(target) == bytes_of(source)
        assert set(await tier.fetch(names, targets)) == {Result.DONE}, "the tier goes on"

    async def test_closing_gives_up_and_waits(self, make_tier):
        tier = make_tier()
        names = [name_of(number) for number in range(300)]
        spilling = asyncio.ensure_future(tier.spill(names, [filled((8192,))] * 300))
        await asyncio.sleep(0)
        await asyncio.wait_for(tier.close(), PATIENCE_S)
        spilled = await spilling
        assert set(spilled) <= {Result.DONE, Result.CANCELLED}
        assert Result.CANCELLED in spilled
        await tier.close()
        assert await fetch_one(tier, name_of(1), slot_of((8192,))) is Result.CANCELLED

    # ---- bad objects --------------------------------------------------------------------------

    async def expect_bad(self, make_tier: Any, tier: Tier, name: Name, data: bytes) -> Result:
        """Put bytes in the place of an object: they are not served, and are deleted."""
        self.store(make_tier, name, data)
        result = await fetch_one(tier, name, slot_of((1000, 3096)))
        assert result in BAD
        assert await tier.probe([name]) == [False]
        return result

    async def test_an_object_with_a_flipped_bit_is_never_served(self, make_tier, tier):
        rng, name = random.Random(7), name_of(1)
        await spill_one(tier, name, filled((4096,), 3))
        good = self.stored(make_tier, name)
        fields = range(128 * 8)
        anywhere = [rng.randrange(len(good) * 8) for _ in range(1000)]
        for bit in (*fields, *anywhere)[::49]:  # tests of the seals try each
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            await self.expect_bad(make_tier, tier, name, bytes(bad))
        self.store(make_tier, name, good)
        assert await fetch_one(tier, name, slot_of((4096,))) is Result.DONE

    async def test_a_truncated_object_is_corrupt(self, make_tier, tier):
        """And one that is too long."""
        await spill_one(tier, name_of(1), filled((4096,)))
        good = self.stored(make_tier, name_of(1))
        lengths = *self.cuts, *(len(good) + more for more in (1, 512, 4096))
        for length in lengths:
            data = good[:length].ljust(length, b"\0")
            result = await self.expect_bad(make_tier, tier, name_of(1), data)
            assert result is Result.CORRUPT, length

    async def test_an_object_of_zeros_is_corrupt(self, make_tier, tier):
        """What a crash of the machine may leave."""
        data = bytes(HEADER_BYTES + 4096)
        await spill_one(tier, name_of(1), filled((4096,)))
        assert await self.expect_bad(make_tier, tier, name_of(1), data) is Result.CORRUPT

    async def test_an_object_of_another_name_is_foreign(self, make_tier, tier):
        """In the group, the key, the namespace, the length of the key."""
        others = [name_of(1, 1), name_of(2), name_of(1, space=bytes(16)), Name(SPACE, 0, b"short")]
        await spill_one(tier, name_of(1), filled((4096,)))
        for other in others:
            await spill_one(tier, other, filled((4096,)))
            data = self.stored(make_tier, other)
            result = await self.expect_bad(make_tier, tier, name_of(1), data)
            assert result is Result.FOREIGN, other

    async def test_bytes_of_another_object_behind_the_right_header_are_corrupt(
        self, make_tier, tier
    ):
        await spill_one(tier, name_of(1), filled((4096,), 1))
        data = self.stored(make_tier, name_of(1))[:HEADER_BYTES] + os.urandom(4096)
        assert await self.expect_bad(make_tier, tier, name_of(1), data) is Result.CORRUPT

    async def test_what_somebody_makes_of_objects_is_never_served(self, make_tier, tier):
        """Of this object and others, of other keys and of none, cut and put together."""
        rng, name = random.Random(8), name_of(1)
        slots, seals = [filled((4096,), n) for n in range(2)], (PLAIN, Seal(KEY), OTHER)
        sources = [sealed_by(seal, name, slot) for seal in (self.seal, *seals) for slot in slots]
        sources += [sealed_by(self.seal, name_of(2), slots[0]), rng.randbytes(HEADER_BYTES + 4096)]
        await spill_one(tier, name, slots[0])
        cuts = (8, 10, 24, 32, 64, 128, HEADER_BYTES - 64, HEADER_BYTES - 48, HEADER_BYTES - 16)
        for _ in range(self.num_forged):
            at = rng.choice((*cuts, HEADER_BYTES, rng.randrange(HEADER_BYTES + 4096)))
            first, last = rng.sample(sources, 2)
            data = first[:at] + last[at:]
            self.store(make_tier, name, data)
            target = slot_of((4096,))
            result = await fetch_one(tier, name, target)
            is_whole = any(data == each for each in sources[:2])
            assert (result is Result.DONE) is is_whole, at
            assert not is_whole or bytes_of(target) in map(bytes_of, slots)

    async def test_an_object_that_was_bad_can_be_written_again(self, make_tier, tier):
        await spill_one(tier, name_of(1), filled((4096,), 1))
        await self.expect_bad(make_tier, tier, name_of(1), b"x")
        assert await spill_one(tier, name_of(1), filled((4096,), 2)) is Result.DONE
        target = slot_of((4096,))
        assert await fetch_one(tier, name_of(1), target) is Result.DONE
        assert bytes_of(target) == bytes_of(filled((4096,), 2))
