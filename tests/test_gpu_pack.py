"""What `make gpu-pack` makes of a library and of a checkout."""

import struct

from tests.benchmarks.report import COMMIT_FILE
from tests.gpu.pack.__main__ import files_of_checkout
from tests.gpu.pack.trim_fatbin import ELF, ELF_MAGIC, MAGIC, PTX, trim

HOPPER, BLACKWELL = 90, 100


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    head = struct.pack("<HHIQQII", kind, 1, 32, len(payload), 0, 0, arch)
    return head + payload


def container(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(content)) + content


def library(*containers: bytes) -> bytes:
    """A file of ELF with one section of machine code, and the one of names."""
    code, names = b"".join(containers), b"\0.nv_fatbin\0.shstrtab\0"
    table = 64 + len(code) + len(names)
    head = ELF_MAGIC + bytes(36) + struct.pack("<Q", table) + bytes(10)
    head += struct.pack("<HHH", 64, 3, 2)
    sections = [(0, 0, 0), (1, 64, len(code)), (12, 64 + len(code), len(names))]
    headers = [struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 0, 0)
               for name, at, size in sections]  # fmt: skip
    return head + code + names + b"".join(headers)


def test_machine_code_of_other_gpus_becomes_zeros_and_nothing_moves():
    """Where there is none for the GPU, the newest text that it can compile stays."""
    wanted, other = ELF_MAGIC + b"wanted  ", ELF_MAGIC + b"other   "
    both = container(entry(ELF, HOPPER, wanted), entry(ELF, BLACKWELL, other))
    texts = container(*(entry(PTX, arch, b"text %03d" % arch) for arch in (75, 80, 120)))
    before = library(both, texts)
    after, said = trim(before, HOPPER)
    expected = before
    for gone in (other, b"text 075", b"text 120"):
        expected = expected.replace(gone, bytes(len(gone)))
    assert after == expected
    assert said.startswith("2 of 5 entries kept")
    after, _ = trim(before, HOPPER, lambda code: b"wanted" not in code)
    assert wanted not in after, "nor is what is for the GPU and not asked for"


def test_a_checkout_is_packed_with_its_commit():
    files = files_of_checkout()
    assert files["tests/gpu/pack/unpack.sh"].startswith(b"# Unpacks")
    assert files[COMMIT_FILE]
    assert not [name for name in files if name.startswith(".venv/")]
