"""A number that is none of those allowed is a ConfigError with the fix, wherever it is written.

Values are those that JSON as Python reads it has, and what a program may pass beside them; settings
and tiers are in test_fuzz.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from safe_offload.commands.cli import main
from safe_offload.config import tenants
from safe_offload.config.options import OffloadConfig
from safe_offload.config.transfer_config import CONNECTOR_NAME
from safe_offload.errors import ConfigError, SafeOffloadError
from safe_offload.scheduler.limits import read_limits
from safe_offload.start.checks import take_offloading_size

HOSTILE = [
    *(float("inf"), float("-inf"), float("nan"), -0.0, 0.0, 0, -1, 5e-324, 1e308, -1e308, 0.5),
    *(True, False, 10**400, -(10**400), 10**400 + 1, 2**63, 2**64, -(2**63), None, [], {}),
    *("1e999", "-1e999", "inf", "nan", "Infinity", "-0", "0x10", "1e99PiB", "9" * 5000, "1_0"),
]


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


@pytest.mark.parametrize("where", ["default", "share", "prefix", "salt_sha256", "label", "whole"])
def test_of_the_file_of_tenants(where):
    for value in HOSTILE:
        check_tenants(where, value)


def check_tenants(where: str, value: Any) -> None:
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


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:12])
def test_of_vllms_own_size(value):
    own = {"kv_connector": CONNECTOR_NAME}
    arguments = SimpleNamespace(kv_offloading_size=value, kv_transfer_config=dict(own))
    with expected("--kv-offloading-size"):
        take_offloading_size(arguments)
        assert arguments.kv_offloading_size is None
    if value is not None and arguments.kv_offloading_size is None:
        check(arguments.kv_transfer_config["kv_connector_extra_config"], "cpu_bytes_to_use")


def test_of_what_a_client_asks_for():
    keys = ("max_offload_tokens", "max_load_tokens", "pin_s", "store", "do_remote_prefill")
    for key, value in itertools.product(keys, HOSTILE):
        limits, _ = read_limits({key: value})
        assert limits.pin_s is None or limits.pin_s >= 0


WORDS = ["-inf", "nan", "0", "-1", "9" * 5000, "0x10", ""]


@pytest.mark.parametrize(
    "command",
    [
        "cache rm {folder} --all --older-than",
        *(
            f"bench engine --model none {option}"
            for option in (
                *("--prompt-tokens", "--rounds", "--cpu-bytes"),
                *("--kv-transfer-config", "--engine-args"),
            )
        ),
        "config --kv-transfer-config",
    ],
)
def test_of_an_option(command, tmp_path, capsys, monkeypatch):
    """Nothing is measured: what may be is refused before, or would be started here."""
    begun = SafeOffloadError("begun")

    def begin(*_: object) -> None:
        raise begun

    monkeypatch.setattr("safe_offload.commands.bench.engine.measure", begin)
    (tmp_path / "usage").touch()
    for word in WORDS:
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
