"""What operators see of Mooncake Store: `safe-offload cache` and `doctor`."""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from safe_offload.commands.cli import main
from safe_offload.commands.doctor.tiers import check_tier
from safe_offload.config.tier_url import MASTER_PORT
from safe_offload.config.tiers import TierConfig
from safe_offload.findings import Severity
from safe_offload.tiers.base import Result
from safe_offload.tiers.mooncake import mooncake_store as store
from safe_offload.tiers.mooncake.client import Client
from safe_offload.tiers.mooncake.mooncake_store import PAGES_PORT
from safe_offload.tiers.naming import (
    DESCRIPTION_BYTES_MAX,
    PREFIX,
    description_key,
    key_of,
    namespace,
)
from tests.kubernetes_api import check, resources_of
from tests.mooncake_server import Master, mooncake_tier
from tests.tiers.contract import FACTS, SPACE, filled, name_of

MANIFEST = Path(__file__).parents[3] / "examples" / "kubernetes" / "mooncake" / "master.yaml"
OTHER_FACTS = {"model": "b", "rank": 0}


@pytest.fixture
async def stored(config):
    """Three objects of one model, and one of another."""
    for facts, count in ((FACTS, 3), (OTHER_FACTS, 1)):
        tier = mooncake_tier(config, facts)
        names = [name_of(number, space=namespace(facts)) for number in range(count)]
        spilled = await tier.spill(names, [filled((8192,), number) for number in range(count)])
        assert set(spilled) <= {Result.DONE, Result.PRESENT}
        await tier.close()


@pytest.fixture
def cache(master, capsys):
    """Run `safe-offload cache` on the master; return the exit status, and the JSON or the error."""

    pages = f"http://127.0.0.1:{master.metrics_port}"
    return lambda *arguments: run_on(pages, master, capsys, *arguments)


def test_namespaces_are_listed_checked_and_deleted(stored, cache, anyone):
    status, found = cache("ls")
    assert status == 0
    counts = {each["namespace"]: each["num_objects"] for each in found["namespaces"]}
    assert counts[SPACE.hex()] == 3
    models = {each["namespace"]: each["facts"].get("model") for each in found["namespaces"]}
    assert (models[SPACE.hex()], models[namespace(OTHER_FACTS).hex()]) == ("a", "b")

    assert cache("verify")[1]["bad"] == []
    key = key_of(name_of(1)).decode()
    good = bytes(anyone.get(key))
    anyone.remove(key, True)
    anyone.put(key, good[:-1] + bytes([good[-1] ^ 1]))
    status, found = cache("verify", "--delete")
    assert [each["file"] for each in found["bad"]] == [key]

    assert cache("rm", SPACE.hex())[1]["num_objects"] == 2
    counts = {each["namespace"]: each["num_objects"] for each in cache("ls")[1]["namespaces"]}
    assert counts == {namespace(OTHER_FACTS).hex(): 1}
    refused = cache("rm", "--all", "--older-than", "1d")
    assert "does not report when objects were last used" in refused[1]


