"""Loaded by vLLM in every process: registers the connector and checks its configuration.

vLLM calls `register` (entry point group `vllm.general_plugins`) in the API server, in EngineCore
and in every worker, before any of them needs the connector.

`LLM(kv_transfer_config={...})` makes a `KVTransferConfig` before that. So that class is also
wrapped as soon as its module is imported: `register_early` (entry point group
`vllm.platform_plugins`) is called before or during that import, when vLLM looks for its platform.

Source: vLLM 0.32.0, vllm/plugins/__init__.py, vllm/platforms/__init__.py, vllm/entrypoints/llm.py,
vllm/engine/arg_utils.py, vllm/config/kv_transfer.py.
"""

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from safe_offload import started  # noqa: F401  # it looks at the clock now, before a model loads
from safe_offload.compat.media_ids import wrap_hashes, wrap_requests
from safe_offload.compat.whole_blocks import wrap_worker
from safe_offload.compat.wrapping import is_wrapped, when_imported, wrap
from safe_offload.config.transfer_config import (
    CONNECTOR_MODULE,
    CONNECTOR_NAME,
    complete,
    settings_of,
    settle,
)
from safe_offload.errors import ConfigError
from safe_offload.start.checks import prepare_start, take_offloading_size, warn_of_lost_metrics

_CONFIG_MODULE: Final = "vllm.config.kv_transfer"
_ARGUMENTS_MODULE: Final = "vllm.engine.arg_utils"
_MEDIA_MODULE: Final = "vllm.multimodal.processing.inputs"
_REQUESTS_MODULE: Final = "vllm.v1.engine.input_processor"
_WORKER_MODULE: Final = "vllm.v1.worker.worker_base"
_BUILT_BY_PYDANTIC: Final = (
    "__pydantic_core_schema__",
    "__pydantic_validator__",
    "__pydantic_serializer__",
)

# Below vLLM's logger, which has the handlers.
_logger = logging.getLogger(f"vllm.{__name__}")
_is_registered = False


def register() -> None:
    """Make vLLM know the connector; may be called any number of times and never raises.

    An exception here would end every vLLM process, also those that do not use our connector.
    """
    try:
        _register_name()
        _wrap_kv_transfer_config()
        _wrap_engine_arguments()
        when_imported(_MEDIA_MODULE, lambda module: wrap_hashes(module.ProcessorInputs))
        when_imported(_REQUESTS_MODULE, lambda module: wrap_requests(module.InputProcessor))
        when_imported(_WORKER_MODULE, _wrap_workers)
    except Exception:
        from safe_offload.compat.versions import installed_version

        _logger.exception(
            "safe_offload could not register %s with vLLM %s, which rejects that name. Expected "
            "KVConnectorFactory.register_connector and KVTransferConfig.__post_init__ as in vLLM "
            "0.32. Fix: install a version of vLLM that safe_offload is tested with, or uninstall "
            "safe-offload.",
            CONNECTOR_NAME,
            installed_version() or "of unknown version",
        )


def register_early() -> None:
    """Wrap `KVTransferConfig`, now or as soon as its module is imported; never raises.

    None tells vLLM that this is no platform. Nothing of vLLM is imported here: the call comes from
    the middle of an import, and another one would search for the platform again.
    """
    when_imported(_CONFIG_MODULE, lambda _: _wrap_kv_transfer_config())


def _register_name() -> None:
    global _is_registered
    if _is_registered:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    except ValueError:
        _logger.warning(
            "Another package has registered the KV connector name %s and takes precedence. Fix: "
            'to use safe_offload\'s, add "kv_connector_module_path": "%s" to '
            "--kv-transfer-config.",
            CONNECTOR_NAME,
            CONNECTOR_MODULE,
        )
    _is_registered = True


def _wrap_workers(module: Any) -> None:
    """Let workers order KV cache layouts, and prepare their copies before they load the model.

    The connector is created only once vLLM has profiled the model, right before the KV cache.
    Source: vLLM 0.31 to 0.33, `WorkerWrapperBase.init_worker` in vllm/v1/worker/worker_base.py and
    `Worker.initialize_from_config` in gpu_worker.py.
    """
    wrap_worker(module.WorkerBase)

    def around(create: Callable[..., None], worker: Any, /, *args: Any, **kwargs: Any) -> None:
        create(worker, *args, **kwargs)
        try:
            _prepare_copies(worker.vllm_config)
        except Exception:
            _logger.debug("Copies are not prepared ahead", exc_info=True)

    wrap(module.WorkerBase, "__init__", around)


