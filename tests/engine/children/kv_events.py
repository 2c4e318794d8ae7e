"""A storm of requests, aborts and resets, and a router that replays what vLLM publishes.

The router reads the events as any other does, over ZeroMQ sockets of its own. It joins late and
asks for what it has missed. Whenever nothing is in flight, what it knows of the host is compared
with what the connector's directory holds.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.engine.children import engine

SEED = 17
NUM_PROMPTS = 16
NUM_REQUESTS = 36
NUM_AT_ONCE = 8
WAIT_MS = 60_000


class Router:
    """Knows which blocks are on the host, by the events alone."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str) -> None:
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.subscribe(topic)
        self._events.connect(endpoint)
        self._missed = self._context.socket(zmq.DEALER)
        self._missed.connect(replay_endpoint)
        self._next = 0
        self.on_host: set[tuple[int, Any]] = set()
        self.num_replayed = self.num_stored = self.num_removed = self.num_double = 0
        self.example: Any = None

    def catch_up(self, num_batches: int) -> None:
        """Read until this many batches have been seen, all that there are."""
        while self._next < num_batches:
            if not self._events.poll(100):
                self._ask_for_missed()
                continue
            _, number, payload = self._events.recv_multipart()
            self._take(int.from_bytes(number, "big"), payload)

    def _ask_for_missed(self) -> None:
        self._missed.send_multipart((b"", self._next.to_bytes(8, "big")))
        while True:
            assert self._missed.poll(WAIT_MS), "vLLM does not answer"
            _, _, number, payload = self._missed.recv_multipart()
            if not payload:  # the end
                return
            self.num_replayed += 1
            self._take(int.from_bytes(number, "big"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        if number < self._next:
            return  # it was asked for, and came by itself too
        if number > self._next:
            self._ask_for_missed()
        if number != self._next:
            return
        self._next = number + 1
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        for event in batch.events:
            if getattr(event, "medium", None) == "CPU":
                self._replay(event)
        if self.example is None:
            raw = msgspec.msgpack.decode(payload)[1]
            long = (e for e in raw if e["medium"] == "CPU" and len(e["block_hashes"]) == 2)
            self.example = next(long, None)

    def _replay(self, event: Any) -> None:
        keys = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
        if isinstance(event, BlockStored):
            self.num_double += len(self.on_host & keys)
            self.num_stored += len(keys)
            self.on_host |= keys
        elif isinstance(event, BlockRemoved):
            self.num_double += len(keys - self.on_host)
            self.num_removed += len(keys)
            self.on_host -= keys

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)


class Storm:
    """An engine that is stepped here, and the requests to it."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.rng = random.Random(SEED)
        prefixes = [self._tokens(96, 160) for _ in range(4)]
        self.prompts = [
            [*prefixes[index % 4], *self._tokens(16, 120)] for index in range(NUM_PROMPTS)
        ]
        self.num_aborted = self.num_resets = self._num_sent = 0

    def _tokens(self, fewest: int, most: int) -> list[int]:
        return self.rng.choices(range(256), k=self.rng.randint(fewest, most))

    def rage(self, num_requests: int, *, resets: bool) -> None:
        """Send requests, let a third of the clients go, reset everything now and then; drain."""
        llm_engine, left = self.llm.llm_engine, num_requests
        live: dict[str, int] = {}
        while left or llm_engine.has_unfinished_requests():
            while left and len(live) < NUM_AT_ONCE:
                left -= 1
                name = f"r{self._num_sent}"
                self._num_sent += 1
                prompt = {"prompt_token_ids": self.rng.choice(self.prompts)}
                llm_engine.add_request(name, prompt, engine.sampling(self.rng.randint(2, 16)))
                live[name] = self.rng.randrange(12) if self.rng.random() < 1 / 3 else -1
            for name in [name for name, steps in live.items() if steps == 0]:
                llm_engine.abort_request([name])
                del live[name]
                self.num_aborted += 1
            if resets and self.rng.random() < 1 / 5:
                self.reset(reset_running_requests=self.rng.random() < 0.5)
            for output in llm_engine.step():
                if output.finished:
                    live.pop(output.request_id, None)
            live = {name: steps - 1 if steps > 0 else steps for name, steps in live.items()}
        engine.drain(self.llm)

    def reset(self, *, reset_running_requests: bool = False) -> None:
        """Reset both caches."""
        try:
            self.llm.reset_prefix_cache(reset_running_requests, reset_connector=True)
            self.num_resets += 1
        except RuntimeError as error:
            if "waiting for remote KV transfer" not in str(error):
                raise  # vLLM refuses it while a request waits for a load, and nothing else


def scenario(job: dict[str, Any]) -> dict[str, Any]:
    """See the module's docstring."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        return run(job, f"ipc://{Path(folder, 'events')}", f"ipc://{Path(folder, 'replay')}")


def run(job: dict[str, Any], endpoint: str, replay_endpoint: str) -> dict[str, Any]:
    """Let storms pass over an engine that publishes at these endpoints."""
    job["arguments"]["kv_events_config"] = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": replay_endpoint,
        "topic": "kv@test",
    }
    llm = engine.start(job)
    scheduler = engine.scheduler_of(llm)
    planner = engine.planner_of(scheduler.connector)
    published: list[Any] = []
    publish = scheduler.kv_event_publisher.publish

    def count_and_publish(batch: Any) -> None:
        published.append(batch)
        publish(batch)

    scheduler.kv_event_publisher.publish = count_and_publish
    storm, moments = Storm(llm), []

    storm.rage(6, resets=False)
    router = Router(endpoint, replay_endpoint, "kv@test")  # which has missed what was before

    def compare(what: str) -> None:
        router.catch_up(len(published))
        index = {
            (key.group_idx, maybe_convert_block_hash(key.block_hash))
            for key in planner.hits.directory.all_keys()
        }
        told = router.on_host
        moments.append([what, len(index), len(told - index), len(index - told)])

    try:
        compare("before the storm")
        storm.rage(NUM_REQUESTS, resets=False)
        compare("after the storm")
        storm.reset()
        engine.drain(llm)
        compare("after a reset")
        storm.rage(NUM_REQUESTS // 2, resets=True)
        compare("after a storm with resets")
        assert llm.reset_prefix_cache(), "the GPU's prefix cache could not be reset"
        storm.rage(4, resets=False)
        compare("after a reset of the GPU's cache alone")
    finally:
        router.close()
    return {
        "moments": moments,
        "num_batches": len(published),
        "num_replayed": router.num_replayed,
        "num_stored": router.num_stored,
        "num_removed": router.num_removed,
        "num_double": router.num_double,
        "num_aborted": storm.num_aborted,
        "num_resets": storm.num_resets,
        "example": router.example,
        "metrics": engine.connector_metrics(llm),
        "audit": engine.audit(llm),
    }
