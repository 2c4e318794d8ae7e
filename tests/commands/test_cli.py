"""The command reads its arguments, and says what is wrong with them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import safe_offload
from safe_offload.commands.cli import main

HEAVY = {"torch", "vllm", "numpy", "triton", "matplotlib"}


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy_and_print_nothing_else(argument: str) -> None:
    """torch and vLLM take seconds to import, and print lines of their own."""
    script = """
import atexit, json, sys
from safe_offload.commands.cli import main
atexit.register(lambda: print(json.dumps(sorted(name for name in sys.modules if "." not in name))))
main(sys.argv[1:])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, argument],
        cwd=Path(safe_offload.__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *printed, modules = done.stdout.splitlines()
    assert not HEAVY & set(json.loads(modules))
    expected = f"safe-offload {safe_offload.__version__}"
    assert printed == [expected] if argument == "--version" else "bench" in done.stdout


def test_the_help_of_a_group_names_its_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "--help"])
    words = capsys.readouterr().out.split()
    assert "engine" in words


def test_help_names_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "engine", "--help"])
    assert "--prompt-tokens" in capsys.readouterr().out


def test_no_rounds_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--rounds", "0"]) == 1
    assert "--rounds: expected at least 1" in capsys.readouterr().err


def test_a_transfer_config_without_a_connector_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "engine", "--kv-transfer-config", "{}", "--rounds", "1"]) == 1
    assert "kv_connector" in capsys.readouterr().err
