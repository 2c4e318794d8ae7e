"""Reads small files named by users, which may have been replaced by something else."""

import errno
import os
import stat


def read_file(path: str, max_bytes: int) -> tuple[bytes, int]:
    """Return the first bytes of a regular file, and its mode; opening a pipe does not block.

    Raises OSError if it cannot be read, or is not a regular file.
    """
    file_fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(file_fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return os.read(file_fd, max_bytes), mode
    finally:
        os.close(file_fd)
