"""A storm of requests and aborts over HTTP against a real vLLM server with the connector.

Once more with copies that fail and stall.

100 requests, a third of them cut off by the client, meet a GPU pool that preempts all the time and
a host pool that evicts all the time. Every token that any client received is compared with the
answer of a server without the connector, and afterwards every GPU block and host slot is free.

`STORM_SEED=7 python -m pytest tests/engine/test_abort_storm.py` runs another storm than the usual
one, and `STORM_REQUESTS=1000` a longer one. What the engine does with it depends on the machine's
timing, the workload does not.
"""

import asyncio
import functools
import json
import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_models import ModelKind, write_tiny_model
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
from tests.engine.http_server import HANG_S, HttpServer

SEED = int(os.environ.get("STORM_SEED", "1"))

NUM_REQUESTS = int(os.environ.get("STORM_REQUESTS", "100"))
NUM_CUT_OFF = NUM_REQUESTS // 3
NUM_PROMPTS = 32
NUM_PREFIXES = 8
NUM_ANSWER_TOKENS_MIN, NUM_ANSWER_TOKENS_MAX = 60, 100
NUM_IN_FLIGHT = 16
"""Requests that the clients keep open at one time."""
CUT_OFF_DELAY_MAX_S = 1.0
NUM_GUST_REQUESTS = NUM_REQUESTS // 2
GUST_DELAY_MAX_S = 0.06

SLIDING_WINDOW = 96
LARGE_GPU_POOL_BLOCKS = 2000
NUM_GPU_BLOCKS: dict[ModelKind, int] = {"llama": 40, "gemma3": 80}
"""Enough for one request of the longest kind, and far from enough for all that may run."""
NUM_HOST_SLOTS: dict[ModelKind, int] = {"llama": 100, "gemma3": 200}

MUST_BE_ZERO = (
    "vllm:kv_cache_usage_perc",
    "vllm:safe_offload_leased_slots",
    "vllm:safe_offload_stores_in_flight",
    "vllm:safe_offload_loads_in_flight",
)
FAILURES = tuple(
    f"vllm:safe_offload_{name}_total"
    for name in (
        "contained_errors",
        "transfer_failures",
        "stale_reports",
        "duplicate_reports",
        "dropped_ids",
    )
)
"""What only a fault makes."""
COPY_FAULTS = {"fail": 0.02, "stall": 0.01, "stall_s": 1.0, "seed": 1}

SERVER: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "arguments": ("--enable-chunked-prefill", "--max-num-batched-tokens", "128"),
}


@dataclass(slots=True)
class Storm:
    """What a storm left behind, for the tests to judge."""

    kind: ModelKind
    has_faults: bool
    prompts: list[list[int]]
    expected: list[Expected]
    replies: list[Reply]  # to the requests of the storm
    gust: list[Reply]  # to the requests that were sent when the storm had drained
    returns: list[Reply]  # to every prompt once more, after that
    metrics_of_storm: dict[str, float]  # of the server, when the storm had drained
    metrics: dict[str, float]  # of the server, at the very end
    metrics_text: str  # the same, with all labels
    log: str  # of the server, all of its life
    is_healthy: bool  # what /health said at the very end

    @property
    def all_replies(self) -> list[Reply]:
        """Everything that any client saw."""
        return [*self.replies, *self.gust, *self.returns]


def make_prompts(rng: random.Random) -> list[list[int]]:
    """Three prompts of four begin with one of a few prefixes, the others with none."""

    def some_tokens(fewest: int, most: int) -> list[int]:
        return rng.choices(range(256), k=rng.randint(fewest, most))

    prefixes = [some_tokens(64, 256) for _ in range(NUM_PREFIXES)]
    return [
        [*rng.choice(prefixes), *some_tokens(8, 96)] if idx % 4 else some_tokens(40, 320)
        for idx in range(NUM_PROMPTS)
    ]


