"""What routers make of our events, as vLLM publishes them with what docs/guides/kv-events.md says.

Dynamo's own indexer is started (`make servers`). llm-d's is a program in Go; here its decoder and
its index are written down from its source.
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
from typing import Any, Protocol

import msgspec
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


class Router(Protocol):
    """A router that has joined."""

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """Return how many leading tokens the engine has on the GPU, and there or on the host."""


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


# ---- llm-d -------------------------------------------------------------------------------------


class LlmD:
    """Written from llm-d-kv-cache 0.9 (github.com/llm-d/llm-d-kv-cache).

    Frames and topic: pkg/kvevents/zmq_subscriber.go, runSubscriber; engineadapter/common.go,
    parseTopic. Events as maps: engineadapter/vllm_adapter.go (pull request 661). What becomes of
    them: pkg/kvevents/pool.go, processEventBatch; pkg/kvcache/kvblock/in_memory.go.
    """

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe("kv@")  # its default topicFilter
        self._socket.connect(endpoint)
        self._key_of: dict[int, Any] = {}
        self._where: dict[Any, set[tuple[str, str, int]]] = {}
        self.num_messages = 0
        self.num_orphans = 0

    def close(self) -> None:
        self._socket.close(linger=0)

    def read(self) -> bool:
        """Take what has come; returns whether anything ever has."""
        while self._socket.poll(50):
            topic, number, payload = self._socket.recv_multipart()
            assert len(number) == 8
            kind, pod, model = topic.decode().split("@")
            assert (kind, pod, model) == ("kv", POD, MODEL)
            _, events, _ = msgspec.msgpack.decode(payload)
            self.num_messages += 1
            for event in events:
                getattr(self, f"_{event['type']}")(pod, **event)
        return self.num_messages > 0

    def _BlockStored(
        self,
        pod: str,
        block_hashes: list[int],
        parent_block_hash: int | None,
        token_ids: list[int],
        block_size: int,
        medium: str,
        group_idx: int,
        **_: Any,
    ) -> None:
        parent = None
        if parent_block_hash is not None:
            if parent_block_hash not in self._key_of:
                self.num_orphans += 1
                return
            parent = self._key_of[parent_block_hash]
        for i, block_hash in enumerate(block_hashes):
            parent = parent, tuple(token_ids[i * block_size : (i + 1) * block_size])
            self._key_of[block_hash] = parent
            self._where.setdefault(parent, set()).add((pod, medium.lower(), group_idx))

    def _BlockRemoved(
        self, pod: str, block_hashes: list[int], medium: str, group_idx: int, **_: Any
    ) -> None:
        for block_hash in block_hashes:
            if block_hash in self._key_of:
                entries = self._where[self._key_of[block_hash]]
                entries.discard((pod, medium.lower(), group_idx))
                if not entries:
                    del self._key_of[block_hash]

    def _AllBlocksCleared(self, pod: str, **_: Any) -> None:
        self._key_of.clear()
        self._where.clear()

    def find(self, tokens: list[int]) -> tuple[int, int]:
        self.read()
        num_gpu = num_any = 0
        key: Any = None
        for i in range(0, len(tokens), BLOCK_TOKENS):
            key = key, tuple(tokens[i : i + BLOCK_TOKENS])
            media = {medium for _, medium, _ in self._where.get(key, ())}
            if not media:
                break
            num_any += BLOCK_TOKENS
            num_gpu += BLOCK_TOKENS if "gpu" in media and num_gpu == i else 0
        return num_gpu, num_any


@contextlib.contextmanager
def llm_d(rig: Rig, folder: Path) -> Iterator[LlmD]:
    with published(rig, recipe("llm-d")) as (endpoint, _):
        router = LlmD(endpoint)
        try:
            wait_for(router.read, rig)
            yield router
        finally:
            router.close()


# ---- both --------------------------------------------------------------------------------------

ROUTERS = pytest.mark.parametrize("join", [dynamo, llm_d], ids=lambda join: join.__name__)


@ROUTERS
def test_a_prompt_that_the_gpu_has_lost_is_known_to_be_on_the_host(make_rig, tmp_path, join):
    rig = make_rig(has_events=True, num_blocks=9)
    with join(rig, tmp_path) as router:
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


@ROUTERS
def test_what_the_host_has_evicted_too_is_not_expected_there(make_rig, tmp_path, join):
    rig = make_rig(has_events=True, num_blocks=9, num_slots=7)
    with join(rig, tmp_path) as router:
        rig.start()
        prompts = [rig.prompt(PROMPT_TOKENS, seed) for seed in range(1, 4)]
        for prompt in prompts:
            rig.run_alone(f"of {prompt[0]}", prompt, max_tokens=1)
        last = (PROMPT_TOKENS, PROMPT_TOKENS)
        wait_for(lambda: router.find(prompts[-1]) == last, rig)
        wait_for(lambda: router.find(prompts[0]) == (0, 0), rig)


@ROUTERS
def test_after_a_reset_of_both_caches_nothing_is_expected(make_rig, tmp_path, join):
    rig = make_rig(has_events=True)
    with join(rig, tmp_path) as router:
        rig.start()
        prompt = rig.prompt(PROMPT_TOKENS, 1)
        rig.run_alone("a", prompt, max_tokens=1)
        wait_for(lambda: router.find(prompt) == (PROMPT_TOKENS, PROMPT_TOKENS), rig)
        assert rig.scheduler.reset_prefix_cache(reset_connector=True)
        rig.drain()
        wait_for(lambda: router.find(prompt) == (0, 0), rig)


@ROUTERS
def test_lazy_stores_come_last_block_first_and_are_known(make_rig, tmp_path, join):
    """vLLM evicts the end of a prompt first, so children are stored before their parents."""
    rig = make_rig(has_events=True, num_blocks=9, extra={"lazy_offload": True})
    with join(rig, tmp_path) as router:
        rig.start()
        first = rig.prompt(PROMPT_TOKENS, 1)
        rig.run_alone("a", first, max_tokens=1)
        rig.run_alone("b", rig.prompt(PROMPT_TOKENS, 2), max_tokens=1)
        rig.run_alone("c", rig.prompt(2 * BLOCK_TOKENS, 3), max_tokens=1)
        wait_for(lambda: router.find(first) == (BLOCK_TOKENS, PROMPT_TOKENS), rig)
        assert rig.run_alone("d", first, max_tokens=1) == 4 * BLOCK_TOKENS - 1
