"""Detects that the weights of a running engine may have changed; vLLM does not notify connectors.

Weights are changed by calls of EngineCore between two steps, on the scheduler's thread
(docs/guides/resets.md). These are wrapped, for engines with this connector only, and the caches are
reset before anything else is scheduled. A trainer in the engine's process may load weights into the
model directly: such loads are counted, and the connector compares the count before it plans a step
and before it publishes stores.

Source: vLLM 0.31 to 0.33, v1/engine/core.py; their v1/worker/gpu_worker.py for the methods.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from safe_offload.compat.wrapping import wrap

_KEEPS_WEIGHTS: Final = frozenset(
    {
        *("check_health", "compute_weight_checksums", "get_cache_block_size_bytes"),
        *("get_kv_cache_spec", "get_kv_connector_handshake_metadata", "get_model_inspection"),
        *("get_supported_kv_cache_layouts", "get_supported_tasks", "init_weight_transfer_engine"),
        *("list_loras", "pin_lora", "profile", "reset_encoder_cache", "reset_mm_cache"),
        *("save_sharded_state", "save_tensorized_model", "set_kv_cache_layout"),
        *("shutdown_weight_transfer_engine", "supports_draft_weight_updates"),
        *("synchronize_device", "update_max_model_len"),
        *("start_probe", "take_probe", "thread_names"),  # of our own benchmarks
    }
)
"""Methods of a worker that do not change its weights; any other method may."""

logger = logging.getLogger(f"vllm.{__name__}")


class Adapters:
    """The LoRA adapters that an engine has seen, to detect one whose content may have changed.

    vLLM identifies an adapter by name and path (0.31 to 0.33, `_gen_lora_extra_hash_keys`). With
    `load_inplace`, it reads the adapter again in each step of a request, without a call: then the
    files are compared by inode, size and times.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], object] = {}

    def loads(self, adapter: Any) -> bool:
        """Record that vLLM is about to read an adapter; return whether it was in use before."""
        return self._exchange(adapter, _state_of(adapter.lora_path)) is not None

    def is_other(self, adapter: Any, request_id: str) -> bool:
        """Return whether the adapter of a new request has changed."""
        if not adapter.load_inplace:
            self._seen.setdefault((adapter.lora_name, adapter.lora_path), ())
            return False
        state = _state_of(adapter.lora_path) or request_id  # unreadable files count as changed
        return self._exchange(adapter, state) not in (None, state)

    def _exchange(self, adapter: Any, state: object) -> object:
        key = adapter.lora_name, adapter.lora_path
        before = self._seen.get(key)
        self._seen[key] = state
        return before


def _state_of(path: str) -> tuple[object, ...]:
    """Return the metadata of a folder's files, which any write changes; empty if unreadable."""
    try:
        found = [(file.name, file.stat()) for file in sorted(Path(path).iterdir())]
    except OSError:
        return ()
    return tuple((n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in found)


class ModelLoads:
    """Counts weight loads into the models of this process; a singleton."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        # Of starts and ends of loads, as another thread may step the engine meanwhile.
        self.count = 0

    def watch(self) -> None:
        """Wrap `load_weights` of each model class that this process has imported.

        Source: vLLM 0.31 to 0.33, get_model_architecture of model_executor/model_loader/utils.py.
        """
        utils = sys.modules.get("vllm.model_executor.model_loader.utils")
        for model_class, _ in getattr(utils, "_MODEL_ARCH_BY_HASH", {}).values():
            wrap(model_class, "load_weights", self._counted)

    def _counted(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.count = next(self._numbers)
        try:
            return original(*args, **kwargs)
        finally:
            self.count = next(self._numbers)


MODEL_LOADS: Final = ModelLoads()


def watch() -> None:
    """Wrap the calls of EngineCore that may change weights; a second call does nothing."""
    MODEL_LOADS.watch()
    from vllm.v1.engine.core import EngineCore

    for name, (argument, cause_of) in _CALLS.items():
        if hasattr(EngineCore, name):
            wrap(EngineCore, name, functools.partial(_watched, argument, cause_of))
        else:
            logger.warning(
                "This vLLM has no EngineCore.%s, so weight changes through it are not noticed. "
                "Fix: reset the cache with the connector after each change "
                "(docs/guides/resets.md).",
                name,
            )


def _watched(
    argument: str,
    cause_of: Callable[[Any, Any], str | None],
    original: Callable[..., Any],
    engine_core: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Make a call, then reset the caches of this connector, even if the call failed."""
    connectors = _connectors_of(engine_core)
    subject = args[0] if args else kwargs.get(argument)
    causes = [cause_of(connector, subject) for connector in connectors]
    try:
        return original(engine_core, *args, **kwargs)
    finally:
        for connector, cause in zip(connectors, causes, strict=True):
            if cause is not None:
                connector.weights_changed(cause)
        if any(causes):
            _try_to_forget_embeddings(engine_core)


def _connectors_of(engine_core: Any) -> list[Any]:
    """Return the engine's connectors of this class, also those in a MultiConnector."""
    connector = getattr(getattr(engine_core, "scheduler", None), "connector", None)
    children = getattr(connector, "sub_connectors", [connector])
    return [child for child in children if hasattr(child, "weights_changed")]


def _try_to_forget_embeddings(engine_core: Any) -> None:
    """Reset the encoder cache, which vLLM does in its workers, in some of these calls only."""
    try:
        config = engine_core.vllm_config.model_config
        if config.is_multimodal_model and not engine_core.scheduler.has_unfinished_requests():
            engine_core.reset_encoder_cache()
    except Exception:
        logger.exception("The encoder cache could not be reset after a weight change")


def _cause_of_rpc(_: Any, method: Any) -> str | None:
    if not isinstance(method, str):
        return f"collective_rpc of {getattr(method, '__qualname__', 'a function')}"
    return None if method in _KEEPS_WEIGHTS else f"collective_rpc of {method!r}"


def _cause_of_adding(connector: Any, adapter: Any) -> str | None:
    return "a LoRA adapter was loaded again" if connector.adapters.loads(adapter) else None


def _cause_of_sleep(_: Any, level: Any) -> str | None:
    return None if level in (None, 0, 1) else f"sleep of level {level}"


_CALLS: Final[dict[str, tuple[str, Callable[[Any, Any], str | None]]]] = {
    "collective_rpc": ("method", _cause_of_rpc),
    "add_lora": ("lora_request", _cause_of_adding),
    "remove_lora": (
        "lora_id",
        lambda _, __: "a LoRA adapter was removed, and is read again when it is needed",
    ),
    "sleep": ("level", _cause_of_sleep),
}
"""Calls of EngineCore, each with its decisive argument and the cause of a reset, if any."""
