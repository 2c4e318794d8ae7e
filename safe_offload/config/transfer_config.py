"""The fields beside our settings in a KVTransferConfig that names us: defaults and refusals.

`complete` takes the configuration as written, before vLLM reads it; `settle` takes vLLM's object.
Both leave configurations of other connectors unchanged.

Source: vLLM 0.32.0, vllm/config/kv_transfer.py, v1/core/sched/scheduler.py and
distributed/kv_transfer/kv_connector/v1/multi_connector.py.
"""

import contextlib
import difflib
import importlib.util
import json
from collections.abc import Mapping
from typing import Any, Final

from safe_offload.config.options import VALID_KEYS, OffloadConfig
from safe_offload.config.printing import shown
from safe_offload.config.tier_list import MIXED_KEYS
from safe_offload.errors import ConfigError

CONNECTOR_NAME: Final = "SafeCPUOffloadConnector"
CONNECTOR_MODULE: Final = "safe_offload.connector"
DEFAULT_KV_ROLE: Final = "kv_both"
DEFAULT_FAILURE_POLICY: Final = "recompute"

_MULTI_CONNECTOR: Final = "MultiConnector"
_POLICY_KEY: Final = "kv_load_failure_policy"
_MODULE_KEY: Final = "kv_connector_module_path"
_EXTRA_KEY: Final = "kv_connector_extra_config"
# Above what vLLM's SimpleCPUOffloadConnector has in common with our name, 0.88.
_SPELLING_CUTOFF: Final = 0.9


