"""A real server whose start the connector refuses: the reason is what its output ends with."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.engine.conftest import GetModel
from tests.engine.http_server import HttpServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ARGUMENTS = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"),
    *("--block-size", "32", "--max-model-len", "512", "--num-gpu-blocks-override", "60"),
)
EXIT_TIMEOUT_S = 240.0


def test_what_only_the_engine_can_know_is_repeated_at_the_end(
    model: GetModel, tmp_path: Path
) -> None:
    """Half of a block: how large a block is, the worker knows when it has the model.

    Behind the message come at most the two lines of Python's resource tracker, which outlives the
    server.
    """
    transfer_config = {
        "kv_connector": "SafeCPUOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": "4KiB"},
    }
    arguments = [*ARGUMENTS, "--kv-transfer-config", json.dumps(transfer_config)]
    with HttpServer(model("llama"), arguments, tmp_path) as server:
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        while server.is_running and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert not server.is_running, server.log_tail()
        lines = [line for line in server.log().splitlines() if "resource_tracker" not in line]
    assert lines[-1].startswith(
        'SafeCPUOffloadConnector ended the start: "cpu_bytes_to_use" gives each rank 4.00 KiB'
    ), server.log_tail()
    assert lines[-2].startswith("RuntimeError: Engine core initialization failed"), lines[-2]
