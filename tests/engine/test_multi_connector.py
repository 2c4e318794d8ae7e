"""Beside another connector, under vLLM's MultiConnector.

The other one is vLLM's ExampleConnector, which keeps KV cache in files and loads it synchronously.
It supports neither the hybrid KV cache manager nor a prefill in chunks.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import GetModel
from tests.engine.engines import (
    ABC_TWICE,
    EMPTY_FOLDER,
    NUM_PROMPT_TOKENS,
    RESET_GPU_CACHE,
    Job,
    connector,
    make_job,
    num_hit_tokens,
    run,
)

NUM_HIT_TOKENS = num_hit_tokens(NUM_PROMPT_TOKENS)


def example_connector(folder: Path) -> dict[str, Any]:
    """vLLM's ExampleConnector, keeping its files in a folder."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def make_multi_job(model: GetModel, *children: dict[str, Any], **arguments: Any) -> Job:
    """An engine with several connectors, the first to be asked first."""
    return make_job(
        model("llama"),
        max_num_batched_tokens=NUM_PROMPT_TOKENS + 64,
        disable_hybrid_kv_cache_manager=True,
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": list(children)},
        },
        **arguments,
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Where ExampleConnector keeps its files."""
    return tmp_path_factory.mktemp("example-connector")


@pytest.fixture(scope="module")
def ours_first(model, files, tmp_path_factory):
    """A, B, C, A, B, C; leaves the files of all three prompts behind."""
    job = make_multi_job(model, connector(), example_connector(files))
    (report,) = run(tmp_path_factory.mktemp("ours-first"), job)
    return report


def test_the_first_of_two_connectors_brings_prompts_back(ours_first, files):
    """Ours is asked first, and has the whole hit."""
    ours_first.check_second_round_hits(NUM_HIT_TOKENS)
    assert any(files.iterdir()), "ExampleConnector has stored nothing: it was not there"
    ours_first.check_well()


def test_what_another_connector_has_loaded_comes_back_from_the_host(
    ours_first, model, files, tmp_path
):
    """The other one is asked first and has files of A, B and C: our stores read what it loaded.

    Then its files go, so that the second round is ours (docs/guarantees.md: K4).
    """
    job = make_multi_job(model, example_connector(files), connector())
    turns = (*ABC_TWICE[:3], RESET_GPU_CACHE, EMPTY_FOLDER, *ABC_TWICE[3:])
    (report,) = run(tmp_path, replace(job, turns=turns, options={"folder": str(files)}))
    assert [answer.num_host for answer in report.answers] == [NUM_HIT_TOKENS] * 6
    assert report.count("hit_tokens") == 3 * NUM_HIT_TOKENS, "the first round was not the files'"
    assert report.tokens == 2 * ours_first.tokens[:3]
    report.check_well()
