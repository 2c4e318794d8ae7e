"""The manifests of examples/kubernetes, against the schemas of the Kubernetes API."""

import argparse
import re
from typing import Any

import jsonschema
import pytest
import yaml

from safe_offload.commands.cli import make_parser
from safe_offload.commands.doctor.command import read_rest
from safe_offload.compat.versions import make_serve_parser
from tests.kubernetes_api import VERSIONS, changed, check, manifests
from tests.prometheus_rule import ALERTS, RULE, rule

FOLDER = RULE.parent
MANIFESTS = {kind: resource for (kind, _), resource in manifests(FOLDER).items()}


def container() -> dict[str, Any]:
    (found,) = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    result: dict[str, Any] = found
    return result


def test_all_four_kinds_are_there():
    assert set(MANIFESTS) == {"Deployment", "Service", "ServiceMonitor", "PrometheusRule"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", MANIFESTS)
def test_the_api_takes_it(kind, version):
    check(MANIFESTS[kind], version)


TEMPLATE = ("spec", "template", "spec")


@pytest.mark.parametrize(
    ("kind", "place", "key", "value"),
    [
        ("Deployment", ("spec",), "replica", 1),
        ("Deployment", (*TEMPLATE, "containers", 0), "resource", {}),
        ("Deployment", (*TEMPLATE, "containers", 0, "startupProbe"), "failureThreshold", "many"),
        ("Deployment", (*TEMPLATE, "volumes", 0, "emptyDir"), "size", "16Gi"),
        ("Service", ("spec", "ports", 0), "port", "http"),
        ("ServiceMonitor", ("spec", "endpoints", 0), "interval", "often"),
        ("ServiceMonitor", ("spec",), "endpoint", []),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0), "expression", "up"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0), "expr", 1),
    ],
)
def test_a_wrong_one_is_refused(kind, place, key, value):
    with pytest.raises(jsonschema.ValidationError):
        check(changed(MANIFESTS[kind], place, key, value))


def test_the_rule_has_the_alerts_of_the_other_example():
    """If not: `python -m tests.prometheus_rule`."""
    assert RULE.read_text() == rule()
    assert MANIFESTS["PrometheusRule"]["spec"] == yaml.safe_load(ALERTS.read_text())


def test_labels_and_ports_lead_from_the_monitor_to_the_pods():
    monitor, service = MANIFESTS["ServiceMonitor"], MANIFESTS["Service"]
    template = MANIFESTS["Deployment"]["spec"]["template"]
    selected = monitor["spec"]["selector"]["matchLabels"]
    assert selected.items() <= service["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    (container_port,) = container()["ports"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == port["name"]
    assert port["targetPort"] == container_port["name"]


def test_probes_ask_for_health_and_wait_for_nothing_else():
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container()[probe]["httpGet"] == {"path": "/health", "port": "http"}
        assert container()[probe]["timeoutSeconds"] == 5, "one second is short on a busy machine"


def test_a_rollout_leaves_time_for_the_answers_that_run():
    """`tests/engine/test_lifecycle.py` sends the signal."""
    pod = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
    leave_s = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain_s = vllm_arguments().shutdown_timeout
    assert leave_s >= 10, "until endpoints and load balancers have followed"
    assert drain_s > 0, "vLLM's default cuts answers off"
    assert pod["terminationGracePeriodSeconds"] >= leave_s + drain_s + 120


def vllm_arguments() -> argparse.Namespace:
    command, *arguments = container()["command"] + container()["args"]
    assert (command, arguments.pop(0)) == ("vllm", "serve")
    return make_serve_parser().parse_args(arguments)


def test_the_files_that_the_pages_apply_exist():
    """A folder stands for all its files."""
    root = FOLDER.parents[1]
    commands = [
        found
        for page in (root / "docs").rglob("*.md")
        for found in re.findall(r"kubectl (?:create|apply) ([^\n`]+)", page.read_text())
    ]
    files = [file for command in commands for file in re.findall(r"-f (\S+)", command)]
    assert "examples/kubernetes/fleet" in files
    for file in files:
        path = root / file
        assert path.is_file() or list(path.glob("*.yaml")), file


def test_doctor_takes_its_arguments():
    (doctor,) = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["initContainers"]
    read = make_parser().parse_args([*doctor["command"][1:], *doctor["args"]])
    *of_vllm, option, config = container()["args"]
    assert read_rest(read) == of_vllm
    assert option == "--kv-transfer-config"
    assert read.kv_transfer_config == config
    assert read.fail_on == "error"
