"""The row kernel: NVIDIA's compiler takes it, and its words fit the layout.

What it does is tested by the contract, where the C++ compiler builds it (fake_device.py).
"""

import ctypes
import importlib.util
import tomllib
from pathlib import Path

import numpy as np
import pytest

from safe_offload.layout import HostLayout, Segment, make_geometry
from safe_offload.worker.copies import row_kernel
from safe_offload.worker.copies.row_kernel import (
    EXTRAS,
    RowArguments,
    cupy_misfit,
    installed_cupy,
    make_source,
    word_bytes,
)


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


# ---- the cupy that compiles it -----------------------------------------------------------------

FOR_12, FOR_13, FOR_ROCM = ({name: "14.2"} for name in EXTRAS)


@pytest.mark.parametrize(
    ("cuda", "hip", "installed", "fix"),
    [
        ("13.0", None, {}, "pip install 'safe-offload[cuda13]'"),
        ("12.9", None, {}, "pip install 'safe-offload[cuda12]'"),
        ("", "7.0.51831", {}, "pip install 'safe-offload[rocm]'"),
        ("13.0", None, FOR_12, "uninstall -y cupy-cuda12x && pip install 'safe-offload[cuda13]'"),
        ("12.8", None, FOR_13, "uninstall -y cupy-cuda13x && pip install 'safe-offload[cuda12]'"),
        ("13.0", None, FOR_ROCM, "cupy-rocm-7-0 && pip install 'safe-offload[cuda13]'"),
        (None, "7.0", FOR_13, "cupy-cuda13x && pip install 'safe-offload[rocm]'"),
        ("13.0", None, FOR_12 | FOR_13, "uninstall -y cupy-cuda12x cupy-cuda13x && pip install"),
        ("11.8", None, {}, "build cupy for CUDA 11.8"),
        (None, "6.4", FOR_ROCM, "uninstall -y cupy-rocm-7-0 && build cupy for ROCm 6.4"),
    ],
)
def test_a_cupy_that_does_not_fit_torch_comes_with_what_to_install(cuda, hip, installed, fix):
    misfit = cupy_misfit(cuda, hip, installed)
    assert misfit is not None
    assert fix in misfit.fix
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}"
    assert misfit.problem.endswith(f"torch is for {build}")
    assert all(name in misfit.problem for name in installed)


@pytest.mark.parametrize(
    ("cuda", "hip", "installed"),
    [
        ("13.0", None, FOR_13),
        ("12.4", "", FOR_12),
        (None, "7.1", FOR_ROCM),
        ("13.0", None, {"cupy": "14.2"}),  # built here
        (None, None, {}),  # torch for CPUs
        ("", "", FOR_12),
    ],
)
def test_a_cupy_that_fits_and_a_torch_that_needs_none_are_left_alone(cuda, hip, installed):
    assert cupy_misfit(cuda, hip, installed) is None


def test_the_extras_bring_the_packages_that_are_named():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {extra: extras[extra][0].partition(">")[0] for extra in EXTRAS.values()} == {
        extra: package for package, extra in EXTRAS.items()
    }


def test_packages_of_cupy_are_found_by_their_names(tmp_path, monkeypatch):
    for name in ("cupy_cuda12x", "cupyx_other", "numpyro"):
        metadata = tmp_path / f"{name}-14.2.0.dist-info"
        metadata.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 14.2.0\n"
        (metadata / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_cupy() == {"cupy-cuda12x": "14.2.0"}
