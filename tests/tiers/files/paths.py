"""Where the objects of a file tier lie, and what its log has said."""

import logging
from pathlib import Path

from safe_offload.tiers.base import Name
from safe_offload.tiers.naming import namespace_folder, path_of


def path_in(root: Path, name: Name) -> Path:
    return root.joinpath(namespace_folder(name.namespace), *path_of(name))


def files_below(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir())


def folders_below(root: Path) -> list[Path]:
    return [path for path in (root, *root.rglob("*")) if path.is_dir()]


def said(log: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in log if record.levelno >= logging.WARNING]
