"""`safe-offload config`: every setting, and what a configuration sets, without vLLM."""

import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from safe_offload.commands.cli import main
from safe_offload.config.options import SETTINGS, VALID_KEYS
from safe_offload.config.tiers import COMMON, OWN, TIER_KEYS

OURS: dict[str, Any] = {"kv_connector": "SafeCPUOffloadConnector"}
OTHER: dict[str, Any] = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def ours(**settings: object) -> dict[str, Any]:
    return {**OURS, "kv_connector_extra_config": settings}


def multi(*children: dict[str, Any], **outer: Any) -> dict[str, Any]:
    extra = {"connectors": list(children)}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra, **outer}


@pytest.fixture
def run(capsys):
    """Run the command on a configuration; what it printed, by the first word of each line."""

    def call(written: object, *options: str) -> dict[str, str]:
        text = written if isinstance(written, str) else json.dumps(written)
        assert main(["config", "--kv-transfer-config", text, *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        return {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line}

    return call


def refusal(written: object, capsys: pytest.CaptureFixture[str]) -> str:
    text = written if isinstance(written, str) else json.dumps(written)
    assert main(["config", "--kv-transfer-config", text]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_every_setting_is_listed_with_its_default_and_what_is_allowed(capsys):
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    of_tiers = next(index for index, line in enumerate(lines) if '"tiers":' in line)
    shown = {line.split()[0]: line for line in lines[3:of_tiers] if line}
    assert tuple(shown) == VALID_KEYS
    words = [line.split()[0] for line in lines[of_tiers:] if line and not line.endswith(":")]
    assert tuple(dict.fromkeys(words)) == TIER_KEYS
    assert '"8GiB"' in shown["cpu_bytes_to_use"]
    assert "seconds, more than 0 and at most 3600" in shown["transfer_timeout_s"]


def test_explain_says_what_every_setting_does(capsys):
    assert main(["config", "--explain"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(row.help in said for row in (*SETTINGS.values(), *COMMON.values()))
    assert all(row.help in said for rows in OWN.values() for row in rows.values())


WRITTEN = {**ours(cpu_bytes_to_use="64GiB", verify="load"), "kv_role": "kv_consumer"}
POLICY = multi(OURS, OTHER, kv_role="kv_both", kv_load_failure_policy="recompute")
SECRET = ours(tiers=[{"url": "redis://me:hunter2@kv"}, {"url": "file:///mnt/kv", "wait_s": 3}])


@pytest.mark.parametrize(
    ("written", "key", "expected"),
    [
        (OURS, "kv_role", '"kv_both" filled in'),
        (OURS, "kv_load_failure_policy", '"recompute" filled in'),
        (OURS, "cpu_bytes_to_use", '"8GiB" default'),
        (OURS, "num_cpu_blocks", None),
        (OURS, "tiers", "[] default"),
        (ours(tiers=[{"url": "file:///a"}]), "tiers", '[{"url": "file:///a"}] written'),
        (WRITTEN, "kv_role", '"kv_consumer" written'),
        (WRITTEN, "cpu_bytes_to_use", '"64GiB" written'),
        (WRITTEN, "verify", '"load" written'),
        (WRITTEN, "copy_threads", "1 default"),
        (
            ours(cpu_bytes_to_use="64GiB", num_cpu_blocks=7),
            "num_cpu_blocks",
            '7 written, no effect: "cpu_bytes_to_use" takes precedence',
        ),
        (POLICY, "kv_load_failure_policy", '"recompute" written'),
        (
            SECRET,
            "tiers",
            '[{"url": "redis://***@kv"}, {"url": "file:///mnt/kv", "wait_s": 3}] written',
        ),
    ],
)
def test_a_value_is_shown_with_who_sets_it(run, written, key, expected):
    assert run(written).get(key) == expected
    assert "Limit" in run(written, "--explain")


def test_each_connector_of_ours_under_multi_connector_is_shown(capsys):
    written = multi(ours(verify="load"), OTHER, ours(num_cpu_blocks=7), kv_role="kv_both")
    assert main(["config", "--kv-transfer-config", json.dumps(written)]) == 0
    outer, first, third = capsys.readouterr().out.split("\n\n")
    assert "vLLM's default: failed loads end their request" in outer
    assert first.startswith("connectors[0].kv_connector_extra_config:")
    assert '"load"       written' in first
    assert third.startswith("connectors[2].kv_connector_extra_config:")
    assert "7            written" in third


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "expected an object"),
        ({}, "does not name SafeCPUOffloadConnector"),
        (OTHER, "does not name SafeCPUOffloadConnector"),
        (multi(OTHER, kv_role="kv_both"), "does not name SafeCPUOffloadConnector"),
        ({"kv_connector": "SafeCpuOffloadConnector"}, "unknown connector"),
        (ours(cpu_bytes_to_uze="64GiB"), 'Fix: write "cpu_bytes_to_use"'),
        ({**OURS, "kv_role": "both"}, '"kv_role" = "both". Allowed: "kv_both"'),
        ({**OURS, "kv_load_failure_policy": "retry"}, 'Allowed: "recompute", "fail"'),
        ({**OURS, "kv_rolle": "kv_both"}, '"kv_rolle" is not a field of --kv-transfer-config'),
        (multi(OURS), '"kv_role" is missing beside "MultiConnector"'),
        (
            multi(OURS, {"kv_connector": "ExampleConnector"}, kv_role="kv_both"),
            '"kv_role" is missing beside "ExampleConnector"',
        ),
        (multi(OTHER, ours(verify="on"), kv_role="kv_both"), 'Fix: write "verify": "load"'),
        (ours(transfer_timeout_s="30"), '"30": this is a value of type str, not a number'),
        (ours(check_invariants="yes"), '"yes": this is a value of type str, not a boolean'),
        (ours(tiers=[{"url": "redis://kv", "password": "hunter2"}]), '"password_file" if you'),
        (ours(tiers=[{"url": "redis://me:hunter2"}]), '"redis://***": the host or port'),
        ({**OURS, "kv_connector_extra_config": []}, "kv_connector_extra_config is []"),
        *[
            (
                {**written, "kv_connector_module_path": path},
                f'kv_connector_module_path = "{path}": it has no {name}. '
                'Fix: write "kv_connector_module_path": "safe_offload.connector", or omit it',
            )
            for written, name, path in (
                (OURS, "SafeCPUOffloadConnector", "safe_offload.conector"),
                (OURS, "SafeCPUOffloadConnector", "json.decoder.connector"),
                (OURS, "SafeCPUOffloadConnector", ""),
            )
        ],
        (
            {"kv_connector": "Offload", "kv_connector_module_path": "safe_offload.connector"},
            'kv_connector = "Offload": unknown connector',
        ),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused_with_the_fix(written, message, capsys):
    """All is in one line, the only one; and vLLM says it, too, where it is a configuration."""
    (said,) = refusal(written, capsys).splitlines()
    assert said.startswith("safe-offload: ")
    assert message in said
    assert "Fix: " in said
    assert "hunter2" not in said
    if isinstance(written, dict) and "kv_connector_module_path" in written:
        with pytest.raises(ValueError, match=re.escape(message)):
            make_vllms(written)


def make_vllms(written: dict[str, Any]) -> None:
    from vllm.config import KVTransferConfig

    from safe_offload.start import plugin

    plugin.register()
    KVTransferConfig(**written)


def test_the_module_of_another_connector_is_left_alone():
    for written in (OTHER, {**OURS, "kv_connector_module_path": "safe_offload.connector"}):
        make_vllms({**written})
    make_vllms({**OTHER, "kv_connector_module_path": "nowhere.at.all"})
    make_vllms({**OURS, "kv_connector_module_path": "tests.commands.test_config"})


@pytest.mark.parametrize(
    "written",
    [
        OURS,
        {**OURS, "kv_role": None},
        {**OURS, "kv_load_failure_policy": None},
        multi(OURS, kv_role=None),
        ours(num_cpu_blocks=4, lazy_offload=True),
        multi(OURS, OTHER, kv_role="kv_both"),
        {**OURS, "kv_role": "both"},
        {**OURS, "kv_rolle": "kv_both"},
        multi(OURS),
        multi(OURS, {"kv_connector": "ExampleConnector", "kv_rolle": 1}, kv_role="kv_both"),
    ],
)
def test_vllm_takes_and_refuses_the_same(written, capsys):
    """Also for the children of MultiConnector, of which vLLM makes a configuration each."""
    from vllm.config import KVTransferConfig

    from safe_offload.start import plugin

    plugin.register()
    children = written.get("kv_connector_extra_config", {}).get("connectors", [])
    try:
        for each in (written, *children):
            KVTransferConfig(**each)
    except ValueError:
        expected = 1
    else:
        expected = 0
    assert main(["config", "--kv-transfer-config", json.dumps(written)]) == expected


def test_it_needs_neither_vllm_nor_torch():
    script = (
        "import sys; from safe_offload.commands.cli import main; "
        f"main(['config', '--kv-transfer-config', {json.dumps(json.dumps(OURS))}]); "
        "sys.exit(bool({'vllm', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_page_shows_how_what_the_command_prints_begins(capsys):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    command, shown = page.partition("## Check a configuration\n")[2].split("\n\nprints\n")
    program, *arguments = shlex.split(command)
    assert (program, main(arguments)) == ("safe-offload", 0)
    printed = textwrap.indent(capsys.readouterr().out, "    ")
    example = shown.partition("\nand so on")[0].strip("\n")
    assert example
    assert printed.startswith(example), f"docs/reference/cli.md should show\n{printed}"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--kv-transfer-config", json.dumps(OURS)], 0),
        (["--kv-transfer-config", "{"], 1),
        (["--kv-transfer-config", json.dumps(ours(cpu_bytes_to_uze=1))], 1),
        (["--kv-transfer"], 2),
        (["--kv-transfer-config", json.dumps(OURS), "--nothing"], 2),
    ],
)
def test_the_exit_status_is_that_of_the_page(arguments, expected):
    try:
        status = main(["config", *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == expected
