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
def test_help_and_version_import_nothing_heavy_and_print_nothing_else(argument):
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


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["bench", "--help"], "engine"), (["bench", "engine", "--help"], "--prompt-tokens")],
)
def test_help_names_subcommands_and_options(arguments, word, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    assert word in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds: expected at least 1"),
        (["--kv-transfer-config", "{}", "--rounds", "1"], "kv_connector"),
    ],
)
def test_what_cannot_be_measured_is_an_error(arguments, message, capsys):
    assert main(["bench", "engine", "--model", "some/model", *arguments]) == 1
    assert message in capsys.readouterr().err
