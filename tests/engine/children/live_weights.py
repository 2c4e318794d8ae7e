"""Changes the weights of a running engine by each of vLLM's ways, and asks again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine

BACKEND = "disk"
"""Of vLLM's weight transfer: what `update_weights` names is read from there."""


def load(model: Any, model_config: Any, folder: str) -> None:
    """Load weights into a model that runs, as vLLM's own transfers do."""
    from safetensors.torch import load_file
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(model)
    model.load_weights(load_file(Path(folder) / "model.safetensors").items())
    finalize_layerwise_reload(model, model_config)


def add_backend() -> None:
    """Have vLLM know a backend of weight transfer that needs neither a trainer nor a GPU."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    class Disk(WeightTransferEngine):
        init_info_cls = update_info_cls = dict

        def init_transfer_engine(self, init_info: Any) -> None: ...
        def start_weight_update(self) -> None: ...
        def finish_weight_update(self) -> None: ...
        def receive_weights(self, update_info: Any) -> None: ...
        def shutdown(self) -> None: ...

        def update_weights(self, update_info: Any) -> None:
            load(self.model, self.model_config, update_info["folder"])

    WeightTransferEngineFactory.register_engine(BACKEND, Disk)


def reload_weights(llm: Any, folder: str) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


def apply_model(llm: Any, folder: str) -> None:
    model_config = llm.llm_engine.model_config
    llm.apply_model(lambda model: load(model, model_config, folder))


def call_a_function(llm: Any, folder: str) -> None:
    llm.collective_rpc(lambda worker: load(worker.get_model(), worker.model_config, folder))


def update_weights(llm: Any, folder: str) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": {"folder": folder}})
    llm.finish_weight_update()


def sleep_and_reload(llm: Any, folder: str) -> None:
    """On the CPU vLLM keeps its memory while it sleeps; what it tells others is the same."""
    llm.sleep(level=2)
    llm.wake_up()
    reload_weights(llm, folder)


WAYS: tuple[Callable[[Any, str], None], ...] = (
    reload_weights,
    apply_model,
    call_a_function,
    update_weights,
    sleep_and_reload,
)


def scenario(job: dict[str, Any]) -> dict[str, Any]:
    """Ask A and B, change the weights, ask A; forget the GPU's cache, ask B. Once for each way."""
    add_backend()
    llm = engine.start(job)
    found = {}
    folders = job["options"]["folders"]
    for turn, way in enumerate(WAYS, start=1):
        before = {name: ask(llm, job, name) for name in "AB"}
        way(llm, folders[turn % 2])
        after = {"A": ask(llm, job, "A")}
        assert llm.reset_prefix_cache()
        after["B"] = ask(llm, job, "B")
        found[way.__name__] = {"before": before, "after": after, "model": turn % 2}
    looked = look_at(llm, job)
    engine.drain(llm)
    return {
        "ways": found,
        "looked": looked,
        "audit": engine.audit(llm),
        "metrics": engine.connector_metrics(llm),
    }


def ask(llm: Any, job: dict[str, Any], name: str) -> dict[str, Any]:
    answer = engine.ask(llm, job["prompts"][name], job["num_answer_tokens"])
    if job["arguments"].get("kv_transfer_config"):
        engine.drain(llm)
    return answer


def look_at(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Calls that leave the weights alone leave the cache alone."""
    ask(llm, job, "A")
    assert llm.reset_prefix_cache()
    llm.collective_rpc("list_loras") if job["arguments"].get("enable_lora") else None
    llm.collective_rpc("check_health")
    llm.collective_rpc("get_model_inspection")
    return ask(llm, job, "A")


if __name__ == "__main__":
    engine.main(scenario)
