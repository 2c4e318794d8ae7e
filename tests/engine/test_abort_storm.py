"""A storm of requests and aborts over HTTP against a real vLLM server with the connector.

300 requests, a third of them cut off by the client, meet a GPU pool that preempts all the time and
a host pool that evicts all the time. Every token that any client received is compared with the
answer of a server without the connector, and afterwards every GPU block and host slot is free.

`STORM_SEED=7 python -m pytest tests/engine/test_abort_storm.py` runs another storm than the usual
one. What the engine does with it depends on the machine's timing, the workload does not.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from safe_offload.bench.tiny_models import ModelKind, write_tiny_model
from tests.engine.http_server import HttpServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SEED = int(os.environ.get("STORM_SEED", "1"))

NUM_REQUESTS = 300
NUM_CUT_OFF = 100
NUM_PROMPTS = 80
NUM_PREFIXES = 8
NUM_ANSWER_TOKENS_MIN, NUM_ANSWER_TOKENS_MAX = 60, 100
NUM_IN_FLIGHT = 16
"""Requests that the clients keep open at one time."""
CUT_OFF_DELAY_MAX_S = 1.0
NUM_GUST_REQUESTS = 150
GUST_DELAY_MAX_S = 0.06
REQUEST_TIMEOUT_S = 180.0

BLOCK_SIZE = 32
SLIDING_WINDOW = 96
LARGE_GPU_POOL_BLOCKS = 2000
NUM_GPU_BLOCKS: dict[ModelKind, int] = {"llama": 40, "gemma3": 80}
"""Enough for one request of the longest kind, and far from enough for all that may run."""
NUM_HOST_SLOTS: dict[ModelKind, int] = {"llama": 100, "gemma3": 200}

MARGIN_MIN = 1e-3
"""Nearer than this (in log-probability) the two likeliest tokens are a tie, which rounding decides.

A prompt that is computed in other chunks, in another batch, or from a cache rounds differently, by
about 1e-5 in float32.
"""

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
        "failed_loads",
        "failed_stores",
        "stale_reports",
        "duplicate_reports",
        "dropped_unknown_ids",
        "dropped_premature_ids",
        "dropped_duplicate_ids",
        "dropped_unowned_ids",
    )
)
"""What only a fault makes; there is none in this storm."""

SERVER_ARGUMENTS = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"),
    *("--block-size", str(BLOCK_SIZE), "--max-model-len", "512", "--max-num-seqs", "16"),
    *("--enable-chunked-prefill", "--max-num-batched-tokens", "128"),
)


@dataclass(frozen=True, slots=True)
class Expected:
    """The baseline's answer to a prompt.

    Attributes:
        margins: by how much each token is likelier than the runner-up, in log-probability.
        runners_up: the second likeliest token at each position.
    """

    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    runners_up: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the storm.

    Attributes:
        prompt_idx: which prompt.
        num_tokens: length of the answer that is asked for.
        cut_off_tokens: the client goes away when it has received this many tokens; 0 is before the
            first one.
        cut_off_s: the client goes away this long after it has begun to send.
    """

    number: int
    prompt_idx: int
    num_tokens: int
    cut_off_tokens: int | None = None
    cut_off_s: float | None = None

    @property
    def is_cut_off(self) -> bool:
        """Whether the client means to go away before the end."""
        return self.cut_off_tokens is not None or self.cut_off_s is not None


@dataclass(slots=True)
class Reply:
    """What the client of one request saw."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    is_complete: bool = False
    error: str | None = None


@dataclass(slots=True)
class Storm:
    """What a storm left behind, for the tests to judge.

    Attributes:
        replies: to the requests of the storm.
        gust: to the requests that were sent when the storm had drained.
        returns: to every prompt once more, after that.
        metrics_of_storm: of the server, when the storm had drained.
        metrics: of the server, at the very end.
        log: of the server, all of its life.
        is_healthy: what /health said at the very end.
    """

    kind: ModelKind
    prompts: list[list[int]]
    expected: list[Expected]
    replies: list[Reply]
    gust: list[Reply]
    returns: list[Reply]
    metrics_of_storm: dict[str, float]
    metrics: dict[str, float]
    log: str
    is_healthy: bool

    @property
    def all_replies(self) -> list[Reply]:
        """Everything that any client saw."""
        return [*self.replies, *self.gust, *self.returns]


def make_prompts(rng: random.Random) -> list[list[int]]:
    """Three prompts of four begin with one of a few prefixes, the others with nobody's."""

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


# ---- the clients ---------------------------------------------------------------------------------


def make_body(prompt: list[int], num_tokens: int) -> dict[str, object]:
    """A greedy request for exactly so many tokens, in token ids."""
    return {
        "model": "model",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }


