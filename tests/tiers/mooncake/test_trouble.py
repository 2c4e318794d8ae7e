"""What a master, its machines and others who write to it can do: at worst misses."""

import asyncio
import contextlib
import ctypes
import importlib.util
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.reduction import send_handle
from pathlib import Path
from types import SimpleNamespace

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError
from safe_offload.mapped_files import make_memfd, map_new
from safe_offload.node.locks import Locks
from safe_offload.node.pools import open_rank
from safe_offload.tiers.base import Result
from safe_offload.tiers.guarded_tier import GuardedTier
from safe_offload.tiers.mooncake import client, helper, settings
from tests import stopping
from tests.mooncake_server import Master, Segment, mooncake_tier
from tests.node.engines import pools_in, wanted
from tests.tiers.contract import (
    FACTS,
    PATIENCE_S,
    SPACE,
    bytes_of,
    name_of,
)
from tests.tiers.process.slots import Slots
from tests.tiers.process.test_ends import flags_of_slots, title_of
from tests.tiers.process.test_process_tier import wait_until

OBJECT_BYTES = 1 << 20
REAL_HELPER = client.HELPER
NUM_OBJECTS = 16
MANY = 64
NAMES = [name_of(number) for number in range(NUM_OBJECTS)]
MARK = b"\xaa" * OBJECT_BYTES
CONTENT = random.Random(1).randbytes(100)


def shared_slot(data: bytes) -> tuple:
    """A slot that a process of the client reads and writes by itself."""
    memory = map_new(len(data))
    memory[:] = data
    return (memoryview(memory),)


def slots_of() -> list:
    return [shared_slot(bytes(OBJECT_BYTES)) for _ in NAMES]


def sources() -> list:
    return [shared_slot(random.Random(n).randbytes(OBJECT_BYTES)) for n in range(NUM_OBJECTS)]


@contextlib.asynccontextmanager
async def opened(config, seal=None):
    """A tier that is closed in the end."""
    tier = mooncake_tier(config, FACTS, seal) if seal else mooncake_tier(config, FACTS)
    try:
        yield tier
    finally:
        await asyncio.wait_for(tier.close(), PATIENCE_S)


@pytest.fixture
def own(tmp_path):
    """A master and a segment that only this test uses."""
    with Master(tmp_path, client_ttl="3") as master, Segment(tmp_path, master) as segment:
        yield master, segment


@pytest.mark.nightly
async def test_no_slot_is_written_to_after_a_read_that_failed_has_returned(tmp_path, monkeypatch):
    """The machine with the objects stops in the middle of a read, and goes on after it."""
    for name in ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"):
        monkeypatch.setenv(name, "30")
    with Master(tmp_path, client_ttl="3600") as master, Segment(tmp_path, master) as segment:
        async with opened(TierConfig.at(master.url)) as tier:
            assert set(await tier.spill(NAMES, sources())) == {Result.DONE}
            targets = slots_of()
            segment.suspend()
            reading = asyncio.create_task(tier.fetch(NAMES, targets))
            assert set(await asyncio.wait_for(reading, PATIENCE_S)) == {Result.FAILED}
            for target in targets:
                target[0][:] = MARK
            segment.resume()
            again = slots_of()
            while set(await tier.fetch(NAMES, again)) != {Result.DONE}:
                pass
            assert [bytes_of(slot) for slot in again] == [bytes_of(slot) for slot in sources()]
            assert all(bytes_of(target) == MARK for target in targets)


@pytest.fixture
def faulty(monkeypatch):
    """Let the processes that are started from now on have a fault, or none."""

    def let(fault):
        script = Path(__file__).with_name("faulty_helper.py") if fault else REAL_HELPER
        monkeypatch.setattr(client, "HELPER", str(script))
        monkeypatch.setenv("FAULT", fault)

    return let


@pytest.mark.parametrize("fault", ["scribble", "hang", "die"])
async def test_a_read_that_goes_wrong_gives_back_slots_that_nobody_writes_to(
    tmp_path, faulty, fault, caplog, monkeypatch
):
    """Its process is killed, and the objects that another one gives the store are still there."""
    faulty(fault)
    logger = logging.getLogger("vllm.safe_offload.tiers.rare_log")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    with Master(tmp_path) as master:
        config = TierConfig.at(master.url, segment_bytes=64 << 20, timeout_s=1.0)
        async with opened(config) as tier:
            assert await tier.probe(NAMES) == [False] * NUM_OBJECTS
            assert set(await tier.spill(NAMES, sources())) == {Result.DONE}
            guarded = GuardedTier(tier, config, lambda _: SPACE, slot_bytes=OBJECT_BYTES)
            targets = slots_of()
            assert set(await guarded.fetch(NAMES, targets)) == {Result.FAILED}
            assert "does not answer" not in caplog.text, "one that hangs is not waited for"
            for target in targets:
                target[0][:] = MARK
            for _ in range(20):
                assert all(bytes_of(target) == MARK for target in targets)
            faulty("")
            assert set(await tier.fetch(NAMES, targets)) == {Result.DONE}
            assert [bytes_of(slot) for slot in targets] == [bytes_of(slot) for slot in sources()]


