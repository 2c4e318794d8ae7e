"""The chart of examples/helm, rendered by Helm: against manifests, schemas and the connector."""

import copy
import json
import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from safe_offload import __version__
from safe_offload.compat.versions import make_serve_parser
from safe_offload.config.options import OffloadConfig
from safe_offload.errors import ConfigError
from safe_offload.worker.memory.host_memory import check_host_bytes
from tests.kubernetes_api import VERSIONS, check, manifests, resources_of
from tests.programs import find_program
from tests.prometheus_rule import ALERTS, EXAMPLES, IN_CHART, RULE, groups

FOLDER = EXAMPLES / "helm"
CHART = FOLDER / "safe-offload"
HELM = find_program("helm") or ""
pytestmark = pytest.mark.skipif(not HELM, reason="no helm: `make servers` gets it")
PREFIX = "https://git.example/team/repo/blob/v1"
VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    **{path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))},
    "monitored": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "p"}},
        "prometheusRule": {"enabled": True, "runbookUrlPrefix": f"{PREFIX}/"},
    },
    "all-pods-of-a-machine": {"share": "hostPath", "doctor": {"enabled": False}},
    "two-pools": {"gpus": 4, "dataParallelSize": 2, "cpuBytesToUse": "512MiB", "vllmMemory": "1Gi"},
    "all-tiers": {
        "tiers": {
            "secretName": "keys",
            "encrypt": True,
            "directory": {"enabled": True, "volume": {"emptyDir": {"sizeLimit": "2Ti"}}},
            "valkey": {"enabled": True, "url": "redis://kv:6379", "settings": {"ttl": "12h"}},
            "bucket": {"enabled": True, "credentialsSecretName": "of-the-bucket"},
        },
        "doctor": {"tiers": True},
    },
    "everything-else": {
        "args": ["--served-model-name=it's", "--enforce-eager"],
        "extraConfig": {"min_load_tokens": 0, "kv_hints": True, "pin_share": 0.5, "verify": "off"},
        "extraEnv": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}],
        "extraVolumes": [{"name": "more", "configMap": {"name": "more"}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "models": {"volume": {"persistentVolumeClaim": {"claimName": "models"}}},
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccountName": "vllm",
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
    },
}
Resources = dict[tuple[str, str], dict[str, Any]]


