"""The file of tenants: what it may have, what is said of what it may not, that it may change."""

import hashlib
import json
import os
from typing import Any

import pytest

from safe_offload.commands.cli import main
from safe_offload.config.options import OffloadConfig
from safe_offload.config.tenants import MAX_TENANTS, REST, Tenants, TenantsFile, parse
from safe_offload.errors import ConfigError

SALT = "5ecret-9f1c07aa"
DIGEST = hashlib.sha256(SALT.encode()).hexdigest()


def of(default: object = "10%", **guaranteed: object) -> Tenants:
    return parse(json.dumps({"default": default, "guaranteed": guaranteed}).encode())


def label_of(tenants: Tenants, salt: str | None) -> str:
    return tenants.labels[tenants.number_of(salt)]


def test_a_salt_is_of_the_longest_prefix_unless_its_digest_is_given():
    tenants = of(
        short={"share": "12.5%", "prefix": "team-"},
        long={"share": "1 %", "prefix": ["team-a-", "x"]},
        one={"share": "0.07%", "salt_sha256": hashlib.sha256(b"team-a-7").hexdigest()},
    )
    assert tenants.shares == (1000, 1250, 100, 7)
    salts = "team-b", "team-a-1", "x", "team-a-7", "other", "", None
    found = [label_of(tenants, salt) for salt in salts]
    assert found == ["short", "long", "long", "one", REST, REST, REST]


def test_an_empty_object_guarantees_nothing():
    assert parse(b"{}") == Tenants()


BAD: dict[str, Any] = {
    "no JSON": f'{{"default": "{SALT}'.encode(),
    "no object": json.dumps([SALT]).encode(),
    "a salt as a key": json.dumps({SALT: "30%"}).encode(),
    "a salt as the share of all others": json.dumps({"default": SALT}).encode(),
    "no labels": json.dumps({"guaranteed": [SALT]}).encode(),
    "a salt with a share in the place of a label": {SALT: "30%"},
    "a salt that is no label": {f"{SALT}/": {"share": "30%", "prefix": SALT}},
    "the word of all others": {REST: {"share": "30%", "prefix": SALT}},
    "no share": {"a": {"prefix": SALT}},
    "a salt as a share": {"a": {"share": SALT, "prefix": SALT}},
    "more than all": {"a": {"share": "101%", "prefix": SALT}},
    "a number as a share": {"a": {"share": 30, "prefix": SALT}},
    "no salt": {"a": {"share": "30%"}},
    "an empty prefix": {"a": {"share": "30%", "prefix": ["", SALT]}},
    "a salt as a digest": {"a": {"share": "30%", "salt_sha256": SALT}},
    "a salt as a key of a tenant": {"a": {"share": "30%", "prefix": SALT, SALT: 1}},
    "one prefix of two": {n: {"share": "1%", "prefix": SALT} for n in "ab"},
    "one salt of two": {n: {"share": "1%", "salt_sha256": DIGEST} for n in "ab"},
    "a label twice": b'{"guaranteed": {"a": {"share": "1%%", "prefix": "%b"}, "a": {}}}'
    % SALT.encode(),
    "a salt twice": json.dumps({SALT: 1, "x": 1}).replace("x", SALT).encode(),
    "too much together": {n: {"share": "50.01%", "prefix": SALT + n} for n in "ab"},
    "too many": {f"t{n}": {"share": "0%", "prefix": f"{SALT}{n}"} for n in range(MAX_TENANTS + 1)},
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_used_is_refused_with_a_fix_and_without_a_salt(what):
    text = BAD[what]
    if isinstance(text, dict):
        text = json.dumps({"default": "0%", "guaranteed": text}).encode()
    with pytest.raises(ConfigError, match="Fix: write it as") as error:
        parse(text)
    assert SALT not in str(error.value)
    assert DIGEST not in str(error.value)
    assert error.value.__suppress_context__, "a JSONDecodeError has the whole text"


def test_shares_may_be_all_there_is_to_a_hundredth_of_a_percent():
    assert sum(of("0.01%", a={"share": "99.99%", "prefix": "a"}).shares) == 10_000
    with pytest.raises(ConfigError, match=r"100\.01%, more"):
        of("0.02%", a={"share": "99.99%", "prefix": "a"})


def test_no_salt_is_in_what_is_printed_of_tenants_or_settings(tmp_path, capsys):
    tenants = of(a={"share": "30%", "prefix": SALT}, b={"share": "1%", "salt_sha256": DIGEST})
    for shown in (repr(tenants), str(tenants), f"{OffloadConfig(tenants=SALT)}"):
        assert SALT not in shown
        assert DIGEST not in shown
    for value in (SALT, f"/{SALT}", {"default": SALT}, {SALT: "30%"}, [SALT]):
        extra = {"kv_connector_extra_config": {"tenants": value}}
        written = json.dumps({"kv_connector": "SafeCPUOffloadConnector", **extra})
        main(["config", "--kv-transfer-config", written])
        printed = capsys.readouterr()
        assert SALT not in printed.out + printed.err


# ---- it changes --------------------------------------------------------------------------------


def text_of(share: str) -> str:
    return json.dumps({"guaranteed": {"chat": {"share": share, "prefix": SALT}}})


def test_a_file_that_cannot_be_used_is_an_error_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="it cannot be read"):
        TenantsFile(str(tmp_path / "missing"))
    (tmp_path / "bad").write_text(SALT)
    with pytest.raises(ConfigError, match="not JSON at character 1"):
        TenantsFile(str(tmp_path / "bad"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it cannot be read"):
        TenantsFile(str(tmp_path / "pipe"))


def test_a_label_that_is_there_twice_is_named():
    with pytest.raises(ConfigError, match='"chat" is duplicated'):
        parse(b'{"guaranteed": {"chat": {"share": "10%", "prefix": "a"}, "chat": {}}}')
    with pytest.raises(ConfigError, match='"share" is duplicated'):
        parse(b'{"guaranteed": {"chat": {"share": "10%", "share": "20%", "prefix": "a"}}}')


def test_a_change_is_taken_over_and_what_is_bad_keeps_what_was(tmp_path, package_log, monkeypatch):
    """By the thread that watches it; nothing is logged twice, and no salt at all."""
    monkeypatch.setattr("safe_offload.config.tenants.POLL_S", 0.001)
    path = tmp_path / "tenants.json"
    path.write_text(text_of("10%"))
    file = TenantsFile(str(path))
    file.start()

    def after(change: Any) -> tuple[tuple[int, ...], int]:
        before = file.tenants, file.num_bad
        change()
        while (file.tenants, file.num_bad) == before:
            pass
        return file.tenants.shares, file.num_bad

    try:
        assert file.tenants.shares == (0, 1000)
        assert after(lambda: replace(path, text_of("30%")))[0] == (0, 3000)
        assert after(lambda: replace(path, f'{{"{SALT}')) == ((0, 3000), 1)
        assert after(path.unlink) == ((0, 3000), 2)
        assert after(lambda: replace(path, text_of("40%"))) == ((0, 4000), 2)
    finally:
        file.close()
    told = [record.getMessage() for record in package_log]
    assert sum("Keeping the previous file" in line for line in told) == 2
    assert "1 tenants with quotas of 40% in total" in told[-1]
    assert SALT not in "".join(told)


def replace(path: Any, text: str) -> None:
    """At once, as `mv` does."""
    other = path.with_suffix(".new")
    other.write_text(text)
    other.rename(path)
