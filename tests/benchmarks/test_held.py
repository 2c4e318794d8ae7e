"""`python -m tests.benchmarks held`, and what it must show: the host holds what is read again."""

import json

import pytest

from tests.benchmarks.__main__ import main
from tests.benchmarks.held import MODELS, PROMPT_TOKENS, measure

ONE_KIND = ("Llama-3.1-8B", "DeepSeek-V3.2", "MiniMax-M3")


@pytest.mark.parametrize("name", ONE_KIND)
def test_where_all_attention_is_full_the_host_holds_what_is_read(name):
    held = measure(MODELS[name], PROMPT_TOKENS)
    assert held.read == held.host
    assert (held.unshared, held.padding, held.kept) == (0, 0, 0)


def test_what_is_read_of_a_model_with_windows_is_what_its_configuration_says():
    read = measure(MODELS["Gemma-3-27B"], PROMPT_TOKENS).read
    token_bytes = 2 * 16 * 128 * 2
    assert read == token_bytes * (10 * PROMPT_TOKENS + 52 * 1023)


def test_the_parts_are_all_that_the_host_holds(tmp_path):
    path = tmp_path / "held.json"
    assert main(["held", "--models", "DeepSeek-V4-Flash", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["DeepSeek-V4-Flash"]
    parts = [figures[name] for name in ("read", "unshared", "padding", "kept")]
    assert min(parts) > 0
    assert sum(parts) == figures["host"]
