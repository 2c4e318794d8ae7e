"""A real server whose start the connector refuses: its output has the reason."""

import re
from pathlib import Path

import pytest

from safe_offload.worker.memory.host_memory import available_host_bytes
from tests.engine.http_server import HttpServer

pytestmark = pytest.mark.nightly


def ending(model: Path, folder: Path, size: str, *arguments: str) -> list[str]:
    """Start a server that is refused; return its output, but for Python's resource tracker.

    That outlives the server, and may write two lines behind the message.
    """
    config = {
        "kv_connector": "SafeCPUOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": size},
    }
    with HttpServer(model, folder, config=config, arguments=arguments, is_command=True) as server:
        server.wait_for_end()
        return [line for line in server.log().splitlines() if "resource_tracker" not in line]


def test_engines_whose_pools_do_not_fit_together_are_refused(model, tmp_path):
    """Each by itself would: nothing is started, and the figures and what fits are the last line."""
    size_mib = 6 * available_host_bytes() // 10 >> 20
    lines = ending(model("llama"), tmp_path, f"{size_mib}MiB", "--data-parallel-size", "2")
    assert "2 ranks on this machine" in lines[-1], lines[-5:]
    assert re.search('set "cpu_bytes_to_use" .* to at most "\\d+MiB"', lines[-1])
    assert not any("EngineCore" in line for line in lines)


def test_what_only_the_engine_can_know_is_an_error_of_ours_in_its_log(model, tmp_path):
    """Half of a block: how large a block is, the worker knows when it has the model."""
    lines = ending(model("llama"), tmp_path, "4KiB")
    assert any(
        'ConfigError: "cpu_bytes_to_use" gives each rank 4.00 KiB' in line for line in lines
    ), lines[-5:]