def open_session(server: HttpServer) -> aiohttp.ClientSession:
    """A session whose every request has a connection of its own, which going away closes."""
    return aiohttp.ClientSession(
        server.url,
        connector=aiohttp.TCPConnector(limit=NUM_IN_FLIGHT, force_close=True),
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
    )


async def ask_baseline(server: HttpServer, prompts: Sequence[list[int]]) -> list[Expected]:
    """The answer of maximal length to every prompt, with the likelihood of its tokens."""
    turn = asyncio.Semaphore(8)

    async def ask_one(session: aiohttp.ClientSession, prompt: list[int]) -> Expected:
        body = make_body(prompt, NUM_ANSWER_TOKENS_MAX)
        body |= {"logprobs": 2, "return_tokens_as_token_ids": True}
        async with turn, session.post("/v1/completions", json=body) as response:
            response.raise_for_status()
            (choice,) = (await response.json())["choices"]
        margins, runners_up = [], []
        for likeliest in choice["logprobs"]["top_logprobs"]:
            (_, first), (second_token, second) = likeliest.items()
            margins.append(first - second)
            runners_up.append(int(second_token.removeprefix("token_id:")))
        return Expected(tuple(choice["token_ids"]), tuple(margins), tuple(runners_up))

    async with open_session(server) as session:
        return list(await asyncio.gather(*(ask_one(session, prompt) for prompt in prompts)))


async def ask_all(
    server: HttpServer, prompts: Sequence[list[int]], asks: Sequence[Ask], num_in_flight: int
) -> list[Reply]:
    """Send requests in order, so many at a time, and go away from those that say so.

    When one gets no answer, no other is sent: an engine that hangs does so for all of them.
    """
    turn = asyncio.Semaphore(num_in_flight)
    gave_up = False

    async def ask_one(session: aiohttp.ClientSession, ask: Ask) -> Reply:
        nonlocal gave_up
        reply = Reply(ask)
        async with turn:
            if gave_up:
                reply.error = "not sent"
                return reply
            try:
                async with asyncio.timeout(ask.cut_off_s):
                    await receive(session, prompts[ask.prompt_idx], reply)
            except TimeoutError:
                if ask.cut_off_s is None:
                    reply.error = f"no answer within {REQUEST_TIMEOUT_S:.0f} s"
                    gave_up = True
            except (aiohttp.ClientError, OSError) as error:
                reply.error = repr(error)
        return reply

    async with open_session(server) as session:
        return list(await asyncio.gather(*(ask_one(session, ask) for ask in asks)))


async def receive(session: aiohttp.ClientSession, prompt: list[int], reply: Reply) -> None:
    """Stream one answer into the reply until its end or until the client goes away."""
    ask = reply.ask
    body = make_body(prompt, ask.num_tokens) | {"stream": True}
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            reply.error = f"HTTP {response.status}: {await response.text()}"
            return
        if ask.cut_off_tokens == 0:
            response.close()
            return
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                reply.is_complete = True
                return
            event = json.loads(data)
            if "error" in event:
                reply.error = str(event["error"])
                return
            reply.tokens += event["choices"][0]["token_ids"]
            if ask.cut_off_tokens is not None and len(reply.tokens) >= ask.cut_off_tokens:
                response.close()
                return
    reply.error = "the stream ended without [DONE]"


# ---- the storm -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gemma3", pytest.param("llama", marks=pytest.mark.slow)])
def storm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Storm:
    """Let a storm pass over a server with the connector and see what is left."""
    kind: ModelKind = request.param
    print(f"storm of {kind}, STORM_SEED={SEED}")
    folder = tmp_path_factory.mktemp(f"storm-{kind}")
    model = write_tiny_model(kind, folder / "model", sliding_window=SLIDING_WINDOW)
    rng = random.Random(f"{SEED} {kind}")
    prompts, asks = make_prompts(rng), make_asks(rng)
    gust = make_gust(rng)
    returns = [Ask(idx, idx, 8) for idx in range(NUM_PROMPTS)]
    with (
        start_server(model, folder / "baseline", LARGE_GPU_POOL_BLOCKS, None) as baseline,
        start_server(model, folder / "storm", NUM_GPU_BLOCKS[kind], NUM_HOST_SLOTS[kind]) as server,
    ):
        baseline.wait_until_healthy()
        expected = asyncio.run(ask_baseline(baseline, prompts))
        baseline.stop()
        server.wait_until_healthy()
        replies = asyncio.run(ask_all(server, prompts, asks, NUM_IN_FLIGHT))
        wait_until_drained(server)
        metrics_of_storm = server.metrics()
        gust_replies = asyncio.run(ask_all(server, prompts, gust, 2))
        wait_until_drained(server)
        returned = asyncio.run(ask_all(server, prompts, returns, 4))
        wait_until_drained(server)
        return Storm(
            kind=kind,
            prompts=prompts,
            expected=expected,
            replies=replies,
            gust=gust_replies,
            returns=returned,
            metrics_of_storm=metrics_of_storm,
            metrics=observe_final_state(server),
            log=server.log(),
            is_healthy=server.is_healthy(),
        )


