"""`python -m tests.benchmarks first_pass`: threads, and their rows in the report."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from safe_offload.commands.bench.engine_breakdown import BASELINE, CONNECTOR, FIRST, TTFT
from safe_offload.commands.bench.engine_report import EngineFound, make_report
from tests.benchmarks.first_pass import (
    FIRST_TOUCH,
    FORWARD,
    FRONT_END,
    LOADS,
    LOOP,
    OTHERS,
    ROLES,
    STORES,
    ThreadProbe,
    ThreadUse,
    WatchedThreads,
    first_pass_rows,
    read_thread,
    read_uses,
    role_of,
    waiting,
    with_threads,
)
from tests.commands.bench.test_engine_report import make_found
from tests.worker.test_bridge import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    found = Worker().register()
    yield found
    found.bridge.shutdown()


def test_threads_are_told_by_name_with_the_process_they_are_of(worker: Worker) -> None:
    pid, parent_pid, names = ThreadProbe().thread_names()
    assert (pid, parent_pid) == (os.getpid(), os.getppid())
    assert {LOOP, STORES, LOADS, FIRST_TOUCH, OTHERS} <= {role_of(name) for name in names.values()}
    assert names[str(threading.get_native_id())] == "MainThread"


def test_a_thread_is_read_from_the_kernel_s_files(tmp_path: Path) -> None:
    (tmp_path / "schedstat").write_text("2500000000 1500000 77\n")
    (tmp_path / "stat").write_text("12 (VLLM :: (odd) name) S 1 2 3 4 5 6 88 0 9 0 1 2\n")
    assert read_thread(tmp_path) == ThreadUse(2.5, 0.0015, 88)
    assert read_thread(tmp_path / "gone") == ThreadUse()
    assert read_thread(Path(f"/proc/self/task/{threading.get_native_id()}")).cpu_s > 0
    assert read_uses((os.getpid(), os.getppid(), {}))[FORWARD].cpu_s > 0
    assert FRONT_END not in read_uses((os.getpid(), os.getppid(), {})), "it is the worker here"


def found_with_uses(waited_s: dict[str, float] | None = None) -> EngineFound:
    """Requests of 1 s; first passes whose forwards have waited this long, by engine."""
    found = make_found()
    observed = []
    for one in found.observed:
        uses = {role: ThreadUse(0.010, 0.0, 2) for role in ROLES}
        uses[FORWARD] = ThreadUse(1.0, (waited_s or {}).get(one.engine, 0.0), 5)
        if one.engine == BASELINE:
            del uses[LOOP]
            uses[STORES] = ThreadUse()
        answer = replace(one.watched.answer, total_s=1.0)
        observed.append(replace(one, watched=WatchedThreads(answer, one.watched.probe, uses)))
    return replace(found, observed=observed)


def test_the_rows_say_who_used_more_than_without_a_connector() -> None:
    rows = first_pass_rows(found_with_uses({CONNECTOR: 0.06, BASELINE: 0.02}).observed)
    assert rows[TTFT] == pytest.approx([2000.0, 2040.0, 40.0])
    assert rows[f"CPU: {STORES}"] == pytest.approx([0.0, 10.0, 10.0])
    assert rows[f"CPU: {LOOP}"] == pytest.approx([0.0, 10.0, 10.0])
    assert rows[f"CPU: {FORWARD}"] == pytest.approx([1000.0, 1000.0, 0.0])
    assert rows["the forward's thread waits for its core"] == pytest.approx([20.0, 60.0, 40.0])


@pytest.mark.parametrize(("engine", "name"), [(BASELINE, BASELINE), (CONNECTOR, "SafeCPU")])
def test_a_forward_that_waits_for_its_core_is_said_to_be_disturbed(engine: str, name: str) -> None:
    assert waiting(found_with_uses({engine: 0.04})) == []
    (line,) = waiting(found_with_uses({engine: 0.3}))
    assert line.startswith(f"DISTURBED: with {name}")
    assert "up to 30%" in line


def test_the_report_has_the_threads_below_the_rest() -> None:
    found = found_with_uses({CONNECTOR: 0.3})
    report = with_threads(make_report(found), found)
    text = report.render()
    assert "2 page faults in our copying threads" in text
    assert "DISTURBED: with SafeCPUOffloadConnector" in text
    content = json.loads(json.dumps(report.to_json()))
    assert content["first_pass_ms"][TTFT] == pytest.approx([2000.0, 2040.0, 40.0])
    places = [sample["kind"] for sample in content["samples"]]
    assert content["uses"][places.index(FIRST)][FORWARD]["num_page_faults"] == 5
