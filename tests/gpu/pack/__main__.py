"""Packs what a campaign needs for a machine that has a GPU and no network: `make gpu-pack`.

That machine has Python, torch for CUDA 13, transformers, cupy and pytest. Four archives bring the
rest, each of which unpacks by itself: vLLM's Python files; its libraries with the machine code of
one kind of GPU (trim_fatbin.py); the packages in packages.txt, with this package for its entry
points; and a checkout, with its commit and the recorded agents. `unpack.sh` lies beside them. With
--rehearse the same is packed for this Python, unpacked and tried (rehearse.py); what vLLM learns of
its models then is packed, too, and spares each engine a process of some seconds.

Left out of vLLM: FlashAttention 2, FlashMLA, DeepGEMM, qutlass, the kernels of experts. A model
that needs one of them does not run.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import lzma
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.benchmarks.report import COMMIT_FILE, describe_machine
from tests.gpu.pack import trim_fatbin
from tests.gpu.steps import ROOT, TRACES

HERE = Path(__file__).parent
HEADS = {("64", "64"), ("128", "128"), ("256", "256"), ("192", "128"), ("64", "512")}
"""Sizes of heads of the shapes in tests/gpu/shapes.py."""
LIBRARIES = {
    "vllm/_C_stable_libtorch.abi3.so": trim_fatbin.everything,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": trim_fatbin.flash_attention(HEADS),
    "vllm/cumem_allocator.abi3.so": trim_fatbin.everything,
    "vllm/spinloop.abi3.so": trim_fatbin.everything,
    "vllm/fs_io_C.abi3.so": trim_fatbin.everything,
}
"""vLLM's, with which of their entries are wanted."""
NOT_PACKED = ("*.so", "vllm/vllm-rs", "vllm/third_party/deep_gemm/*", "vllm/entrypoints/*/static/*",
              "vllm/benchmarks/*", "*/RECORD", "*.pyi", "*.data/*")  # fmt: skip
NEVER_USED = ("*/__pycache__/*", "*.pyi", "bin/*", "*/tests/*.py", "*.dist-info/RECORD", "*.a")
MANYLINUX = (1, 2014, *(f"_2_{minor}" for minor in (17, 24, 26, 27, 28, 31)))
PLATFORMS = [word for one in MANYLINUX for word in ("--platform", f"manylinux{one}_x86_64")]
LIMIT_BYTES = 64 << 20
"""What such a machine takes of files with a command."""

Files = dict[str, bytes]


def is_among(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words, "--quiet"], check=True)