def start_server(
    model: Path, folder: Path, num_gpu_blocks: int, num_host_slots: int | None
) -> HttpServer:
    """A server with a GPU pool of this size, and with the connector if there is a host pool."""
    arguments = [*SERVER_ARGUMENTS, "--num-gpu-blocks-override", str(num_gpu_blocks)]
    if num_host_slots is not None:
        transfer_config = {
            "kv_connector": "SafeCPUOffloadConnector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "num_cpu_blocks": num_host_slots,
                "check_invariants": True,
            },
        }
        arguments += ["--kv-transfer-config", json.dumps(transfer_config)]
    return HttpServer(model, arguments, folder)


def wait_until_drained(server: HttpServer) -> None:
    """Wait until the engine has no request, or fail: then it lost one."""

    def is_drained() -> bool:
        metrics = server.metrics()
        names = ("running", "waiting")
        return not any(metrics[f"vllm:num_requests_{name}"] for name in names)

    server.wait_for(is_drained, "the engine to be without requests", timeout_s=120.0)


def observe_final_state(server: HttpServer) -> dict[str, float]:
    """The metrics when nothing is in flight any more; as they are after 60 s if something stays."""
    deadline_s = time.monotonic() + 60.0
    while True:
        metrics = server.metrics()
        if time.monotonic() > deadline_s or not any(metrics[name] for name in MUST_BE_ZERO):
            return metrics
        time.sleep(0.1)


# ---- what must hold ------------------------------------------------------------------------------


def test_the_server_survives_the_storm(storm: Storm) -> None:
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
    assert not complaints, "\n".join(complaints)


def test_every_token_that_a_client_received_is_the_baselines(storm: Storm) -> None:
    """Of cut-off answers too, and of every prompt once more from what the storm left behind."""
    wrong, num_tokens, num_ties = [], 0, 0
    for reply in storm.all_replies:
        expected = storm.expected[reply.ask.prompt_idx]
        position = first_difference(expected, reply.tokens)
        num_tokens += len(reply.tokens)
        if position is None:
            continue
        if (
            expected.margins[position] < MARGIN_MIN
            and reply.tokens[position] == expected.runners_up[position]
        ):
            num_ties += 1
        else:
            wrong.append(describe(storm, reply, position))
    print(f"{num_tokens} tokens compared, {num_ties} answers left the baseline's at a tie")
    assert not wrong, f"{len(wrong)} answers differ; the first three:\n" + "\n".join(wrong[:3])
    assert num_tokens > NUM_REQUESTS * NUM_ANSWER_TOKENS_MIN // 2
    assert num_ties <= NUM_REQUESTS // 50


def test_every_block_and_slot_is_free_when_the_storm_is_over(storm: Storm) -> None:
    assert {name: storm.metrics[name] for name in MUST_BE_ZERO} == dict.fromkeys(MUST_BE_ZERO, 0)


def test_nothing_went_wrong_inside_the_connector(storm: Storm) -> None:
    assert {name: storm.metrics[name] for name in FAILURES} == dict.fromkeys(FAILURES, 0)


def test_it_was_a_storm(storm: Storm) -> None:
    """Else the tests above show nothing: preemption, aborts at all moments, eviction, host hits."""
    print(describe_storm(storm))
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


def first_difference(expected: Expected, tokens: Sequence[int]) -> int | None:
    """Position of the first token that is not the baseline's, if any."""
    pairs = zip(tokens, expected.tokens, strict=False)
    return next((i for i, (found, wanted) in enumerate(pairs) if found != wanted), None)


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


def describe_storm(storm: Storm) -> str:
    """The figures of a storm, for whoever runs it with -s."""
    cut_off = [r for r in storm.replies if r.ask.is_cut_off and not r.is_complete]
    preemptions = storm.metrics["vllm:num_preemptions_total"]
    counts = {
        name.removeprefix("vllm:safe_offload_"): int(value)
        for name, value in storm.metrics.items()
        if name.startswith("vllm:safe_offload_") and not name.endswith("_created") and value
    }
    return (
        f"{storm.kind}, STORM_SEED={SEED}: {len(storm.replies)} requests, {len(cut_off)} cut off, "
        f"{sum(not reply.tokens for reply in cut_off)} of them before the first token, "
        f"{preemptions:.0f} preemptions, {counts}"
    )