def helm(*words: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Helm, with values on its standard input."""
    command = [HELM, *words, "-f", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True)


@pytest.fixture(scope="module")
def rendered() -> dict[str, Resources]:
    found = {}
    for name, values in VALUES.items():
        done = helm("template", "vllm", str(CHART), values=values)
        assert done.returncode == 0, done.stderr
        found[name] = resources_of(done.stdout)
    return found


def pod_of(resources: Resources) -> dict[str, Any]:
    pod: dict[str, Any] = resources["Deployment", "vllm"]["spec"]["template"]["spec"]
    return pod


def container_of(resources: Resources) -> dict[str, Any]:
    (found,) = pod_of(resources)["containers"]
    container: dict[str, Any] = found
    return container


def transfer_config(arguments: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return config


def mib(quantity: str) -> int:
    unit = quantity.removesuffix("B")[-2:]
    return int(quantity.removesuffix("B")[:-2]) * {"Mi": 1, "Gi": 1024, "Ti": 1024**2}[unit]


def comparable(resources: Resources) -> dict[str, dict[str, Any]]:
    """Return them without what only Helm writes: its labels, an image's policy, a default type."""
    found = {}
    for (kind, _), resource in resources.items():
        made = copy.deepcopy(resource)
        spec = made["spec"]
        pods = [spec["template"]["spec"]] if kind == "Deployment" else []
        labelled = [made["metadata"], *([spec["template"]["metadata"]] if pods else [])]
        selectors = [spec["selector"].get("matchLabels", spec["selector"])]
        for labels in [each["labels"] for each in labelled] + selectors:
            for key in [key for key in labels if key != "app.kubernetes.io/name"]:
                del labels[key]
        if kind == "Service":
            assert spec.pop("type", "ClusterIP") == "ClusterIP"
        for pod in pods:
            for container in [*pod["initContainers"], *pod["containers"]]:
                assert container.pop("imagePullPolicy", "IfNotPresent") == "IfNotPresent"
                container["args"] = [*container["args"][:-1], transfer_config(container["args"])]
        found[kind] = made
    return found


@pytest.mark.parametrize(
    ("name", "file"), [("default", "deployment.yaml"), ("fleet", "fleet/vllm.yaml")]
)
def test_it_is_the_deployment_of_the_other_example(rendered, name, file):
    manifest = resources_of((EXAMPLES / "kubernetes" / file).read_text())
    assert comparable(rendered[name]) == comparable(manifest)


def test_its_monitor_and_alerts_are_those_of_the_other_example(rendered):
    """If not: `python -m tests.prometheus_rule`. The runbook is below the address that is set."""
    assert IN_CHART.read_text() == groups()
    found = rendered["monitored"]
    spec = found["PrometheusRule", "vllm"]["spec"]
    expected = yaml.safe_load(ALERTS.read_text())
    for rule in [rule for group in expected["groups"] for rule in group["rules"]]:
        if annotations := rule.get("annotations"):
            annotations["runbook_url"] = f"{PREFIX}/{annotations['runbook_url']}"
    assert spec == expected
    monitor = manifests(RULE.parent)["ServiceMonitor", "vllm"]["spec"]
    assert found["ServiceMonitor", "vllm"]["spec"]["endpoints"] == monitor["endpoints"]
    assert found["ServiceMonitor", "vllm"]["metadata"]["labels"]["release"] == "p"
    assert not {"ServiceMonitor", "PrometheusRule"} & {kind for kind, _ in rendered["default"]}


@pytest.mark.parametrize("name", VALUES)
def test_the_api_vllm_the_connector_and_doctor_take_it(rendered, name):
    for resource in rendered[name].values():
        for version in VERSIONS:
            check(resource, version)
    container = container_of(rendered[name])
    read = make_serve_parser().parse_args(container["args"])
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | VALUES[name]
    assert read.model_tag == values["model"]
    assert read.tensor_parallel_size * read.data_parallel_size == values["gpus"]
    written = transfer_config(container["args"])
    extra = written["kv_connector_extra_config"]
    config = OffloadConfig.from_extra_config(extra, world_size=read.tensor_parallel_size)
    assert config.sharing == ("node" if values["share"] else None)
    assert values["extraConfig"].items() <= extra.items()
    assert config.cpu_bytes_to_use == mib(values["cpuBytesToUse"]) << 20
    for doctor in pod_of(rendered[name]).get("initContainers", ()):
        assert doctor["command"] == ["safe-offload", "doctor", "--fail-on", "error"]
        assert doctor["args"][:-1] == container["args"][:-1]
        if not VALUES[name].get("doctor"):
            extra.pop("tiers", None)
        assert transfer_config(doctor["args"]) == written
        for key in ("image", "env", "envFrom", "resources", "securityContext", "volumeMounts"):
            assert doctor.get(key) == container.get(key), key


def test_the_nearest_tier_comes_first_and_all_are_encrypted(rendered):
    pod, container = pod_of(rendered["all-tiers"]), container_of(rendered["all-tiers"])
    extra = transfer_config(container["args"])["kv_connector_extra_config"]
    tiers = OffloadConfig.from_extra_config(extra, world_size=2).tiers
    assert [tier.location.scheme for tier in tiers] == ["file", "redis", "s3"]
    keys = "/etc/kv-cache/encryption.keys"
    assert {(t.encryption_key_file, t.hmac_key_file) for t in tiers} == {(keys, None)}
    assert tiers[1].password_file == "/etc/kv-cache/password"
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    secret = volumes[mounted["/etc/kv-cache"]]["secret"]
    assert secret["secretName"] == "keys"
    paths = {item["path"] for item in secret["items"]}
    assert paths == {"password", "operator-password", "encryption.keys"}
    assert "emptyDir" in volumes[mounted[tiers[0].location.path]]
    assert container["envFrom"] == [{"secretRef": {"name": "of-the-bucket"}}]


@pytest.mark.parametrize("name", VALUES)
def test_the_memory_is_what_the_guide_computes(rendered, name):
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | VALUES[name]
    resources = container_of(rendered[name])["resources"]
    assert resources["limits"] == resources["requests"], "Guaranteed"
    pool, vllm, shm = (mib(values[key]) for key in ("cpuBytesToUse", "vllmMemory", "shmSize"))
    is_shared = bool(values["share"])
    pools = -(-pool * 101 // 100) if is_shared else pool * values["dataParallelSize"]
    limit = mib(resources["limits"]["memory"])
    formula = max((pools + vllm) / 0.95, pools + vllm + 512) + shm
    assert formula <= limit < formula + 1024, "in whole GiB"
    extra = {"cpu_bytes_to_use": values["cpuBytesToUse"]}
    config = OffloadConfig.from_extra_config(extra, world_size=1)

    def start(available: int) -> None:
        check_host_bytes(
            config,
            bytes_per_rank=pools << 20,
            num_ranks_on_host=1,
            available_bytes=available << 20,
        )

    start(limit - shm - vllm)
    with pytest.raises(ConfigError, match="must stay free"):
        start(pools + 511)
    volumes = pod_of(rendered[name])["volumes"]
    (volume,) = (each for each in volumes if each["name"] == "shm")
    if values["share"] == "hostPath":
        assert volume["hostPath"] == {"path": "/dev/shm", "type": "Directory"}
        return
    assert volume["emptyDir"]["medium"] == "Memory"
    assert mib(volume["emptyDir"]["sizeLimit"]) == shm + (pools if is_shared else 0)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"gpu": 2}, "additional properties 'gpu' not allowed"),
    ({"cpuBytesToUse": "320Gi"}, "- at '/cpuBytesToUse': '320Gi' does not match pattern"),
    ({"tiers": {"valkey": {"url": "rediss://vllm:word@kv"}}}, "- at '/tiers/valkey/url': "),
    ({"share": "emptyDir", "tiers": {"bucket": {"enabled": True}}}, "do not go together"),
    ({"gpus": 2, "dataParallelSize": 3}, "write a multiple of dataParallelSize"),
    ({"shutdownTimeout": 600}, "write at least 735"),
    ({"tiers": {"directory": {"enabled": True}}}, "has no volume"),
    ({"extraConfig": {"tiers": []}}, "extraConfig has tiers"),
]


