"""The manifests of examples/kubernetes, against the schemas of the Kubernetes API."""

import argparse
import re
from typing import Any

import pytest
import yaml

from safe_offload.commands.cli import make_parser
from safe_offload.commands.doctor.command import read_rest
from safe_offload.compat.versions import make_serve_parser
from tests.kubernetes_api import VERSIONS, check, manifests
from tests.prometheus_rule import ALERTS, RULE, rule

FOLDER = RULE.parent
MANIFESTS = {kind: resource for (kind, _), resource in manifests(FOLDER).items()}


def container() -> dict[str, Any]:
    (found,) = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    result: dict[str, Any] = found
    return result


@pytest.mark.parametrize("version", VERSIONS)
def test_the_api_takes_it(version):
    fleet = manifests(FOLDER / "fleet")
    assert fleet
    for resource in (*MANIFESTS.values(), *fleet.values()):
        check(resource, version)


def test_the_rule_has_the_alerts_of_the_other_example():
    """If not: `python -m tests.prometheus_rule`."""
    assert RULE.read_text() == rule()
    assert MANIFESTS["PrometheusRule"]["spec"] == yaml.safe_load(ALERTS.read_text())


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
