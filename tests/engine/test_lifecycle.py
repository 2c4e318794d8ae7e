"""A real server through its life: what it tells, salts, junk, resets, sleep, kills, restart, drain.

One server does all of it, so that the tests are steps: they run in the order of this file, and each
one only needs the server to be up.
"""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import safe_offload
from examples.tiny_models import write_tiny_model
from tests.engine.engines import connector, make_prompts
from tests.engine.http_server import HANG_S, HttpServer, make_body

NUM_TOKENS = 321
NUM_HIT_TOKENS = 320
NUM_STREAMS, NUM_STREAMED = 3, 700
NUM_ROLLOUTS_MAX = 5
PROMPTS = make_prompts(NUM_TOKENS, "ABCDE")
SECRET = "what the client asked in confidence"
NOT_OURS = ("psm_", "vllm-", "torchinductor", "triton")
"""What vLLM and torch keep there. psm_* are vLLM's queues between its processes, which it leaves
behind after a SIGKILL with any connector and with none; tests/test_layering.py says that we make
none."""


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """A server with the endpoints that operators use."""
    with HttpServer(
        model("llama"),
        tmp_path_factory.mktemp("lifecycle"),
        config=connector(500, pin_share=0.3),
        arguments=("--shutdown-timeout", "600", "--enable-prompt-tokens-details"),
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    ) as made:
        made.wait_until_healthy()
        yield made


def ask(server: HttpServer, name: str, num_tokens: int = 4, **more: Any) -> list[int]:
    """Answer a prompt; returns its greedy tokens."""
    tokens = server.ask(PROMPTS[name], num_tokens, **more)
    assert len(tokens) == num_tokens
    return tokens


def hits(server: HttpServer, name: str, **more: Any) -> float:
    """Tokens that come from the host for a prompt of which the GPU has forgotten everything."""
    server.settle()
    server.post("/reset_prefix_cache")
    before = server.count("hit_tokens")
    ask(server, name, **more)
    server.settle()
    return server.count("hit_tokens") - before


def check_well(server: HttpServer) -> None:
    """Nothing has gone wrong so far."""
    for name in ("contained_errors", "transfer_failures", "stale_reports"):
        assert server.count(name) == 0, (name, server.log_tail())


def test_slots_are_told_before_the_first_request(server):
    server.wait_for(lambda: server.count("slots") == 500, "slots to be told")
    metrics = server.metrics()
    assert metrics["vllm:prompt_tokens_total"] == 0
    assert metrics["vllm:safe_offload_info"] == 1, "one set of labels, of which all is known"
    assert "Host memory is ready: 500 slots per rank (1)." in server.log()


def test_an_answer_says_what_was_cached_and_metrics_say_where(server):
    """As docs/operate/dashboard.md says."""
    sources = "local_cache_hit", "external_kv_transfer", "local_compute"

    def ask_again() -> tuple[int, tuple[float, ...]]:
        before = by_source(server)
        usage = server.post("/v1/completions", make_body(PROMPTS["E"], 1))["usage"]
        server.settle()
        after = by_source(server)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return cached, tuple(after[name] - before[name] for name in sources)

    assert ask_again() == (0, (0, 0, NUM_TOKENS)), "computed"
    assert ask_again() == (NUM_HIT_TOKENS, (NUM_HIT_TOKENS, 0, 1)), "of the GPU"
    server.post("/reset_prefix_cache")
    assert ask_again() == (NUM_HIT_TOKENS, (0, NUM_HIT_TOKENS, 1)), "of the host"


def by_source(server: HttpServer) -> dict[str, float]:
    """Prompt tokens by where they came from, as vLLM counts them."""
    pattern = r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)$'
    return {
        name: float(value)
        for name, value in re.findall(pattern, server.metrics_text(), re.MULTILINE)
    }


