"""One kernel launch for many small ranges: rows of blocks gathered into slots, or scattered back.

A copy engine spends about as long on the descriptor of a range as on 8 KiB of its bytes. The kernel
works out every address from ids: groups of 32 threads take one piece of one row at a time and move
it in words as wide as the layout lets them. The source is in the subset that CUDA, HIP and, in the
tests, a C++ compiler share.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from safe_offload.layout import HostLayout

KERNEL_NAME = "copy_rows"
GROUP_SIZE = 32
THREADS_PER_BLOCK = 256
NUM_BLOCKS = 12
"""Blocks of a launch: few multiprocessors fill the host link, the rest is left to the forward."""
LAUNCH_BYTES = 24 << 20
"""Maximum of one launch: its multiprocessors are the forward's again when it ends."""
PIECE_BYTES = 4096

SOURCE = r"""
struct Segment {
    unsigned long long block_base;    // address of block 0
    unsigned long long block_stride;
    unsigned long long array_base;    // address of slot 0, seen from the device
    unsigned long long row_bytes;
};

extern "C" __global__ void copy_rows(
    const Segment* segments, const long long* block_ids, const long long* slot_ids,
    long long num_pairs, long long num_segments, long long pieces_per_row,
    long long slots_per_slab, unsigned long long slab_bytes, int is_store)
{
    const long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    const long long num_groups = gridDim.x * (long long)blockDim.x / GROUP_SIZE;
    const long long num_pieces = num_pairs * num_segments * pieces_per_row;
    const int lane = thread % GROUP_SIZE;
    for (long long piece = thread / GROUP_SIZE; piece < num_pieces; piece += num_groups) {
        const long long row = piece / pieces_per_row;
        const long long pair = row % num_pairs;
        const Segment segment = segments[row / num_pairs];
        const unsigned long long begin = (piece % pieces_per_row) * PIECE_BYTES;
        if (begin >= segment.row_bytes) continue;
        const unsigned long long left = segment.row_bytes - begin;
        const int num_words = (left < PIECE_BYTES ? left : PIECE_BYTES) / sizeof(Word);
        const long long slot = slot_ids[pair];
        Word* in_block = (Word*)(segment.block_base + begin
                                 + block_ids[pair] * segment.block_stride);
        Word* in_slot = (Word*)(segment.array_base + begin + slot / slots_per_slab * slab_bytes
                                + slot % slots_per_slab * segment.row_bytes);
        const Word* source = is_store ? in_block : in_slot;
        Word* target = is_store ? in_slot : in_block;
        // Four words under way for each thread hide the way to the host and back.
        int word = lane;
        for (; word + 3 * GROUP_SIZE < num_words; word += 4 * GROUP_SIZE) {
            const Word a = source[word], b = source[word + GROUP_SIZE];
            const Word c = source[word + 2 * GROUP_SIZE], d = source[word + 3 * GROUP_SIZE];
            target[word] = a;
            target[word + GROUP_SIZE] = b;
            target[word + 2 * GROUP_SIZE] = c;
            target[word + 3 * GROUP_SIZE] = d;
        }
        for (; word < num_words; word += GROUP_SIZE) target[word] = source[word];
    }
}
"""

EXTRAS: Final = {"cupy-cuda12x": "cuda12", "cupy-cuda13x": "cuda13", "cupy-rocm-7-0": "rocm"}
"""Packages of cupy, which compiles the kernel, and the extras of this package that bring them."""

WORDS = {16: "uint4", 8: "unsigned long long", 4: "unsigned int", 2: "unsigned short", 1: "char"}
"""Types of the words that the kernel moves, by their size in bytes."""


@dataclass(frozen=True, slots=True)
class RowArguments:
    """The kernel's arguments in its order; addresses as the device sees them."""

    segments: int
    block_ids: int
    slot_ids: int
    num_pairs: int
    num_segments: int
    pieces_per_row: int
    slots_per_slab: int
    slab_bytes: int
    is_store: int

    def as_scalars(self) -> tuple[np.generic, ...]:
        """Return the same, typed for a launch."""
        *wide, is_store = astuple(self)
        return (*(np.uint64(value) for value in wide), np.int32(is_store))


def word_bytes(layout: HostLayout, *addresses: int) -> int:
    """Return the bytes of the widest word that divides every address and length of a layout."""
    numbers = [*addresses, layout.slab_bytes, *layout.array_offsets()]
    for segment in layout.geometry.segments:
        numbers += [segment.offset_bytes, segment.stride_bytes, segment.length_bytes]
    return math.gcd(*numbers, max(WORDS))


def make_source(size_bytes: int) -> str:
    """Return the kernel's source for words of a size."""
    return (
        f"#define GROUP_SIZE {GROUP_SIZE}\n#define PIECE_BYTES {PIECE_BYTES}ull\n"
        f"typedef {WORDS[size_bytes]} Word;\n{SOURCE}"
    )


def segment_table(
    layout: HostLayout, base_address: int, host_address: int
) -> npt.NDArray[np.uint64]:
    """Return the kernel's `Segment` structures; shape (num_segments, 4)."""
    rows = [
        (base_address + s.offset_bytes, s.stride_bytes, host_address + offset, s.length_bytes)
        for s, offset in zip(layout.geometry.segments, layout.array_offsets(), strict=True)
    ]
    return np.array(rows, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class CupyMisfit:
    """The problem of the installed cupy, and the fix."""

    problem: str
    fix: str


def installed_cupy() -> dict[str, str]:
    """Return the packages of cupy that are installed, and their versions."""
    found = ((each.name or "", each.version) for each in importlib.metadata.distributions())
    return {name: version for name, version in found if f"{name}-".startswith("cupy-")}


def cupy_misfit(
    cuda: str | None, hip: str | None, installed: Mapping[str, str]
) -> CupyMisfit | None:
    """Return why cupy does not fit a torch; None if it does, or torch is for CPUs.

    Args:
        cuda, hip: that torch was built for, such as "13.0"; one of them, or none.
        installed: packages of cupy; "cupy" is one that was built here, for what nobody can tell.
    """
    if not (cuda or hip):
        return None
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}"
    major = (cuda or hip or "").partition(".")[0]
    wanted = f"cupy-cuda{major}x" if cuda else f"cupy-rocm-{major}-0"
    if list(installed) in ([wanted], ["cupy"]):
        return None
    install = f"pip install 'safe-offload[{EXTRAS.get(wanted)}]'"
    if wanted not in EXTRAS:
        install = f"build cupy for {build} (https://docs.cupy.dev/en/stable/install.html)"
    if not installed:
        return CupyMisfit(f"cupy is not installed, and torch is for {build}", install)
    names = " and ".join(installed)
    problem = f"{names} is installed, and torch is for {build}"
    if len(installed) > 1:
        problem = f"{names} are installed, which overwrite one another, and torch is for {build}"
    return CupyMisfit(problem, f"pip uninstall -y {' '.join(installed)} && {install}")
