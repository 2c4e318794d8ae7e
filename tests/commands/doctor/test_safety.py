"""`safe-offload doctor` on what the page on security asks for and a tier lacks."""

import json
import re
from typing import Any

import pytest

from safe_offload.commands.doctor.tiers import check_safety, check_tier, check_user
from safe_offload.config.tiers import TierConfig
from safe_offload.findings import Severity

KEY = "/run/secrets/kv/hmac.key"


def found_of(url: str, **values: Any) -> dict[str, str]:
    found = {one.id: one for one in check_safety(TierConfig.at(url, **values))}
    assert all(one.fix and one.expected for one in found.values())
    return {id: one.found for id, one in found.items()}


@pytest.mark.parametrize(
    ("url", "values", "ids"),
    [
        ("redis://kv.internal", {}, {"tiers.tls", "tiers.key"}),
        ("redis://10.0.0.7", {"hmac_key_file": KEY}, {"tiers.tls"}),
        ("rediss://kv.internal", {}, {"tiers.key"}),
        ("rediss://kv.internal", {"hmac_key_file": KEY}, set()),
        ("redis://127.0.0.1", {}, set()),
        ("redis://[::1]", {}, set()),
        ("redis://localhost", {}, set()),
        ("unix:///run/valkey.sock", {}, set()),
        ("file:///mnt/nvme/kv", {}, set()),
        ("s3://kv/prod", {}, {"tiers.key"}),
        ("s3://kv/prod", {"endpoint": "http://127.0.0.1:9000"}, {"tiers.key"}),
        ("s3://kv/prod", {"endpoint": "http://minio:9000"}, {"tiers.key", "tiers.tls"}),
        ("gs://kv", {"hmac_key_file": KEY}, set()),
        ("gs://kv", {"encryption_key_file": KEY}, set()),
        ("s3://kv", {"hmac_key_file": KEY, "endpoint": "HTTP://minio"}, {"tiers.tls"}),
    ],
)
def test_what_a_tier_lacks_is_named(url, values, ids):
    assert set(found_of(url, **values)) == ids


@pytest.mark.parametrize("setting", ["encryption_key_file", "hmac_key_file"])
@pytest.mark.parametrize(
    ("content", "mode", "problem", "fix"),
    [
        (bytes(range(32)).hex(), 0o644, "can be read by every user", "set its mode to 0400"),
        (bytes(range(31)).hex(), 0o400, "(has 31 bytes|is not 64 hex)", "`openssl rand -hex 32`"),
        (bytes(range(32)).hex(), 0o400, "", ""),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_named(
    tmp_path, setting, content, mode, problem, fix
):
    (tmp_path / "keys").write_text(content)
    (tmp_path / "keys").chmod(mode)
    url, path = f"file://{tmp_path}/tier", str(tmp_path / "keys")
    found = {one.id: one for one in check_tier(TierConfig.at(url, **{setting: path}))}
    is_warning = setting == "hmac_key_file" and mode == 0o644
    assert ("tiers.key" in found) == (bool(problem) and not is_warning)
    assert found["tiers.rate"].severity is Severity.INFO, "the place is tried all the same"
    if "tiers.key" in found:
        assert found["tiers.key"].severity is Severity.ERROR
        assert re.search(problem, found["tiers.key"].found)
        assert fix in found["tiers.key"].fix
        assert content[:16] not in json.dumps(found["tiers.key"].to_json())


@pytest.mark.parametrize("password", ["CHANGE-ME", "PASSWORD", "change_me", "Secret1\n"])
def test_the_password_of_an_example_is_known_and_never_shown(password, tmp_path):
    file = tmp_path / "kv"
    file.write_text(password)
    found = found_of("redis://vllm@127.0.0.1", password_file=str(file))
    assert set(found) == {"tiers.example"}
    in_url = found_of(f"redis://vllm:{password.strip()}@127.0.0.1")
    assert set(in_url) == {"tiers.password", "tiers.example"}
    assert password.strip() not in json.dumps([found, in_url]).replace('"a password', "")


def test_a_password_of_ones_own_is_none_of_them(tmp_path):
    (tmp_path / "kv").write_text("3f0c9d2be1")
    for file in ("kv", "none"):
        assert not found_of("redis://vllm@127.0.0.1", password_file=str(tmp_path / file))


def test_an_engine_that_would_run_as_root_is_named():
    assert not list(check_user(is_root=False))
    (found,) = check_user(is_root=True)
    assert found.id == "tiers.user"
    assert found.fix
