"""The command reads its arguments, and says what is wrong with them."""

import pytest

from safe_offload.cli import main


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
