"""The row kernel: NVIDIA's compiler takes it, and its words fit the layout.

What it does is tested by the contract, where the C++ compiler builds it (fake_device.py).
"""

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from safe_offload.layout import HostLayout, Segment, make_geometry
from safe_offload.worker.copies import row_kernel
from safe_offload.worker.copies.row_kernel import RowArguments, make_source, word_bytes


def find_nvrtc() -> Path | None:
    """The compiler's library, from the package nvidia-cuda-nvrtc-cu12."""
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        return None
    folders = spec.submodule_search_locations if spec is not None else None
    found = sorted(p for folder in folders or () for p in Path(folder).glob("lib/libnvrtc.so.*"))
    return found[0] if found else None


NVRTC = find_nvrtc()


@pytest.mark.skipif(NVRTC is None, reason="needs the package nvidia-cuda-nvrtc-cu12")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("size_bytes", row_kernel.WORDS)
def test_the_cuda_compiler_takes_it(size_bytes, architecture):
    library = ctypes.CDLL(str(NVRTC))
    program = ctypes.c_void_p()
    source = make_source(size_bytes).encode()
    assert not library.nvrtcCreateProgram(ctypes.byref(program), source, b"rows.cu", 0, None, None)
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"-std=c++17")
    status = library.nvrtcCompileProgram(program, 2, options)
    length = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(length))
    log = ctypes.create_string_buffer(length.value)
    library.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    assert not log.value.strip(), "a warning"
    library.nvrtcGetPTXSize(program, ctypes.byref(length))
    assembly = ctypes.create_string_buffer(length.value)
    library.nvrtcGetPTX(program, assembly)
    assert f".entry {row_kernel.KERNEL_NAME}(".encode() in assembly.value
    # Nine parameters of these sizes: what RowArguments.as_scalars passes.
    assert assembly.value.count(b".param .u64") == 8
    assert assembly.value.count(b".param .u32") == 1
    library.nvrtcDestroyProgram(ctypes.byref(program))


def test_scalars_have_the_sizes_of_the_parameters():
    scalars = RowArguments(1, 2, 3, 4, 5, 6, 7, 8, 1).as_scalars()
    assert [scalar.nbytes for scalar in scalars] == [8] * 8 + [4]
    assert [int(scalar) for scalar in scalars] == [1, 2, 3, 4, 5, 6, 7, 8, 1]


def test_the_segment_table_has_one_row_for_each_segment():
    geometry = make_geometry([Segment(64, 0, 64), Segment(80, 640, 72)], 8, 2048)
    table = row_kernel.segment_table(HostLayout(geometry, 10, 5), 1000, 5000)
    np.testing.assert_array_equal(table, [[1000, 64, 5000, 64], [1640, 80, 5000 + 320, 72]])


@pytest.mark.parametrize(
    ("row", "base_address", "expected"),
    [(4096, 1 << 20, 16), (4096, (1 << 20) + 8, 8), (24, 0, 8), (36, 0, 4), (6, 0, 2), (7, 0, 1)],
)
def test_words_are_as_wide_as_the_layout_lets_them(row, base_address, expected):
    geometry = make_geometry([Segment(row, 0, row)], 8, 8 * row)
    layout = HostLayout.in_one_slab(geometry, 8)
    assert word_bytes(layout, base_address, 1 << 30) == expected
