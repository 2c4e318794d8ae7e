"""`safe-offload doctor` on directories of tiers: real ones, and file systems that are not here."""

import os

import pytest

from safe_offload.commands.doctor import tiers
from safe_offload.commands.doctor.command import examine
from safe_offload.commands.doctor.configuration import Written
from safe_offload.commands.doctor.tiers import check_tier
from safe_offload.config.tier_url import Location
from safe_offload.config.tiers import FileConfig, TierConfig
from safe_offload.config.units import GIB
from safe_offload.findings import Finding, Severity
from safe_offload.tiers.files import diagnosis
from safe_offload.tiers.files.capacity import keep
from safe_offload.tiers.files.diagnosis import file_system_finding, file_system_of, room_finding
from safe_offload.tiers.files.directory import open_root
from safe_offload.tiers.naming import NAMESPACE_BYTES, namespace_folder
from tests.commands.doctor.test_doctor import MACHINE, SOUND, Answer, ours, wrong

CONFIG = FileConfig(Location("file", "/mnt/kv"), capacity_bytes=100 * GIB)


def check(path: object, **values: object) -> dict[str, Finding]:
    return {one.id: one for one in check_tier(TierConfig.at(f"file://{path}", **values), 131072)}


@pytest.mark.parametrize("exists", [True, False])
def test_a_directory_is_tried_and_left_as_it_was(tmp_path, exists):
    path = tmp_path / "kv"
    if exists:
        path.mkdir()
    found = check(path, capacity_bytes=1 << 20)
    found.pop("tiers.file-system")  # of this machine
    assert not wrong([*found.values()])
    can = "can be written" if exists else "does not exist yet and can be created"
    assert f"{can} by user {os.geteuid()}" in found["tiers.directory"].found
    assert "0 bytes in use, of a capacity of 1.00 MiB" in found["tiers.room"].found
    assert "tokens a second" in found["tiers.rate"].found
    assert list(tmp_path.rglob("*")) == [path] * exists


def test_a_file_in_the_place_of_a_directory(tmp_path):
    (tmp_path / "file").touch()
    ((id, problem),) = check(tmp_path / "file" / "kv").items()
    assert (id, problem.severity) == ("tiers.directory", Severity.ERROR)
    assert "Not a directory" in problem.found
    assert "mount the missing volume" in problem.fix


def test_what_another_user_stored(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    namespace = tmp_path / namespace_folder(bytes(NAMESPACE_BYTES))
    namespace.mkdir()
    (tmp_path / namespace_folder(bytes(range(NAMESPACE_BYTES)))).mkdir()  # our own
    os.chown(namespace, 4711, -1)
    problem = wrong([*check(tmp_path).values()])["tiers.directory"]
    assert "contains files of user 4711; this" in problem.found


def test_what_a_tier_holds_already_is_room_for_it(tmp_path):
    folder = tmp_path / bytes(NAMESPACE_BYTES).hex() / "ab"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(bytes(5000))
    root_fd = open_root(str(tmp_path))
    keep(root_fd, None)
    os.close(root_fd)
    assert "free, 8.00 KiB in use" in check(tmp_path, capacity_bytes=GIB)["tiers.room"].found


@pytest.mark.parametrize(
    ("finding", "fix"),
    [
        (room_finding(CONFIG, "x", 60 * GIB, 20 * GIB), '"capacity": "73728MiB" or less'),
        (room_finding(CONFIG, "x", 80 * GIB, 20 * GIB), ""),
        (file_system_finding("x", "nfs4"), "place it elsewhere"),
        (file_system_finding("x", "overlay"), "mount one at this path"),
        (file_system_finding("x", "tmpfs"), ""),
        (file_system_finding("x", "lustre"), ""),
        (file_system_finding("x", "ext4"), ""),
    ],
)
def test_what_is_wrong_with_its_file_system(finding, fix):
    assert fix in finding.fix
    assert list(wrong([finding])) == [finding.id] * bool(fix)


def test_a_tier_that_takes_no_object(tmp_path, monkeypatch):
    async def nothing(*_: object) -> tuple[float, float]:
        return 0.0, 0.0

    monkeypatch.setattr(tiers, "measure", nothing)
    assert "the other findings" in wrong([*check(tmp_path).values()])["tiers.rate"].fix


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


@pytest.mark.parametrize(
    ("error", "said"),
    [(None, "one lock twice"), (OSError(37, "No locks"), "flock fails: No locks")],
)
def test_a_lock_that_does_not_lock(tmp_path, monkeypatch, error, said):
    def flock(*_: object) -> None:
        if error is not None:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(diagnosis.fcntl, "flock", flock)
        problem = diagnosis.lock_problem_of(str(tmp_path / "lock"))
    assert said in problem
    monkeypatch.setattr(diagnosis, "lock_problem_of", lambda _: problem)
    assert "with locks" in wrong([*check(tmp_path).values()])["tiers.lock"].fix


def test_the_command_tries_every_tier(tmp_path):
    written = Written.read(
        ours(tiers=[{"url": f"file://{tmp_path / name}"} for name in ("near", "far")])
    )
    found = examine(written, Answer(SOUND), MACHINE)
    labels = [one.found.split()[0] for one in found if one.id == "tiers.directory"]
    assert labels == [f"file://{tmp_path}/near", f"file://{tmp_path}/far"]
