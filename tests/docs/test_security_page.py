"""What docs/guides/security.md tells users to write: the ACLs on a real server, and the rest."""

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.retry import Retry

from safe_offload.commands.cli import main
from safe_offload.config.tier_list import tiers
from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Result
from safe_offload.tiers.naming import key_of
from safe_offload.tiers.sealed_tier import SealedTier
from safe_offload.tiers.seals.seal import PLAIN
from safe_offload.tiers.valkey import commands
from safe_offload.tiers.valkey.commands import allowing
from tests.tiers.contract import filled, name_of, slot_of, tier_at
from tests.valkey_server import Cluster, Server, redis_binary, valkey_binary

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "security.md").read_text()
FLEET = ROOT / "examples" / "kubernetes" / "fleet"
SECRET = (FLEET / "secret.yaml").read_text()
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
NAMES = [name_of(number) for number in range(4)]
ADMIN = "user admin on nopass ~* &* +@all\n"


def blocks(language: str) -> list[str]:
    return [found[2] for found in BLOCK.finditer(PAGE) if found[1] == language]


ACLS = "".join(blocks("text"))
UNKNOWN_TO_REDIS_7_0 = re.findall(
    r"`(\+\S+)`", re.findall(r"Redis 7.0 does not start.*? omit", PAGE)[0]
)


class ServerOfThePage(Server):
    """A server with the users of the page, and one of the test's."""

    def client(self, user: str = "admin") -> Redis:
        return Redis(
            unix_socket_path=str(self.socket),
            username=user,
            password="PASSWORD",
            socket_timeout=250,
        )

    def tier(self, user: str, database: int = 0, **values: Any) -> SealedTier:
        url = f"redis://{user}:PASSWORD@{self.host_port}/{database}"
        return tier_at(TierConfig.at(url, **values))

    def refused(self) -> set[str]:
        """What the server refused to any client."""
        with self.client() as client:
            return {str(entry["object"]) for entry in client.acl_log()}


def _version(binary: str) -> str:
    return subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module", params=["valkey", "redis"])
def running(request, tmp_path_factory):
    binary = valkey_binary() if request.param == "valkey" else redis_binary()
    if binary is None:
        pytest.skip("no redis-server: `make servers`")
    folder = tmp_path_factory.mktemp("acl")
    users = folder / "users.acl"
    text = ADMIN + ACLS
    if request.param == "redis" and " v=7.0." in _version(binary):
        for word in UNKNOWN_TO_REDIS_7_0:
            text = text.replace(f" {word}", "")
    users.write_text(text)
    with ServerOfThePage(folder, {"aclfile": str(users)}, binary=binary) as server:
        yield server


@pytest.fixture
def server(running):
    with running.client() as client:
        client.flushall()
        client.acl_log_reset()
    return running


def rights_of(user: str, acls: str = ACLS) -> set[str]:
    (line,) = re.findall(rf"^user {user} .*", acls, re.MULTILINE)
    return {word[1:] for word in line.split() if word.startswith("+")}


def test_the_users_of_the_page_may_do_what_is_sent():
    assert re.findall(r"^user (\S+)", ACLS, re.MULTILINE) == ["default", *NOT_ALLOWED]
    assert rights_of("vllm") == set(commands.EVERY)
    reading = (*commands.READING, *commands.LOGIN, commands.SLOTS)
    assert rights_of("vllm-reader") == set(reading)
    operators = {*commands.LOOKING, *commands.DELETING}
    assert rights_of("kv-operator") == {*operators, "client|no-touch"}
    (program,) = re.findall(r"    ACL = (\(.*?\n    \))", SECRET, re.DOTALL)
    secret: str = ast.literal_eval(program)
    assert rights_of("vllm", secret) == {*commands.EVERY, "ping"}, "a probe pings"
    assert rights_of("kv-operator", secret) == rights_of("kv-operator")
    assert "user default off" in secret
    for user in ("vllm", "kv-operator"):
        (line,) = re.findall(rf"^user {user} .*", secret, re.MULTILINE)
        known = ["resetkeys", "~safe-offload:*", "resetchannels", "nocommands"]
        assert [word for word in line.split()[4:] if word[0] != "+"] == known


@pytest.mark.parametrize("values", [{}, {"ttl_s": 3600.0, "database": 1}], ids=["", "all"])
async def test_an_engine_needs_no_other_right(server, values):
    tier = server.tier("vllm", **values)
    sources = [filled((4096,), number) for number in range(4)]
    targets = [slot_of((4096,)) for _ in NAMES]
    assert await tier.spill(NAMES, sources) == [Result.DONE] * 4
    assert await tier.spill(NAMES, sources) == [Result.PRESENT] * 4
    with server.client() as client:
        client.select(values.get("database", 0))
        client.set(key_of(NAMES[0]), b"damaged")
    assert await tier.probe(NAMES) == [True] * 4
    assert await tier.fetch(NAMES, targets) == [Result.CORRUPT] + [Result.DONE] * 3
    with server.client() as client:
        client.select(values.get("database", 0))
        assert not client.exists(key_of(NAMES[0])), "it was deleted"
    await tier.close()
    assert server.refused() == set()


