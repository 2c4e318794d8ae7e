"""`safe-offload cache` does the same in every kind of place."""

import pytest

from safe_offload.commands.cache import command
from safe_offload.tiers import store
from safe_offload.tiers.files import file_store
from safe_offload.tiers.naming import DESCRIPTION_BYTES_MAX, namespace_folder
from safe_offload.tiers.objects import bucket_store
from safe_offload.tiers.seals.seal import Seal
from safe_offload.tiers.valkey import valkey_store
from tests.commands.cache.calls import (
    AFTER_RESET,
    FACTS,
    FIRST,
    KEY,
    STORED_BYTES,
    Call,
    described,
    flipped,
    read,
    value_of,
)
from tests.commands.cache.conftest import Rig
from tests.tiers.contract import ENCRYPTION, name_of
from tests.tiers.contract import KEY as ENCRYPTION_KEY

DAY_S = 86_400
NAME, OTHER = namespace_folder(FIRST), namespace_folder(AFTER_RESET)


def test_ls_shows_every_namespace_with_its_model(call, rig):
    status, text = call("ls", rig.url)
    assert status == 0
    head, *rows, total = text.splitlines()
    assert head.split() == ["NAMESPACE", "OBJECTS", "SIZE", "LAST", rig.use, "OLDEST", "MODEL"]
    by_namespace = {row.split()[0]: row for row in rows}
    assert set(by_namespace) == {NAME, OTHER}
    assert by_namespace[NAME].split()[1:4] == ["10", "160.00", "KiB"]
    assert by_namespace[NAME].endswith("meta-llama/Llama-3.1-8B")
    assert by_namespace[OTHER].endswith("(after a reset)")
    assert total == f"2 namespaces, 13 objects, 208.00 KiB in {rig.url}"


def test_ls_in_json_has_all_facts(call, rig):
    status, document = read(call, "ls", rig.url)
    assert (status, document["size_bytes"]) == (0, 13 * STORED_BYTES)
    first = {each["namespace"]: each for each in document["namespaces"]}[NAME]
    assert first["facts"] == FACTS
    assert (first["num_objects"], first["size_bytes"]) == (10, 10 * STORED_BYTES)


def test_ls_shows_ages(call, aged):
    aged.age(0, 3 * DAY_S)
    (row,) = (row for row in call("ls", aged.url)[1].splitlines() if row.startswith(NAME))
    assert row.split()[5] == "3d"


def test_a_namespace_whose_description_is_gone_or_damaged_is_shown(call, rig):
    rig.delete(rig.description(FIRST))
    rig.write(rig.description(AFTER_RESET), b"[")
    _, text = call("ls", rig.url)
    assert [row.split()[-1] for row in text.splitlines()[1:3]] == ["?", "?"]
    assert "13 objects" in text


@pytest.mark.parametrize(
    "facts",
    [
        '{"model": "x", "more": "%s"}' % ("x" * DESCRIPTION_BYTES_MAX),
        '{"model": "x", "more": %s}' % ("[" * 900 + "]" * 900),
        '{"model": "x", "more": [NaN, 1e999, -Infinity]}',
        '{"model": "x", "more": %s}' % ("9" * 5000),
    ],
    ids=["too long", "too deep", "no number", "too large a number"],
)
def test_a_description_that_anyone_wrote_is_read_as_far_as_it_can_be_one(call, rig, facts):
    rig.write(rig.description(FIRST), b'{"facts": %b}' % facts.encode())
    status, document = read(call, "ls", rig.url)
    found = {each["namespace"]: each["facts"] for each in document["namespaces"]}
    assert (status, found) == (0, {NAME: {}, OTHER: FACTS})


def test_facts_are_kept_of_as_many_descriptions_as_fit(call, rig, monkeypatch):
    monkeypatch.setattr(command, "_FACTS_BYTES_MAX", len(described(FIRST)))
    found = read(call, "ls", rig.url)[1]["namespaces"]
    assert {NAME: FACTS, OTHER: {"model": FACTS["model"]}} in [
        {each["namespace"]: each["facts"] for each in found},
        {OTHER if each["namespace"] == NAME else NAME: each["facts"] for each in found},
    ]


