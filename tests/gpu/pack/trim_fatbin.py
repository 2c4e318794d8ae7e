"""Shrinks CUDA libraries to the machine code of one kind of GPU.

In the `.nv_fatbin` section of an ELF file the payload of every entry that is not wanted is
overwritten with zeros, so that it compresses to nothing. Headers, sizes and offsets stay as they
are: the driver chooses by the headers and reads nothing of other GPUs.

A container is a header of 16 bytes (magic, version, its own length, length of what follows) and
entries; an entry is a header (kind, version, length of the header, length of the payload, ...,
architecture at byte 28) and its payload. Found by reading files that nvcc made.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

MAGIC = 0xBA55ED50
PTX, ELF = 1, 2
ELF_MAGIC = b"\x7fELF"
ALIGNMENT_BYTES = 8


class Entry(NamedTuple):
    kind: int
    arch: int
    begin: int  # of the payload, in the file
    size_bytes: int


Wanted = Callable[[bytes], bool]
"""Whether the machine code of one entry is wanted, by its bytes, which have names of kernels."""


def everything(_: bytes) -> bool:
    return True


def section(data: bytes, wanted: str) -> tuple[int, int]:
    """Return offset and size of an ELF section; (0, 0) if there is none.

    Source: System V ABI, ELF-64 object file format.
    """
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names_index = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    for header in headers:
        begin = names + header[0]
        if data[begin : data.index(b"\0", begin)].decode() == wanted:
            return header[4], header[5]
    return 0, 0


def containers(data: bytes) -> Iterator[list[Entry]]:
    at, size = section(data, ".nv_fatbin")
    end = at + size
    while at + 16 <= end:
        magic, _, header_bytes, length = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += ALIGNMENT_BYTES
            continue
        at += header_bytes
        stop = at + length
        found = []
        while at < stop:
            kind, _, own_bytes = struct.unpack_from("<HHI", data, at)
            (payload_bytes,) = struct.unpack_from("<Q", data, at + 8)
            (arch,) = struct.unpack_from("<I", data, at + 28)
            found.append(Entry(kind, arch, at + own_bytes, payload_bytes))
            at += own_bytes + payload_bytes
        yield found


def kept(data: bytes, arch: int, wanted: Wanted) -> set[Entry]:
    """Return what a GPU of this architecture loads: its machine code, or the newest PTX for it.

    Machine code runs on the same major version from its minor version on; where a container has
    none of it, the driver compiles the PTX.
    """
    chosen: set[Entry] = set()
    for found in containers(data):
        code = [e for e in found if e.kind == ELF and e.arch // 10 == arch // 10 and e.arch <= arch]
        texts = [e for e in found if e.kind == PTX and e.arch <= arch]
        for one in code or [e for e in texts if e.arch == max(t.arch for t in texts)]:
            payload = data[one.begin : one.begin + one.size_bytes]
            if not payload.startswith(ELF_MAGIC) or wanted(payload):
                chosen.add(one)
    return chosen


def trim(before: bytes, arch: int, wanted: Wanted = everything) -> tuple[bytes, str]:
    """Return a library with zeros for what is not wanted, and what was kept, in words."""
    data, keep = bytearray(before), kept(before, arch, wanted)
    entries = [one for found in containers(before) for one in found]
    for one in entries:
        if one not in keep:
            data[one.begin : one.begin + one.size_bytes] = bytes(one.size_bytes)
    assert [*containers(data)] == [*containers(before)], "headers are as they were"
    size_bytes = sum(one.size_bytes for one in keep)
    return bytes(data), f"{len(keep)} of {len(entries)} entries kept, {size_bytes:,} bytes"


SIZES = re.compile(
    rb"CollectiveMainloopFwdSm90ILi\d+EN4cute5tupleIJ.*?EEENS\d*_?IJ(.*?)EEELi(\d+)E"
)


def flash_attention(sizes: set[tuple[str, str]]) -> Wanted:
    """Keep bfloat16 of FlashAttention 3 with these sizes of heads (of queries, of values).

    Its kernels for other types and sizes are in entries of their own.
    """

    def wanted(payload: bytes) -> bool:
        if b"FlashAttnFwdSm90" not in payload:
            return True  # what all of them need
        if b"6half_t" in payload or b"float_e4m3_t" in payload:
            return False
        # A size that is equal to one before it is written as a reference to that (S_): so the
        # last one that is spelled out is the size of the head.
        found = {
            (re.findall(rb"ILi(\d+)E", tile)[-1].decode(), value.decode())
            for tile, value in SIZES.findall(payload)
            if not tile.endswith(b"_")
        }
        same = {value.decode() for tile, value in SIZES.findall(payload) if tile.endswith(b"_")}
        return bool(found & sizes) or bool(same & {value for _, value in sizes})

    return wanted
