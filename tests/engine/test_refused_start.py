"""A real server whose start the connector refuses: the reason is what its output ends with."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from safe_offload.worker.memory.host_memory import available_host_bytes
from tests.engine.conftest import GetModel
from tests.engine.http_server import HttpServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

ARGUMENTS = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"),
    *("--block-size", "32", "--max-model-len", "512", "--num-gpu-blocks-override", "60"),
)
EXIT_TIMEOUT_S = 240.0


def ending(model: Path, arguments: list[str], folder: Path) -> list[str]:
    """Start a server that is refused; return its output, but for Python's resource tracker.

    That outlives the server, and may write two lines behind the message.
    """
    with HttpServer(model, arguments, folder) as server:
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        while server.is_running and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert not server.is_running, server.log_tail()
        return [line for line in server.log().splitlines() if "resource_tracker" not in line]


def test_engines_whose_pools_do_not_fit_together_are_refused(
    model: GetModel, tmp_path: Path
) -> None:
    """Each by itself would: nothing is started, and the figures and what fits are the last line."""
    size_mib = 6 * available_host_bytes() // 10 >> 20
    transfer_config = {
        "kv_connector": "SafeCPUOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": f"{size_mib}MiB"},
    }
    arguments = [*ARGUMENTS, "--kv-transfer-config", json.dumps(transfer_config)]
    lines = ending(model("llama"), [*arguments, "--data-parallel-size", "2"], tmp_path)
    assert "2 ranks on this machine" in lines[-1], lines[-5:]
    assert re.search('set "cpu_bytes_to_use" .* to at most "\\d+MiB"', lines[-1])
    assert not any("EngineCore" in line for line in lines)


def test_what_only_the_engine_can_know_is_repeated_at_the_end(
    model: GetModel, tmp_path: Path
) -> None:
    """Half of a block: how large a block is, the worker knows when it has the model."""
    transfer_config = {
        "kv_connector": "SafeCPUOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": "4KiB"},
    }
    arguments = [*ARGUMENTS, "--kv-transfer-config", json.dumps(transfer_config)]
    lines = ending(model("llama"), arguments, tmp_path)
    assert lines[-1].startswith(
        'SafeCPUOffloadConnector ended the start: "cpu_bytes_to_use" gives each rank 4.00 KiB'
    ), lines[-5:]
    assert lines[-2].startswith("RuntimeError: Engine core initialization failed"), lines[-2]
