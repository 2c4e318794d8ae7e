"""`python -m tests.benchmarks serve` without a vLLM: its prompts, its users, its figures."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from safe_offload.commands.bench import engine_process
from safe_offload.errors import SafeOffloadError
from tests.benchmarks import serve
from tests.benchmarks.__main__ import main
from tests.benchmarks.serve_report import ServeFound, make_report
from tests.benchmarks.serve_workload import (
    GROWING,
    ONE_OFF,
    Reply,
    Served,
    Sizes,
    make_prompts,
    serve_users,
)

SIZES = Sizes(users=3, turns=4, context_tokens=100, turn_tokens=40, answer_tokens=5, rounds=2)
OPTIONS = "--users 3 --turns 4 --context-tokens 100 --turn-tokens 40 --answer-tokens 5 --rounds 2"


def test_prompts_grow_or_have_nothing_in_common() -> None:
    users = make_prompts(GROWING, SIZES, "0/1")
    for prompts in users:
        assert [len(prompt) for prompt in prompts] == [100, 140, 180, 220]
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before)] == before
    assert users == make_prompts(GROWING, SIZES, "0/1"), "every server gets the same"
    one_off = [prompt for user in make_prompts(ONE_OFF, SIZES, "0/1") for prompt in user]
    later = [user[0] for user in make_prompts(GROWING, SIZES, "0/2")]
    heads = {tuple(prompt[:16]) for prompt in (*one_off, *later, *(user[0] for user in users))}
    assert len(heads) == 12 + 3 + 3


def test_the_servers_differ_in_connector_or_pool(tmp_path: Path) -> None:
    parser = ArgumentParser()
    serve.add_arguments(parser)
    options = serve.server_options(SIZES, parser.parse_args(["--cpu-bytes", "64MiB"]), tmp_path)
    plain, ours, limit = (one.arguments for one in options.values())
    assert list(options) == ["no connector", "SafeCPUOffloadConnector", serve.LIMIT]
    assert {key for key in ours if ours[key] != plain.get(key)} == {"kv_transfer_config"}
    assert {key for key in limit if limit[key] != plain[key]} == {"num_gpu_blocks_override"}


# ---- users, against a server that answers at once ----------------------------------------------


class Server:
    """Speaks what vLLM's server speaks; answers with the last tokens of the prompt, spoiled.

    `num_together`: the first answers wait for this many prompts.
    """

    def __init__(
        self, spoil: Callable[[list[int]], list[int]] = list, num_together: int = 1
    ) -> None:
        self._spoil = spoil
        self._num_together, self._are_together = num_together, asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self.prompts: list[list[int]] = []
        self.num_at_once = self.num_at_once_max = 0
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(self._runner.setup())
        self._loop.run_until_complete(web.TCPSite(self._runner, "127.0.0.1", 0).start())
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(250)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(250)
        self._loop.close()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "some model"}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        name = "vllm:prompt_tokens_by_source_total"
        num_computed = sum(len(prompt) // 2 for prompt in self.prompts)
        sources = (("local_compute", num_computed), ("local_cache_hit", 1e9))
        lines = (f'{name}{{engine="0",source="{source}"}} {value}' for source, value in sources)
        return web.Response(text="\n".join(lines))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert (body["model"], body["temperature"], body["stream"]) == ("some model", 0, True)
        self.prompts.append(body["prompt"])
        self.num_at_once += 1
        self.num_at_once_max = max(self.num_at_once_max, self.num_at_once)
        if self.num_at_once == self._num_together:
            self._are_together.set()
        await asyncio.wait_for(self._are_together.wait(), 250)
        self.num_at_once -= 1
        response = web.StreamResponse()
        await response.prepare(request)
        for token_id in self._spoil(body["prompt"][-body["max_tokens"] :]):
            event = {"choices": [{"token_ids": [token_id]}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setattr(engine_process, "SPIN_S", 0.0)
    servers: list[Server] = []

    def start_one(*args: Callable[[list[int]], list[int]], **options: int) -> Server:
        servers.append(Server(*args, **options))
        return servers[-1]

    yield start_one
    for server in servers:
        server.stop()


def ask(server: Server) -> Served:
    users = make_prompts(GROWING, SIZES, "0/1")
    return asyncio.run(serve_users(server.url, users, SIZES.answer_tokens, 600.0))


def test_users_ask_at_once_and_each_waits_for_its_answer(start: Callable[..., Server]) -> None:
    server = start(num_together=SIZES.users)
    served = ask(server)
    assert server.num_at_once_max == SIZES.users
    for user, prompts in enumerate(make_prompts(GROWING, SIZES, "0/1")):
        arrived = [server.prompts.index(list(prompt)) for prompt in prompts]
        assert arrived == sorted(arrived)
        answers = [reply.token_ids for reply in served.replies[user]]
        assert answers == [tuple(prompt[-5:]) for prompt in prompts]
    assert served.num_prompt_tokens == 3 * (100 + 140 + 180 + 220)
    assert served.num_computed_tokens == served.num_prompt_tokens // 2
    assert all(0 < ttft_s < served.duration_s for ttft_s in served.ttfts_s)
    assert served.request_throughput == pytest.approx(12 / served.duration_s)
    with pytest.raises(SafeOffloadError, match="expected 5 tokens, found 4"):
        ask(start(lambda tokens: tokens[1:]))


def test_two_servers_take_turns_and_a_wrong_token_is_told(
    start: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = make_prompts(ONE_OFF, SIZES, "7/2")[1][2]

    def spoil(tokens: list[int]) -> list[int]:
        return [*tokens[:-1], tokens[-1] + (tokens == wrong[-5:])]

    first, second = start(), start(spoil)
    file = tmp_path / "found.json"
    command = ["serve", *OPTIONS.split(), "--seed", "7", "--url", first.url, second.url]
    assert main([*command, "--json", str(file)]) == 1
    text = capsys.readouterr().out
    assert "answers: all 24 equal, 5 greedy tokens each" in text
    assert "answers: 1 of 24 DIFFER" in text
    progress = [line for line in text.splitlines() if line.startswith("round")]
    order = [first.url if first.url in line else second.url for line in progress]
    assert order == [first.url, second.url] * 2 + [second.url, first.url] * 2
    assert set(json.loads(file.read_text())["summary"]) == {
        f"{workload}, {server.url}" for workload in (GROWING, ONE_OFF) for server in (first, second)
    }


# ---- figures -----------------------------------------------------------------------------------


def test_ratios_are_taken_within_a_round() -> None:
    replies = [[Reply(0.1, (1,)), Reply(0.2, (1,))]]
    passes = {
        name: [Served(duration_s, replies, 100, 25) for duration_s in durations_s]
        for name, durations_s in {"a": (2.0, 4.0), "b": (1.0, 2.0), "c": (0.8, 1.6)}.items()
    }
    found = ServeFound({GROWING: passes}, "c", Sizes(1, 2, rounds=2), "method", {}, {})
    text = make_report(found).render()
    (row,) = (line for line in text.splitlines() if line.startswith("b "))
    expected = (
        "b  1.50 (1.00 to 2.00)  150  200  2.000 (2.000 to 2.000)  0.800 (0.800 to 0.800)  25%"
    )
    assert row.split() == expected.split()
