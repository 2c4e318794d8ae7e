"""What a preempted request had computed comes back from the host, in a real engine.

One engine answers every prompt alone, forgets all that it and the connector have, and is then given
all prompts at once, in a pool for half of them.
"""

from typing import Any

import pytest

from safe_offload.commands.bench.engine_process import EngineProcess, generate
from tests.engine.preempted import Workload, make_engine_options, make_workload, run_watched

pytestmark = pytest.mark.usefixtures("forked_engines")

START_TIMEOUT_S = RUN_TIMEOUT_S = 1000.0
"""Of what would never end: a busy machine is no failure."""
HOST_SHARE_MIN = 0.8
ENGINES = {"ours eager": {}, "ours lazy": {"lazy_offload": True}}


def answer_alone(engine: Any, workload: Workload) -> tuple[tuple[int, ...], ...]:
    """The answers of requests that have the pool for themselves; the caches are empty after it."""
    answers = []
    for prompt, number in zip(workload.prompts, workload.nums_answer_tokens, strict=True):
        (output,) = generate(engine, [prompt], [number])
        answers.append(tuple(output.outputs[0].token_ids))
    assert engine.reset_prefix_cache(reset_connector=True)
    return tuple(answers)


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        pytest.param("llama", "ours eager", marks=pytest.mark.nightly),
        pytest.param("gemma3", "ours eager", marks=pytest.mark.nightly),
        ("gemma3", "ours lazy"),
    ],
)
def test_most_of_what_the_gpu_lost_comes_back_and_every_token_is_the_same(
    model, tmp_path, kind, engine
):
    """Of gemma3 vLLM hashes no window inside an answer, as it does by default."""
    workload = make_workload()
    options = make_engine_options(kind, model(kind), workload, ENGINES[engine])
    with EngineProcess(engine, options, tmp_path / "log") as process:
        process.wait_until_started(START_TIMEOUT_S)
        expected = process.call(answer_alone, workload, RUN_TIMEOUT_S)
        run = process.call(run_watched, workload, RUN_TIMEOUT_S)
    assert run.token_ids == expected
    assert run.num_preemptions >= 3, "the pool holds too much"
    assert run.host_share >= HOST_SHARE_MIN, run
