"""The schemas of the Kubernetes API and of the Prometheus Operator, for manifests of examples/."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

VERSIONS = ("1.30", "1.33", "1.37")
"""Of Kubernetes."""

NAMED = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {"name": {"type": "string"}, "labels": {"$ref": "#/$defs/strings"}},
}


def crd(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """The schema of a resource of the Prometheus Operator, with the fields that are used here."""
    return {
        "$defs": {
            "strings": {"type": "object", "additionalProperties": {"type": "string"}},
            "duration": {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"},
        },
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
        "properties": {
            "apiVersion": {"const": "monitoring.coreos.com/v1"},
            "kind": {"const": kind},
            "metadata": NAMED,
            "spec": spec,
        },
    }


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required,
        "additionalProperties": False,
        "properties": properties,
    }


STRING, STRINGS = {"type": "string"}, {"$ref": "#/$defs/strings"}
DURATION = {"$ref": "#/$defs/duration"}
ALERT = closed(
    ["expr"],
    alert=STRING,
    record=STRING,
    expr=STRING,
    labels=STRINGS,
    annotations=STRINGS,
    **{"for": DURATION, "keep_firing_for": DURATION},
)
ENDPOINT = closed(["port"], port=STRING, path=STRING, interval=DURATION)
GROUP = closed(["name", "rules"], name=STRING, interval=DURATION, rules={"items": ALERT})
# Source: prometheus-operator, api monitoring.coreos.com/v1.
CRDS = {
    "ServiceMonitor": crd(
        "ServiceMonitor",
        closed(
            ["selector", "endpoints"],
            selector=closed(["matchLabels"], matchLabels=STRINGS),
            endpoints={"type": "array", "items": ENDPOINT},
        ),
    ),
    "PrometheusRule": crd("PrometheusRule", closed(["groups"], groups={"items": GROUP})),
}


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
    """Raise jsonschema.ValidationError if the API would not take this."""
    if schema := CRDS.get(resource["kind"]):
        jsonschema.validate(resource, schema)
        return
    validator = pytest.importorskip(
        "kubernetes_validate", reason="no kubernetes-validate: `make venv` installs it"
    )
    validator.validate(resource, version, strict=True)
