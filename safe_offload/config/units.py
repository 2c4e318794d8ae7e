"""Units of memory, and sizes as people read them."""

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40


def format_bytes(size_bytes: int) -> str:
    """Return a size with two decimals and a binary unit, such as `8.00 GiB`."""
    for unit_bytes, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.2f} {unit}"
    return f"{size_bytes} bytes"
