"""Faults of the table in docs/guarantees.md that no other test makes happen, on vLLM's scheduler.

Each name begins with the id of its row. test_faults_of_peers.py runs some of them on vLLM's own
connectors.
"""

import pytest

from tests.simulator.device import Device
from tests.simulator.engine_core import random_prompt
from tests.simulator.scenes import (
    check_answers,
    check_idle,
    forget_gpu_cache,
    hold_copies,
    run_alone,
    step_until,
    watch_matches,
)

PLAIN = ("full",)
HYBRID = ("window:16", "full")


@pytest.mark.parametrize("groups", [PLAIN, HYBRID])
def test_c10_a_block_that_loses_its_hash_while_it_is_stored_is_still_right(make_engine, groups):
    engine = make_engine(groups=groups)
    prompt = random_prompt(41, 1)
    hold_copies(engine, True)
    engine.add("a", prompt, 8)
    for _ in range(3):
        engine.step()
    engine.pool.evict_blocks({b.block_id for b in engine.pool.blocks if b.block_hash is not None})
    for _ in range(2):
        engine.step()
    hold_copies(engine, False)
    engine.drain()
    check_answers(engine, a=8)
    forget_gpu_cache(engine)
    run_alone(engine, "again", prompt, 4)
    assert engine.counts["hit_tokens"] == 40
    check_answers(engine, again=4)
    check_idle(engine)


@pytest.mark.parametrize("groups", [PLAIN, HYBRID])
def test_k11_a_hit_is_shorter_than_the_prompt_and_never_negative(make_engine, groups):
    """Prompts that end at, before and behind every boundary of blocks and windows."""
    engine = make_engine(groups=groups)
    prompt = random_prompt(60, 1)
    run_alone(engine, "a", prompt)
    offered = watch_matches(engine)
    for num_tokens in range(1, 60):
        forget_gpu_cache(engine)
        run_alone(engine, f"n{num_tokens}", prompt[:num_tokens], 2)
        check_answers(engine, **{f"n{num_tokens}": 2})
        assert all(0 <= hit < num_tokens for hit in offered[f"n{num_tokens}"]), num_tokens
    check_idle(engine)


def test_k3_a_block_given_to_the_same_prompt_is_stored_before_it_is_written(
    make_engine, monkeypatch
):
    """It has an equal hash again when the next step is planned."""
    engine = make_engine(groups=("full",) * 2, num_blocks=11, is_zeroed=True, has_streams=True)
    zero = Device.zero

    def zero_and_copy(device: Device, block_id: int) -> None:
        zero(device, block_id)
        hold_copies(engine, False)
        device.tick()

    hold_copies(engine, True)
    engine.add("other", [0], 4)  # has the other two blocks
    engine.add("a", random_prompt(16, 1), 1)
    step_until(engine, lambda: "a" not in engine.scheduler.requests)
    monkeypatch.setattr(Device, "zero", zero_and_copy)
    engine.add("same", random_prompt(16, 1), 1)
    engine.drain()
    assert not engine.workers[0].device.hold_copies, "the last block was computed anew"
    forget_gpu_cache(engine)
    run_alone(engine, "again", random_prompt(17, 1))
    assert engine.counts["hit_tokens"] == 16
    check_answers(engine, a=1, same=1, again=1)
    check_idle(engine)


def test_l2_blocks_of_an_overdue_load_are_given_to_nobody_until_it_has_ended(make_engine):
    engine = make_engine(num_blocks=26, has_streams=True, extra={"transfer_timeout_s": 2})
    run_alone(engine, "a", random_prompt(41, 1))
    forget_gpu_cache(engine)
    hold_copies(engine, True)
    engine.add("gone", random_prompt(41, 1))
    engine.step()
    engine.abort("gone")
    step_until(engine, lambda: engine.counts["overdue_transfers"] > 0)
    engine.add("next", random_prompt(80, 2), 8)  # which needs blocks of the load
    for _ in range(4):
        engine.step()
    hold_copies(engine, False)
    engine.drain()
    check_answers(engine, next=8)
    check_idle(engine)


def test_p2_with_draft_tokens_prompts_are_hit(make_engine):
    engine = make_engine(num_draft_tokens=2)
    run_alone(engine, "a", random_prompt(41, 1), 4)
    forget_gpu_cache(engine)
    run_alone(engine, "again", random_prompt(41, 1), 4)
    assert engine.counts["hit_tokens"] > 30
    check_answers(engine, a=4, again=4)
    check_idle(engine)


def test_lazy_stores_do_not_push_out_one_another_in_a_pool_that_is_too_small(make_engine):
    settings = {"lazy_offload": True}
    engine = make_engine(num_blocks=60, num_slots=8, max_batched_tokens=64, extra=settings)
    for number in range(4):
        run_alone(engine, f"a{number}", random_prompt(40, number), 1)
    before = engine.counts["stored_blocks"]
    run_alone(engine, "long", random_prompt(9, 99), 60)
    assert engine.counts["stored_blocks"] - before <= 2 * 8
