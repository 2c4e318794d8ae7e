"""Small files that users name, and that may be something else by the time they are read."""

import errno
import os
import stat


def read_file(path: str, max_bytes: int) -> tuple[bytes, int]:
    """Return the first bytes of a file, and its mode.

    Nobody waits for the other end of a pipe.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    file_fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(file_fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return os.read(file_fd, max_bytes), mode
    finally:
        os.close(file_fd)
