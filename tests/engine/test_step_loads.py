"""Hits that load in the step that computes the rest of their prompt, in a real engine."""

from typing import Any

import pytest

from safe_offload.commands.bench.engine_process import EngineProcess, generate
from tests.engine.children.engine import drain, planner_of, scheduler_of
from tests.engine.preempted import Workload, make_engine_options, make_workload

pytestmark = pytest.mark.usefixtures("forked_engines")

TIMEOUT_S = 1000.0
"""Of what would never end: a busy machine is no failure."""
NUM_TOKENS = 8
CALM, AGAIN = "calm", "after it was computed again"
FAILS, ABORTS = "its load fails", "another request goes while its load is copied"


def serve(engine: Any, workload: Workload) -> dict[str, Any]:
    """Answer a prompt anew, from the host, from the host with trouble, and say how it went."""
    from vllm import SamplingParams

    from safe_offload.worker.copies.cpu import CpuBackend

    scheduler = scheduler_of(engine)
    planner = planner_of(scheduler.connector)
    steps: list[tuple[int, int]] = []  # tokens to compute and to load in each
    plan = planner.build_connector_meta

    def see(output: Any, now_s: float) -> Any:
        made = plan(output, now_s)
        steps.append((output.total_num_scheduled_tokens, len(made.loads_in_step)))
        return made

    planner.build_connector_meta = see
    prompt = workload.prompts[0]

    def answer() -> list[int]:
        steps.clear()
        (output,) = generate(engine, [prompt], [NUM_TOKENS])
        drain(engine)  # until what it stores can be hit
        return list(output.outputs[0].token_ids)

    report: dict[str, Any] = {"anew": answer()}
    assert engine.reset_prefix_cache()
    report[CALM] = answer()
    report["first steps"] = steps[:2]
    assert engine.reset_prefix_cache()
    join, CpuBackend.join = CpuBackend.join, lambda *_: False  # type: ignore[method-assign]
    try:
        report[FAILS] = answer()
    finally:
        CpuBackend.join = join  # type: ignore[method-assign]
    report[AGAIN] = answer()
    assert engine.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.llm_engine.add_request("gone", {"prompt_token_ids": list(prompt)}, sampling)
    engine.llm_engine.step()
    engine.llm_engine.abort_request(["gone"])
    report[ABORTS] = answer()
    report["leases"] = len(planner.leases)
    return report


def test_an_idle_host_hit_computes_in_the_step_of_its_hook(model, tmp_path):
    workload = make_workload()
    settings = {"load_in_step": True, "check_invariants": True}
    options = make_engine_options("llama", model("llama"), workload, settings)
    with EngineProcess("ours", options, tmp_path / "log") as process:
        process.wait_until_started(TIMEOUT_S)
        report = process.call(serve, workload, TIMEOUT_S)
    computes, loads = report["first steps"][0]
    assert (computes > 0, loads) == (True, 1), report
    for what in (CALM, FAILS, AGAIN, ABORTS):
        assert report[what] == report["anew"], (what, report)
    assert report["leases"] == 0
