"""Show every setting of SafeCPUOffloadConnector, or check a configuration and show what it sets.

    safe-offload config --explain
    safe-offload config --kv-transfer-config '{"kv_connector":"SafeCPUOffloadConnector"}'

It needs neither vLLM nor a GPU. Whether there is enough memory is checked when the engine starts.
"""

import json
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final

from safe_offload.config import options, other_connectors
from safe_offload.config.options import CAPACITY_KEYS, OUTER_KEYS, SETTINGS, OffloadConfig
from safe_offload.config.printing import NOT_SHOWN, masked, printable, shown, shown_key
from safe_offload.config.tiers import COMMON, OWN, URL, TierConfig, schemes_with
from safe_offload.config.transfer_config import (
    CONNECTOR_NAME,
    DEFAULT_KV_ROLE,
    children_of,
    complete,
    is_ours,
    settle,
)
from safe_offload.errors import ConfigError

_EXTRA_KEY: Final = "kv_connector_extra_config"
# What vLLM itself accepts and fills in. Source: vLLM 0.32.0, vllm/config/kv_transfer.py.
_OUTER_CHOICES: Final = {
    "kv_role": ("kv_both", "kv_consumer", "kv_producer"),
    "kv_load_failure_policy": ("recompute", "fail"),
}
_OUTER_DEFAULTS: Final[Mapping[str, Any]] = {
    "kv_connector": None,
    "kv_role": None,
    "kv_load_failure_policy": "fail",
    _EXTRA_KEY: {},
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--explain", action="store_true", help="explain every setting")
    parser.add_argument(
        "--kv-transfer-config",
        metavar="JSON",
        help="vLLM's argument: validate it and show the effective values and their origin",
    )


def run_command(arguments: Namespace) -> int:
    """Print the settings; return the exit status."""
    if arguments.kv_transfer_config is None:
        lines = _all_settings(explain=arguments.explain)
    else:
        lines = _in_force(parse(arguments.kv_transfer_config), explain=arguments.explain)
    sys.stdout.write("\n".join([*lines, ""]))  # at once: a reader like `head` may stop early
    return 0


def _all_settings(*, explain: bool) -> Iterator[str]:
    yield f"Settings of {CONNECTOR_NAME}, in {_EXTRA_KEY}. All are optional.\n"
    yield _row("key", "default", "allowed")
    yield from _defaults(SETTINGS.values(), explain=explain)
    yield '\nSettings of each mapping in "tiers":\n'
    yield from _defaults((URL, *COMMON.values()), explain=explain)
    for config, own in OWN.items():
        yield f"\nBeside {schemes_with(config)}:\n"
        yield from _defaults(own.values(), explain=explain)


def _defaults(rows: Iterable[Any], *, explain: bool) -> Iterator[str]:
    for row in rows:
        default = "" if row.default is None else json.dumps(row.default)
        yield _row(row.key, default, row.kind.allowed, row.help if explain else "")


def parse(text: str) -> dict[str, Any]:
    """Return the object of `--kv-transfer-config`, which is JSON."""
    try:
        written = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f"is not JSON ({printable(str(error))})"
    else:
        if isinstance(written, dict):
            return written
        written = NOT_SHOWN if isinstance(written, str) else written
        problem = f"is {shown(written)}; expected an object"
    raise ConfigError(
        f"--kv-transfer-config {problem}. Fix: write it in single quotes, as in "
        f"""--kv-transfer-config '{{"kv_connector":"{CONNECTOR_NAME}"}}'."""
    )


def check(written: dict[str, Any]) -> tuple[Any, dict[str, Mapping[str, Any]]]:
    """Check a `--kv-transfer-config` as the start of an engine does.

    Return its fields, completed, as attributes, and each configuration of our connector in it, by
    its place.
    """
    config = SimpleNamespace(**{**_OUTER_DEFAULTS, **complete(written)})
    settle(config)
    children = {f"connectors[{idx}].": each for idx, each in enumerate(children_of(written))}
    ours = {place: each for place, each in {"": written, **children}.items() if is_ours(each)}
    if not ours:
        raise ConfigError(
            f"--kv-transfer-config does not name {CONNECTOR_NAME}. "
            f'Fix: write "kv_connector": "{CONNECTOR_NAME}".'
        )
    for each in (written, *children.values()):
        _require_fields(each)
    return config, ours


def _in_force(written: dict[str, Any], *, explain: bool) -> Iterator[str]:
    """Yield the values that an engine would use, after the checks of its start."""
    config, ours = check(written)
    for key in _OUTER_CHOICES:
        value = getattr(config, key)
        filled_in = "vLLM's default" if value == _OUTER_DEFAULTS[key] else "filled in"
        source = "written" if written.get(key) == value else filled_in
        if value == "fail":
            source += ': failed loads end their request with an error; write "recompute"'
        yield _row(key, json.dumps(value), source)
    for place, each in ours.items():
        yield f"\n{place}{_EXTRA_KEY}:"
        extra = each.get(_EXTRA_KEY) or {}
        reasons = other_connectors.without_effect(extra, options.VALID_KEYS)
        found = OffloadConfig.from_extra_config(extra, world_size=1)
        tiers = () if "tiers" in extra or not other_connectors.directories(extra) else found.tiers
        capacity_key = found.capacity_key
        for row in SETTINGS.values():
            value = extra.get(row.key, row.default)
            source = "written" if row.key in extra else "default"
            if row.key in CAPACITY_KEYS and row.key != capacity_key:
                source += f', no effect: "{capacity_key}" takes precedence'
            if tiers and row.key == "tiers":
                value = [_as_written(tier) for tier in tiers]
                source = "from the keys of another connector"
            if row.key in reasons:
                source += f"; {reasons[row.key]}"
            if value is not None or row.key in reasons:
                text = json.dumps(masked(value, row.key))
                yield _row(row.key, text, source, row.help if explain else "")
        for key, why in reasons.items():
            if key not in options.VALID_KEYS:
                yield _row(key, "", f"no effect: {why}")


def _as_written(tier: TierConfig) -> dict[str, object]:
    """Return how a directory would be written as a tier."""
    bound = {} if tier.limit_bytes is None else {"capacity": tier.limit_bytes}
    return {"url": tier.location.label, **bound}


def _require_fields(written: Mapping[str, Any]) -> None:
    """Refuse fields that vLLM would refuse, of a configuration or a child of MultiConnector."""
    for key, value in written.items():
        if key not in OUTER_KEYS:
            raise ConfigError(
                f"{shown_key(key)} is not a field of --kv-transfer-config. Allowed: "
                f"{', '.join(OUTER_KEYS)}. Fix: write one of these, or remove it."
            )
        if key in _OUTER_CHOICES and value not in (*_OUTER_CHOICES[key], _OUTER_DEFAULTS[key]):
            words = ", ".join(f'"{word}"' for word in _OUTER_CHOICES[key])
            raise ConfigError(
                f'"{key}" = {shown(value, key)}. Allowed: {words}. Fix: write one of them.'
            )
    if written.get("kv_role") is None and not is_ours(written):
        raise ConfigError(
            f'"kv_role" is missing beside {shown(written.get("kv_connector"))}, where vLLM needs '
            f'it. Fix: write "kv_role": "{DEFAULT_KV_ROLE}" there.'
        )


def _row(key: str, value: str, remark: str, help: str = "") -> str:
    lines = [f"{key:<26} {value:<12} {remark}".rstrip(), *textwrap.wrap(help, 96)]
    return "\n    ".join(lines)
