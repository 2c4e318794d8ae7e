"""What vLLM loads in every process: makes the connector's name known and its config line short.

vLLM calls `register` (entry point group `vllm.general_plugins`) in the API server, in EngineCore
and in every worker, before any of them needs the connector. After that,
`{"kv_connector": "SafeCPUOffloadConnector"}` is a complete `--kv-transfer-config`.

One road leads to `KVTransferConfig` before `register` has run: `LLM(kv_transfer_config={...})`
builds it from the dict first, and only then loads the general plugins. So the part that concerns
`KVTransferConfig` is also done while vLLM finds out its platform, which happens when `vllm.config`
is imported (entry point group `vllm.platform_plugins`, function `register_early`).

Source: vLLM 0.32.0, vllm/plugins/__init__.py, vllm/platforms/__init__.py, vllm/entrypoints/llm.py,
vllm/engine/arg_utils.py, vllm/config/kv_transfer.py.
"""

import functools
import logging
import sys
from typing import Any, Final

from safe_offload.config import OffloadConfig

CONNECTOR_NAME: Final = "SafeCPUOffloadConnector"
CONNECTOR_MODULE: Final = "safe_offload.connector"
DEFAULT_KV_ROLE: Final = "kv_both"

_WRAPPED_MARK: Final = "_safe_offload_defaults_kv_role"

# Below vLLM's logger, which has the handlers.
_logger = logging.getLogger(f"vllm.{__name__}")
_is_registered = False


def register() -> None:
    """Make vLLM know the connector; may be called any number of times and never raises.

    An exception here would end every vLLM process of the environment, also of users who do not
    name our connector. So what goes wrong is logged, with the fix, and vLLM runs without us.
    """
    try:
        _register_name()
        _wrap_kv_transfer_config()
    except Exception:
        _logger.exception(
            "safe_offload could not make %s known to vLLM %s, which runs without it. Expected "
            "KVConnectorFactory.register_connector and KVTransferConfig.__post_init__ as in "
            "vLLM 0.32. Fix: install a version of vLLM that the README of safe_offload lists as "
            "tested, or uninstall safe-offload.",
            CONNECTOR_NAME,
            _vllm_version(),
        )


def register_early() -> None:
    """Wrap `KVTransferConfig` while vLLM finds out its platform; never raises.

    vLLM asks every platform plugin for a platform, and None, which this returns, says that it is
    none. The call comes out of the import of `vllm.config`; where it does not (a script that
    imports `vllm.platforms` first), importing `vllm.config` from here would recurse into the
    search for the platform, so nothing is done and `register` does it later.
    """
    if "vllm.config" not in sys.modules:
        return
    try:
        _wrap_kv_transfer_config()
    except Exception:
        # register() meets the same failure and reports it.
        _logger.debug("KVTransferConfig is not wrapped yet", exc_info=True)


def _register_name() -> None:
    """Register the connector's name once per process; its module is imported when it is used."""
    global _is_registered
    if _is_registered:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    except ValueError:
        _logger.warning(
            "Another package has registered the KV connector name %s; that one is used. Fix: to "
            'use the one of safe_offload, add "kv_connector_module_path": "%s" to '
            "--kv-transfer-config.",
            CONNECTOR_NAME,
            CONNECTOR_MODULE,
        )
    _is_registered = True


def _wrap_kv_transfer_config() -> None:
    """Give `kv_role` a default and check our settings, in a KVTransferConfig that names us.

    vLLM demands a role of every connector; ours has only one. And a wrong setting is refused here,
    in the process that reads the command line, rather than by a worker that has loaded the model.
    Both belong into `__post_init__`, which pydantic calls as well; configs that name another
    connector are left alone. A `ConfigError` is a `ValueError`, so pydantic reports it as its own.
    """
    from vllm.config.kv_transfer import KVTransferConfig

    original = KVTransferConfig.__post_init__
    if getattr(original, _WRAPPED_MARK, False):
        return

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.kv_connector == CONNECTOR_NAME:
            if self.kv_role is None:
                self.kv_role = DEFAULT_KV_ROLE
            OffloadConfig.from_extra_config(self.kv_connector_extra_config, world_size=1)
        original(self, *args, **kwargs)

    setattr(post_init, _WRAPPED_MARK, True)
    setattr(KVTransferConfig, "__post_init__", post_init)  # noqa: B010 (mypy refuses a method)


def _vllm_version() -> str:
    """Return the version of the vLLM that runs, for messages."""
    try:
        from vllm.version import __version__
    except Exception:
        return "of unknown version"
    return str(__version__)
