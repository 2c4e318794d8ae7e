"""The schemas of the Kubernetes API, for manifests of examples/."""

from pathlib import Path
from typing import Any

import pytest
import yaml

VERSIONS = ("1.30", "1.33", "1.37")
"""Of Kubernetes."""


def manifests(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return every resource of a folder, by its kind and name."""
    texts = [path.read_text() for path in sorted(folder.glob("*.yaml"))]
    return {key: found for text in texts for key, found in resources_of(text).items()}


def resources_of(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return every resource of a text, by its kind and name."""
    return {
        (resource["kind"], resource["metadata"]["name"]): resource
        for resource in yaml.safe_load_all(text)
        if resource is not None
    }


def check(resource: dict[str, Any], version: str = VERSIONS[-1]) -> None:
    """Raise an error if the API would not take this; it has no schema of other operators' kinds."""
    if resource["apiVersion"].startswith("monitoring.coreos.com/"):
        return
    validator = pytest.importorskip(
        "kubernetes_validate", reason="no kubernetes-validate: `make venv` installs it"
    )
    validator.validate(resource, version, strict=True)