def test_of_very_many_namespaces_some_are_listed_and_all_are_deleted(call, rig, monkeypatch):
    for module in (store, command, file_store, valkey_store, bucket_store):
        monkeypatch.setattr(module, "LISTED_MAX", 1, raising=False)
    for name in rig.foreign:
        rig.delete(name)
    status, text = call("ls", rig.url)
    assert (status, len(text.splitlines())) == (0, 3)
    assert text.endswith("; more may be there\n")
    status, text = call("rm", rig.url, "--all")
    assert (status, "13 objects" in text, text[-21:]) == (0, True, "; more may be there.\n")
    call("rm", rig.url, "--all")
    assert rig.names() == []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda value: flipped(value, 0), "no header"),
        (lambda value: flipped(value, 4000), "its checksum is wrong"),
        (lambda value: flipped(value, -1), "its checksum is wrong"),
        (lambda value: flipped(value, 32), "its header names another object"),
        (lambda value: value[:-1], "its header says 12288"),
        (lambda value: value + b"x", "its header says 12288"),
        (lambda value: b"x", "no header"),
    ],
)
def test_verify_finds_what_is_bad_and_deletes_it_if_it_is_told_to(call, rig, damage, problem):
    rig.write(rig.name(3), damage(value_of(name_of(3, space=FIRST))))
    check_found(call, rig, problem)
    assert sum(rig.there()) == 9


@pytest.mark.parametrize(("old", "new"), [("03", "abcdef"), ("03", "xyz"), ("/03/", "/04/")])
def test_verify_finds_what_lies_under_another_name(call, rig, old, new):
    name = rig.name(3)
    moved = name.replace(old, new) if "/" in old else name.removesuffix(old) + new
    rig.delete(name)
    rig.write(moved if moved != name else f"{name}ab", value_of(name_of(3, space=FIRST)))
    check_found(call, rig, "names another object")


def check_found(call: Call, rig: Rig, problem: str) -> None:
    status, text = call("verify", rig.url)
    assert status == 1
    assert problem in text.splitlines()[0]
    assert "1 bad. Engines never use them. Fix: run this again with --delete." in text
    status, document = read(call, "verify", rig.url, "--delete")
    assert (status, len(document["bad"]), document["deleted"]) == (0, 1, True)
    assert call("verify", rig.url) == (0, "12 objects, 192.00 KiB checked: 0 bad.\n")


def test_sealed_objects_are_checked_with_their_key_only(call, rig, tmp_path):
    seal, space = Seal(KEY), bytes(16)
    rig.write(rig.description(space), described(space, seal))
    for n in range(4):
        rig.write(rig.name(n, space), value_of(name_of(n, space=space), seal))
    keys = {"right": KEY, "other": KEY[::-1]}
    for name, key in keys.items():
        (tmp_path / name).write_text(key.hex())
        (tmp_path / name).chmod(0o400)
    status, text = call("verify", rig.url)
    assert status == 1
    assert "4 more objects are sealed with a key and were not checked. Fix: pass it with" in text
    with_key = ("verify", rig.url, "--hmac-key-file", tmp_path / "right")
    assert call(*with_key) == (0, "17 objects, 272.00 KiB checked: 0 bad.\n")
    rig.write(rig.name(3, space), value_of(name_of(3, space=space)))  # by one without the key
    status, text = call(*with_key)
    assert (status, "1 bad" in text) == (1, True)
    other = call("verify", rig.url, "--hmac-key-file", tmp_path / "other")
    assert "sealed with another key" in other[1]


