"""What a worker prepares as vLLM creates it, before it has a device, a model and a connector."""

from typing import Any

import pytest
from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

from safe_offload.start.plugin import register
from safe_offload.worker.copies import choice
from tests.simulator.vllm_setup import EngineShape, make_config

OURS = {"kv_connector": "SafeCPUOffloadConnector"}


def create_worker(device_type: str, kv_connector: str, extra: dict[str, Any]) -> WorkerBase:
    """Create a worker as vLLM's executors do."""
    config = make_config(EngineShape())
    config.device_config.device_type = device_type
    config.parallel_config.worker_cls = "vllm.v1.worker.worker_base.WorkerBase"
    config.kv_transfer_config.kv_connector = kv_connector
    config.kv_transfer_config.kv_connector_extra_config = extra
    wrapper = WorkerWrapperBase()
    wrapper.init_worker(
        [{"vllm_config": config, "local_rank": 0, "rank": 0, "distributed_init_method": ""}]
    )
    return wrapper.worker


@pytest.mark.parametrize(
    ("device_type", "kv_connector", "extra", "is_imported"),
    [
        ("cuda", "SafeCPUOffloadConnector", {}, True),
        ("cuda", "MultiConnector", {"connectors": [{"kv_connector": "Other"}, OURS]}, True),
        ("cuda", "MultiConnector", {"connectors": [{"kv_connector": "Other"}]}, False),
        ("cpu", "SafeCPUOffloadConnector", {}, False),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_that_may_need_cupy_begins_to_import_it_as_it_is_created(
    monkeypatch, device_type, kv_connector, extra, is_imported, fails
):
    imported: list[str] = []

    def import_ahead() -> None:
        imported.append("cupy")
        if fails:
            raise OSError("injected")

    monkeypatch.setattr(choice, "import_ahead", import_ahead)
    register()
    assert create_worker(device_type, kv_connector, extra).kv_transfer_config is not None
    assert bool(imported) is is_imported