def _prepare_copies(vllm_config: Any) -> None:
    for config in settings_of(vllm_config.kv_transfer_config):
        # Only workers import the code that copies (tests/test_layering.py).
        from safe_offload.worker.copies.choice import prepare

        prepare(str(vllm_config.device_config.device_type), config)


def _wrap_kv_transfer_config() -> None:
    """Complete a KVTransferConfig that names us, and check our settings before a worker starts."""
    from vllm.config.kv_transfer import KVTransferConfig

    if is_wrapped(KVTransferConfig, "__post_init__"):
        return

    def around(post_init: Callable[..., None], config: Any, /, *args: Any, **kwargs: Any) -> None:
        with _as_pydantic_says():
            _check(settle, config)
        post_init(config, *args, **kwargs)

    wrap(KVTransferConfig, "__post_init__", around)
    _complete_as_written(KVTransferConfig)


def _complete_as_written(config_class: Any) -> None:
    """Pass the configuration as written to `complete`, before pydantic fills in vLLM's defaults.

    `__post_init__` cannot distinguish a default from the same word written by the user. If this
    fails, vLLM's defaults stay. Source: pydantic, `dataclasses.rebuild_dataclass`.
    """
    try:
        from pydantic.dataclasses import rebuild_dataclass
        from pydantic_core import ArgsKwargs, core_schema

        names = [field.name for field in dataclasses.fields(config_class)]

        def read(written: Any) -> Any:
            with _as_pydantic_says():
                return read_inside(written)

        def read_inside(written: Any) -> Any:
            if isinstance(written, Mapping):
                return _check(complete, written) or written
            if not isinstance(written, ArgsKwargs):
                return written  # an instance
            by_place = dict(zip(names, written.args, strict=False))
            completed = _check(complete, {**by_place, **(written.kwargs or {})})
            if completed is None:
                return written
            by_name = {key: value for key, value in completed.items() if key not in by_place}
            return ArgsKwargs(written.args, by_name)

        def get_core_schema(_: Any, source: Any, handler: Callable[[Any], Any]) -> Any:
            return core_schema.no_info_before_validator_function(read, handler(source))

        built = {name: vars(config_class)[name] for name in _BUILT_BY_PYDANTIC}
        # Its errors show the input, in which there may be a password.
        config_class.__pydantic_config__ = {
            **getattr(config_class, "__pydantic_config__", {}),
            "hide_input_in_errors": True,
        }
        config_class.__get_pydantic_core_schema__ = classmethod(get_core_schema)
        try:
            rebuild_dataclass(config_class, force=True)
        except Exception:
            del config_class.__get_pydantic_core_schema__
            for name, value in built.items():
                setattr(config_class, name, value)
            raise
    except Exception:
        _logger.debug("KVTransferConfig is read as vLLM alone reads it", exc_info=True)


@contextlib.contextmanager
def _as_pydantic_says() -> Iterator[None]:
    """End pydantic's message with ours: to a plain ValueError, it adds a url."""
    try:
        yield
    except ConfigError as error:
        from pydantic_core import PydanticCustomError

        kind = type(error).__name__
        raise PydanticCustomError(kind, "{message}", {"message": str(error)}) from error


def _check(check: Callable[[Any], Any], subject: Any) -> Any:
    """Return the result of a check; None if it fails itself: other connectors must start."""
    try:
        return check(subject)
    except ConfigError:
        raise
    except Exception:
        _logger.exception(
            "safe_offload could not check the configuration, and vLLM continues without the check. "
            "This is a bug: please open an issue with this traceback and your --kv-transfer-config "
            "without its passwords."
        )
        return None


def _wrap_engine_arguments() -> None:
    """Check a whole engine's configuration in the process that the user starts."""
    arguments = sys.modules.get(_ARGUMENTS_MODULE)
    if arguments is None:
        return

    def around(create: Callable[..., Any], arguments: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check(take_offloading_size, arguments)
        _check(warn_of_lost_metrics, arguments)
        config = create(arguments, *args, **kwargs)
        _check(prepare_start, config)
        return config

    wrap(arguments.EngineArgs, "create_engine_config", around)
