"""What the public writes for other offloading connectors starts with our name."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from safe_offload.commands.cli import main
from safe_offload.config.options import VALID_KEYS, OffloadConfig
from safe_offload.config.other_connectors import KNOWN, without_effect
from safe_offload.config.transfer_config import CONNECTOR_NAME
from safe_offload.errors import ConfigError
from safe_offload.start import checks, plugin
from tests.config.public_configurations import PUBLIC

PLACES = [public.place for public in PUBLIC]


def options(written: dict[str, Any], **more: Any) -> OffloadConfig:
    return OffloadConfig.from_extra_config({**written, **more}, world_size=1)


@pytest.fixture(scope="module", autouse=True)
def registered():
    plugin.register()  # as vLLM does


@pytest.mark.parametrize("public", PUBLIC, ids=PLACES)
def test_what_the_public_writes_starts_with_our_name(public):
    """As `vllm serve` reads it: the real KVTransferConfig, then the flag, then our settings."""
    from vllm.config import KVTransferConfig

    read = KVTransferConfig(**public.with_our_name)
    arguments = SimpleNamespace(kv_transfer_config=read, kv_offloading_size=public.offloading_size)
    checks.take_offloading_size(arguments)
    assert arguments.kv_offloading_size is None, "vLLM would take its own connector"
    assert (read.kv_role, read.kv_load_failure_policy) == ("kv_both", "recompute")
    config = options(read.kv_connector_extra_config)
    of_tiers = {
        "paths": [tier.location.path for tier in config.tiers],
        "capacities": [tier.capacity_bytes for tier in config.tiers],
    }
    expected = public.comes_to
    assert expected == {
        key: of_tiers[key] if key in of_tiers else getattr(config, key) for key in expected
    }
    found = without_effect(read.kv_connector_extra_config, VALID_KEYS)
    assert sorted(found) == sorted(public.warned)
    assert all(found.values())


@pytest.mark.parametrize("public", PUBLIC, ids=PLACES)
def test_the_command_says_what_comes_of_it(public, capsys, monkeypatch):
    written = json.dumps(public.with_our_name)
    monkeypatch.setattr(sys, "argv", ["safe-offload", "config", "--kv-transfer-config", written])
    assert main() == 0
    output = capsys.readouterr().out
    rows = {line.split()[0]: line for line in output.splitlines() if line.strip()}
    assert set(public.warned) <= rows.keys()
    for path in public.comes_to.get("paths", ()):
        assert f"file://{path}" in rows["tiers"]
    assert "secret" not in output.replace("secret_key", "")


@pytest.mark.parametrize(("key", "bound"), [("max_bytes", 0), ("gc_max_size_gb", "much")])
def test_a_bound_that_cannot_be_kept_is_refused(key, bound):
    tier = {"type": "fs", "root_dir": "/mnt/kv", key: bound}
    with pytest.raises(ConfigError, match=rf'\["secondary_tiers"\]\[0\]\["{key}"\] = .* Fix: '):
        options({"secondary_tiers": [tier]})


def test_the_command_says_how_a_directory_is_bounded(capsys, monkeypatch):
    tier = {"type": "fs", "root_dir": "/mnt/kv", "max_bytes": 4 << 20, "password": "hidden"}
    extra = {"secondary_tiers": [tier]}
    written = json.dumps({"kv_connector": CONNECTOR_NAME, "kv_connector_extra_config": extra})
    monkeypatch.setattr(sys, "argv", ["safe-offload", "config", "--kv-transfer-config", written])
    assert main() == 0
    output = capsys.readouterr().out
    assert '[{"url": "file:///mnt/kv", "capacity": 4194304}]' in output
    assert "secondary_tiers[0].password" in output
    assert "hidden" not in output


def test_tiers_that_are_written_count_alone():
    written = {
        "tiers": [{"url": "file:///mnt/ours"}],
        "secondary_tiers": [{"type": "fs", "root_dir": "/mnt/theirs"}],
    }
    config = options(written)
    assert [tier.location.path for tier in config.tiers] == ["/mnt/ours"]
    assert list(without_effect(written, VALID_KEYS)) == ["secondary_tiers"]


@pytest.mark.parametrize("path", [None, "kv", 7])
def test_a_directory_that_cannot_be_meant_is_refused(path):
    with pytest.raises(ConfigError, match="absolute path"):
        options({"secondary_tiers": [{"type": "fs", "root_dir": path}]})


@pytest.mark.parametrize("key", [key for key in KNOWN if key != "shared_storage_path"])
def test_whatever_stands_in_their_keys_starts(key):
    for value in (None, {}, [], "x", 3, [None], [[]], [{"type": []}]):
        assert options({key: value}).tiers == ()
        without_effect({key: value}, VALID_KEYS)


def test_only_a_key_that_nobody_knows_is_refused():
    """A spec of another package may have any; a key of ours that is misspelt is refused."""
    theirs = {"spec_module_path": "their.spec", "their_key": 1, "x" * 40: 2}
    assert options(theirs).cpu_bytes_to_use == 8 << 30
    assert set(without_effect(theirs, VALID_KEYS)) == {"spec_module_path", "their_key", "***"}
    for wrong in ("their_key", "lazy_ofload"):
        with pytest.raises(ConfigError, match="not a setting"):
            options({wrong: True})


def test_a_policy_of_another_connector_is_replaced_with_a_warning():
    written = {"eviction_policy": "arc"}
    assert options(written).eviction_policy == "returns"
    found = without_effect(written, VALID_KEYS)
    assert found == {"eviction_policy": '"returns" is used instead'}


def test_a_policy_of_another_package_is_not_refused():
    theirs = {"cache_policy_module_path": "their.policy", "eviction_policy": "theirs"}
    assert options(theirs).eviction_policy == "returns"
    assert set(without_effect(theirs, VALID_KEYS)) == set(theirs)
    with pytest.raises(ConfigError, match="unknown value"):
        options({"eviction_policy": "theirs"})


@pytest.mark.parametrize("key", ["disk_path", "disk_capacity_bytes"])
def test_a_disk_without_its_backend_is_a_warning_as_there(key):
    written = {key: "/mnt/kv" if key == "disk_path" else "1TiB"}
    assert options(written).tiers == ()
    (reason,) = without_effect(written, VALID_KEYS).values()
    assert '"kv_offload_backend": "disk"' in reason
    disk = {"kv_offload_backend": "disk", "disk_path": "/mnt/kv"}
    assert without_effect({**disk, **written}, VALID_KEYS) == {}
    assert len(options({**disk, **written}).tiers) == 1
