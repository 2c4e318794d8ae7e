"""What Dynamo's own indexer makes of our events, with what docs/guides/kv-events.md says.

It is started where it is installed (`make servers`).
"""

import contextlib
import errno
import itertools
import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import EventPublisherFactory, KVEventBatch

from tests.engine.http_server import find_free_port
from tests.programs import find_program
from tests.scheduler.rig import Rig
from tests.simulator.groups import BLOCK_TOKENS

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "kv-events.md"
POD, MODEL = "10.0.0.7:8000", "Qwen/Qwen3-32B"
PROMPT_TOKENS = 5 * BLOCK_TOKENS
WAIT_S = 600.0
PORTS_TRIED_MAX = 20
"""Another process may take a port that was free a moment ago."""


def recipe(router: str) -> dict[str, Any]:
    """Return what the page's recipe gives to --kv-events-config."""
    section = PAGE.read_text().partition(f"\n### {router}\n")[2].partition("\n#")[0]
    found = re.search(r"\{[^{}]*enable_kv_cache_events[^{}]*\}", section)
    assert found, section
    config: dict[str, Any] = json.loads(found.group().replace("$(POD_IP)", POD.partition(":")[0]))
    return config


@contextlib.contextmanager
def published(rig: Rig, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Have vLLM publish as configured, but on free ports; what a router connects to."""
    assert config["endpoint"] == "tcp://*:5557"
    for attempt in itertools.count(1):
        ports = find_free_port(), find_free_port()
        own = {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}"}
        try:
            publisher = EventPublisherFactory.create(KVEventsConfig(**config | own), 0)
            break
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or attempt == PORTS_TRIED_MAX:
                raise
    rig.scheduler.kv_event_publisher = publisher
    try:
        yield f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}"
    finally:
        publisher.shutdown()


def wait_for(is_met: Callable[[], bool], rig: Rig) -> None:
    """Publish until something is so: a subscriber notices what it has missed with the next one."""
    deadline_s = time.monotonic() + WAIT_S
    while not is_met():
        assert time.monotonic() < deadline_s
        rig.scheduler.kv_event_publisher.publish(KVEventBatch(ts=0.0, events=[]))
        time.sleep(0.02)


# ---- Dynamo ------------------------------------------------------------------------------------


class Dynamo:
    """The indexer of Dynamo's router, as a server."""

    def __init__(self, port: int) -> None:
        self._port = port

    def post(self, path: str, body: dict[str, Any]) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return json.load(response)

    def is_up(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=WAIT_S)
        except urllib.error.URLError:
            return False
        return True

    def find(self, tokens: list[int]) -> tuple[int, int]:
        found = self.post("/query", {"token_ids": tokens, "model_name": MODEL})["instances"]
        return (found["1"]["gpu"], found["1"]["cpu"]) if found else (0, 0)


@contextlib.contextmanager
def indexer(program: str, rig: Rig, log: Path) -> Iterator[Dynamo | None]:
    """Start it on a free port; None if another process has taken this port."""
    router = Dynamo(find_free_port())
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [program, "--port", str(router._port)], stdout=file, stderr=file
        ) as process,
    ):
        try:
            wait_for(lambda: process.poll() is not None or router.is_up(), rig)
            is_running = process.poll() is None
            assert is_running or "already in use" in log.read_text(), log.read_text()
            yield router if is_running else None
        finally:
            process.kill()


@contextlib.contextmanager
def dynamo(rig: Rig, folder: Path) -> Iterator[Dynamo]:
    program = find_program("dynamo-indexer")
    if program is None:
        pytest.skip("no dynamo-indexer: `make servers`")
    with (
        published(rig, recipe("Dynamo")) as (endpoint, replay_endpoint),
        contextlib.ExitStack() as running,
    ):
        for attempt in range(PORTS_TRIED_MAX):
            router = running.enter_context(indexer(program, rig, folder / f"log-{attempt}"))
            if router is not None:
                break
        assert router is not None
        engine = {"instance_id": 1, "model_name": MODEL, "block_size": BLOCK_TOKENS}
        router.post(
            "/register", engine | {"endpoint": endpoint, "replay_endpoint": replay_endpoint}
        )
        yield router


# ---- what it knows -----------------------------------------------------------------------------


@pytest.mark.parametrize("router", ["Dynamo", "llm-d"])
def test_vllm_takes_the_configuration_of_each_recipe(router):
    assert KVEventsConfig(**recipe(router)).enable_kv_cache_events


def test_a_prompt_that_the_gpu_has_lost_is_known_to_be_on_the_host(make_rig, tmp_path):
    rig = make_rig(has_events=True, num_blocks=9)
    with dynamo(rig, tmp_path) as router:
        rig.start()
        first, second = (rig.prompt(PROMPT_TOKENS, seed) for seed in (1, 2))
        rig.run_alone("a", first, max_tokens=1)
        wait_for(lambda: router.find(first) == (PROMPT_TOKENS, PROMPT_TOKENS), rig)
        rig.run_alone("b", second, max_tokens=1)
        wait_for(lambda: router.find(second) == (PROMPT_TOKENS, PROMPT_TOKENS), rig)
        num_gpu, num_any = router.find(first)
        assert num_gpu < PROMPT_TOKENS
        assert num_any == PROMPT_TOKENS
        assert rig.run_alone("c", first, max_tokens=1) > 0, "so it is"


def test_after_a_reset_of_both_caches_nothing_is_expected(make_rig, tmp_path):
    rig = make_rig(has_events=True)
    with dynamo(rig, tmp_path) as router:
        rig.start()
        prompt = rig.prompt(PROMPT_TOKENS, 1)
        rig.run_alone("a", prompt, max_tokens=1)
        wait_for(lambda: router.find(prompt) == (PROMPT_TOKENS, PROMPT_TOKENS), rig)
        assert rig.scheduler.reset_prefix_cache(reset_connector=True)
        rig.drain()
        wait_for(lambda: router.find(prompt) == (0, 0), rig)


def test_lazy_stores_come_last_block_first_and_are_known(make_rig, tmp_path):
    """vLLM evicts the end of a prompt first, so children are stored before their parents."""
    rig = make_rig(has_events=True, num_blocks=9, extra={"lazy_offload": True})
    with dynamo(rig, tmp_path) as router:
        rig.start()
        first = rig.prompt(PROMPT_TOKENS, 1)
        rig.run_alone("a", first, max_tokens=1)
        rig.run_alone("b", rig.prompt(PROMPT_TOKENS, 2), max_tokens=1)
        rig.run_alone("c", rig.prompt(2 * BLOCK_TOKENS, 3), max_tokens=1)
        wait_for(lambda: router.find(first) == (BLOCK_TOKENS, PROMPT_TOKENS), rig)
        assert rig.run_alone("d", first, max_tokens=1) == 4 * BLOCK_TOKENS - 1
