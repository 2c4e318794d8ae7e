"""A real server whose copies fail and stall: every request is answered, and answered right.

`FAULTY_REQUESTS=1000 python -m pytest tests/engine/test_failing_copies.py` sends more of them.
"""

import asyncio
import json
import os
import random
import re
from dataclasses import dataclass
from typing import Any

import pytest

from examples.tiny_models import write_tiny_model
from tests.engine.clients import (
    Ask,
    Expected,
    Reply,
    ask_all,
    ask_baseline,
    first_difference,
    is_a_tie,
)
from tests.engine.engines import connector
from tests.engine.http_server import HttpServer

NUM_REQUESTS = int(os.environ.get("FAULTY_REQUESTS", "100"))
NUM_PROMPTS = 30
NUM_ANSWER_TOKENS = 24
NUM_IN_FLIGHT = 8
FAULTS = {"fail": 0.02, "stall": 0.01, "stall_s": 1.0, "seed": 1}
TRANSFER_TIMEOUT_S = 0.25
SERVER: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "arguments": ("--enable-chunked-prefill", "--max-num-batched-tokens", "256"),
}


@dataclass(slots=True)
class Run:
    """What the clients saw, and what the server says of itself at the end."""

    expected: list[Expected]
    replies: list[Reply]
    metrics: dict[str, float]
    metrics_text: str
    is_healthy: bool

    def count(self, name: str) -> float:
        """A counter of the connector."""
        return self.metrics.get(f"vllm:safe_offload_{name}_total", 0.0)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Ask a server whose copies fail, in a GPU pool that has room for two requests."""
    folder = tmp_path_factory.mktemp("faulty")
    model = write_tiny_model("gemma3", folder / "model", sliding_window=96)
    rng = random.Random(5)
    prefixes = [rng.choices(range(256), k=rng.randint(96, 256)) for _ in range(6)]
    prompts = [
        [*rng.choice(prefixes), *rng.choices(range(256), k=rng.randint(8, 96))]
        for _ in range(NUM_PROMPTS)
    ]
    asks = [Ask(n, rng.randrange(NUM_PROMPTS), NUM_ANSWER_TOKENS) for n in range(NUM_REQUESTS)]
    with HttpServer(model, folder / "baseline", num_blocks=2000, **SERVER) as baseline:
        baseline.wait_until_healthy()
        expected = asyncio.run(ask_baseline(baseline, prompts, NUM_ANSWER_TOKENS))
    # The faults are for copies of requests, not for those of the self-test.
    config = connector(400, transfer_timeout_s=TRANSFER_TIMEOUT_S, self_test="off")
    del config["kv_load_failure_policy"]  # the README's command has none either
    with HttpServer(
        model,
        folder / "faulty",
        num_blocks=60,
        config=config,
        environment={"COPY_FAULTS": json.dumps(FAULTS)},
        **SERVER,
    ) as server:
        server.wait_until_healthy()
        replies = asyncio.run(ask_all(server, prompts, asks, NUM_IN_FLIGHT))
        server.wait_until_drained()
        return Run(expected, replies, server.metrics(), server.metrics_text(), server.is_healthy())


def test_every_request_is_answered(faulty):
    assert faulty.is_healthy
    lost = [reply for reply in faulty.replies if reply.error is not None or not reply.is_complete]
    assert not lost, lost[0]
    assert len(faulty.replies) == NUM_REQUESTS


def test_every_answer_is_the_baselines(faulty):
    num_ties = 0
    for reply in faulty.replies:
        expected = faulty.expected[reply.ask.prompt_idx]
        position = first_difference(expected, reply.tokens)
        if position is not None:
            assert is_a_tie(expected, reply.tokens, position), reply
            num_ties += 1
    assert num_ties <= NUM_REQUESTS // 50 + 1


def test_the_failures_were_counted_and_none_was_the_connectors_own(faulty):
    """Else the tests above show nothing."""
    counts = {
        name.removeprefix("vllm:safe_offload_"): value
        for name, value in faulty.metrics.items()
        if name.startswith("vllm:safe_offload_") and value and not name.endswith("_created")
    }
    print(counts)
    failed = re.findall(
        r'safe_offload_transfer_failures_total{direction="(\w+)",.* [1-9]', faulty.metrics_text
    )
    assert set(failed) == {"load", "store"}
    assert faulty.count("overdue_transfers") > 0
    assert 0 < faulty.count("loaded_tokens") < faulty.count("hit_tokens")
    assert faulty.count("contained_errors") == 0
