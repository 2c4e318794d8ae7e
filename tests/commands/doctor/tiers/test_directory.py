"""`safe-offload doctor` on directories of tiers: real ones, and file systems that are not here."""

import asyncio
import dataclasses
import os
from typing import Any

import pytest

from safe_offload.commands.doctor.command import examine
from safe_offload.commands.doctor.configuration import Written
from safe_offload.commands.doctor.findings import Finding, Severity
from safe_offload.commands.doctor.tiers import directory as tier_directory
from safe_offload.commands.doctor.tiers.check import judge
from safe_offload.commands.doctor.tiers.directory import (
    DirectoryTrial,
    check_directory,
    file_system_of,
    try_directory,
)
from safe_offload.config.tier_url import Location
from safe_offload.config.tiers import FileConfig, TierConfig
from safe_offload.config.units import GIB
from safe_offload.tiers.naming import NAMESPACE_BYTES, namespace_folder
from tests.commands.doctor.test_doctor import MACHINE, SOUND, TRIAL, Answer, ours, wrong

SOUND_TIER = DirectoryTrial(
    label="file:///mnt/kv",
    file_system="ext4",
    free_bytes=80 * GIB,
    held_bytes=20 * GIB,
    write_bytes_per_s=2e9,
    read_bytes_per_s=4e9,
)
CONFIG = FileConfig(Location("file", "/mnt/kv"), capacity_bytes=100 * GIB)


def check(config: TierConfig = CONFIG, **changes: Any) -> dict[str, Finding]:
    trial = dataclasses.replace(SOUND_TIER, **changes)
    return {one.id: one for one in judge(config, trial, 131072)}


@pytest.mark.parametrize("exists", [True, False])
def test_a_directory_is_tried_and_left_as_it_was(tmp_path, exists):
    path = tmp_path / "kv"
    if exists:
        path.mkdir()
    trial = asyncio.run(try_directory(FileConfig(Location("file", str(path)))))
    assert not trial.problem
    assert (trial.exists, trial.uid, trial.lock_problem) == (exists, os.geteuid(), "")
    assert trial.file_system
    assert trial.free_bytes > 0
    assert min(trial.write_bytes_per_s, trial.read_bytes_per_s) > 0
    assert list(tmp_path.rglob("*")) == [path] * exists


def test_a_file_in_the_place_of_a_directory(tmp_path):
    (tmp_path / "file").touch()
    trial = asyncio.run(try_directory(FileConfig(Location("file", str(tmp_path / "file" / "kv")))))
    assert "Not a directory" in trial.problem
    (problem,) = check_directory(CONFIG, trial)
    assert (problem.id, problem.severity) == ("tiers.directory", Severity.ERROR)


def test_what_another_user_stored(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    namespace = tmp_path / namespace_folder(bytes(NAMESPACE_BYTES))
    namespace.mkdir()
    (tmp_path / namespace_folder(bytes(range(NAMESPACE_BYTES)))).mkdir()  # our own
    os.chown(namespace, 4711, -1)
    trial = asyncio.run(try_directory(FileConfig(Location("file", str(tmp_path)))))
    assert trial.others == (4711,)
    found = check(others=trial.others)
    assert "contains files of user 4711" in wrong(list(found.values()))["tiers.directory"].found


def test_a_sound_tier():
    found = check()
    assert not wrong(list(found.values()))
    assert "80.00 GiB free, 20.00 GiB in use" in found["tiers.room"].found
    assert "30518 tokens a second" in found["tiers.rate"].found


@pytest.mark.parametrize(
    ("id", "changes", "fix"),
    [
        ("tiers.room", {"free_bytes": 60 * GIB}, '"capacity": "73728MiB" or less'),
        ("tiers.file-system", {"file_system": "nfs4"}, "place it elsewhere"),
        ("tiers.file-system", {"file_system": "overlay"}, "mount one at this path"),
        ("tiers.lock", {"lock_problem": "flock fails: No locks available"}, "with locks"),
        ("tiers.rate", {"read_bytes_per_s": 0.0}, "the other findings"),
    ],
)
def test_what_is_wrong_with_a_tier(id, changes, fix):
    problems = wrong(list(check(**changes).values()))
    assert list(problems) == [id]
    assert problems[id].severity is Severity.WARNING
    assert fix in problems[id].fix


def test_the_type_of_a_file_system(tmp_path):
    inner = tmp_path / "a b" / "inner"
    inner.mkdir(parents=True)
    point = str(tmp_path / "a b").replace(" ", r"\040")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"2 1 8:2 / {point} rw shared:1 - xfs /dev/sdb rw\n"
        f"3 1 0:9 / {point} rw - nfs4 host:/x rw\n"
    )
    assert file_system_of(inner, mounts) == "nfs4"
    assert file_system_of(tmp_path, mounts) == "ext4"
    assert file_system_of(inner, tmp_path / "missing") == ""


def test_a_lock_that_does_not_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(tier_directory.fcntl, "flock", lambda *_: None)
    assert (
        "one lock twice"
        in asyncio.run(try_directory(FileConfig(Location("file", str(tmp_path))))).lock_problem
    )


def test_the_command_tries_every_tier(tmp_path, monkeypatch):
    from safe_offload.commands.doctor import trial

    monkeypatch.setattr(trial, "run_trial", lambda *_: TRIAL)
    monkeypatch.setattr(trial, "devices", lambda: [])
    written = Written.read(
        ours(tiers=[{"url": f"file://{tmp_path / name}"} for name in ("near", "far")])
    )
    found = examine(written, Answer(SOUND), MACHINE)
    labels = [one.found.split()[0] for one in found if one.id == "tiers.directory"]
    assert labels == [f"file://{tmp_path}/near", f"file://{tmp_path}/far"]
