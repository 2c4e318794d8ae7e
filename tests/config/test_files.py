"""What has taken the place of a file that is read again stops nobody and leaves nothing."""

import os
from pathlib import Path

import pytest

from safe_offload.config.files import read_file


def a_pipe(path: Path) -> None:
    """Who reads from it as from a file waits for as long as the test runs."""
    os.mkfifo(path)


def a_full_pipe(path: Path) -> None:
    a_pipe(path)
    os.write(os.open(path, os.O_RDWR), b"x")  # and it stays open


@pytest.mark.parametrize(
    "put",
    [a_pipe, a_full_pipe, Path.mkdir, lambda path: path.symlink_to("/dev/zero")],
    ids=["pipe", "full pipe", "directory", "device"],
)
def test_what_is_no_regular_file_is_refused_and_no_descriptor_stays_open(tmp_path, put):
    path = tmp_path / "file"
    put(path)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(OSError, match="it is not a regular file"):
            read_file(str(path), 10)
    assert os.listdir("/proc/self/fd") == before


def test_no_more_of_a_file_is_read_than_is_wanted(tmp_path):
    (tmp_path / "long").write_bytes(b"x" * 100)
    (tmp_path / "file").symlink_to("long")
    content, mode = read_file(str(tmp_path / "file"), 10)
    assert (content, mode & 0o777) == (b"x" * 10, (tmp_path / "long").stat().st_mode & 0o777)