def make_asks(rng: random.Random) -> list[Ask]:
    """The storm: which prompts come when, and which clients go away at which moment."""
    cut_off = set(rng.sample(range(NUM_REQUESTS), NUM_CUT_OFF))
    asks = []
    for number in range(NUM_REQUESTS):
        num_tokens = rng.randint(NUM_ANSWER_TOKENS_MIN, NUM_ANSWER_TOKENS_MAX)
        cut_off_tokens = cut_off_s = None
        if number in cut_off:
            moment = rng.random()
            if moment < 0.2:
                cut_off_tokens = 0
            elif moment < 0.4:
                cut_off_s = rng.uniform(0.0, CUT_OFF_DELAY_MAX_S)
            else:
                cut_off_tokens = rng.randrange(1, num_tokens - 1)
        prompt_idx = rng.randrange(NUM_PROMPTS)
        asks.append(Ask(number, prompt_idx, num_tokens, cut_off_tokens, cut_off_s))
    return asks


def make_gust(rng: random.Random) -> list[Ask]:
    """Requests that are cut off within moments, on an engine that has room for them.

    In the storm a request waits for its turn much longer than it is being loaded. Here it is loaded
    at once, so that some clients go away in the middle of that.
    """
    return [
        Ask(number, rng.randrange(NUM_PROMPTS), 8, cut_off_s=rng.uniform(0.0, GUST_DELAY_MAX_S))
        for number in range(NUM_GUST_REQUESTS)
    ]


# ---- the storm -----------------------------------------------------------------------------------


@functools.cache
def baseline_of(kind: ModelKind, folder: Path) -> tuple[Path, list[Expected]]:
    """The folder of a model, and what a server without the connector answers."""
    model = write_tiny_model(kind, folder / "model", sliding_window=SLIDING_WINDOW)
    pool = {"num_blocks": LARGE_GPU_POOL_BLOCKS}
    with HttpServer(model, folder / "baseline", **pool, **SERVER) as baseline:
        baseline.wait_until_healthy()
        asked = ask_baseline(baseline, make_prompts(draw_of(kind)), NUM_ANSWER_TOKENS_MAX)
        return model, asyncio.run(asked)