@pytest.fixture
def cache(server, capsys):
    """Run `safe-offload cache` as a user; return its exit status and what is said."""

    def run(user, action, *more):
        url = f"redis://{user}:PASSWORD@{server.host_port}"
        status = main(["cache", action, url, *more])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


ACTIONS = [("ls",), ("verify",), ("rm", "--all", "--older-than", "7d"), ("rm", "--all")]


def stored(server: ServerOfThePage) -> None:
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        for name in NAMES:
            client.set(key_of(name), PLAIN.header(name, ()))


def test_an_operator_needs_no_other_right(server, cache):
    stored(server)
    for action in ACTIONS:
        status, said = cache("kv-operator", *action)
        assert (status, "denies" in said) == (0, False), said
    assert cache("kv-operator", "ls")[1].startswith("No engine has stored anything")
    assert server.refused() == set()


async def test_an_engine_that_lacks_a_right_says_which(server, caplog):
    """Not those that it has."""
    with server.client() as client:
        rights = [f"+{right}" for right in commands.EVERY if right != "set"]
        client.execute_command("ACL", "SETUSER", "less", "on", "nopass", "~safe-offload:*", *rights)
    tier = server.tier("less")
    assert await tier.spill(NAMES[:1], [filled((4096,))]) == [Result.REFUSED]
    await tier.close()
    (line,) = [line for line in caplog.messages if "NOPERM" in line]
    assert line.endswith("answers NOPERM. Its user may not run set: add +set to its ACL.")


async def test_a_user_that_may_not_choose_a_database_is_told_so(server, caplog):
    with server.client() as client:
        rights = f"other on nopass ~safe-offload:* {allowing(commands.EVERY)} -select".split()
        client.execute_command("ACL", "SETUSER", *rights)
    tier = tier_at(TierConfig.at(f"redis://other@{server.host_port}/1"))
    assert await tier.fetch(NAMES[:1], [slot_of((4096,))]) == [Result.FAILED]
    await tier.close()
    assert "Give the user +select, or remove the number from the url" in caplog.text


async def test_a_reader_reads_and_does_not_write(server):
    writer, reader = server.tier("vllm"), server.tier("vllm-reader")
    await writer.spill(NAMES[:2], [filled((4096,))] * 2)
    assert await reader.probe(NAMES) == [True, True, False, False]
    assert await reader.fetch(NAMES[:2], [slot_of((4096,))] * 2) == [Result.DONE] * 2
    assert server.refused() == set()
    assert await reader.spill(NAMES[2:], [filled((4096,))] * 2) == [Result.REFUSED] * 2
    assert server.refused() == {"set"}
    for tier in (writer, reader):
        await tier.close()


NOT_ALLOWED = {
    "vllm": (
        *("GET others", "SET others 1", "FLUSHALL", "CONFIG SET maxmemory 1", "KEYS *", "SCAN 0"),
        *("EVAL return_1 0", "SWAPDB 0 1", "CLIENT KILL TYPE normal", "CLUSTER RESET"),
        *("ACL LIST", "MONITOR", "SHUTDOWN", "REPLICAOF other 6379"),
    ),
    "vllm-reader": ("DEL safe-offload:a", "GET others"),
    "kv-operator": ("SET safe-offload:a 1", "UNLINK others", "STRLEN others"),
}


@pytest.mark.parametrize("user", NOT_ALLOWED)
def test_a_user_may_do_nothing_else(server, user):
    with server.client(user) as client:
        for command in NOT_ALLOWED[user]:
            with pytest.raises(NoPermissionError):
                client.execute_command(*command.split())


def test_nobody_comes_in_without_a_password(server):
    retry = Retry(NoBackoff(), 0)
    with Redis(unix_socket_path=str(server.socket), retry=retry) as client:
        with pytest.raises(AuthenticationError):
            client.ping()
        with pytest.raises(AuthenticationError):
            client.execute_command("AUTH", "vllm", "another")


async def test_an_engine_needs_no_other_right_on_a_cluster(tmp_path):
    with Cluster(tmp_path) as cluster:
        for one in cluster.servers:
            with one.client() as client:
                for line in ACLS.splitlines()[1:]:
                    _, user, *rules = line.split()
                    client.execute_command("ACL", "SETUSER", user, *rules)
        url = f"redis://vllm:PASSWORD@{cluster.servers[0].host_port}"
        tier = tier_at(TierConfig.at(url))
        names = [name_of(number) for number in range(30)]
        sources = [filled((512,), number) for number in range(30)]
        assert await tier.spill(names, sources) == [Result.DONE] * 30
        assert await tier.fetch(names, [slot_of((512,)) for _ in names]) == [Result.DONE] * 30
        await tier.close()
        for one in cluster.servers:
            with one.client() as client:
                assert client.acl_log() == []


def test_the_policy_of_a_bucket_allows_what_is_needed_and_no_more():
    tier, policy, _ = (json.loads(block) for block in blocks("json"))
    assert tiers().read("tiers", [tier])[0].encryption_key_file
    assert policy["Version"] == "2012-10-17"
    allowed = {statement["Resource"]: statement["Action"] for statement in policy["Statement"]}
    assert {each["Effect"] for each in policy["Statement"]} == {"Allow"}
    assert allowed == {
        "arn:aws:s3:::my-kv-cache/*": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"],
        "arn:aws:s3:::my-kv-cache": "s3:ListBucket",
    }