def test_encrypted_objects_are_checked_as_far_as_the_keys_show(call, rig, tmp_path):
    space = bytes(16)
    text = described(space, ENCRYPTION)
    rig.write(rig.description(space), ENCRYPTION.closed_description(space, text))
    for n in range(4):
        rig.write(rig.name(n, space), value_of(name_of(n, space=space), ENCRYPTION))
    keys = {"right": f"{KEY[::-1].hex()}\n{ENCRYPTION_KEY.hex()}", "other": KEY.hex()}
    for name, lines in keys.items():
        (tmp_path / name).write_text(lines)
        (tmp_path / name).chmod(0o400)
    option = "--encryption-key-file"
    not_checked = "4 more objects are sealed with {} key and were not checked. Fix: pass it with"
    status, text = call("verify", rig.url)
    assert (status, not_checked.format("a") in text) == (1, True)
    status, text = call("verify", rig.url, option, tmp_path / "other")
    assert (status, not_checked.format("another") in text) == (1, True)
    with_key = ("verify", rig.url, option, tmp_path / "right")
    assert call(*with_key) == (0, "17 objects, 272.00 KiB checked: 0 bad.\n")
    for arguments, num_known in (((), 0), ((option, tmp_path / "right"), 1)):
        found = read(call, "ls", rig.url, *arguments)[1]["namespaces"]
        assert [each["namespace"] for each in found].count(space.hex()) == 1
        known = [each for each in found if each["facts"].get("seal") == "aes-256-gcm"]
        assert len(known) == num_known
    swapped = value_of(name_of(2, space=space), ENCRYPTION)
    rig.write(rig.name(3, space), swapped)
    assert read(call, "verify", rig.url)[1]["num_bad"] == 1, "its name can be read"
    rig.write(rig.name(3, space), flipped(value_of(name_of(3, space=space), ENCRYPTION), -1))
    assert read(call, "verify", rig.url)[1]["num_bad"] == 0, "its bytes cannot"
    status, text = call(*with_key)
    assert (status, "its seal is wrong" in text) == (1, True)


def test_rm_by_age_deletes_all_that_is_older_and_nothing_else(call, aged):
    for number in range(4):
        aged.age(number, 8 * DAY_S)
    before = set(aged.names())
    found = call("rm", aged.url, NAME, "--older-than", "7d")
    assert found == (0, f"Deleted {NAME}: 4 objects older than 7d, 64.00 KiB.\n")
    assert before - set(aged.names()) == {aged.name(number) for number in range(4)}
    assert read(call, "rm", aged.url, "--all", "--older-than", "7d")[1]["num_objects"] == 0
    assert aged.description(FIRST) in aged.names()


def test_rm_deletes_one_namespace_and_no_other(call, rig):
    found = call("rm", rig.url, NAME[:6])
    assert found == (0, f"Deleted {NAME}: 10 objects, 160.00 KiB.\n")
    left = set(rig.names())
    assert not any(rig.there())
    assert left >= {rig.description(AFTER_RESET), *rig.foreign}
    assert sum(name in left for name in (rig.name(n, AFTER_RESET) for n in range(3))) == 3


def test_rm_all_deletes_what_is_ours_and_nothing_else(call, rig):
    status, document = read(call, "rm", rig.url, "--all")
    assert (status, document["num_objects"]) == (0, 13)
    assert set(rig.names()) == set(rig.foreign)
    assert "0 objects" in call("ls", rig.url)[1] or "No engine" in call("ls", rig.url)[1]


@pytest.mark.parametrize(
    "arguments",
    [("rm", "--all", "--older-than", "7d"), ("rm", NAME)],
)
def test_a_dry_run_says_what_would_be_deleted_and_changes_nothing(call, aged, arguments):
    for number in range(10):
        aged.age(number, 8 * DAY_S if number < 4 else 1000 - 10 * number)
    before, (action, *options) = aged.names(), arguments
    assert call(action, aged.url, *options, "--dry-run")[1].startswith("Would delete ")
    would = read(call, action, aged.url, *options, "--dry-run")[1]
    assert aged.names() == before
    assert {**would, "dry_run": False} == read(call, action, aged.url, *options)[1]
    assert len(aged.names()) < len(before)


def test_what_is_gone_meanwhile_is_passed_over(call, aged):
    place = aged.open()
    items = list(place.items(NAME))
    for number in range(2):
        aged.delete(aged.name(number))
    (gone, *_) = (item for item in items if item.name == name_of(0, space=FIRST))
    with pytest.raises(FileNotFoundError):
        list(place.pieces(gone))
    assert len(place.delete(items)) in (8, 10), "a bucket does not say what was there"
    assert not any(aged.there())
    place.close()