ENGINE = """
import sys, threading
from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.mooncake.client import Client
from safe_offload.tiers.mooncake.settings import complete
store = Client(complete(TierConfig.at(sys.argv[1])))
store.has(["a"])
print("it asks", flush=True)
threading.Event().wait()
"""


def test_the_process_of_an_engine_that_is_killed_ends(own):
    command = [sys.executable, "-c", ENGINE, own[0].url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout.readline() == "it asks\n"
        children = Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()
        assert len(children) == 1
        engine.kill()
    deadline_s = time.monotonic() + PATIENCE_S
    while stopping.is_running(int(children[0])):
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize("verb", ["fetch", "spill"])
async def test_nothing_moves_after_a_call_whose_process_was_killed(own, verb):
    """A call under way ends when the client's processes are dead, too, as children of the tier's.

    The machine with the objects is slow, and goes on when the slots are others'. The objects keep
    all channels busy: an idle one lets the client's process see that the tier's has ended.
    """
    master, segment = own
    many = [name_of(number) for number in range(MANY)]
    slots = Slots(MANY, (OBJECT_BYTES,))
    slots.fill(1)
    tier = slots.open(TierConfig.at(master.url))
    await tier.spill(many[:1], [0])
    if verb == "fetch":
        await tier.spill(many, range(MANY))
    child = tier.process.pid
    helpers = [int(pid) for pid in _children_of(child)]
    assert len(helpers) == 2
    segment.suspend()
    call = asyncio.ensure_future(getattr(tier, verb)(many, range(MANY)))
    await asyncio.sleep(0.5)  # for the reads or writes to be under way; less shows less
    os.kill(child, signal.SIGKILL)
    await asyncio.wait([call], timeout=PATIENCE_S)
    with pytest.raises(OSError, match="its process has ended"):
        await call
    slots.memory[:] = MARK * MANY
    segment.resume()
    await wait_until(lambda: not any(map(stopping.is_running, helpers)))
    assert await tier.probe(many[:1]) == [True]
    assert slots.memory == MARK * MANY
    await asyncio.wait_for(tier.close(), PATIENCE_S)


def _children_of(pid: int) -> list[str]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [child for task in tasks for child in task.read_text().split()]


async def test_slots_are_neither_in_core_dumps_nor_in_children_of_the_client(config):
    """And ps shows what it is."""
    slots = Slots(1, (OBJECT_BYTES,))
    tier = slots.open(config)
    await tier.spill(NAMES[:1], [0])
    helpers = _children_of(tier.process.pid)
    assert len(helpers) == 2
    for pid in map(int, helpers):
        assert flags_of_slots(pid) >= {"dd", "dc"}
        assert title_of(pid) == f"safe-offload tier {tier.label} client"
    await tier.close()


LIAR = """
import json, sys, time
from multiprocessing.connection import Connection
channel = Connection(int(sys.argv[2]))
channel.recv_bytes()
channel.send_bytes(b'[0, ""]')
channel.recv_bytes()
channel.send_bytes({word!r})
time.sleep(600)
"""


@pytest.mark.parametrize(
    "word",
    [
        *(b"", b"{]", b"5", b"[]", b"[[1, 1]]", b'[[1, 1], "", 3]', b"[" * 100_000),
        *(b'[null, ""]', b'[7, ""]', b'["ab", ""]', b'[{"a": 1, "b": 2}, ""]', b'[[], ""]'),
        *(b'[[1], ""]', b'[[1, 1, 1], ""]', b'[[1, true], ""]', b'[[1, 1.0], ""]'),
        *(b'[[1, "x"], ""]', b'[[1, NaN], ""]', b'[[1, null], "no"]', b"x" * (2 << 20)),
    ],
    ids=lambda word: repr(word[:20]),
)
def test_a_client_that_says_what_it_should_not_is_killed(config, tmp_path, monkeypatch, word):
    """Whatever has talked to the network in it: the call fails, and the next one has another."""
    script = tmp_path / "liar.py"
    script.write_text(LIAR.format(word=word))
    monkeypatch.setattr(client, "HELPER", str(script))
    store = client.Client(settings.complete(config))
    with pytest.raises(OSError, match=r"Mooncake|message length"):
        store.has(["a", "b"])
    assert store._process.status is not None


def test_an_engine_of_a_pool_lives_as_long_as_its_client(config, tmp_path):
    """Others would take slots over that it still writes to."""
    with pools_in(tmp_path):
        pool = open_rank(wanted(8))
    (table,) = tmp_path.glob("*/pool/table")
    store = client.Client(settings.complete(config))
    store.put(["a"], [(memoryview(pool.mapping)[:1000],)])
    with contextlib.closing(Locks(str(table))) as others:
        pool.locks.close()  # as the kernel does when the engine is killed
        assert others.is_taken(pool.token)
        store.close()
        assert not others.is_taken(pool.token)


async def test_many_objects_of_many_layers_wait_for_a_busy_machine(own):
    """Mooncake queues 1,024 ranges for a machine, and fails others within a second.

    These are moved as one range each.
    """
    master, segment = own
    count, length = 64, 4096
    memory = memoryview(map_new(count * count * length))
    memory[:] = content = random.Random(1).randbytes(len(memory))
    rows = [memory[at : at + length] for at in range(0, len(memory), length)]
    slots = [tuple(rows[number::count]) for number in range(count)]  # each layer has an array
    names = [name_of(number) for number in range(count)]
    async with opened(TierConfig.at(master.url)) as tier:
        await tier.probe(names)
        segment.suspend()
        asyncio.get_running_loop().call_later(2, segment.resume)
        assert {*await tier.spill(names, slots)} == {Result.DONE}
        memory[:] = bytes(len(memory))
        assert {*await tier.fetch(names, slots)} == {Result.DONE}
    assert memory == content


async def test_what_was_in_the_memory_of_an_engine_that_has_gone_is_absent(own, tmp_path):
    master, segment = own
    async with opened(TierConfig.at(master.url)) as tier:
        await tier.spill(NAMES, sources())
        segment.kill()
        with Segment(tmp_path, master):
            deadline_s = time.monotonic() + PATIENCE_S
            while any(await tier.probe(NAMES)):
                found = await tier.fetch(NAMES, slots_of())
                assert set(found) <= {Result.FAILED, Result.ABSENT}
                assert time.monotonic() < deadline_s
            assert set(await tier.fetch(NAMES, slots_of())) == {Result.ABSENT}
            assert set(await tier.spill(NAMES, sources())) == {Result.DONE}
            assert set(await tier.fetch(NAMES, slots_of())) == {Result.DONE}


async def test_replicas_survive_the_loss_of_a_machine(own, tmp_path):
    """And are soft-pinned, where only what was hit is written."""
    master, segment = own
    with Segment(tmp_path, master):
        async with opened(TierConfig.at(master.url, replicas=2, store="hit")) as tier:
            assert set(await tier.spill(NAMES, sources())) == {Result.DONE}
            segment.kill()
            deadline_s = time.monotonic() + PATIENCE_S
            while (found := set(await tier.fetch(NAMES, targets := slots_of()))) != {Result.DONE}:
                assert found <= {Result.DONE, Result.FAILED}
                assert time.monotonic() < deadline_s
            assert [bytes_of(slot) for slot in targets] == [bytes_of(s) for s in sources()]


async def test_one_call_of_a_batch_waits_for_a_master_that_is_away(own, monkeypatch):
    """And not one for each object."""
    master, _ = own
    asked = []
    monkeypatch.setattr(client.Client, "sizes", lambda _, keys: asked.extend(keys) or [-1])
    async with opened(TierConfig.at(master.url)) as tier:
        await tier.spill(NAMES, sources())
        master.kill()
        with pytest.raises(OSError, match="code"):
            await tier.probe(NAMES)
        assert set(await tier.fetch(NAMES, slots_of())) == {Result.FAILED}
        assert asked == []


async def test_an_engine_gives_memory_and_takes_it_away_when_it_ends(tmp_path):
    with Master(tmp_path, client_ttl="3") as master:
        async with opened(TierConfig.at(master.url)) as reader:
            async with opened(TierConfig.at(master.url, segment_bytes=64 << 20)) as giver:
                assert await giver.probe(NAMES) == [False] * NUM_OBJECTS
                assert set(await giver.spill(NAMES, sources())) == {Result.DONE}
                targets = slots_of()
                assert set(await reader.fetch(NAMES, targets)) == {Result.DONE}
                assert [bytes_of(s) for s in targets] == [bytes_of(s) for s in sources()]
            deadline_s = time.monotonic() + PATIENCE_S
            while any(await reader.probe(NAMES)):
                assert time.monotonic() < deadline_s
            assert set(await reader.spill(NAMES, sources())) == {Result.FULL}


def test_ranges_are_cut_where_parts_of_a_memory_are_registered(monkeypatch):
    monkeypatch.setattr(helper, "REGISTERED_BYTES", 1 << 16)
    with tempfile.TemporaryFile() as file:
        file.truncate(200_000)
        memory = helper.Memory(os.dup(file.fileno()))
    store = Registering()
    pieces = list(memory.pieces(store, 60_000, 100_000))
    first = pieces[0][0] - 60_000
    assert [(at - first, length) for at, length in pieces] == [
        (60_000, 5_536),
        (65_536, 65_536),
        (131_072, 28_928),
    ]
    assert list(memory.pieces(store, 199_999, 1)) == [(first + 199_999, 1)]
    assert [(at - first, length) for at, length in store.registered] == [
        (0, 65_536),
        (65_536, 65_536),
        (131_072, 65_536),
        (196_608, 3_392),
    ]


def test_sizes_are_not_asked_for_one_by_one_of_a_master_that_is_away():
    calls = helper.Helper(Registering(), None)
    assert calls.sizes(["a", "b", "c"]) == [7, helper.NO_MASTER[0]]


class Remote:
    """A store that has every object in one machine's memory, and a transfer engine.

    `states`: of reads, as they are asked for.
    """

    def __init__(self, size_bytes, states=()):
        self.calls = []
        self._states = iter(states)
        self.buffer_descriptor = SimpleNamespace(
            size=size_bytes, buffer_address=1 << 40, transport_endpoint="there"
        )

    def initialize(self, *arguments):
        self.calls.append("initialize")
        return 0

    def get_engine(self):
        return self

    def setup(self, *arguments):
        return 0

    def register_buffer(self, address, length):
        return 0

    def batch_get_replica_desc(self, keys):
        return {key: [self] for key in keys if key != "absent"}

    def is_memory_replica(self):
        return True

    def get_memory_descriptor(self):
        return self

    def batch_transfer_async_read(self, endpoint, here, there, lengths):
        start = there[0] - (1 << 40)
        self.calls.append((endpoint, start, lengths[0]))
        ctypes.memmove(here[0], CONTENT[start:], lengths[0])
        return next(self._states)

    def batch_put_from_multi_buffers(self, keys, addresses, lengths, how):
        parts = (map(ctypes.string_at, *each) for each in zip(addresses, lengths, strict=True))
        self.calls += map(list, parts)
        return [0 for _ in keys]

    def transfer_check_status(self, read):
        return read

    def batch_get_into_multi_buffers(self, keys, addresses, lengths):
        self.calls.append(list(keys))
        return [-704 for _ in keys]


def helper_of(remote, protocol):
    """One whose client is set up, and that knows a memory, as number 0."""
    calls = helper.Helper(remote, remote)
    assert calls.set_up("here", "P2PHANDSHAKE", 0, 0, protocol, "", "master") == 0
    ours, theirs = multiprocessing.Pipe()
    descriptor = make_memfd(1 << 20)
    send_handle(ours, descriptor, os.getpid())
    os.close(descriptor)
    calls.open(0, 1, theirs)
    return calls


def test_over_tcp_objects_of_small_ranges_are_moved_as_one_range():
    remote = Remote(30, states=(1,))
    calls = helper_of(remote, "tcp")
    ((address,),), _ = calls.places([[(0, 0, 1 << 20)]])
    held, ranges = (ctypes.c_char * 200).from_address(address), [(0, 50, 20), (0, 0, 10)]
    held[:] = MARK[:200]
    assert calls.get(["a", "absent"], [ranges, [(0, 100, 10), (0, 120, 20)]]) == [30, -704]
    assert remote.calls[1:] == [("there", 0, 30), ["absent"]]
    assert (held[50:70], held[:10]) == (CONTENT[:20], CONTENT[20:30])
    assert held[100:140] == MARK[:40], "what is absent changes nothing"
    remote.calls.clear()
    large = [(0, 0, helper.RANGE_BYTES), (0, 200 << 10, helper.RANGE_BYTES)]
    assert calls.put(["a", "b", "c"], [ranges, large, ranges[1:]], 1, False) == [0, 0, 0]
    assert remote.calls[::2] == [[CONTENT[:30]], [CONTENT[20:30]]]
    assert list(map(len, remote.calls[1])) == [helper.RANGE_BYTES] * 2


@pytest.fixture(autouse=True)
def priorities(monkeypatch):
    """What a helper in this process would have its thread's priority set to."""
    monkeypatch.setenv("MC_FORCE_TCP", "")
    found = []
    monkeypatch.setattr(os, "setpriority", lambda which, who, nice: found.append(nice))
    return found


def test_over_tcp_the_engine_reads_what_is_in_memory_and_the_client_the_rest(monkeypatch):
    monkeypatch.setattr(helper, "RANGE_BYTES", 1)
    remote = Remote(30, states=(1, 1))
    found = helper_of(remote, "tcp").get(["a", "absent"], [[(0, 0, 10), (0, 50, 20)]] * 2)
    assert found == [30, -704]
    assert remote.calls == ["initialize", ("there", 0, 10), ("there", 10, 20), ["absent"]]
    assert os.environ["MC_FORCE_TCP"] == "1"


@pytest.mark.parametrize("states", [(1, -1), (1, 0), (1, -2)], ids=["failed", "refused", "late"])
def test_no_object_of_a_call_is_there_if_one_read_fails(states):
    """Others may still be under way, and end with the process."""
    remote = Remote(10, states)
    found = helper_of(remote, "tcp").get(["a", "b"], [[(0, 0, 10)], [(0, 10, 10)]])
    assert found == [helper.FAILED] * 2
    assert helper.FAILED not in client._HARMLESS


def test_over_rdma_the_client_reads_all_by_itself_and_lets_others_go_first(priorities):
    remote = Remote(10)
    calls = helper_of(remote, "rdma")
    assert calls.get(["a"], [[(0, 0, 10)]]) == [-704]
    assert calls.put(["a"], [[(0, 0, 10), (0, 50, 20)]], 1, False) == [0]
    assert remote.calls == [["a"], [bytes(10), bytes(20)]]
    assert priorities == [helper.NICE] * 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
async def test_a_process_is_not_bound_to_the_cores_of_vllms_own_threads(config, monkeypatch):
    """vLLM's CPU engine preloads libgomp, and tells it so in the environment."""
    cores = os.sched_getaffinity(0)
    packages = Path(importlib.util.find_spec("torch").origin).parents[1]
    (libgomp, *_) = [*packages.glob("torch*/**/libgomp*.so*")]
    monkeypatch.setenv("LD_PRELOAD", str(libgomp))
    monkeypatch.setenv("GOMP_CPU_AFFINITY", str(min(cores)))
    one = client.Client(settings.complete(config))
    try:
        process = await asyncio.to_thread(one.running)
        assert os.sched_getaffinity(process.pid) == cores
    finally:
        one.close()


class Registering:
    """A store that notes what is registered, and soon has no master."""

    def __init__(self):
        self.registered = []
        self.codes = [7, helper.NO_MASTER[0]]

    def get_size(self, key):
        return self.codes.pop(0)

    def register_buffer(self, address, length):
        self.registered.append((address, length))
        return 0


def test_a_device_that_is_not_there_is_named_at_the_start(config, monkeypatch, tmp_path):
    rdma = TierConfig.at(config.location.label, protocol="rdma", device_name="mlx5_7")
    monkeypatch.setattr(settings, "_DEVICES", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r'no RDMA device .* write "protocol": "tcp"'):
        mooncake_tier(rdma, FACTS)
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(settings, "_DEVICES", str(tmp_path))
    with pytest.raises(ConfigError, match=r"names mlx5_7, which is not there\. .* mlx5_0"):
        mooncake_tier(rdma, FACTS)


def test_the_file_of_vllms_own_connector_says_what_is_not_written(config, tmp_path):
    file = tmp_path / "mooncake.json"
    file.write_text(
        '{"metadata_server": "etcd://m", "protocol": "tcp", "global_segment_size": "1GB"}'
    )
    at = config.location.label
    found = settings.complete(TierConfig.at(at, config_file=str(file), segment_bytes=5 << 30))
    assert (found.metadata_server, found.protocol, found.segment_bytes) == (
        "etcd://m",
        "tcp",
        5 << 30,
    )
    assert settings.complete(TierConfig.at(at, config_file=str(file))).segment_bytes == 10**9
    for bad in ("[]", "{", '{"protocol": "x"}', '{"device_name": 1}'):
        file.write_text(bad)
        with pytest.raises(ConfigError, match=r"mooncake\.json cannot be used: it "):
            settings.complete(TierConfig.at(at, config_file=str(file)))
