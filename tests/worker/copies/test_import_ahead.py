"""cupy is imported on a thread as a worker starts, whatever becomes of the worker or of cupy."""

import pytest

from safe_offload.config.options import OffloadConfig
from safe_offload.worker.copies import choice
from tests.fresh_process import run_script

IMPORTED = """
import os, sys, threading, time
from safe_offload.worker.copies.device import IMPORT_THREAD, import_ahead, import_cupy

import_ahead("slow")
while "slow" not in sys.modules:
    time.sleep(0.001)
assert IMPORT_THREAD in {thread.name for thread in threading.enumerate()}
"""
FORK = """
child = os.fork()
if not child:
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""
AGAIN = """
try:
    print("imported", import_cupy("slow").__name__)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("end", "then", "printed"),
    [
        ("", FORK + AGAIN, "imported slow"),
        ("raise ImportError('no driver')", AGAIN, "ImportError no driver"),
        ("print('done')", "", "done"),
    ],
    ids=["forks", "fails", "ends"],
)
def test_a_worker_that_needs_it_forks_or_ends_meanwhile_does_so_as_ever(
    tmp_path, end, then, printed
):
    (tmp_path / "slow.py").write_text(f"import time\ntime.sleep(0.5)\n{end}\n")
    assert run_script(IMPORTED + then, tmp_path, {}).split("\n")[:-1] == [printed]


@pytest.mark.parametrize(
    ("device_type", "copy_path", "is_imported"),
    [
        ("cuda", "auto", True),
        ("cuda", "kernel", True),
        ("cuda", "batch", False),
        ("cpu", "auto", False),
    ],
)
def test_only_what_may_use_the_kernel_imports_it(monkeypatch, device_type, copy_path, is_imported):
    calls: list[bool] = []

    def refuse() -> None:
        calls.append(True)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(choice, "import_ahead", refuse)
    config = OffloadConfig.from_extra_config({"copy_path": copy_path}, world_size=1)
    choice.prepare(device_type, config)
    assert bool(calls) is is_imported
