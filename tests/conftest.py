"""What tests of several folders use."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.bucket_server import BucketServer
    from tests.scheduler.rig import MakeRig, Rig
    from tests.valkey_server import Server
    from tests.worker.copies.fake_device import FakeGpu


def pytest_configure(config: pytest.Config) -> None:
    """Let `make test` draw the same examples every time; `make test-nightly` draws others.

    No example has a deadline: a busy machine would miss it.
    """
    from hypothesis import settings

    if hasattr(config, "workerinput"):  # Ctrl-C is for the process that reports, which ends us
        os.setpgid(0, 0)
    config.stash[STDERR] = os.dup(2)
    is_same = "not nightly" in config.option.markexpr
    more = {"derandomize": True, "database": None} if is_same else {}
    settings.register_profile("ours", deadline=None, **more)
    settings.load_profile("ours")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a crash print its stack: a library that vLLM imports takes these signals for itself."""
    faulthandler.disable()
    faulthandler.enable(item.config.stash[STDERR])


STDERR = pytest.StashKey[int]()
ENGINES = "tests/engine/"
LONGEST = tuple(
    f"tests/{name}.py"
    for name in (
        *("engine/test_prefill_decode", "engine/test_abort_storm", "engine/test_lifecycle"),
        *("engine/test_small_model", "engine/test_live_weights", "engine/test_poisoned_blocks"),
        *("engine/test_node", "engine/test_parallel", "engine/test_tiers"),
        *("engine/test_other_models", "engine/test_layouts"),
        *("engine/test_tenants", "engine/test_network_tiers", "engine/test_memory"),
        *("engine/test_observability", "engine/test_preemption", "engine/test_private"),
        *("scheduler/test_internal_errors", "worker/copies/test_gpu", "simulator/test_runs"),
        *("benchmarks/test_scheduler", "scheduler/loads/test_prefixes"),
        *("simulator/test_digests", "simulator/test_swarm", "worker/memory/test_shared_memory"),
    )
)
"""Files in the order in which they begin; the others follow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that what two processes end with are small pieces."""
    places = {path: place for place, path in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a process whole files; the first one gets engines while there are any, the others not.

    Each takes over what is left of the other kind when its own is done.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            is_first = node is self.nodes[0]
            for path in self.workqueue:
                if path.startswith(ENGINES) == is_first:
                    self.workqueue.move_to_end(path, last=False)
                    break
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def signals_that_end() -> None:
    """What tests start ends at Ctrl-C and at a hang-up, also behind `nohup` and `&`.

    These ignore both, and a process hands on what it ignores, but no handler.
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: lambda *_: None}
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@contextlib.contextmanager
def _records(level: int) -> Iterator[list[logging.LogRecord]]:
    """What the package logs from this level on, whatever vLLM does with its loggers."""
    from tests.simulator.vllm_setup import EngineShape, make_config

    make_config(EngineShape())  # vLLM's first one takes away all handlers below its own logger
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler, logger = Keep(), logging.getLogger("vllm.safe_offload")
    level_before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    yield records
    logger.setLevel(level_before)
    logger.removeHandler(handler)


@pytest.fixture
def package_log() -> Iterator[list[logging.LogRecord]]:
    """All that the package logs, DEBUG included."""
    with _records(logging.DEBUG) as records:
        yield records


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What the package warns of, and its errors."""
    with _records(logging.WARNING) as records:
        yield records


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Valkey server that no test ends."""
    from tests.valkey_server import Server

    with Server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(valkey: Server) -> Iterator[Server]:
    """It as it is after its start."""
    with valkey.client() as client:
        client.flushall()
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
        yield valkey
        for user in client.acl_users():
            if user != "default":
                client.acl_deluser(user)


@pytest.fixture(scope="session")
def _bucket_server() -> Iterator[BucketServer]:
    from tests.bucket_server import BucketServer

    with BucketServer() as server:
        yield server


@pytest.fixture
def bucket_server(_bucket_server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> BucketServer:
    """A real object store that no test ends; its credentials are in the environment."""
    for name, value in _bucket_server.environment().items():
        monkeypatch.setenv(name, value)
    return _bucket_server


@pytest.fixture
def forked_engines() -> Iterator[None]:
    """Engines that the test starts are forks of a process that has imported vLLM."""
    from tests.fresh_process import engine_server

    with engine_server():
        yield


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """Engines of the simulator to step by hand; see `tests.scheduler.rig`."""
    from tests.scheduler.rig import Rig

    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A GPU of threads, on a machine that does not tell where pages lie."""
    from safe_offload.worker.memory import placement
    from tests.worker.copies.fake_device import FakeGpu

    monkeypatch.setattr(placement, "pages_of", lambda *_: placement.Pages(None, {}))
    made = FakeGpu()
    yield made
    made.close()
    assert made.violations == []