@pytest.mark.parametrize(("values", "words"), BAD)
def test_helm_refuses_a_bad_value_and_says_where_and_what(values, words):
    done = helm("template", "vllm", str(CHART), values=values)
    assert done.returncode == 1
    assert words in done.stderr


WRITTEN = {
    "-tp": "tensorParallelSize",
    "--tensor-parallel-size": "tensorParallelSize",
    "-dp": "dataParallelSize",
    "--data_parallel-size": "dataParallelSize",
    "--kv_transfer_config": "extraConfig",
    "--kv-offloading-siz": "cpuBytesToUse",
    "--shutdown-timeout": "shutdownTimeout",
    "--port": "service.port",
}
"""Flags of vLLM that the chart writes or relies on, with the value to set in their place.

Some with underscores, some cut short, as vLLM reads them too.
"""


@pytest.mark.parametrize("flag", WRITTEN)
def test_a_flag_that_the_chart_writes_is_refused_in_spellings_that_vllm_reads(flag):
    value = "{}" if "transfer" in flag else "3"
    for words in ([flag, value], [f"{flag}={value}"]):
        make_serve_parser().parse_args(["model", *words])
        done = helm("template", "vllm", str(CHART), values={"args": words})
        assert done.returncode == 1, words
        fix = f"args has {words[0]}, which the chart writes: set {WRITTEN[flag]} instead"
        assert fix in done.stderr


def test_helm_lint_has_no_complaint():
    done = helm("lint", str(CHART), "--strict")
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


PAGES = sorted((EXAMPLES.parent / "docs").rglob("*.md"))
COMMANDS = [
    match[1].replace("\\\n", " ")
    for page in PAGES
    for match in re.finditer(r"^ {4}(helm (?:[^\n]*\\\n)*[^\n]*)", page.read_text(), re.MULTILINE)
]


def test_the_commands_of_the_pages_run():
    assert COMMANDS
    for command in COMMANDS:
        program, *words = shlex.split(command)
        assert program == "helm"
        done = subprocess.run(
            [HELM, *words, "--dry-run=client"], cwd=EXAMPLES.parent, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