def test_a_salt_is_part_of_what_a_hit_is_found_by(server):
    """Security (K9): without the salt a client learns nothing from the time of an answer."""
    tokens = ask(server, "A", cache_salt="of tenant 1")
    assert hits(server, "A", cache_salt="of tenant 2") == 0
    assert hits(server, "A") == 0
    assert hits(server, "A", cache_salt="of tenant 1") == NUM_HIT_TOKENS
    assert ask(server, "A", cache_salt="of tenant 1") == tokens
    check_well(server)


def test_limits_and_junk_of_a_request_are_served(server):
    tokens = ask(server, "B", kv_transfer_params={"max_offload_tokens": 0})
    assert hits(server, "B", kv_transfer_params={"max_offload_tokens": 96}) == 0
    assert hits(server, "B", kv_transfer_params={"max_load_tokens": 70}) == 64
    before = server.count("bad_request_params")
    junk: list[dict[str, Any]] = [
        {"max_load_tokens": SECRET, "max_offload_tokens": [SECRET]},
        {"max_load_tokens": -1},
        {"max_offload_tokens": True, SECRET: {SECRET: [None, 1.5]}},
        {"max_load_tokens": 2**40},
    ]
    for params in junk:
        assert ask(server, "B", kv_transfer_params=params) == tokens
    server.settle()
    assert server.count("bad_request_params") - before == len(junk)
    assert "Invalid kv_transfer_params in 1 requests" in server.log()
    assert SECRET not in server.log()
    check_well(server)


def test_a_response_tells_what_is_pinned(server):
    """An answer that is streamed does not: vLLM hands nothing on there."""
    asked = {"kv_transfer_params": {"pin_s": 60}}

    def told(params: dict[str, Any] = asked) -> Any:
        answer = server.post("/v1/completions", make_body(PROMPTS["D"], 1) | params)
        return answer["kv_transfer_params"]

    pinned = {"pinned_tokens": NUM_HIT_TOKENS, "unpinned_tokens": 0}
    assert told() == pinned
    assert told({}) is None
    assert told() == pinned
    assert server.count("pins") == 1
    with server.open("/v1/completions", make_body(PROMPTS["D"], 1) | asked | {"stream": True}) as s:
        assert "_tokens" not in s.read().decode()
    assert told({"kv_transfer_params": {"pin_s": 0}}) == dict.fromkeys(pinned, 0)
    server.settle()
    assert server.count("pins") == 0
    check_well(server)


def test_a_reset_of_the_connector_forgets_the_host(server):
    ask(server, "C")
    assert hits(server, "C") == NUM_HIT_TOKENS
    before = server.count("resets")
    assert "host cache was reset" not in server.log()
    server.post("/reset_prefix_cache?reset_external=true")
    assert hits(server, "C") == 0
    assert server.log().count("host cache was reset") == 1
    assert server.count("resets") == before + 1
    assert hits(server, "C") == NUM_HIT_TOKENS, "storing goes on"
    check_well(server)


def test_weights_that_change_over_http_bring_nothing_back_and_wait_for_nobody(
    server, model, tmp_path
):
    """While a request runs vLLM cannot reset its own cache. It goes on with what it has."""
    before = ask(server, "C")
    other = write_tiny_model("llama", tmp_path / "other", seed=1)
    with ThreadPoolExecutor(1) as executor:
        asked = executor.submit(ask, server, "D", 400)
        server.wait_for(
            # On a machine that is busy with something else it may be over when we look.
            lambda: server.metrics()["vllm:num_requests_running"] > 0 or asked.done(),
            "D to run",
        )
        change_weights(server, other)
        first = ask(server, "C")
        assert len(asked.result()) == 400
    assert first != before
    assert hits(server, "C") == NUM_HIT_TOKENS, "it was stored anew"
    server.settle()
    server.post("/reset_prefix_cache?reset_external=true")
    assert ask(server, "C") == first, "as it is computed"
    change_weights(server, model("llama"))
    assert hits(server, "C") == 0
    assert ask(server, "C") == before
    assert "The weights may have changed (collective_rpc of 'reload_weights')" in server.log()
    check_well(server)


def change_weights(server: HttpServer, folder: Path) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    server.post("/collective_rpc", body)


