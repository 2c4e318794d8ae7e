"""A number that is none of those allowed is a ConfigError with the fix, wherever it is written.

Values are those that JSON as Python reads it has, and what a program may pass beside them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from safe_offload.commands.cli import main
from safe_offload.config import tenants
from safe_offload.config.options import SETTINGS, OffloadConfig
from safe_offload.config.tiers import KINDS, TIER_KEYS
from safe_offload.config.transfer_config import CONNECTOR_NAME
from safe_offload.errors import ConfigError, SafeOffloadError
from safe_offload.scheduler.limits import read_limits
from safe_offload.start.checks import take_offloading_size

HOSTILE = [
    *(float("inf"), float("-inf"), float("nan"), -0.0, 0.0, 0, -1, 5e-324, 1e308, -1e308, 0.5),
    *(True, False, 10**400, -(10**400), 10**400 + 1, 2**63, 2**64, -(2**63), None, [], {}),
    *("1e999", "-1e999", "inf", "nan", "Infinity", "-0", "0x10", "1e99PiB", "9" * 5000, "1_0"),
]
HOSTILE_VALUES = pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:12])


def check(extra: Any, *named: str) -> OffloadConfig | None:
    """It is a configuration that can be used, or refused in a line that names what and the fix."""
    with expected(*named):
        config = OffloadConfig.from_extra_config(extra, world_size=1)
        assert hash(config) is not None
        return config
    return None


@contextlib.contextmanager
def expected(*named: str) -> Iterator[None]:
    """Nothing is raised but a ConfigError of one line, with the fix."""
    problem = ""
    try:
        yield
    except ConfigError as error:
        problem = str(error)
    if problem:
        assert problem.isprintable()
        assert "Fix: " in problem
        assert any(name in problem for name in named or ("",)), problem


@HOSTILE_VALUES
def test_of_a_setting(value):
    for row in SETTINGS.values():
        check_setting(row.key, value)


def check_setting(key: str, value: Any) -> None:
    more = {"kv_offload_backend": "disk", "disk_path": "/mnt/kv"} if "disk" in key else {}
    check(more | {key: value}, f'["{key}"]', '["kv_offload_backend"]')


@HOSTILE_VALUES
@pytest.mark.parametrize("scheme", ["file", "rediss", "s3", "mooncake"])
def test_of_a_tier(scheme, value):
    for key in TIER_KEYS[1:]:
        tier = {"url": KINDS[scheme].example, key: value}
        check({"tiers": [tier]}, f'["tiers"][0]["{key}"]')


DIRECTORY_KEYS = ["root_dir", "type", "gc_max_size_gb", "max_bytes", "n_read_threads", "other"]


@HOSTILE_VALUES
@pytest.mark.parametrize("key", DIRECTORY_KEYS)
def test_of_a_directory_of_another_connector(key, value):
    tier = {"type": "fs", "root_dir": "/mnt/kv"} | {key: value}
    config = check({"secondary_tiers": [tier]}, f'["secondary_tiers"][0]["{key}"]')
    if config is not None and config.tiers:
        assert config.tiers[0].capacity_bytes is None or config.tiers[0].capacity_bytes > 0


@HOSTILE_VALUES
@pytest.mark.parametrize("where", ["default", "share", "prefix", "salt_sha256", "label", "whole"])
def test_of_the_file_of_tenants(where, value):
    tenant: dict[str, Any] = {"share": "30%", "prefix": "chat-"}
    if where in ("share", "prefix", "salt_sha256"):
        tenant[where] = value
    written: Any = {"default": "20%", "guaranteed": {"chat": tenant}}
    if where == "default":
        written["default"] = value
    elif where == "label":
        written["guaranteed"]["chat"] = value
    elif where == "whole":
        written = value
    try:
        text = json.dumps(written)
    except ValueError:  # an integer of too many digits
        text = '{"default": %s}' % ("9" * 5000)
    with expected():
        tenants.parse(text.encode())


@HOSTILE_VALUES
@pytest.mark.parametrize("name", [CONNECTOR_NAME, "MultiConnector"])
def test_of_vllms_own_size(name, value):
    own = {"kv_connector": CONNECTOR_NAME}
    config = (
        own
        if name == CONNECTOR_NAME
        else {
            "kv_connector": name,
            "kv_connector_extra_config": {"connectors": [own]},
        }
    )
    arguments = SimpleNamespace(kv_offloading_size=value, kv_transfer_config=dict(config))
    with expected("--kv-offloading-size"):
        take_offloading_size(arguments)
        assert arguments.kv_offloading_size is None
    if value is not None and arguments.kv_offloading_size is None:
        check(arguments.kv_transfer_config["kv_connector_extra_config"], "cpu_bytes_to_use")


@HOSTILE_VALUES
def test_of_what_a_client_asks_for(value):
    keys = ("max_offload_tokens", "max_load_tokens", "pin_s", "store", "do_remote_prefill")
    for key in keys:
        limits, _ = read_limits({key: value})
        assert limits.pin_s is None or limits.pin_s >= 0


WORDS = ["inf", "-inf", "nan", "1e999", "-0", "0", "-1", "9" * 5000, "1e308", "0x10", "", "NaN"]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    "command",
    [
        "cache rm {folder} --all --older-than",
        *(
            f"bench engine --model none {option}"
            for option in (
                *("--prompt-tokens", "--answer-tokens", "--rounds", "--pool-ratio", "--seed"),
                *("--num-gpu-blocks", "--block-size", "--max-num-batched-tokens", "--cpu-bytes"),
                *("--answer-timeout", "--kv-transfer-config", "--engine-args"),
            )
        ),
        "config --kv-transfer-config",
    ],
)
def test_of_an_option(command, word, tmp_path, capsys, monkeypatch):
    """Nothing is measured: what may be is refused before, or would be started here."""
    begun = SafeOffloadError("begun")

    def begin(*_: object) -> None:
        raise begun

    monkeypatch.setattr("safe_offload.commands.bench.engine.measure", begin)
    (tmp_path / "usage").touch()
    arguments = [*command.format(folder=tmp_path).split(), word]
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert status in (0, 1, 2)
    assert "Traceback" not in said.err
    if status and "begun" not in said.err:
        option = command.split()[-1].removeprefix("--")
        assert option in said.err or f'["{option.replace("-", "_")}"]' in said.err