def complete(written: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration as written, with the default failure policy where it applies.

    vLLM reads only the outermost policy, which applies to all connectors. So under MultiConnector
    it is filled in only if all are ours.

    Raises:
        ConfigError: our name or that of its module is misspelt, or a setting stands beside it.
    """
    completed = dict(written)
    _require_spelling(written)
    if is_ours(written):
        _require_module(written.get(_MODULE_KEY))
        _require_settings_inside(written)
    connectors = children_of(written) or [written]
    if all(is_ours(connector) for connector in connectors):
        completed.setdefault(_POLICY_KEY, DEFAULT_FAILURE_POLICY)
    return completed


def settle(config: Any) -> None:
    """Give a KVTransferConfig that names us its role; raise ConfigError for invalid settings.

    Our children under MultiConnector are checked here, because vLLM reads them only after loading
    the model. Each gets the outer failure policy, which applies, and loads ahead of steps.
    """
    if config.kv_connector == CONNECTOR_NAME:
        if config.kv_role is None:
            config.kv_role = DEFAULT_KV_ROLE
        _require_role(config.kv_role)
        OffloadConfig.from_extra_config(config.kv_connector_extra_config, world_size=1)
        return
    children = children_of(vars(config))
    for child in children:
        complete(child)
    if not any(is_ours(child) for child in children):
        return
    _require_role(config.kv_role)
    have_key = set[bool]()
    for child in filter(is_ours, children):
        _require_role(child.get("kv_role"))
        extra: Any = child.get(_EXTRA_KEY)
        tiers = OffloadConfig.from_extra_config(extra, world_size=1).tiers
        have_key |= {tier.has_key for tier in tiers}
    if len(have_key) > 1:
        raise ConfigError(
            f"some tiers of the connectors have a key and others none: {MIXED_KEYS}. "
            'Fix: write "hmac_key_file" into each tier of each connector, or into none.'
        )
    policy = {_POLICY_KEY: config.kv_load_failure_policy}
    config.kv_connector_extra_config = {
        **config.kv_connector_extra_config,
        "connectors": [
            {**child, **policy, _EXTRA_KEY: _ahead_of_steps(child)} if is_ours(child) else child
            for child in children
        ],
    }


def _ahead_of_steps(child: Mapping[str, Any]) -> dict[str, Any]:
    """Return a child's settings without loads in steps: another may load the same request."""
    return {**(child.get(_EXTRA_KEY) or {}), "load_in_step": False}


def is_ours(written: Mapping[str, object]) -> bool:
    """Return whether this configuration names our connector."""
    return written.get("kv_connector") == CONNECTOR_NAME


def children_of(written: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return the configurations of MultiConnector's children; none for any other connector."""
    extra = written.get(_EXTRA_KEY)
    if written.get("kv_connector") != _MULTI_CONNECTOR or not isinstance(extra, Mapping):
        return []
    children = extra.get("connectors")
    if not isinstance(children, list) or not all(isinstance(c, Mapping) for c in children):
        return []  # vLLM says what is wrong with it
    return children


def ours_of(transfer_config: Any) -> list[Mapping[str, Any]]:
    """Return every configuration of our connector in a KVTransferConfig, a mapping or None."""
    if transfer_config is None:
        return []
    is_mapping = isinstance(transfer_config, Mapping)
    written = transfer_config if is_mapping else vars(transfer_config)
    return [each for each in (written, *children_of(written)) if is_ours(each)]


def settings_of(transfer_config: Any, world_size: int = 1) -> list[OffloadConfig]:
    """Return the settings of the connectors that `ours_of` finds."""
    extras = [each.get(_EXTRA_KEY) for each in ours_of(transfer_config)]
    return [OffloadConfig.from_extra_config(extra, world_size=world_size) for extra in extras]


def _require_spelling(written: Mapping[str, object]) -> None:
    name = written.get("kv_connector")
    if not isinstance(name, str) or name == CONNECTOR_NAME:
        return
    if written.get(_MODULE_KEY) not in (None, CONNECTOR_MODULE):
        return
    is_of_our_module = written.get(_MODULE_KEY) == CONNECTOR_MODULE
    ratio = difflib.SequenceMatcher(None, name.casefold(), CONNECTOR_NAME.casefold()).ratio()
    if ratio < _SPELLING_CUTOFF and not is_of_our_module:
        return
    raise ConfigError(
        f'kv_connector = {shown(name)}: unknown connector. Fix: write "kv_connector": '
        f'"{CONNECTOR_NAME}".'
    )


def _require_module(path: object) -> None:
    """Refuse a missing module, or another one of ours: vLLM would exit with a traceback."""
    if not isinstance(path, str) or path == CONNECTOR_MODULE:
        return
    with contextlib.suppress(ImportError, ValueError):
        package = CONNECTOR_MODULE.partition(".")[0]
        if path.partition(".")[0] != package and importlib.util.find_spec(path) is not None:
            return
    raise ConfigError(
        f'{_MODULE_KEY} = {shown(path)}: it has no {CONNECTOR_NAME}. Fix: write "{_MODULE_KEY}": '
        f'"{CONNECTOR_MODULE}", or omit it.'
    )


def _require_settings_inside(written: Mapping[str, object]) -> None:
    misplaced = {key: written[key] for key in VALID_KEYS if key in written}
    for key, value in misplaced.items():
        extra = written.get(_EXTRA_KEY)
        extra = {**(extra if isinstance(extra, Mapping) else {}), **misplaced}
        inside = ", ".join(
            f'"{key}": {json.dumps(value) if isinstance(value, bool) else shown(value, key)}'
            for key, value in extra.items()
            if key in VALID_KEYS
        )
        raise ConfigError(
            f'"{key}" = {shown(value, key)} is beside "kv_connector", where vLLM does not accept '
            f'it. Fix: write {{"kv_connector": "{CONNECTOR_NAME}", "{_EXTRA_KEY}": {{{inside}}}}}.'
        )


def _require_role(role: object) -> None:
    """Refuse the role with which a load and a step in flight may write the same block.

    Only if the connector may load (`is_kv_consumer`), vLLM keeps blocks until no step writes them.
    """
    if role == "kv_producer":
        raise ConfigError(
            'kv_role = "kv_producer": this connector also loads, and vLLM would reallocate blocks '
            f'that a step in flight still writes. Allowed: "{DEFAULT_KV_ROLE}". Fix: write '
            f'"kv_role": "{DEFAULT_KV_ROLE}", which also produces; without MultiConnector, it may '
            "be omitted."
        )
