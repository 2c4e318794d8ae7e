"""Threads that are all there, and on which cores."""

import os
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest

from safe_offload import threads
from safe_offload.threads import on_other_cores, start_threads

OWN, PARENT = 0, os.getppid()


class FakeCores:
    """What the system answers, and what it is told."""

    def __init__(self, own: set[int], parent: set[int]) -> None:
        self.of = {OWN: own, PARENT: parent}

    def sched_getaffinity(self, pid: int) -> set[int]:
        return set(self.of[pid])

    def sched_setaffinity(self, pid: int, cores: set[int]) -> None:
        self.of[pid] = set(cores)


@pytest.fixture
def make_cores(monkeypatch):
    def make(own: set[int], parent: set[int]) -> FakeCores:
        cores = FakeCores(own, parent)
        for name in ("sched_getaffinity", "sched_setaffinity"):
            monkeypatch.setattr(threads.os, name, getattr(cores, name), raising=False)
        return cores

    return make


def test_a_bound_thread_has_its_parents_other_cores_for_a_while(make_cores):
    cores = make_cores(own={2}, parent={0, 1, 2, 3})
    with on_other_cores():
        assert cores.of[OWN] == {0, 1, 3}
    assert cores.of[OWN] == {2}


def test_the_cores_come_back_after_an_error(make_cores):
    cores = make_cores(own={2}, parent={1, 2})
    with pytest.raises(KeyError), on_other_cores():
        raise KeyError
    assert cores.of[OWN] == {2}


@pytest.mark.parametrize("parent", [{2}, {1}, {0, 1, 3}], ids=["the same", "another", "others"])
def test_cores_that_do_not_hold_the_own_ones_are_not_taken(make_cores, parent):
    """This process has been bound to cores that its parent does not have."""
    cores = make_cores(own={2}, parent=parent)
    with on_other_cores():
        assert cores.of[OWN] == {2}


@pytest.mark.parametrize("error", [AttributeError, ProcessLookupError, PermissionError])
def test_a_system_that_does_not_tell_or_allow_is_no_error(monkeypatch, make_cores, error):
    cores = make_cores(own={2}, parent={1, 2})
    monkeypatch.setattr(threads.os, "getppid", Mock(side_effect=error))
    with on_other_cores():
        assert cores.of[OWN] == {2}


SCRIPT = """
import os
from safe_offload.threads import on_other_cores, start_threads
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
ask = lambda: os.sched_getaffinity(0)
bound = start_threads(1, "bound")
with on_other_cores():
    free = start_threads(1, "free")
for threads in bound, free:
    print(threads.submit(ask).result())
print(ask())
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no such call")
def test_threads_of_a_bound_child_run_on_its_parents_other_cores():
    mine = os.sched_getaffinity(0)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    first = {min(mine)}
    assert done.stdout.splitlines() == [str(first), str(mine - first or mine), str(first)]


def test_all_threads_of_a_pool_run_when_it_is_given_out():
    before = {thread.ident for thread in threading.enumerate()}
    pool = start_threads(3, "pool")
    new = [thread for thread in threading.enumerate() if thread.ident not in before]
    assert sorted(thread.name for thread in new) == ["pool_0", "pool_1", "pool_2"]
    pool.shutdown()


def test_an_environment_names_no_path_that_is_not_absolute(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f".:/a::b/c:/d e:{os.sep}")
    assert threads.environment()["PYTHONPATH"] == "/a:/d e:/"
    monkeypatch.delenv("PYTHONPATH")
    assert threads.environment()["PYTHONPATH"] == "", "which names none"


@pytest.mark.parametrize("before", ["", "1", None])
def test_what_is_spawned_for_a_while_runs_no_code_of_the_working_directory(
    monkeypatch, tmp_path, before
):
    monkeypatch.chdir(tmp_path)
    if before is None:
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    with threads.switched_on("PYTHONSAFEPATH"):
        command = [sys.executable, "-c", "import sys; print('' in sys.path)"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert os.environ.get("PYTHONSAFEPATH") == before
