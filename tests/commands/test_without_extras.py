"""Commands where nothing is installed but what the package requires: one line with the fix."""

from __future__ import annotations

import pytest

from tests.commands.doctor.test_without_vllm import clean, run

__all__ = ["clean"]

CASES = {
    "bench engine --model none": "needs vLLM, which",
    "cache ls s3://bucket/kv": "pip install 'safe-offload[s3]'",
    "cache ls mooncake://127.0.0.1:9": "pip install 'safe-offload[mooncake]'",
    "cache ls redis://127.0.0.1:9": "cannot connect to 127.0.0.1:9",
    "cache ls {folder}/none": "cannot be opened: No such file or directory",
    "cache ls {folder}": "",
    "cache ls node": "",
    "config --explain": "",
}


@pytest.mark.parametrize("command", CASES)
def test_what_is_missing_is_said_in_one_line(clean, tmp_path, command):
    python, packages = clean
    done = run(python, *command.format(folder=tmp_path).split(), path=[packages])
    said = CASES[command]
    assert done.returncode == bool(said), done.stderr
    assert "Traceback" not in done.stderr
    if said:
        assert said in done.stderr
        assert "Fix: " in done.stderr
        assert len(done.stderr.splitlines()) == 1
