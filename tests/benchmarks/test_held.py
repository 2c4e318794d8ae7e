"""`python -m tests.benchmarks held`, and what it must show: the host holds what is read again."""

import functools
import json
from dataclasses import replace

import pytest

from tests.benchmarks.__main__ import main
from tests.benchmarks.held import (
    MODELS,
    PROMPT_TOKENS,
    measure,
    serve,
    shape_of,
    whole_hit,
)

ONE_KIND = ("Llama-3.1-8B", "DeepSeek-V3.2", "MiniMax-M3")


measured = functools.cache(lambda name: measure(MODELS[name], PROMPT_TOKENS))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ONE_KIND)
def test_where_all_attention_is_full_the_host_holds_what_is_read(name):
    held = measured(name)
    assert held.read == held.host
    assert (held.unshared, held.padding, held.kept) == (0, 0, 0)


@pytest.mark.nightly
def test_what_is_read_of_a_model_with_windows_is_what_its_configuration_says():
    read = measured("Gemma-3-27B").read
    token_bytes = 2 * 16 * 128 * 2
    assert read == token_bytes * (10 * PROMPT_TOKENS + 52 * 1023)


def test_the_parts_are_all_that_the_host_holds(tmp_path):
    path = tmp_path / "held.json"
    assert main(["held", "--models", "DeepSeek-V4-Flash", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["DeepSeek-V4-Flash"]
    parts = [figures[name] for name in ("read", "unshared", "padding", "kept")]
    assert min(parts) > 0
    assert sum(parts) == figures["host"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["DeepSeek-V4-Flash", "Gemma-3-27B", "Kimi-Linear-48B"])
def test_what_stays_when_memory_is_short_is_at_most_a_tenth_more_than_is_read(name):
    held = measured(name)
    assert held.short <= 1.1 * held.read
    assert held.short < held.host


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["DeepSeek-V4-Flash", "Kimi-Linear-48B"])
def test_memory_that_is_short_is_full_of_whole_prompts(name):
    num_held, num_needed = measured(name).num_slots
    num_whole = 2
    num_slots = num_whole * num_needed + num_held - num_needed
    shape = shape_of(replace(MODELS[name], is_small=False), PROMPT_TOKENS, num_slots)
    engine, requests = serve(shape, PROMPT_TOKENS, 2 * num_whole)
    hits = [whole_hit(engine, request) for request in requests[num_whole:]]
    assert all(hit and hit.num_tokens > 0.95 * PROMPT_TOKENS for hit in hits)
