"""What threads of an engine use, told by their names."""

import os
import threading
from pathlib import Path

import pytest

from tests.benchmarks.thread_uses import (
    FIRST_TOUCH,
    FORWARD,
    FRONT_END,
    LOADS,
    LOOP,
    OTHERS,
    STORES,
    ThreadProbe,
    ThreadUse,
    read_thread,
    read_uses,
    role_of,
)
from tests.worker.test_bridge import Worker


@pytest.fixture
def worker():
    found = Worker().register()
    yield found
    found.bridge.shutdown()


def test_threads_are_told_by_name_with_the_process_they_are_of(worker):
    pid, parent_pid, names = ThreadProbe().thread_names()
    assert (pid, parent_pid) == (os.getpid(), os.getppid())
    assert {LOOP, STORES, LOADS, FIRST_TOUCH, OTHERS} <= {role_of(name) for name in names.values()}
    assert names[str(threading.get_native_id())] == "MainThread"


def test_a_thread_is_read_from_the_kernel_s_files(tmp_path):
    (tmp_path / "schedstat").write_text("2500000000 1500000 77\n")
    (tmp_path / "stat").write_text("12 (VLLM :: (odd) name) S 1 2 3 4 5 6 88 0 9 0 1 2\n")
    assert read_thread(tmp_path) == ThreadUse(2.5, 0.0015, 88)
    assert read_thread(tmp_path / "gone") == ThreadUse()
    assert read_thread(Path(f"/proc/self/task/{threading.get_native_id()}")).cpu_s > 0
    assert read_uses((os.getpid(), os.getppid(), {}))[FORWARD].cpu_s > 0
    assert FRONT_END not in read_uses((os.getpid(), os.getppid(), {})), "it is the worker here"
