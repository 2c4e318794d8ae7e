"""What tenants are guaranteed of a directory: no other's flood deletes it."""

import json
import os
import random
from pathlib import Path

import pytest

from safe_offload.config.tenants import WHOLE, TenantsFile
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.files.capacity import EVICT_TO, _payments
from safe_offload.tiers.naming import HEADER_BYTES
from tests.tiers.contract import SPACE, fetch_one, filled, name_of, slot_of, spill_one
from tests.tiers.files.paths import path_in

OBJECT_BYTES = 60 << 10
FILE_BYTES = HEADER_BYTES + OBJECT_BYTES
NUM_OBJECTS = 50
LIMIT_BYTES = NUM_OBJECTS * FILE_BYTES
SOURCE = filled((OBJECT_BYTES,))


def write(file: Path, **shares: str) -> None:
    each = {label: {"share": share, "prefix": label} for label, share in shares.items()}
    file.write_text(json.dumps({"guaranteed": each}))


@pytest.fixture
def file(tmp_path):
    write(tmp_path / "tenants.json", chat="60%", flood="10%")
    return tmp_path / "tenants.json"


@pytest.fixture
def mark(file):
    """The mark of a label; of all others 0."""
    tenants = TenantsFile(str(file)).tenants
    return lambda label: dict(zip(tenants.labels, tenants.marks, strict=True)).get(label, 0)


@pytest.fixture
def tier(make, file):
    return make(capacity_bytes=LIMIT_BYTES, num_threads=1, tenants_path=str(file))


def names_of(count: int, first: int, mark: int) -> list[Name]:
    numbers = range(first, first + count)
    return [Name(SPACE, 0, number.to_bytes(32, "big"), mark) for number in numbers]


async def spill(tier, names: list[Name]) -> None:
    assert set(await tier.spill(names, [SOURCE] * len(names))) == {Result.DONE}


@pytest.mark.parametrize("seed", range(20))
def test_none_gives_of_its_share_of_what_stays_and_what_is_above_becomes_equal(seed):
    chance = random.Random(seed)
    held = {mark: chance.randrange(2000) for mark in range(chance.randint(1, 6))}
    cuts = sorted(chance.choices(range(WHOLE + 1), k=len(held)))
    shares = {mark: b - a for mark, (a, b) in enumerate(zip([0, *cuts], cuts, strict=False))}
    excess = chance.randint(0, sum(held.values()))
    payments, kept = _payments(held, excess, shares), sum(held.values()) - excess
    assert sum(payments.values()) == excess
    own = {mark: shares[mark] * kept // WHOLE for mark in held}
    above = {mark: held[mark] - payments[mark] - own[mark] for mark in held}
    for mark, paid in payments.items():
        assert 0 <= paid <= max(0, held[mark] - own[mark])
        if paid:  # the others have no more than it has now, but for what does not divide
            assert max(above.values()) <= above[mark] + len(held)


@pytest.mark.parametrize("first", ["chat", "flood"])
async def test_a_flood_takes_nothing_that_another_is_guaranteed(tier, mark, first):
    """As much as a count leaves: nine tenths of the capacity."""
    chats = names_of(int(0.6 * EVICT_TO * NUM_OBJECTS), 1000, mark("chat"))
    flood = names_of(10 * NUM_OBJECTS, 2000, mark("flood"))
    for names in (chats, flood) if first == "chat" else (flood, chats, flood[:200]):
        await spill(tier, names)
    assert all(await tier.probe(chats))
    assert sum(await tier.probe(flood)) >= NUM_OBJECTS * 0.9 - len(chats)
    assert tier.used_bytes <= LIMIT_BYTES


async def test_without_shares_a_flood_takes_all(make, mark):
    tier = make(capacity_bytes=LIMIT_BYTES, num_threads=1)
    chats = names_of(10, 1000, mark("chat"))
    await spill(tier, [*chats, *names_of(10 * NUM_OBJECTS, 2000, mark("flood"))])
    assert not any(await tier.probe(chats))


async def test_what_is_free_is_for_all_and_given_back_the_oldest_first(tier, mark):
    """An object without a mark, or of a label that the file does not name, is `rest`'s."""
    olds = names_of(15, 0, 0) + names_of(15, 100, mark("chat") - 1) + names_of(18, 200, 0)
    await spill(tier, olds)
    assert all(await tier.probe(olds))
    await spill(tier, names_of(20, 1000, mark("chat")))
    left = await tier.probe(olds)
    assert left == sorted(left)
    assert 0 < sum(left) < len(left)
    assert all(await tier.probe(names_of(18, 1002, mark("chat"))))


async def test_a_change_of_the_file_counts_from_the_next_count(tier, mark, file):
    chats, others = names_of(18, 1000, mark("chat")), names_of(10 * NUM_OBJECTS, 2000, 0)
    await spill(tier, [*chats, *others])
    assert all(await tier.probe(chats))
    file.write_text("{")  # what was in force stays
    await spill(tier, others[:300])
    assert all(await tier.probe(chats))
    write(file, flood="10%")
    await spill(tier, names_of(10 * NUM_OBJECTS, 4000, 0))
    assert not any(await tier.probe(chats))


async def test_a_mark_outlasts_a_hit_and_a_second_store(tier, root):
    name, twin = names_of(1, 1, 999_999)[0], name_of(1)
    await spill(tier, [name])
    before_ns = path_in(root, name).stat().st_mtime_ns
    assert before_ns % 10**9 == 999_999_000
    os.utime(path_in(root, name), ns=(0, before_ns))
    assert await spill_one(tier, twin, SOURCE) is Result.PRESENT
    os.utime(path_in(root, name), ns=(0, before_ns))
    assert await fetch_one(tier, twin, slot_of((OBJECT_BYTES,))) is Result.DONE
    assert path_in(root, name).stat().st_atime_ns > 0
    assert path_in(root, name).stat().st_mtime_ns == before_ns
