"""The traces of `python -m tests.benchmarks scheduler` are what they say, every time."""

import subprocess
import sys

import pytest

from tests.benchmarks.scheduler_traces import (
    BLOCK_TOKENS,
    LAYOUTS,
    MAX_MODEL_LEN,
    TRACES,
    WINDOW_BLOCKS_MAX,
    make_trace,
)

SHARE = 16
FINGERPRINT = (
    "import zlib; from tests.benchmarks.scheduler_traces import *; "
    f"print([zlib.crc32(repr(make_trace(n, 'plain', share={SHARE})).encode()) for n in TRACES])"
)


def test_a_trace_is_the_same_in_another_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TRACES)
def test_every_request_fits_into_the_pool(name: str, layout: str) -> None:
    for share in (1, SHARE):
        trace = make_trace(name, layout, share=share)
        for user in trace.users:
            num_tokens = 0
            for turn in user.turns:
                before = num_tokens if turn.continues else 0
                num_tokens = before + len(turn.token_ids) + turn.num_answer_tokens
                assert num_tokens <= MAX_MODEL_LEN
                num_blocks = -(-num_tokens // BLOCK_TOKENS)
                if layout == "hybrid":
                    num_blocks += min(num_blocks, WINDOW_BLOCKS_MAX)
                assert num_blocks < trace.num_blocks


def test_prompts_of_the_long_trace_take_most_of_the_pool() -> None:
    trace = make_trace("long", "plain")
    (reader,) = trace.users
    prompts = [turn.token_ids for turn in reader.turns]
    assert {len(prompt) for prompt in prompts} == {90_000}
    assert prompts[:3] == prompts[3:6] == prompts[6:]
    assert trace.num_blocks * BLOCK_TOKENS / 90_000 == pytest.approx(1.6, abs=0.01)
