"""What README.md and docs/get-started.md have a newcomer type, as it is written there.

One server with a tokenizer and a tiny model does all of it: the tests are steps, in this order.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.engine.http_server import HttpServer

DOCS = Path(__file__).parents[2] / "docs"
README = (DOCS.parent / "README.md").read_text()
GET_STARTED = (DOCS / "get-started.md").read_text()


def blocks(page: str, title: str) -> list[str]:
    """The indented blocks of a section."""
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [
        re.sub("^ {4}", "", found, flags=re.MULTILINE)
        for found in re.findall(r"(?:^ {4}.*\n)+", section, re.MULTILINE)
    ]


(INSTALL_AND_SERVE,) = blocks(README, "Try it")
ASK, SHOWN = blocks(GET_STARTED, "Verify in three lines")
SERVE = shlex.split(INSTALL_AND_SERVE.splitlines()[-1])


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """It is started with the connector that README.md shows, as a test server."""
    vllm, serve, name, option, config = SERVE
    assert (vllm, serve, name, option) == ("vllm", "serve", "MODEL", "--kv-transfer-config")
    with HttpServer(
        model("llama"),
        tmp_path_factory.mktemp("first-steps"),
        num_blocks=400,
        max_model_len=12000,
        config=json.loads(config),
        arguments=("--no-skip-tokenizer-init", "--shutdown-timeout", "600"),
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    ) as made:
        made.wait_until_healthy()
        yield made


def typed(server: HttpServer, lines: str) -> str:
    """What a shell says to these lines; the server and its model have other names here."""
    lines = lines.replace("localhost:8000", server.url).replace("MODEL", "model")
    return subprocess.run(["bash", "-ec", lines], capture_output=True, text=True, check=True).stdout


def test_without_the_reset_the_gpu_answers_the_repeat(server):
    before = server.count("hit_tokens")
    typed(server, re.sub(r"curl -s -X POST \S+; ", "", ASK))
    assert server.count("hit_tokens") == before


def test_get_started_shows_what_is_said(server):
    server.post("/reset_prefix_cache?reset_external=true")
    counted = {name: server.count(name) for name in ("hit_tokens", "stored_blocks")}
    said = typed(server, ASK)
    shown = dict(re.findall(r"safe_offload_(\w+)_total\{.*\} (\S+)$", SHOWN, re.MULTILINE))
    assert said.startswith(SHOWN.splitlines()[0])
    for name, value in shown.items():
        assert f"vllm:safe_offload_{name}_total" in said
        assert server.count(name) - counted[name] == float(value)
    (num_tokens, block_size) = re.findall(r"With ([\d,]+) tokens in blocks of (\d+)", GET_STARTED)[
        0
    ]
    assert len(" ".join(map(str, range(1, 1001)))) == int(num_tokens.replace(",", ""))
    assert float(shown["hit_tokens"]) == float(shown["stored_blocks"]) * int(block_size)
