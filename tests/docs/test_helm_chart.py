"""The chart of examples/helm, rendered by Helm: against manifests, schemas and the connector."""

import argparse
import copy
import json
import math
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
needs_helm = pytest.mark.skipif(not HELM, reason="no helm: `make servers` gets it")
MONITORED = {"serviceMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}
SECRET = "kv-cache"
VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    **{path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))},
    "monitored": MONITORED | {"serviceMonitor": {"enabled": True, "labels": {"release": "p"}}},
    "all-pods-of-a-machine": {"share": "hostPath", "doctor": {"enabled": False}},
    "two-pools": {"gpus": 4, "dataParallelSize": 2, "cpuBytesToUse": "512MiB", "vllmMemory": "1Gi"},
    "all-tiers": {
        "tiers": {
            "secretName": SECRET,
            "directory": {"enabled": True, "volume": {"emptyDir": {"sizeLimit": "2Ti"}}},
            "valkey": {"enabled": True, "url": "redis://kv:6379", "settings": {"ttl": "12h"}},
            "bucket": {"enabled": True, "credentialsSecretName": "keys"},
        },
        "doctor": {"tiers": True},
    },
    "encrypted": {"tiers": {"secretName": SECRET, "encrypt": True, "bucket": {"enabled": True}}},
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


