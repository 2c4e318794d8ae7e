"""Small file systems of a test's own, where the machine allows `mount`."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.worker.waiting import wait_until


def mount(
    folder: Path, kind: str = "tmpfs", size_bytes: int = 4 << 20, num_inodes: int = 0
) -> None:
    """Mount a new file system on a folder, or skip the test; 0 inodes are no limit of a tmpfs."""
    folder.mkdir(exist_ok=True)
    if kind == "tmpfs":
        options = f"size={size_bytes},nr_inodes={num_inodes},mode=0700"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    else:
        image = folder.with_suffix(".img")
        image.write_bytes(bytes(size_bytes))
        made = subprocess.run([f"mkfs.{kind}", "-q", str(image)], capture_output=True)
        if made.returncode:
            pytest.skip(f"no {kind} can be made here")
        command = ["mount", "-o", "loop", str(image), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")


def remount(folder: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True)


def unmount(folder: Path) -> None:
    """Fails if a descriptor below it stays open; what a thread is about to close is waited for."""
    wait_until(lambda: subprocess.run(["umount", str(folder)]).returncode == 0)


@contextmanager
def mounted(
    folder: Path, kind: str = "tmpfs", size_bytes: int = 4 << 20, num_inodes: int = 0
) -> Iterator[Path]:
    mount(folder, kind, size_bytes, num_inodes)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True)