@pytest.fixture
def pages():
    """The master's pages as anyone may serve them: what they yield of all keys, and its address."""
    served: dict[str, Iterable[bytes]] = {}

    class Page(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # whoever reads has enough
                for piece in served[self.path]:
                    self.wfile.write(piece)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield served, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    serving.join()
    server.server_close()


def run_on(pages, master, capsys, *arguments):
    action, *more = arguments
    status = main(["cache", action, master.url, *more, "--endpoint", pages, "--json"])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out.strip() else said.err


def test_keys_that_are_none_of_ours_are_passed_over(stored, pages, master, capsys):
    served, address = pages
    ours = [key_of(name_of(number)) for number in range(3)]
    strange = [
        *(b"\xff" * 40, PREFIX.encode() + b"\xfe", PREFIX.encode() + b"0" * 32 + b":\x80", b""),
        *(b"x" * 5000, key_of(name_of(4)) + b"x" * 5000, b"other\x1b[2J"),
    ]
    page = b"\n".join([*strange, ours[0], *strange, *ours[1:]])
    for length in (97, 4096, len(page)):  # wherever a piece ends
        served["/get_all_keys"] = [page[at : at + length] for at in range(0, len(page), length)]
        status, found = run_on(address, master, capsys, "ls")
        assert status == 0
        assert [(each["namespace"], each["num_objects"]) for each in found["namespaces"]] == [
            (SPACE.hex(), 3)
        ]


@pytest.mark.parametrize("piece", [b"a" * 65536, b"\n" * 65536, key_of(name_of(0)) + b"\n"])
def test_a_page_without_end_is_an_error(stored, pages, master, capsys, monkeypatch, piece):
    monkeypatch.setattr(store, "PAGES_BYTES_MAX", 1 << 20)
    served, address = pages
    served["/get_all_keys"] = itertools.repeat(piece)
    status, said = run_on(address, master, capsys, "ls")
    assert status == 1
    assert "it has not ended after 1.0" in said
    assert "Fix: give the address of the master's pages" in said


def test_objects_of_any_length_are_not_read(stored, cache, anyone, monkeypatch):
    """A description is no longer than one may be, an object as long as a slot may be."""
    description = description_key(SPACE).decode()
    anyone.remove(description, True)
    assert anyone.put(description, b"x" * (DESCRIPTION_BYTES_MAX + 1)) == 0
    lengths = []
    get = Client.get

    def noted(client, keys, slots):
        lengths.extend(sum(buffer.nbytes for buffer in slot) for slot in slots)
        return get(client, keys, slots)

    monkeypatch.setattr(Client, "get", noted)
    status, found = cache("ls")
    facts = {each["namespace"]: each["facts"] for each in found["namespaces"]}
    assert (status, facts[SPACE.hex()], max(lengths) <= DESCRIPTION_BYTES_MAX) == (0, {}, True)
    monkeypatch.setattr(store, "OBJECT_BYTES_MAX", 8192)
    status, found = cache("verify")
    assert (status, max(lengths) <= DESCRIPTION_BYTES_MAX) == (1, True)
    assert {each["problem"] for each in found["bad"]} == {
        "it cannot be read: it has 12.00 KiB, more than 8.00 KiB"
    }
    cache("rm", "--all")


def test_a_master_that_is_away_is_said_to_be(tmp_path, capsys):
    assert main(["cache", "ls", Master(tmp_path).url]) != 0
    assert "there is no connection to the master" in capsys.readouterr().err


def findings_of(config):
    return {found.id: found for found in check_tier(config)}


def test_doctor_tries_a_master_and_says_how_fast_it_is(master, segment, anyone):
    pages = f"http://127.0.0.1:{master.metrics_port}"
    found = findings_of(TierConfig.at(master.url, endpoint=pages))
    assert found["tiers.place"].severity is Severity.OK
    assert found["tiers.access"].severity is Severity.OK
    assert "read at" in found["tiers.rate"].found
    assert found["tiers.key"].severity is Severity.WARNING


def test_doctor_says_what_is_missing(tmp_path):
    away = Master(tmp_path)
    found = findings_of(TierConfig.at(away.url))["tiers.place"]
    assert "there is no connection to the master" in found.found
    assert "engines start without it" in found.found
    rdma = findings_of(TierConfig.at(away.url, protocol="rdma", device_name="mlx5_99"))
    assert "mlx5_99" in rdma["tiers.place"].found or "no RDMA device" in rdma["tiers.place"].found
    with Master(tmp_path / "empty") as master:
        pages = f"http://127.0.0.1:{master.metrics_port}"
        found = findings_of(TierConfig.at(master.url, endpoint=pages))["tiers.place"]
        assert "objects cannot be written (code -200)" in found.found
        assert found.severity is Severity.WARNING, "another engine may give memory"


def test_the_first_engine_that_gives_memory_is_not_kept_from_starting(tmp_path):
    """What it will give is not there yet, and the trial does not take that much."""
    with Master(tmp_path) as master:
        pages = f"http://127.0.0.1:{master.metrics_port}"
        found = findings_of(TierConfig.at(master.url, endpoint=pages, segment_bytes=1 << 50))
        assert found["tiers.access"].severity is Severity.OK
        assert "read at" in found["tiers.rate"].found


async def test_the_manifest_of_a_master_is_valid_and_starts_one(tmp_path):
    found = resources_of(MANIFEST.read_text())
    for resource in found.values():
        check(resource)
    (pod,) = (each for (kind, _), each in found.items() if kind == "Deployment")
    (container,) = pod["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["mooncake_master"]
    flags = dict(flag.removeprefix("--").split("=") for flag in container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"rpc": int(flags.pop("rpc_port")), "metrics": int(flags.pop("metrics_port"))}
    assert (ports["rpc"], ports["metrics"]) == (MASTER_PORT, PAGES_PORT)
    with Master(tmp_path, **flags) as master:
        tier = mooncake_tier(TierConfig.at(master.url), FACTS)
        assert await tier.probe([name_of(1)]) == [False]
        await tier.close()
