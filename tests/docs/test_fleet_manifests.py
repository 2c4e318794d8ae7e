"""The manifests of examples/kubernetes/fleet: the schemas, the connector and a real Valkey."""

import asyncio
import base64
import contextlib
import http.server
import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from safe_offload.commands.doctor.tiers import check_safety, check_tier
from safe_offload.config.options import OffloadConfig
from safe_offload.config.tiers import TierConfig
from safe_offload.findings import Severity
from safe_offload.tiers.base import Result
from safe_offload.tiers.choice import open_tier
from tests.engine.http_server import hold_port
from tests.kubernetes_api import check, manifests
from tests.tiers.contract import FACTS, bytes_of, filled, name_of, slot_of, tier_at
from tests.valkey_server import (
    LOCALHOST,
    Certificates,
    redis_binary,
    wait_for,
)

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes" / "fleet"
FLEETS_PAGE = (ROOT / "docs" / "guides" / "fleets.md").read_text()
MANIFESTS = manifests(FOLDER)

DEPLOYMENT = MANIFESTS["Deployment", "vllm"]
STATEFUL_SET = MANIFESTS["StatefulSet", "kv-cache"]
JOB = MANIFESTS["Job", "kv-cache-secret"]


def pod(resource: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = resource["spec"]["template"]["spec"]
    return spec


def container(resource: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(resource)["containers"]
    result: dict[str, Any] = found
    return result


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


# ---- what leads to what ------------------------------------------------------------------------


def test_the_tier_is_the_service_and_its_password_the_secret():
    service = MANIFESTS["Service", "kv-cache"]
    (port,) = service["spec"]["ports"]
    assert (tier().location.host, tier().location.port) == ("kv-cache", port["port"])
    labels = STATEFUL_SET["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["metadata"]["name"] == STATEFUL_SET["spec"]["serviceName"]
    assert port["targetPort"] == container(STATEFUL_SET)["ports"][0]["name"]
    files = tier().password_file, tier().ca_file, tier().hmac_key_file
    of_the_tier = dict(zip(files, ("password", "ca.pem", "hmac.key"), strict=True))
    arguments = list_command()
    of_the_operator = {
        arguments[arguments.index(f"--{option}") + 1]: name
        for option, name in {"password-file": "operator-password", "ca-file": "ca.pem"}.items()
    }
    assert mounted_files(DEPLOYMENT) == of_the_tier | of_the_operator
    assert not list(check_safety(tier())), "nothing is missing of what doctor asks for"
    assert mounted_files(STATEFUL_SET) == {
        arguments_of_valkey()[f"--{option}"]: name
        for option, name in {
            "aclfile": "users.acl",
            "tls-ca-cert-file": "ca.pem",
            "tls-cert-file": "tls.pem",
            "tls-key-file": "tls.key",
        }.items()
    }, "each has what it needs, and no more"
    assert arguments_of_valkey()["--port"] == "0", "nothing without TLS"
    assert (
        int(arguments_of_valkey()["--tls-port"])
        == container(STATEFUL_SET)["ports"][0]["containerPort"]
    )


# ---- the Secret, made by the program of the manifest -------------------------------------------


class Api(http.server.BaseHTTPRequestHandler):
    """What the API does with a Secret, over TLS: it takes the first one, from that account."""

    secrets: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = 409 if self.secrets else 201
        is_known = self.headers["Authorization"] == "Bearer token-of-the-account"
        if not is_known or self.path != "/api/v1/namespaces/prod/secrets":
            status = 403
        elif status == 201:
            check(body)
            self.secrets.append(body)
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def api(certificates: Certificates) -> Iterator[int]:
    """Yield the port of an API server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.cert, certificates.key)
    with http.server.ThreadingHTTPServer((LOCALHOST, 0), Api) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def run_job(folder: Path, certificates: Certificates, token: str = "token-of-the-account") -> str:
    """Run the program of the Job as its container does; return what it says."""
    for name, text in {"token": token, "namespace": "prod"}.items():
        (folder / name).write_text(text)
    shutil.copy(certificates.ca, folder / "ca.crt")
    (source,) = MANIFESTS["ConfigMap", "kv-cache-secret"]["data"].values()
    (folder / "make.py").write_text(source)
    python, program, account, *rest = container(JOB)["command"]
    assert (python, Path(program).name, Path(account).name) == (
        "python3",
        "make.py",
        "serviceaccount",
    )
    with api(certificates) as port:
        done = subprocess.run(
            [sys.executable, folder / "make.py", folder, *rest],
            env={
                "PATH": os.environ["PATH"],
                "KUBERNETES_SERVICE_HOST": LOCALHOST,
                "KUBERNETES_SERVICE_PORT": str(port),
            },
            capture_output=True,
            text=True,
        )
    return done.stdout + done.stderr.splitlines()[-1] if done.returncode else done.stdout


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    """The files of the Secret that the Job makes."""
    folder = tmp_path_factory.mktemp("job")
    certificates = Certificates(folder / "api", LOCALHOST)
    assert run_job(folder, certificates) == "Created the Secret kv-cache.\n"
    assert run_job(folder, certificates).endswith("it stays as it is.\n")
    assert "403" in run_job(folder, certificates, "another")
    (made,) = Api.secrets
    assert made["metadata"] == {"name": "kv-cache", "namespace": "prod"}
    return {name: base64.b64decode(data).decode() for name, data in made["data"].items()}


def test_the_secret_has_the_files_that_are_mounted_and_no_others(secret):
    mounted = mounted_files(DEPLOYMENT) | mounted_files(STATEFUL_SET)
    assert set(secret) == set(mounted.values())
    for name in ("password", "operator-password"):
        assert secret[name] not in secret["users.acl"], "only its hash"
    assert "PRIVATE" not in secret["ca.pem"] + secret["tls.pem"]


def test_the_certificate_is_right_to_the_letter(secret, tmp_path):
    """As Python 3.13 checks it."""
    for name in ("ca.pem", "tls.pem"):
        (tmp_path / name).write_text(secret[name])
    strictly = ["-x509_strict", "-purpose", "sslserver", "-verify_hostname", "kv-cache.prod.svc"]
    verify = ["openssl", "verify", *strictly, "-CAfile", "ca.pem", "tls.pem"]
    subprocess.run(verify, cwd=tmp_path, check=True, capture_output=True)


# ---- a real server, started as the manifest says ----------------------------------------------

SMALL = {"--maxmemory": "64mb", "--io-threads": "2"}
UNKNOWN_TO_REDIS_7_0 = ("+client|no-touch ",)


def arguments_of_valkey() -> dict[str, str]:
    written = container(STATEFUL_SET)["args"]
    return dict(zip(written[::2], written[1::2], strict=True))


def mounted(resource: dict[str, Any], secret: dict[str, str], folder: Path) -> dict[str, str]:
    """Write the files that a container has; return by its paths where they are."""
    folder.mkdir()
    for name in mounted_files(resource).values():
        (folder / name).write_text(secret[name])
        (folder / name).chmod(0o440)
    return {path: str(folder / name) for path, name in mounted_files(resource).items()}


@contextlib.contextmanager
def running(binary: str, options: dict[str, str], folder: Path) -> Iterator[Path]:
    """Start a server; yield its socket."""
    path = folder / "socket"
    options |= SMALL | {"--unixsocket": str(path)}
    arguments = [word for option in options.items() for word in option]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([binary, *arguments], cwd=folder, stdout=log, stderr=log)
    try:
        wait_for(lambda: path.exists() or server.poll() is not None, "the server")
        assert server.poll() is None, (folder / "log").read_text()
        yield path
    finally:
        server.kill()
        server.wait()


@pytest.mark.skipif(redis_binary() is None, reason="no redis-server: `make servers`")
async def test_an_engine_and_the_command_of_the_page_use_the_server_over_tls(secret, tmp_path):
    """Redis 7.0 of Debian, which has TLS, and knows two commands of the ACL not yet."""
    acl = secret["users.acl"]
    for words in UNKNOWN_TO_REDIS_7_0:
        acl = acl.replace(words, "")
    files = mounted(STATEFUL_SET, secret | {"users.acl": acl}, tmp_path / "etc")
    held, port = hold_port()
    options = {name: files.get(value, value) for name, value in arguments_of_valkey().items()}
    options |= {"--tls-port": str(port), "--bind": LOCALHOST}
    written = transfer_config(DEPLOYMENT)["kv_connector_extra_config"]["tiers"][0]
    files = mounted(DEPLOYMENT, secret, tmp_path / "etc-of-vllm")
    here = {key: files.get(value, value) for key, value in written.items()}
    here["url"] = here["url"].replace("@kv-cache:6379", f"@localhost:{port}")
    (config,) = OffloadConfig.from_extra_config({"tiers": [here]}, world_size=2).tiers
    source, target = filled((4096, 512)), slot_of((4096, 512))
    with held, running(str(redis_binary()), options, tmp_path):
        opened, _ = open_tier(config, 4608, FACTS)
        try:
            assert await opened.spill([name_of(1)], [source]) == [Result.DONE]
            assert await opened.probe([name_of(1)]) == [True]
            assert await opened.fetch([name_of(1)], [target]) == [Result.DONE]
        finally:
            await opened.close()
        assert bytes_of(target) == bytes_of(source)
        command = [files.get(word, word) for word in list_command()]
        place = urlsplit(command[2])
        assert (place.hostname, place.port) == (tier().location.host, tier().location.port)
        command[2] = f"rediss://{place.username}@localhost:{port}"
        cli = [sys.executable, "-m", "safe_offload", *command]
        done = await asyncio.to_thread(subprocess.run, cli, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "1 namespace, 1 objects" in done.stdout
        url = here["url"].replace("rediss://", "redis://")
        plain = TierConfig.at(url, password_file=here["password_file"])
        with pytest.raises(OSError, match="write rediss://"):
            await tier_at(plain).probe([name_of(1)])
        found = await asyncio.to_thread(lambda: list(check_tier(config)))
        assert not [one for one in found if one.severity in (Severity.ERROR, Severity.WARNING)]


def list_command() -> list[str]:
    """What docs/guides/fleets.md types to see the objects, without the name of the program."""
    (command,) = re.findall(r"`safe-offload (cache ls rediss://[^`]*)`", FLEETS_PAGE)
    return shlex.split(command)
