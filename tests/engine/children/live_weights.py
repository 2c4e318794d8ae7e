"""Changes the weights of a running engine by each of vLLM's ways, and asks again."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.children import engine

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


def load_directly(llm: Any, folder: str) -> None:
    """Around the engine, as some trainers do that run in its process."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    load(worker.get_model(), worker.model_config, folder)


WAYS: tuple[Callable[[Any, str], None], ...] = (
    reload_weights,
    apply_model,
    call_a_function,
    update_weights,
    sleep_and_reload,
    load_directly,
)


class Asker:
    """Asks an engine for the prompts of a job; with `forget` nothing it has ever comes back."""

    def __init__(self, llm: Any, job: dict[str, Any]) -> None:
        self._llm = llm
        self._job = job
        self._forgets = job["options"].get("forget", False)
        self.answers: dict[str, dict[str, Any]] = {}

    def ask(self, what: str, name: str, **more: Any) -> None:
        """Ask for a prompt, and note the answer under a word or two."""
        if self._forgets:
            assert self._llm.reset_prefix_cache()
        prompt, num_tokens = self._job["prompts"][name], self._job["num_answer_tokens"]
        self.answers[what] = engine.ask(self._llm, prompt, num_tokens, **more)
        if not self._forgets:
            engine.drain(self._llm)


def scenario(job: dict[str, Any]) -> dict[str, Any]:
    """What the job wants, of an engine with adapters or of one without."""
    add_backend()
    llm = engine.start(job)
    asker = Asker(llm, job)
    change = change_adapters if job["arguments"].get("enable_lora") else change_weights
    change(llm, asker, job["options"]["folders"])
    report = {"told": asker.answers, "metrics": engine.connector_metrics(llm)}
    if engine.planner_of(engine.scheduler_of(llm).connector) is not None:
        report["audit"] = engine.audit(llm)
    return report


def change_weights(llm: Any, asker: Asker, folders: list[str]) -> None:
    """Ask A and B, change the weights, ask A; forget the GPU's cache, ask B. Once for each way."""
    for turn, way in enumerate(WAYS, start=1):
        for name in "AB":
            asker.ask(f"{name} before {way.__name__}", name)
        way(llm, folders[turn % 2])
        asker.ask(f"A after {way.__name__}", "A")
        assert llm.reset_prefix_cache()
        asker.ask(f"B after {way.__name__}", "B")
    for method in ("check_health", "get_model_inspection", "compute_weight_checksums"):
        llm.collective_rpc(method)
    assert llm.reset_prefix_cache()
    asker.ask("A after calls that only look", "A")


def change_adapters(llm: Any, asker: Asker, folders: list[str]) -> None:
    """Put other files into the folder of an adapter, and have it read again in each of the ways."""
    from vllm.lora.request import LoRARequest

    place = Path(tempfile.mkdtemp()) / "adapter"

    def put(number: int) -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folders[number], place)

    def ask(what: str, number: int = 1, *, in_place: bool = False) -> None:
        adapter = LoRARequest("adapter", number, str(place), load_inplace=in_place)
        asker.ask(what, "A", lora_request=adapter)

    add = llm.llm_engine.add_lora
    put(0)
    ask("first")
    put(1)
    add(LoRARequest("adapter", 1, str(place), load_inplace=True))
    ask("added in place")
    put(0)
    ask("asked for in place", in_place=True)
    assert llm.reset_prefix_cache()
    ask("asked for in place, the same", in_place=True)
    put(1)
    llm.llm_engine.remove_lora(1)
    ask("removed")
    put(0)
    add(LoRARequest("adapter", 2, str(place)))
    ask("added under another number", 2)
