"""Which loads may hold GPU blocks at one time; compared with a look at each of them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from safe_offload.scheduler.loads.admission import SPARE_BLOCKS, Admission

NUM_BLOCKS = 60


def make_admission() -> Admission:
    """Of a geometry with one group, blocks of one token, and a window of ten."""
    geometry: Any = SimpleNamespace(
        is_plain=False,
        group_block_sizes=(1,),
        num_blocks_held=lambda num_tokens: min(num_tokens, 10),
        num_blocks_at_once=lambda num_tokens: num_tokens,
    )
    return Admission(geometry, NUM_BLOCKS)


def needs_of(num_tokens: int, num_prompt: int) -> tuple[int, int]:
    held = min(num_tokens, 10)
    return held, num_prompt - held + SPARE_BLOCKS


def test_who_is_admitted_is_as_if_all_holders_were_looked_at():
    chance = random.Random(0)
    admission, held = make_admission(), {}
    prompts: list[Any] = [
        SimpleNamespace(request=SimpleNamespace(num_tokens=chance.randrange(1, 50)))
        for _ in range(20)
    ]
    states = [type("State", (), {"request": prompt.request, "need": None})() for prompt in prompts]
    answers = set()
    for _ in range(5000):
        state = chance.choice(states)
        num_prompt = state.request.num_tokens
        num_tokens = chance.randrange(num_prompt + 1)
        if chance.random() < 0.5:
            admission.release(state)
            held.pop(state, None)
        elif len(held) < 5:
            admission.hold(state, num_tokens)
            held[state] = needs_of(num_tokens, num_prompt)
        needs = [need for holder, need in held.items() if holder is not state]
        is_alone = not needs
        needs.append(needs_of(num_tokens, num_prompt))
        num_left = NUM_BLOCKS - sum(num_held for num_held, _ in needs)
        expected = is_alone or max(missing for _, missing in needs) <= num_left
        assert admission.admits(state, num_tokens) is expected
        assert {state for state in states if state.need is not None} == held.keys()
        assert admission.num_holders == len(held)
        assert len(admission._by_missing) <= 2 * len(held) + 1
        answers.add(expected)
    assert answers == {True, False}