def draw_of(kind: ModelKind) -> random.Random:
    return random.Random(f"{SEED} {kind}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("storm")


@pytest.fixture(
    scope="module",
    params=[
        ("gemma3", False),
        ("gemma3", True),
        pytest.param(("llama", False), marks=pytest.mark.nightly),
    ],
    ids=["gemma3", "failing copies", "llama"],
)
def storm(request, folder):
    """Let a storm pass over a server with the connector and see what is left."""
    kind, has_faults = request.param
    print(f"storm of {kind}, STORM_SEED={SEED}")
    model, expected = baseline_of(kind, folder)
    rng = draw_of(kind)
    prompts, asks = make_prompts(rng), make_asks(rng)
    gust = make_gust(rng)
    returns = [Ask(idx, idx, 8) for idx in range(NUM_PROMPTS)]
    config = connector(NUM_HOST_SLOTS[kind])
    if has_faults:  # for copies of requests, not for those of the self-test
        config = connector(NUM_HOST_SLOTS[kind], transfer_timeout_s=0.25, self_test="off")
        del config["kv_load_failure_policy"]  # the README's command has none either
    with HttpServer(
        model,
        folder / f"storm {request.param_index}",
        num_blocks=NUM_GPU_BLOCKS[kind],
        config=config,
        environment={"COPY_FAULTS": json.dumps(COPY_FAULTS)} if has_faults else {},
        **SERVER,
    ) as server:
        server.wait_until_healthy()
        replies = asyncio.run(ask_all(server, prompts, asks, NUM_IN_FLIGHT))
        server.wait_until_drained()
        metrics_of_storm = server.metrics()
        gust_replies = asyncio.run(ask_all(server, prompts, gust, 2))
        server.wait_until_drained()
        returned = asyncio.run(ask_all(server, prompts, returns, 4))
        server.wait_until_drained()
        return Storm(
            kind=kind,
            has_faults=has_faults,
            prompts=prompts,
            expected=expected,
            replies=replies,
            gust=gust_replies,
            returns=returned,
            metrics_of_storm=metrics_of_storm,
            metrics=observe_final_state(server),
            metrics_text=server.metrics_text(),
            log=server.log(),
            is_healthy=server.is_healthy(),
        )


def observe_final_state(server: HttpServer) -> dict[str, float]:
    """The metrics when nothing is in flight any more; as they are if something stays for ever."""
    deadline_s = time.monotonic() + HANG_S
    while True:
        metrics = server.metrics()
        if time.monotonic() > deadline_s or not any(metrics[name] for name in MUST_BE_ZERO):
            return metrics
        time.sleep(0.1)


# ---- what must hold ------------------------------------------------------------------------------


def test_the_server_survives_the_storm(storm):
    assert storm.is_healthy
    lost = [reply for reply in storm.all_replies if reply.error is not None]
    assert not lost, f"STORM_SEED={SEED}: {len(lost)} requests failed, the first is {lost[0]}"
    unfinished = [r for r in storm.all_replies if not r.is_complete and not r.ask.is_cut_off]
    assert not unfinished, f"STORM_SEED={SEED}: no complete answer to {unfinished[0].ask}"
    # vLLM logs a harmless traceback as a warning at start: its chat template finds no tokenizer.
    complaints = [
        line
        for line in storm.log.splitlines()
        if "ERROR" in line or ("Traceback" in line and "WARNING" not in line)
    ]
    assert storm.has_faults or not complaints, "\n".join(complaints)


def test_every_token_that_a_client_received_is_the_baselines(storm):
    """Of cut-off answers too, and of every prompt once more from what the storm left behind."""
    wrong, num_tokens, num_ties = [], 0, 0
    for reply in storm.all_replies:
        expected = storm.expected[reply.ask.prompt_idx]
        position = first_difference(expected, reply.tokens)
        num_tokens += len(reply.tokens)
        if position is None:
            continue
        if is_a_tie(expected, reply.tokens, position):
            num_ties += 1
        else:
            wrong.append(describe(storm, reply, position))
    print(f"{num_tokens} tokens compared, {num_ties} answers left the baseline's at a tie")
    assert not wrong, f"{len(wrong)} answers differ; the first three:\n" + "\n".join(wrong[:3])
    assert num_tokens > NUM_REQUESTS * NUM_ANSWER_TOKENS_MIN // 2
    assert num_ties <= NUM_REQUESTS // 50


def test_every_block_and_slot_is_free_when_the_storm_is_over(storm):
    assert {name: storm.metrics[name] for name in MUST_BE_ZERO} == dict.fromkeys(MUST_BE_ZERO, 0)


def test_nothing_went_wrong_inside_the_connector_but_the_copies_that_failed(storm):
    found = {name: storm.metrics[name] for name in FAILURES}
    if storm.has_faults:
        assert found.pop("vllm:safe_offload_transfer_failures_total") > 0
        pattern = r'transfer_failures_total{direction="(\w+)",.* [1-9]'
        assert set(re.findall(pattern, storm.metrics_text)) == {"load", "store"}
        assert storm.metrics["vllm:safe_offload_overdue_transfers_total"] > 0
    assert found == dict.fromkeys(found, 0)


def test_it_was_a_storm(storm):
    """Else the tests above show nothing: preemption, aborts at all moments, eviction, host hits."""
    metrics = storm.metrics_of_storm
    assert metrics["vllm:num_preemptions_total"] >= NUM_REQUESTS / 10
    cut_off = [r for r in storm.replies if r.ask.is_cut_off and not r.is_complete]
    assert len(cut_off) >= NUM_CUT_OFF * 3 // 4
    assert any(not reply.tokens for reply in cut_off)
    assert any(reply.tokens for reply in cut_off)
    num_stored = metrics["vllm:safe_offload_stored_blocks_total"]
    assert num_stored > 2 * NUM_HOST_SLOTS[storm.kind], "hardly anything was evicted"
    assert metrics["vllm:safe_offload_hit_tokens_total"] > 0
    assert metrics["vllm:safe_offload_loaded_blocks_total"] > 0


def describe(storm: Storm, reply: Reply, position: int) -> str:
    """All that is needed to look into a wrong answer."""
    expected = storm.expected[reply.ask.prompt_idx]
    phases = {"storm": storm.replies, "gust": storm.gust, "afterwards": storm.returns}
    (phase,) = (name for name, replies in phases.items() if any(r is reply for r in replies))
    return (
        f"STORM_SEED={SEED}, {storm.kind}, {phase}: {reply.ask}\n"
        f"  prompt of {len(storm.prompts[reply.ask.prompt_idx])} tokens; token {position} differs, "
        f"margin {expected.margins[position]:.6f}, runner-up {expected.runners_up[position]}\n"
        f"  expected {list(expected.tokens[: len(reply.tokens)])}\n"
        f"  found    {reply.tokens}"
    )
