"""The hints that docs/reference/http.md writes, sent as they stand there to real engines.

Over HTTP they are sent to the server of test_observability.py.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import safe_offload
from tests.engine.engines import connector, make_prompts, num_hit_tokens
from tests.engine.http_server import HttpServer, make_body
from tests.fresh_process import ENVIRONMENT, run_script

NUM_TOKENS = 321
NUM_HIT = num_hit_tokens(NUM_TOKENS)
PROMPTS = make_prompts(NUM_TOKENS, ["hint 1", "hint 2"])
"""Which no other test has sent."""
GUIDED = {"kv_hints": True, "pin_share": 0.3}
PAGE = Path(safe_offload.__file__).parents[1] / "docs" / "reference" / "http.md"
BLOCKS = [
    re.sub(r"^ {4}", "", block, flags=re.MULTILINE)
    for block in re.findall(
        r"(?:^ {4}.*\n)+", PAGE.read_text().partition("\n## Hints\n")[2].partition("\n## ")[0], re.M
    )
]
BODIES: dict[str, dict[str, Any]] = {
    body["kv_transfer_params"]["kv_hints"]["actions"][0]["action_type"]: body
    for body in map(json.loads, (block for block in BLOCKS if block.startswith("{")))
}
(PYTHON,) = (block for block in BLOCKS if block.startswith("from "))


def kinds(text: str) -> dict[str, float]:
    """How often each action was counted, as /metrics has it."""
    found = re.findall(r'safe_offload_hints_total\{.*?action="(\w+)".*\} (\S+)', text)
    return {action: float(count) for action, count in found if float(count)}


def send(server: HttpServer, kind: str) -> None:
    """Send a body of the page with another model and prompt."""
    prompt = PROMPTS["hint 1"]
    body = {**make_body(prompt, 1), **BODIES[kind]}
    server.post("/v1/completions", {**body, "model": "model", "prompt": prompt})


def test_the_page_has_a_body_for_each_action():
    assert list(BODIES) == ["kv.fetch", "kv.retain"]


SCRIPT = """
import asyncio, json, sys
from prometheus_client import generate_latest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

async def main(options):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options["arguments"]))
    sampling_params = SamplingParams(max_tokens=1, detokenize=False)
    names = {"engine": engine, "sampling_params": sampling_params}
    *lines, call = options["page"].splitlines()
    exec("\\n".join(lines), names)
    for kind, tokens in options["prompts"].items():
        names["prompt"] = {"prompt_token_ids": tokens}
        async for _ in eval(call.replace("[fetch]", f"[{kind}]"), names):
            pass
    async for _ in engine.generate(names["prompt"], sampling_params, "last"):  # brings the counts
        pass
    await engine.do_log_stats()
    print(generate_latest().decode())
    engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main(json.load(open("options.json"))))
"""


@pytest.mark.nightly
def test_the_hints_of_the_page_in_vllms_own_field_are_done_too(model, tmp_path):
    pytest.importorskip("vllm.v1.kv_hints", reason="vLLM 0.31 on has hints")
    options = {
        "arguments": {
            "model": str(model("llama")),
            "kv_transfer_config": connector(**GUIDED),
            **{"dtype": "float32", "enforce_eager": True, "block_size": 32},
            **{"max_model_len": 1024, "num_gpu_blocks_override": 100, "skip_tokenizer_init": True},
        },
        "page": PYTHON,
        "prompts": dict(zip(("fetch", "retain"), PROMPTS.values(), strict=False)),
    }
    (tmp_path / "options.json").write_text(json.dumps(options))
    text = run_script(SCRIPT, tmp_path, ENVIRONMENT)
    assert kinds(text) == {"fetch": 1, "retain": 1}
    assert "Invalid hints" not in text