def stripped(library: bytes) -> bytes:
    """Return a library without the names that no loader asks for."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        Path(file.name).write_bytes(library)
        subprocess.run(["strip", "--strip-unneeded", file.name], check=True)
        return Path(file.name).read_bytes()


def download(version: str, vllm: str, wheels: Path) -> None:
    """Get the wheels for the Python of the other machine; what is there stays."""
    where = ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    wanted = ["-r", str(HERE / "packages.txt"), f"vllm=={vllm}"]
    pip("download", "--no-deps", *where, *PLATFORMS, "-d", str(wheels), *wanted)


def files_of_vllm(wheel: Path, arch: int) -> tuple[Files, Files]:
    """Return vLLM's Python files, and its libraries for one kind of GPU."""
    python, libraries = {}, {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name in LIBRARIES:
                trimmed, said = trim_fatbin.trim(archive.read(name), arch, LIBRARIES[name])
                print(f"{name}: {said}", flush=True)
                libraries[name] = stripped(trimmed)
            elif not name.endswith("/") and not is_among(name, NOT_PACKED):
                python[name] = archive.read(name)
    assert libraries.keys() == LIBRARIES.keys(), "another vLLM has other libraries"
    return python, libraries


def files_of_packages(version: str, wheels: Path) -> Files:
    """Install the wheels, without what they ask for, into a folder; return what is in it."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        where = ["--target", name, "--python-version", version, "--only-binary=:all:"]
        where += ["--no-index", "--no-compile", "--find-links", str(wheels)]
        pip("install", "--no-deps", *where, *PLATFORMS, "-r", str(HERE / "packages.txt"))
        # Ours is made by this Python; its one library is for any (abi3).
        pip("install", "--no-deps", "--no-compile", "--target", name, str(ROOT))
        for path in Path(name).rglob("*"):
            relative = path.relative_to(name).as_posix()
            if path.is_file() and not is_among(relative, NEVER_USED):
                content = path.read_bytes()
                found[relative] = stripped(content) if ".so" in path.suffixes else content
    return found


def files_of_checkout() -> Files:
    """Return what git has of HEAD, and what the steps need beside it."""
    tar = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "HEAD"], stdout=subprocess.PIPE, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        members = [member for member in archive if member.isfile()]
        found = {member.name: archive.extractfile(member) for member in members}
        files = {name: file.read() for name, file in found.items() if file is not None}
    files[COMMIT_FILE] = describe_machine()["commit"].encode()
    if TRACES.is_file():
        files[f"shared/traces/{TRACES.name}"] = TRACES.read_bytes()
    return files


def write(out: Path, name: str, files: Files, preset: int) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for path in sorted(files):
            member = tarfile.TarInfo(path)
            member.size = len(files[path])
            archive.addfile(member, io.BytesIO(files[path]))
    packed = lzma.compress(raw.getvalue(), preset=preset)
    (out / f"{name}.tar.xz").write_bytes(packed)
    what = f"{len(files)} files, {len(raw.getvalue()):,} bytes, packed {len(packed):,}"
    print(f"{name}.tar.xz: {what}", flush=True)


def pack(options: argparse.Namespace, out: Path, version: str, preset: int) -> int:
    """Pack for a version of Python; return the bytes of it all."""
    download(version, options.vllm, options.wheels)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (wheel,) = options.wheels.glob(f"vllm-{options.vllm}-*.whl")
    parts = dict(zip(("vllm", "libs"), files_of_vllm(wheel, options.arch), strict=True))
    parts |= {"site": files_of_packages(version, options.wheels), "project": files_of_checkout()}
    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(write, out, *part, preset) for part in parts.items()]:
            done.result()
    shutil.copy(HERE / "unpack.sh", out)
    return sum(file.stat().st_size for file in out.iterdir())


def rehearse(packed: Path) -> int:
    """Unpack and try all with this Python; return the exit status."""
    # torch for CUDA brings triton, which an environment for a CPU lacks, and imports of vLLM use.
    pip("install", "--no-deps", "--no-compile", "--target", str(packed / "triton"), "triton")
    script = '. "$0/unpack.sh" "$0/unpacked" && PYTHONPATH="$PYTHONPATH:$0/triton" '
    script += 'exec "$PYTHON" -m tests.gpu.pack.rehearse'
    command = ["bash", "-c", script, str(packed)]
    return subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}).returncode


def main() -> int:
    """Pack; return 1 if it has become too large to be carried, or a rehearsal fails."""
    parser = argparse.ArgumentParser(prog="make gpu-pack", description=__doc__)
    add = parser.add_argument
    add("--vllm", required=True, help="version of vLLM")
    add("--python-version", default="3.12", help="of the other machine (%(default)s)")
    add("--arch", type=int, default=90, help="of its GPU: 90 is Hopper (%(default)s)")
    add("--wheels", type=Path, required=True, help="folder that downloads are kept in")
    add("--out", type=Path, required=True, help="folder that is made anew")
    add("--rehearse", action="store_true", help="try it without a GPU, with this Python")
    arguments = parser.parse_args()
    os.nice(10)
    size_bytes = pack(arguments, arguments.out, arguments.python_version, preset=6)
    print(f"{arguments.out}: {size_bytes / 1e6:.1f} MB, of {LIMIT_BYTES / 1e6:.1f} at most")
    if size_bytes > LIMIT_BYTES:
        return 1
    if not arguments.rehearse:
        return 0
    with tempfile.TemporaryDirectory(prefix="safe-offload-rehearsal-") as name:
        own = ".".join(platform.python_version_tuple()[:2])
        packed = Path(name) / "packed"
        pack(arguments, packed, own, preset=0)
        status = rehearse(packed)
        learnt = (packed / "unpacked/cache/modelinfos").glob("*.json")
        files = {f"modelinfos/{file.name}": file.read_bytes() for file in learnt}
        write(arguments.out, "cache", files, preset=6)
        return status


if __name__ == "__main__":
    sys.exit(main())
