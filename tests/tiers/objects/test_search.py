"""The search for what a store has: few requests, and the right end."""

import random
from collections.abc import Iterable, Sequence

import pytest

from safe_offload.tiers.base import Name
from safe_offload.tiers.objects.search import REQUESTS_MAX, find_present
from tests.tiers.contract import name_of


class Store:
    """Has some names; counts what it is asked."""

    def __init__(self, names: Iterable[Name]) -> None:
        self.names = set(names)
        self.num_requests = 0
        self.num_rounds = 0

    async def ask(self, names: Sequence[Name]) -> list[bool]:
        assert len(set(names)) == len(names)
        self.num_requests += len(names)
        self.num_rounds += 1
        return [name in self.names for name in names]


def group(group_idx: int, number: int) -> list[Name]:
    return [name_of(index, group_idx) for index in range(number)]


async def search(names: Sequence[Name], there: Iterable[Name]) -> tuple[list[bool], Store]:
    store = Store(there)
    found = await find_present(names, store.ask)
    assert len(found) == len(names)
    assert store.num_requests <= REQUESTS_MAX
    return found, store


@pytest.mark.parametrize("number", [0, 1, REQUESTS_MAX])
async def test_of_few_names_each_is_asked_for(number):
    names = group(0, number)
    found, store = await search(names, names[::3])
    assert found == [index % 3 == 0 for index in range(number)]
    assert store.num_requests == number


@pytest.mark.parametrize("number", [41, 100, 1000, 5600, 60_000])
async def test_the_end_of_one_group_is_found_exactly(number):
    names, rng = group(0, number), random.Random(number)
    for end in {
        0,
        1,
        2,
        number // 2,
        number - 2,
        number - 1,
        number,
        *rng.sample(range(number), 9),
    }:
        found, store = await search(names, names[:end])
        if number <= 5600:
            assert found == [index < end for index in range(number)], end
            assert store.num_rounds <= 5
        else:  # too many for so few questions: what is taken to be there is there
            assert sum(found) <= end
            assert sum(found) >= end - number // 1000


@pytest.mark.parametrize("num_groups", [2, 3, 5])
async def test_the_ends_of_groups_that_were_written_together_are_found(num_groups):
    number = 5600 // num_groups
    groups = [group(group_idx, number) for group_idx in range(num_groups)]
    names = [name for each in groups for name in each]
    for end in (0, 1, 17, number // 2, number - 1, number):
        found, _ = await search(names, [name for each in groups for name in each[:end]])
        for group_idx in range(num_groups):
            part = found[group_idx * number : (group_idx + 1) * number]
            assert not any(part[end:]), "what is not there is not said to be"
            assert end - sum(part) <= (0 if num_groups < 4 else number // 20)


async def test_a_group_that_ends_earlier_than_the_others_is_cut_there():
    first, second = group(0, 2800), group(1, 2800)
    found, _ = await search([*first, *second], [*first, *second[:1000]])
    assert not any(found[3800:])
    assert 900 <= sum(found[2800:]) <= 1000


async def test_little_is_offered_whose_first_block_has_gone():
    """A lifecycle rule of the bucket deletes the oldest first: those of a shared prefix."""
    names = group(0, 5600)
    found, store = await search(names, names[100:5000])
    assert not any(found)
    assert store.num_rounds == 1
    found, store = await search(names, names[1:])
    assert sum(found[:-256]) <= 8, "it may be a group of which a hit needs the end only"
    assert not found[0]
    assert store.num_rounds == 2


async def test_a_gap_that_a_sample_meets_is_where_the_prefix_ends():
    names = group(0, 5600)
    found, _ = await search(names, names[:2000] + names[3000:])
    assert found == [index < 2000 for index in range(5600)]


async def test_a_state_just_before_the_end_of_the_others_is_found():
    """A hit with Mamba layers needs one state, where the rest of it ends."""
    full, states = group(0, 2800), group(1, 2800)
    there = [*full[:1500], *states[499:1500:500]]
    found, _ = await search([*full, *states], there)
    assert found[:2800] == [index < 1500 for index in range(2800)]
    assert [index for index in range(2800) if found[2800 + index]] == [1499]


async def test_the_window_before_the_end_of_the_others_is_found():
    """A hit with sliding windows needs the blocks of one window, where the rest of it ends."""
    windows, full = group(0, 2800), group(1, 2800)
    there = [*windows[1400:1500], *full[:1500]]
    found, _ = await search([*windows, *full], there)
    assert found[2800:] == [index < 1500 for index in range(2800)]
    there_windows = [index for index in range(2800) if found[index]]
    assert there_windows == list(range(there_windows[0], 1500))
    assert there_windows[0] in range(1400, 1494)


async def test_many_groups_cost_no_more():
    groups = [group(group_idx, 400) for group_idx in range(14)]
    names = [name for each in groups for name in each]
    found, _ = await search(names, names)
    assert all(found)
    found, _ = await search(names, [name for each in groups for name in each[:200]])
    assert not any(found[index] for index in range(len(names)) if index % 400 >= 200)


async def test_an_error_of_the_store_is_that_of_the_search():
    async def ask(names: Sequence[Name]) -> list[bool]:
        raise OSError("down")

    with pytest.raises(OSError, match="down"):
        await find_present(group(0, 100), ask)