def test_resets_while_requests_run_disturb_no_answer(server):
    expected = {name: ask(server, name, 60) for name in "ABCD"}
    with ThreadPoolExecutor(4) as executor:
        asked = {name: executor.submit(ask, server, name, 60) for name in "ABCD"}
        while not all(answer.done() for answer in asked.values()):
            server.post("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
    assert {name: answer.result() for name, answer in asked.items()} == expected
    server.settle()
    assert server.count("leased_slots") == 0
    check_well(server)


def test_sleep_and_wake_up_leave_an_engine_that_serves(server):
    """On the CPU vLLM keeps its memory while it sleeps; resets and the pause are real."""
    tokens = ask(server, "D")
    server.post("/sleep?level=1")
    server.post("/wake_up")
    assert ask(server, "D") == tokens
    assert hits(server, "D") == NUM_HIT_TOKENS
    check_well(server)


def test_after_sigkill_nothing_is_left_and_the_server_starts_again_at_once(server):
    """No shared memory, no file, no process, and the same port (L4)."""
    tokens = ask(server, "E")
    processes = server.process_ids()
    assert len(processes) > 1
    files = {path for pid in processes for path in files_in_memory_or_tmp(pid)}
    server.kill()
    wait_until_gone(processes)
    left = {path for path in files if path.exists()}
    for path in left:
        if path.name.startswith("psm_"):
            path.unlink()
    assert not [path for path in left if not path.name.startswith(NOT_OURS)]
    server.start()
    server.wait_until_healthy()
    assert ask(server, "E") == tokens
    assert hits(server, "E") == NUM_HIT_TOKENS
    check_well(server)


def test_sigterm_loses_no_answer_and_nothing_is_left(server):
    """As docs/operate/upgrade.md says of a rollout.

    Where the front end has no core, all answers have been computed before the signal comes; then
    once more.
    """
    for _ in range(NUM_ROLLOUTS_MAX):
        processes = server.process_ids()
        # The stream that begins last sends the signal, so that it at least is under way.
        begun = threading.Barrier(NUM_STREAMS, action=server.terminate, timeout=HANG_S)
        with ThreadPoolExecutor(NUM_STREAMS) as executor:
            answers = [executor.submit(stream, server, name, begun) for name in "ABC"]
            ends = [answer.result() for answer in answers]
        assert ends == [(NUM_STREAMED, "length")] * NUM_STREAMS, server.log_tail()
        server.wait_for_end()
        wait_until_gone(processes)
        if re.search(r"draining in-flight requests count=[123] ", server.log()):
            return
        server.start()
        server.wait_until_healthy()
    pytest.fail("no answer was under way when the signal came")


def stream(server: HttpServer, name: str, begun: threading.Barrier) -> tuple[int, str | None]:
    """Read a streamed answer; return how many tokens came, and why it ended."""
    body = make_body(PROMPTS[name], NUM_STREAMED) | {"stream": True}
    num_tokens, reason = 0, None
    with server.open("/v1/completions", body) as response:
        for line in response:
            if line.startswith(b"data: {"):
                if num_tokens == 0:
                    begun.wait()
                choice = json.loads(line[6:])["choices"][0]
                num_tokens += len(choice["token_ids"] or ())
                reason = choice["finish_reason"]
    return num_tokens, reason


def files_in_memory_or_tmp(pid: int) -> set[Path]:
    """Files under /dev/shm and /tmp that a process has open or mapped, but for installed code."""
    found: set[str] = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        found.add(line.split(maxsplit=5)[-1])
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if link.exists():
            found.add(str(link.readlink()))
    paths = {Path(name) for name in found if name.startswith(("/dev/shm/", "/tmp/"))}
    code = Path(safe_offload.__file__).parent
    return {
        path
        for path in paths
        if not set(path.parts) & {"site-packages", "pytest-of-root"} and code not in path.parents
    }


def wait_until_gone(processes: list[int]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        assert time.monotonic() < deadline_s, "a process is left"
        time.sleep(0.05)