def helm(*words: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Helm, which is handed values on its standard input."""
    command = [HELM, *words, "-f", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True)


def render(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    done = helm("template", "vllm", str(CHART), values=values)
    assert done.returncode == 0, done.stderr
    return resources_of(done.stdout)


@pytest.fixture(scope="module")
def rendered() -> dict[str, dict[tuple[str, str], dict[str, Any]]]:
    return {name: render(values) for name, values in VALUES.items()}


def pod_of(resources: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = resources["Deployment", "vllm"]["spec"]["template"]["spec"]
    return pod


def container_of(resources: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    (found,) = pod_of(resources)["containers"]
    container: dict[str, Any] = found
    return container


def transfer_config(arguments: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return config


def mib(quantity: str) -> int:
    unit = quantity.removesuffix("B")[-2:]
    return int(quantity.removesuffix("B")[:-2]) * {"Mi": 1, "Gi": 1024, "Ti": 1024**2}[unit]


# ---- the manifests -----------------------------------------------------------------------------


def comparable(resources: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
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


@needs_helm
def test_without_values_it_is_the_deployment_of_the_other_example(rendered):
    manifest = resources_of((EXAMPLES / "kubernetes" / "deployment.yaml").read_text())
    assert comparable(rendered["default"]) == comparable(manifest)


@needs_helm
def test_with_the_values_of_the_fleet_it_is_the_fleet_of_the_other_example(rendered):
    manifest = resources_of((EXAMPLES / "kubernetes" / "fleet" / "vllm.yaml").read_text())
    assert comparable(rendered["fleet"]) == comparable(manifest)


@needs_helm
def test_its_monitor_and_alerts_are_those_of_the_other_example(rendered):
    """If not: `python -m tests.prometheus_rule`."""
    assert IN_CHART.read_text() == groups()
    found = rendered["monitored"]
    assert found["PrometheusRule", "vllm"]["spec"] == yaml.safe_load(ALERTS.read_text())
    monitor = manifests(RULE.parent)["ServiceMonitor", "vllm"]["spec"]
    assert found["ServiceMonitor", "vllm"]["spec"]["endpoints"] == monitor["endpoints"]
    assert found["ServiceMonitor", "vllm"]["metadata"]["labels"]["release"] == "p"
    assert not {"ServiceMonitor", "PrometheusRule"} & {kind for kind, _ in rendered["default"]}


@needs_helm
@pytest.mark.parametrize("prefix", ["https://git.example/team/repo/blob/v1", "http://docs/x/"])
def test_its_alerts_link_to_the_runbook_below_the_address_that_is_set(prefix):
    resources = render({"prometheusRule": {"enabled": True, "runbookUrlPrefix": prefix}})
    spec = resources["PrometheusRule", "vllm"]["spec"]
    urls = [rule["annotations"]["runbook_url"] for rule in alerts_of(spec)]
    shipped = [rule["annotations"]["runbook_url"] for rule in alerts_of(yaml.safe_load(groups()))]
    assert urls == [f"{prefix.rstrip('/')}/{path}" for path in shipped]


def alerts_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in spec["groups"] for rule in group["rules"] if "alert" in rule]


# ---- the API, vLLM and the connector -----------------------------------------------------------


@needs_helm
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", VALUES)
def test_the_api_takes_it(rendered, name, version):
    for resource in rendered[name].values():
        check(resource, version)


@needs_helm
@pytest.mark.parametrize("name", VALUES)
def test_vllm_and_the_connector_take_the_arguments(rendered, name):
    arguments = container_of(rendered[name])["args"]
    read = make_serve_parser().parse_args(arguments)
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | VALUES[name]
    assert read.model_tag == values["model"]
    assert read.tensor_parallel_size * read.data_parallel_size == values["gpus"]
    extra = transfer_config(arguments)["kv_connector_extra_config"]
    config = OffloadConfig.from_extra_config(extra, world_size=read.tensor_parallel_size)
    assert config.sharing == ("node" if values["share"] else None)
    assert values["extraConfig"].items() <= extra.items()
    assert config.cpu_bytes_to_use == mib(values["cpuBytesToUse"]) << 20


@needs_helm
def test_the_nearest_tier_comes_first_and_all_are_sealed(rendered):
    pod, container = pod_of(rendered["all-tiers"]), container_of(rendered["all-tiers"])
    extra = transfer_config(container["args"])["kv_connector_extra_config"]
    tiers = OffloadConfig.from_extra_config(extra, world_size=2).tiers
    assert [tier.location.scheme for tier in tiers] == ["file", "redis", "s3"]
    assert {tier.hmac_key_file for tier in tiers} == {"/etc/kv-cache/hmac.key"}
    assert tiers[1].password_file == "/etc/kv-cache/password"
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    secret = volumes[mounted["/etc/kv-cache"]]["secret"]
    assert secret["secretName"] == SECRET
    assert [item["path"] for item in secret["items"]] == [
        "password",
        "operator-password",
        "hmac.key",
    ]
    assert "emptyDir" in volumes[mounted[tiers[0].location.path]]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]


@needs_helm
def test_an_encrypted_tier_has_its_keys_from_the_secret(rendered):
    pod, container = pod_of(rendered["encrypted"]), container_of(rendered["encrypted"])
    (tier,) = transfer_config(container["args"])["kv_connector_extra_config"]["tiers"]
    assert tier["encryption_key_file"] == "/etc/kv-cache/encryption.keys"
    assert "hmac_key_file" not in tier
    (volume,) = (each for each in pod["volumes"] if each["name"] == "kv-cache")
    assert [item["path"] for item in volume["secret"]["items"]] == ["encryption.keys"]


@needs_helm
@pytest.mark.parametrize("name", [name for name in VALUES if name != "all-pods-of-a-machine"])
def test_doctor_reads_the_same_arguments_without_the_tiers(rendered, name):
    (doctor,) = pod_of(rendered[name])["initContainers"]
    container = container_of(rendered[name])
    assert doctor["command"] == ["safe-offload", "doctor", "--fail-on", "error"]
    assert doctor["args"][:-1] == container["args"][:-1]
    config = transfer_config(container["args"])
    if not VALUES[name].get("doctor"):
        config["kv_connector_extra_config"].pop("tiers", None)
    assert transfer_config(doctor["args"]) == config
    for key in ("image", "env", "envFrom", "resources", "securityContext", "volumeMounts"):
        assert doctor.get(key) == container.get(key), key


# ---- memory ------------------------------------------------------------------------------------


@needs_helm
@pytest.mark.parametrize("name", VALUES)
def test_the_memory_is_what_the_guide_computes(rendered, name):
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | VALUES[name]
    resources, volumes = (
        container_of(rendered[name])["resources"],
        pod_of(rendered[name])["volumes"],
    )
    assert resources["limits"] == resources["requests"], "Guaranteed"
    pool, vllm, shm = (mib(values[key]) for key in ("cpuBytesToUse", "vllmMemory", "shmSize"))
    is_shared, num_engines = bool(values["share"]), values["dataParallelSize"]
    pools = math.ceil(pool * 1.01) if is_shared else pool * num_engines
    limit = mib(resources["limits"]["memory"])
    formula = max((pools + vllm) / 0.95, pools + vllm + 512) + shm
    assert formula <= limit < formula + 1024, "in whole GiB"
    config = OffloadConfig.from_extra_config(
        {"cpu_bytes_to_use": values["cpuBytesToUse"]}, world_size=1
    )

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
    (volume,) = (each for each in volumes if each["name"] == "shm")
    if values["share"] == "hostPath":
        assert volume["hostPath"] == {"path": "/dev/shm", "type": "Directory"}
        return
    assert volume["emptyDir"]["medium"] == "Memory"
    assert mib(volume["emptyDir"]["sizeLimit"]) == shm + (pools if is_shared else 0)


# ---- values ------------------------------------------------------------------------------------


def nested(path: str, value: object) -> dict[str, Any]:
    made: Any = value
    for key in reversed(path.split(".")):
        made = {key: made}
    result: dict[str, Any] = made
    return result


BAD = [
    ("cpuBytesToUse", 320, "cpuBytesToUse", "string"),
    ("cpuBytesToUse", "320G", "cpuBytesToUse", "GiB|TiB"),
    ("cpuBytesToUse", "320Gi", "cpuBytesToUse", "GiB|TiB"),
    ("vllmMemory", "40GiB", "vllmMemory", "Mi|Gi|Ti"),
    ("gpu", 2, "", "gpu"),
    ("gpus", "2", "gpus", "integer"),
    ("gpus", 0, "gpus", "1"),
    ("share", "node", "share", "hostPath"),
    ("args", "--max-model-len=8", "args", "array"),
    ("args", ["--max-model-len", 8], "args/1", "string"),
    ("tiers.directory.path", "mnt/kv", "tiers/directory/path", "^/"),
    ("tiers.valkey.url", "kv-cache:6379", "tiers/valkey/url", "rediss?"),
    ("tiers.valkey.url", "rediss://vllm:word@kv", "tiers/valkey/url", "rediss?"),
    ("tiers.valkey.enabled", "yes", "tiers/valkey/enabled", "boolean"),
    ("tiers.bucket.url", "https://bucket", "tiers/bucket/url", "s3|gs|az"),
    ("tiers.redis.enabled", True, "tiers", "redis"),
    ("serviceMonitor.interval", 15, "serviceMonitor/interval", "string"),
    ("startupProbe.httpGet", {}, "startupProbe", "httpGet"),
    ("prometheusRule.runbookUrlPrefix", "git.example/x", "prometheusRule/runbookUrlPrefix", "http"),
]
CONTRADICTIONS = [
    ({"share": "emptyDir", "tiers": {"bucket": {"enabled": True}}}, "do not go together"),
    ({"gpus": 2, "dataParallelSize": 3}, "write a multiple of dataParallelSize"),
    ({"shutdownTimeout": 600}, "write at least 735"),
    ({"tiers": {"directory": {"enabled": True}}}, "has no volume"),
    ({"extraConfig": {"tiers": []}}, "extraConfig has tiers"),
]


@needs_helm
@pytest.mark.parametrize(("path", "value", "place", "words"), BAD)
def test_helm_refuses_a_bad_value_and_says_where_and_what(path, value, place, words):
    done = helm("template", "vllm", str(CHART), values=nested(path, value))
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("- at "))
    assert line.startswith(f"- at '{f'/{place}' if place else ''}': ")
    assert words in line


@needs_helm
@pytest.mark.parametrize(("values", "words"), CONTRADICTIONS)
def test_helm_refuses_values_that_do_not_go_together(values, words):
    done = helm("template", "vllm", str(CHART), values=values)
    assert done.returncode == 1
    assert words in done.stderr


WRITTEN = {
    "-tp": "tensorParallelSize",
    "--tensor-parallel-size": "tensorParallelSize",
    "-dp": "dataParallelSize",
    "--data-parallel-size": "dataParallelSize",
    "--kv-transfer-config": "extraConfig",
    "--kv-offloading-size": "cpuBytesToUse",
    "--shutdown-timeout": "shutdownTimeout",
    "--port": "service.port",
}
"""Flags of vLLM that the chart writes or relies on, with the value to set in their place."""


@needs_helm
@pytest.mark.parametrize("flag", WRITTEN)
def test_a_flag_that_the_chart_writes_is_refused_in_every_spelling_that_vllm_reads(flag):
    """With dashes, underscores or both, its value after `=` or apart, and cut short."""
    parser = make_serve_parser()
    value = "{}" if flag == "--kv-transfer-config" else "3"
    underscored = f"{flag[:2]}{flag[2:].replace('-', '_')}"
    mixed = f"{flag[:2]}{flag[2:].replace('-', '_', 1)}"
    (meant,) = changes(parser, [flag, value])
    for spelled in dict.fromkeys((flag, underscored, mixed, flag[:-1])):
        for words in ([spelled, value], [f"{spelled}={value}"]):
            try:
                assert changes(parser, words) == {meant}
            except SystemExit:  # too short, so that it may be another
                continue
            done = helm("template", "vllm", str(CHART), values={"args": words})
            assert done.returncode == 1, words
            fix = f"args has {words[0]}, which the chart writes: set {WRITTEN[flag]} instead"
            assert fix in done.stderr


def changes(parser: argparse.ArgumentParser, words: list[str]) -> set[str]:
    """Names of what vLLM reads otherwise with these words."""
    before, after = (vars(parser.parse_args(["model", *more])) for more in ([], words))
    return {name for name, value in after.items() if value != before[name]}


# ---- the chart itself --------------------------------------------------------------------------


@needs_helm
def test_helm_lint_has_no_complaint():
    done = helm("lint", str(CHART), "--strict")
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


PAGES = sorted((EXAMPLES.parent / "docs").rglob("*.md"))
COMMANDS = [
    match[1].replace("\\\n", " ")
    for page in PAGES
    for match in re.finditer(r"^ {4}(helm (?:[^\n]*\\\n)*[^\n]*)", page.read_text(), re.MULTILINE)
]


@needs_helm
def test_the_commands_of_the_pages_run():
    assert COMMANDS
    for command in COMMANDS:
        program, *words = shlex.split(command)
        assert program == "helm"
        done = subprocess.run(
            [HELM, *words, "--dry-run=client"], cwd=EXAMPLES.parent, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_it_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
