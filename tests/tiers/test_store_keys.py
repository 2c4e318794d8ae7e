"""What objects are called on a server."""

import subprocess
import sys

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError
from safe_offload.tiers.base import Name
from safe_offload.tiers.choice import open_tier
from safe_offload.tiers.naming import description_key, key_of, name_of_key, namespace_of_key
from tests.tiers.contract import FACTS, SPACE, name_of

NAMES = [name_of(1), name_of(2, 7), Name(SPACE, 65535, b"\xff"), Name(bytes(16), 0, bytes(64))]


@pytest.mark.parametrize("name", NAMES)
def test_a_key_says_which_object_it_is(name):
    key = key_of(name)
    assert name_of_key(key) == name
    assert namespace_of_key(key) == name.namespace.hex()
    assert key.isascii()
    assert b"{" not in key, "a hash tag would put all objects on one server of a cluster"


def test_keys_differ():
    assert len({key_of(name) for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"safe-offload",
        b"safe-offload:",
        b"safe-offload::",
        b"other:" + key_of(name_of(1)).partition(b":")[2],
        key_of(name_of(1))[:-1],
        key_of(name_of(1)).upper(),
        key_of(name_of(1)) + b"zz",
        key_of(name_of(1)) + b":00",
        b"\xff" + key_of(name_of(1)),
        description_key(SPACE),
    ],
)
def test_other_keys_are_no_objects(key):
    assert name_of_key(key) is None


def test_the_key_of_a_description_says_what_it_describes():
    assert namespace_of_key(description_key(SPACE)) == SPACE.hex()
    assert namespace_of_key(b"safe-offload:zz:namespace.json") == ""
    assert namespace_of_key(b"namespace.json") == ""


def test_a_tier_needs_no_package():
    program = "import sys, safe_offload.tiers.valkey.valkey_store; sys.exit('redis' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("url", ["redis://kv", "rediss://kv:1", "unix:///run/valkey.sock"])
def test_a_url_of_a_server_opens_one(url):
    tier, namespace_of = open_tier(TierConfig.at(url), 4096, FACTS)
    assert tier.label == TierConfig.at(url).location.label
    assert namespace_of("") == SPACE


def test_files_of_certificates_must_be_there(tmp_path):
    missing = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=r'"ca_file" .*: No such file'):
        open_tier(TierConfig.at("rediss://kv", ca_file=missing), 4096, FACTS)
    with pytest.raises(ConfigError, match=r'"cert_file" .*: No such file'):
        open_tier(TierConfig.at("rediss://kv", cert_file=missing, key_file=missing), 4096, FACTS)
