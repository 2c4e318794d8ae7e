"""The Compose file of examples/compose: its services agree, and run here without Docker."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from safe_offload.commands.doctor.tiers import check_tier
from safe_offload.compat.versions import make_serve_parser
from safe_offload.config.options import OffloadConfig
from safe_offload.config.tiers import TierConfig
from safe_offload.findings import Severity
from tests.docs import test_fleet_manifests as fleet
from tests.programs import find_program
from tests.valkey_server import Server

pytestmark = pytest.mark.skipif(
    None in (find_program("redis-cli"), find_program("promtool")), reason="`make servers`"
)
FOLDER = fleet.ROOT / "examples" / "compose"
FILE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES = FILE["services"]
VLLM, VALKEY = SERVICES["vllm"], SERVICES["kv-cache"]
FLAGS = dict(zip(VALKEY["command"][1::2], VALKEY["command"][2::2], strict=True))
PASSWORD = "2f6c"


def tier(replaced: Mapping[str, object] | None = None) -> TierConfig:
    """Return the engine's tier, with other words in the place of some."""
    written = VLLM["command"][-1]
    for old, new in (replaced or {}).items():
        written = written.replace(old, str(new))
    extra: dict[str, Any] = json.loads(written)["kv_connector_extra_config"]
    (found,) = OffloadConfig.from_extra_config(extra, world_size=1).tiers
    return found


def port(service: str) -> str:
    """Return the port of a service, which only this machine reaches from outside."""
    (written,) = SERVICES[service]["ports"]
    address, outside, inside = written.split(":")
    assert (address, outside) == ("127.0.0.1", inside)
    return str(inside)


def on_host(service: str, path: str) -> Path:
    """Return the file or folder of the checkout that is mounted there."""
    source, target, mode = SERVICES[service]["volumes"][0].split(":")
    assert mode == "ro"
    return (FOLDER / source / Path(path).relative_to(target)).resolve(strict=True)


def test_images_have_the_versions_of_the_other_examples():
    images = {name: service["image"] for name, service in SERVICES.items()}
    assert images["vllm"] == fleet.container(fleet.DEPLOYMENT)["image"]
    assert images["kv-cache"] == fleet.container(fleet.STATEFUL_SET)["image"]
    assert f" {images['grafana']}\n" in (FOLDER.parent / "observability" / "run.sh").read_text()
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images.values())
    assert (FOLDER / VLLM["build"]["context"] / VLLM["build"]["dockerfile"]).is_file()


def test_vllm_takes_its_arguments_and_finds_valkey():
    read = make_serve_parser().parse_args(VLLM["command"])
    (device,) = VLLM["deploy"]["resources"]["reservations"]["devices"]
    assert read.tensor_parallel_size == device["count"]
    assert VLLM["stop_grace_period"] == "7m30s"
    assert read.shutdown_timeout + 120 <= 450
    assert (tier().location.host, str(tier().location.port)) == ("kv-cache", FLAGS["--port"])
    assert set(VLLM["networks"]) & set(VALKEY["networks"]) == {"kv-cache"}
    for service in (VLLM, VALKEY):
        (secret,) = service["secrets"]
        assert tier().password_file == f"/run/secrets/{secret['source']}"


def test_valkey_is_that_of_the_fleet_without_tls():
    manifest = fleet.arguments_of_valkey()
    plain = {name for name in manifest if not name.startswith("--tls-")}
    assert FLAGS.keys() == plain
    own = {"--port", "--maxmemory", "--aclfile"}
    assert {name: FLAGS[name] for name in plain - own} == {n: manifest[n] for n in plain - own}
    used, limit = (int(text[:-2]) for text in (FLAGS["--maxmemory"], VALKEY["mem_limit"]))
    assert 0.85 < used / limit < 0.9
    (program,) = fleet.MANIFESTS["ConfigMap", "kv-cache-secret"]["data"].values()
    (rules,) = re.findall(r"user vllm on \S+ (.*?)\\n", re.sub(r'"\s+"', "", program))
    assert FILE["configs"]["users.acl"]["content"].endswith(f" {rules}\n")


def test_valkey_starts_and_doctor_and_health_check_are_content(tmp_path):
    (acl,) = VALKEY["configs"]
    assert FLAGS["--aclfile"] == acl["target"]
    content = FILE["configs"][acl["source"]]["content"]
    variable = FILE["secrets"]["kv-password"]["environment"]
    users, password = tmp_path / "users.acl", tmp_path / "password"
    users.write_text(re.sub(r"\$\{" + variable + r":\?[^}]+\}", PASSWORD, content))
    password.write_text(PASSWORD)
    options = {name[2:]: value for name, value in FLAGS.items() if name != "--port"}
    options |= {"aclfile": str(users), "maxmemory": "64mb"}
    with Server(tmp_path / "valkey", options) as server:
        here = tier({"kv-cache:6379": server.host_port, str(tier().password_file): password})
        found = list(check_tier(here))
        assert "tiers.rate" in {one.id for one in found}
        assert not [one for one in found if one.severity in (Severity.ERROR, Severity.WARNING)]
        _, check = VALKEY["healthcheck"]["test"]
        check = check.replace("$$", "$").replace("/run/secrets/kv-password", str(password))
        check = check.replace("valkey-cli", f"{find_program('redis-cli')} -p {server.port}")
        check = check.replace("VALKEYCLI_AUTH", "REDISCLI_AUTH")
        assert subprocess.run(check, shell=True).returncode == 0
        password.write_text("another")
        assert subprocess.run(check, shell=True).returncode != 0


def test_prometheus_scrapes_vllm(tmp_path):
    """Its command runs here, with promtool in the place of the server."""
    *shell, script = SERVICES["prometheus"]["entrypoint"] + SERVICES["prometheus"]["command"]
    script = script.replace("/tmp", str(tmp_path))
    script = script.replace("/observability", str(on_host("prometheus", "/observability")))
    check = rf"{find_program('promtool')} check config \1"
    script = re.sub(r"exec prometheus --config.file=(\S+).*", check, script)
    done = subprocess.run([*shell, script], capture_output=True, text=True)
    assert "1 rule files found" in done.stdout
    assert done.returncode == 0, done.stderr
    (job,) = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"vllm:{port('vllm')}"]}]


def test_grafana_has_the_dashboard_and_this_prometheus():
    variables = SERVICES["grafana"]["environment"]
    provisioning = on_host("grafana", variables["GF_PATHS_PROVISIONING"])

    def provisioned(file: str) -> Any:
        text = (provisioning / file).read_text()
        return yaml.safe_load(re.sub(r"\$(\w+)", lambda name: variables[name[1]], text))

    (source,) = provisioned("datasources/prometheus.yaml")["datasources"]
    assert source["url"] == f"http://prometheus:{port('prometheus')}"
    (provider,) = provisioned("dashboards/safe_offload.yaml")["providers"]
    folder = on_host("grafana", provider["options"]["path"])
    assert port("grafana") == "3000"
    assert [file.name for file in folder.rglob("*.json")] == ["dashboard.json"]
