"""A short storm; `python -m tests.tiers.files.storm` runs a long one."""

from tests.tiers.files.storm import main


def test_processes_that_are_killed_leave_nothing_wrong_behind(tmp_path, capfd):
    assert main(["--minutes", "0.01", "--seed", "1", "--directory", str(tmp_path)]) == 0
    assert "no wrong byte, no orphan left, capacity kept" in capfd.readouterr().out
