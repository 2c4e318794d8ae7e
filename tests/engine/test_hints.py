"""The hints that docs/reference/http.md writes, sent as they stand there to real engines."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import safe_offload
from tests.engine.engines import connector, make_prompts, num_hit_tokens, tier_at
from tests.engine.http_server import HttpServer, make_body
from tests.fresh_process import ENVIRONMENT, run_script

NUM_TOKENS = 321
NUM_HIT = num_hit_tokens(NUM_TOKENS)
PROMPTS = make_prompts(NUM_TOKENS)
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


def send(server: HttpServer, kind: str, name: str) -> None:
    """Send a body of the page with another model and prompt."""
    body = {**make_body(PROMPTS[name], 1), **BODIES[kind]}
    server.post("/v1/completions", {**body, "model": "model", "prompt": PROMPTS[name]})


def test_the_page_has_a_body_for_each_action():
    assert list(BODIES) == ["kv.fetch", "kv.retain"]


def test_the_bodies_of_the_page_do_what_it_says(model, tmp_path):
    tiers = [tier_at(tmp_path / "tier", model_version="1")]  # which a reset does not change
    arguments = ("--prefix-caching-hash-algo", "sha256_cbor")
    with HttpServer(
        model("llama"),
        tmp_path / "server",
        config=connector(tiers=tiers, **GUIDED),
        arguments=arguments,
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    ) as server:
        server.wait_until_healthy()
        send(server, "kv.retain", "A")
        server.wait_for(lambda: server.count("pins") == 1, "the pin")
        num_blocks = NUM_HIT // 32
        written = "tier_written_objects"
        server.wait_for(lambda: server.count(written) == num_blocks, "the prompt in the tier")
        server.post("/reset_prefix_cache?reset_external=true")
        send(server, "kv.fetch", "A")
        server.settle()
        assert server.count("fetched_blocks") == num_blocks
        every = {"retain": 1, "fetch": 1}
        server.wait_for(lambda: kinds(server.metrics_text()) == every, "all actions to be counted")
        assert "Invalid hints" not in server.log()

        body = json.loads(json.dumps(BODIES["kv.fetch"]).replace('"1.0"', '"2.0"'))
        server.ask(PROMPTS["C"], 1, kv_transfer_params=body["kv_transfer_params"])
        every["unknown"] = 1
        server.wait_for(lambda: kinds(server.metrics_text()) == every, "another version")
        assert "Invalid hints in 1 requests" in server.log()


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
