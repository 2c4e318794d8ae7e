"""What vLLM keeps for the host's sake only leaves the GPU's prefix cache first."""

from dataclasses import replace

import pytest

from tests.simulator.checkers.twin import Arrival, blocks_of_a_position, gpu_hits, without_loads
from tests.simulator.peers import PeerEngine
from tests.simulator.vllm_setup import NONE, OURS, EngineShape

GEMMA3 = EngineShape(
    groups=("full@32", *["window:128@32"] * 5),
    num_slots=4000,
    max_batched_tokens=256,
    max_model_len=8192,
    retention_interval=0,
)
"""Six layers, five of them with a window of 128."""
SMALLEST_POOL = 337
"""In which vLLM alone still has a prompt of 4,096 tokens after another one."""
ROOMY = EngineShape(
    groups=("full", "window:10"),
    num_blocks=400,
    num_slots=400,
    max_batched_tokens=16,
    retention_interval=0,
)


def a_prompt(letter: str, num_tokens: int = 4096) -> Arrival:
    return [ord(letter), *((place * 7 + ord(letter)) % 89 for place in range(1, num_tokens))], 3


@pytest.mark.parametrize("num_blocks", [SMALLEST_POOL, 345, 356])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_prompt_that_has_ended_stays_on_the_gpu_as_long_as_without_us(num_blocks, is_lazy):
    shape = replace(GEMMA3, num_blocks=num_blocks)
    arrivals = [a_prompt("A"), a_prompt("B"), a_prompt("A")]
    assert gpu_hits(replace(shape, connector=NONE), arrivals) == [0, 0, 4064]
    ours = replace(shape, extra={"lazy_offload": is_lazy})
    for copy_steps in (0, 2):
        assert gpu_hits(ours, arrivals, copy_steps) == [0, 0, 4064]


@pytest.mark.parametrize("copy_steps", [6, 40])
def test_while_copies_are_late_the_gpu_lacks_no_more_than_the_windows_of_one_position(copy_steps):
    """What is to be reused first goes to the head of vLLM's queue once it is stored."""
    arrivals = [a_prompt("A"), a_prompt("B"), a_prompt("A")]
    more = blocks_of_a_position(GEMMA3)
    shapes = [replace(GEMMA3, num_blocks=SMALLEST_POOL + count) for count in (0, more)]
    assert [gpu_hits(shape, arrivals, copy_steps)[-1] for shape in shapes] == [0, 4064]


def test_in_a_smaller_pool_vllm_alone_has_lost_it():
    shape = replace(GEMMA3, num_blocks=SMALLEST_POOL - 1, connector=NONE)
    assert gpu_hits(shape, [a_prompt("A"), a_prompt("B"), a_prompt("A")])[-1] == 0


def test_while_blocks_hold_nothing_the_gpu_keeps_them_too():
    first, _ = a_prompt("A", 200)
    arrivals = [(first, 1), ([*first[:150], 99, 98], 1), ([*first[:150], 97], 1)]
    assert gpu_hits(replace(ROOMY, connector=NONE), arrivals) == [0, 0, 148]
    assert gpu_hits(without_loads(ROOMY), arrivals) == [0, 144, 148]


@pytest.mark.parametrize("connector", [NONE, OURS])
def test_where_vllm_keeps_a_window_on_its_own_it_still_does(connector):
    """The prompt that comes while the second is computed leaves it a few tokens before."""
    shape = replace(without_loads(ROOMY), connector=connector)
    engine = PeerEngine(replace(shape, num_blocks=200, max_batched_tokens=32))
    first, _ = a_prompt("A", 200)
    engine.add("first", first, 1)
    engine.drain()
    engine.add("other", a_prompt("B", 500)[0], 1)  # of the first, windows are lost
    engine.drain()
    second = engine.add("second", [*first[:150], *a_prompt("C", 60)[0]], 1)
    engine.step()
    engine.add("third", [*first[:142], 99], 1)
    engine.drain()
    last = engine.make_request([*first[:150], 98], "last")
    assert engine.scheduler.kv_cache_manager.get_computed_blocks(last)[1] == 148, second
