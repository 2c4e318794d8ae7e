"""A directory that others can fill or replace is not used: attacks by another user, on real files.

What is accepted, and why, is in docs/guides/security.md. Another user is another process, with the
user id of nobody; where only root can prepare something, the test needs root.
"""

import asyncio
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from safe_offload.commands.cache.place import open_place
from safe_offload.commands.doctor.tiers import check_tier
from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Result
from safe_offload.tiers.files import directory
from safe_offload.tiers.files.capacity import LOCK_FILE, USAGE_FILE
from safe_offload.tiers.files.directory import NotOursError, open_our_root
from safe_offload.tiers.sealed_tier import SealedTier
from tests.tiers.contract import fetch_one, filled, name_of, slot_of, spill_one
from tests.tiers.files.paths import files_below, path_in, said

ROOT = Path(__file__).parents[3]
NOBODY = 65534
LENGTHS = (4096, 4096)
SECRET = b"what the victim wrote\n" * 400
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


@pytest.fixture
def make(make):
    return lambda path: make(path, capacity_bytes=1 << 20)


@pytest.fixture
def victim(base):
    path = base / "victim"
    path.write_bytes(SECRET)
    path.chmod(0o644)
    return path


def is_unharmed(victim: Path) -> bool:
    return victim.read_bytes() == SECRET and stat.S_IMODE(victim.stat().st_mode) == 0o644


def attack(where: Path, script: str, user: int = NOBODY) -> None:
    """Run a script, as another user if none is given."""
    switch = {} if user == os.geteuid() else {"user": user, "group": user, "extra_groups": []}
    subprocess.run(["sh", "-ec", script], cwd=where, check=True, **switch)  # type: ignore[call-overload]


def shared(base: Path, mode: int = 0o2775) -> Path:
    """A directory of root's that the group of the other user may write to, as an fsGroup gives."""
    folder = base / "shared"
    folder.mkdir()
    os.chown(folder, 0, NOBODY)
    folder.chmod(mode)
    return folder


async def is_refused(tier: SealedTier, log: list[logging.LogRecord], *words: str) -> None:
    """Nothing is read or written, and the log says why, and how to mend it."""
    assert await spill_one(tier, name_of(1), filled(LENGTHS)) is Result.REFUSED
    lines = [line for line in said(log) if "Fix: " in line]
    assert lines
    for word in words:
        assert word in lines[-1], lines
    log.clear()


# ---- the root, and the way to it ----------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("mode", ["700", "755", "777", "1777"])
async def test_a_root_of_another_user_is_not_used(make, base, mode, package_log):
    os.chmod(base, 0o1777)
    attack(base, f"mkdir kv && chmod {mode} kv")
    tier = make(base / "kv")
    with pytest.raises(PermissionError, match=r"belongs to user 65534, this process is user 0"):
        await tier.probe([name_of(1)])
    assert await fetch_one(tier, name_of(1), slot_of(LENGTHS)) is Result.FAILED
    await is_refused(tier, package_log, "belongs to user 65534", f"chown -h 0 '{base}/kv'")
    assert files_below(base / "kv") == []
    os.chown(base / "kv", 0, 0)
    (base / "kv").chmod(0o700)
    assert await spill_one(make(base / "kv"), name_of(1), filled(LENGTHS)) is Result.DONE


@needs_root
@pytest.mark.parametrize(
    ("owner", "mode", "problem"),
    [
        (0, 0o755, ""),
        (0, 0o711, ""),
        (0, 0o1777, ""),  # as /tmp
        (0, 0o2775, ""),  # as a volume with an fsGroup
        (0, 0o777, "is world-writable"),
        (0, 0o2777, "is world-writable"),
        (NOBODY, 0o755, "belongs to user 65534"),
        (NOBODY, 0o1777, "belongs to user 65534"),
    ],
)
async def test_a_parent_that_others_can_change_is_not_passed(
    make, base, owner, mode, problem, package_log
):
    parent = shared(base, mode)
    (parent / "deep" / "kv").mkdir(parents=True, mode=0o700)
    os.chown(parent, owner, NOBODY)
    for path in (parent / "deep" / "kv", parent / "deep" / "new" / "kv"):
        if problem:
            await is_refused(make(path), package_log, problem, f"'{parent}'", "Fix: ")
            assert not path.exists() or files_below(path) == []
        else:
            assert await spill_one(make(path), name_of(1), filled(LENGTHS)) is Result.DONE


@pytest.mark.parametrize(
    ("mode", "fix"), [(0o777, "chmod o-w "), (0o1777, "use a directory below it")]
)
async def test_a_root_of_ours_that_everybody_may_fill_is_not_used(
    make, base, mode, fix, package_log
):
    (base / "kv").mkdir()
    (base / "kv").chmod(mode)
    await is_refused(make(base / "kv"), package_log, "is world-writable", fix)
    assert list((base / "kv").iterdir()) == []


@needs_root
async def test_a_link_of_another_user_is_not_followed_and_one_of_ours_is(make, base, package_log):
    (base / "real").mkdir(mode=0o700)
    (base / "tmp").mkdir()
    (base / "tmp").chmod(0o1777)
    attack(base / "tmp", "ln -s ../real theirs")
    (base / "tmp" / "ours").symlink_to(base / "real")
    (base / "tmp" / "relative").symlink_to("../tmp/ours")
    await is_refused(make(base / "tmp" / "theirs"), package_log, "belongs to user 65534")
    await is_refused(make(base / "tmp" / "theirs" / "kv"), package_log, "belongs to user 65534")
    assert list((base / "real").iterdir()) == []
    for number, name in enumerate(("ours", "relative")):
        tier = make(base / "tmp" / name)
        assert await spill_one(tier, name_of(number), filled(LENGTHS)) is Result.DONE
    assert path_in(base / "real", name_of(1)).exists()


async def test_links_in_a_circle_end(make, base):
    (base / "a").symlink_to("b")
    (base / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_our_root(str(base / "a"), os.geteuid())


async def test_what_is_missing_is_made_so_that_only_we_may_write(make, base):
    before = os.umask(0)
    try:
        await spill_one(make(base / "a" / "b" / "kv"), name_of(1), filled(LENGTHS))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((base / path).stat().st_mode) for path in ("a", "a/b", "a/b/kv")]
    assert modes == [0o755, 0o755, 0o700]


# ---- swapped while it is used -------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("put", ["mkdir -m 777 kv", "ln -s ../home kv", "ln -s taken kv"])
async def test_a_root_that_is_replaced_while_it_is_used(make, base, put, package_log):
    parent, home = shared(base), base / "home"
    home.mkdir(mode=0o755)
    tier = make(parent / "kv")
    assert await spill_one(tier, name_of(1), filled(LENGTHS)) is Result.DONE
    attack(parent, f"mv kv taken; {put}")
    if "taken" not in put:  # what it leads to is ours, and known
        await is_refused(tier, package_log, "belongs to user 65534")
        assert await fetch_one(tier, name_of(1), slot_of(LENGTHS)) is Result.FAILED
        assert list(home.iterdir()) == []
        assert list((parent / "kv").iterdir()) == []
    await is_refused(make(parent / "kv"), package_log, "belongs to user 65534")
    attack(parent, "rm -r kv; mv taken kv")
    assert await fetch_one(tier, name_of(1), slot_of(LENGTHS)) is Result.DONE


@needs_root
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_root_that_is_replaced_between_two_system_calls(base, moment, monkeypatch):
    parent, real_open = shared(base), os.open
    (parent / "kv").mkdir(mode=0o700)
    inode = (parent / "kv").stat().st_ino

    def swap(name: str, flags: int, *args: int, **options: int) -> int:
        if name != "kv":
            return real_open(name, flags, *args, **options)
        if moment == "before":
            attack(parent, "mv kv taken; mkdir -m 777 kv")
        opened_fd = real_open(name, flags, *args, **options)
        if moment == "after":
            attack(parent, "mv kv taken; mkdir -m 777 kv")
        return opened_fd

    monkeypatch.setattr(directory.os, "open", swap)
    if moment == "before":
        with pytest.raises(NotOursError, match="belongs to user 65534"):
            open_our_root(str(parent / "kv"), 0)
    else:
        root_fd = open_our_root(str(parent / "kv"), 0)
        assert os.fstat(root_fd).st_ino == inode
        os.close(root_fd)


# ---- what lies in it ----------------------------------------------------------------------------


@pytest.mark.parametrize("file", [USAGE_FILE, LOCK_FILE])
async def test_a_hard_link_to_a_file_of_a_victim_is_not_written(
    make, base, victim, file, package_log
):
    (base / "kv").mkdir(mode=0o700)
    os.link(victim, base / "kv" / file)
    tier = make(base / "kv")
    if file == USAGE_FILE:
        await is_refused(tier, package_log, "is one of 2 hard links", f"rm '{base}/kv/usage'")
    await spill_one(tier, name_of(1), filled(LENGTHS))
    await tier.close()
    assert is_unharmed(victim)
    assert any("of 2 hard links" in line for line in said(package_log)) or file == USAGE_FILE
    place = open_place(str(base / "kv"), TierConfig.at(f"file://{base}/kv"))
    with pytest.raises(NotOursError, match="is one of 2 hard links"):
        await asyncio.to_thread(place.recount)
    await asyncio.to_thread(place.close)
    assert is_unharmed(victim)


@pytest.mark.parametrize("put", ["mkfifo usage", "ln -s ../victim usage", "ln -s nowhere usage"])
async def test_what_lies_in_the_place_of_usage_is_not_opened(make, base, victim, put, package_log):
    (base / "kv").mkdir(mode=0o700)
    attack(base / "kv", put, user=os.geteuid())
    await is_refused(
        make(base / "kv"), package_log, "is not a regular file", f"rm '{base}/kv/usage'"
    )
    assert is_unharmed(victim)
    assert not (base / "kv" / "nowhere").exists()


@needs_root
@pytest.mark.parametrize("file", [USAGE_FILE, LOCK_FILE])
@pytest.mark.parametrize("mode", ["600", "666"])
async def test_what_another_user_has_made_is_not_written(make, base, file, mode, package_log):
    root = shared(base)
    attack(root, f"echo theirs > {file}; chmod {mode} {file}")
    tier = make(root)
    await spill_one(tier, name_of(1), filled(LENGTHS))
    await tier.close()
    assert (root / file).read_text() == "theirs\n"
    (line,) = [line for line in said(package_log) if "Fix" in line]
    assert f"'{root}/{file}' belongs to user 65534, this process is user 0" in line


@needs_root
async def test_a_folder_or_an_object_of_another_user_is_not_read(make, base, package_log):
    tier, name = make(base / "kv"), name_of(1)
    assert await spill_one(tier, name, filled(LENGTHS)) is Result.DONE
    path = path_in(base / "kv", name)
    os.chown(path, NOBODY, NOBODY)
    assert await fetch_one(tier, name, slot_of(LENGTHS)) is Result.UNREADABLE
    os.chown(path, 0, 0)
    for folder in (path.parent, path.parent.parent):
        os.chown(folder, NOBODY, NOBODY)
        other = make(base / "kv")
        await is_refused(other, package_log, "belongs to user 65534")
        assert await fetch_one(other, name, slot_of(LENGTHS)) is Result.FAILED
        os.chown(folder, 0, 0)


# ---- containers ---------------------------------------------------------------------------------

AS_ENGINE = """
import ctypes, os, sys
from safe_offload.tiers.files.capacity import CapacityShare
from safe_offload.tiers.files.directory import make_folder, open_our_folder, open_our_root

path, uid, group, namespace = sys.argv[1], *map(int, sys.argv[2:])
os.setgroups([group] if group else [])
os.setgid(uid)
os.setuid(uid)
if namespace:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(4, 1)  # PR_SET_DUMPABLE, so that the map below is ours
    if libc.unshare(0x10000000):  # CLONE_NEWUSER
        sys.exit(f"no user namespace: {os.strerror(ctypes.get_errno())}")
    with open("/proc/self/uid_map", "w") as numbers:
        numbers.write(f"{uid} {uid} 1")
try:
    root_fd = open_our_root(path, uid, make=True)
    make_folder("n" * 64, root_fd)
    open_our_folder("n" * 64, root_fd, uid)
    CapacityShare(1 << 20).keep(root_fd)
    assert CapacityShare(1 << 20).take(root_fd, 4096) is not None
    print("used")
except PermissionError as error:
    print(error)
"""


def run_engine(path: Path, *command: str, uid: int = 0, group: int = 0, namespace: int = 0) -> str:
    """Do what an engine does with a directory, in a process of its own; return what it says."""
    arguments = [str(path), str(uid), str(group), str(namespace)]
    done = subprocess.run(
        [*command, sys.executable, "-c", AS_ENGINE, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if "no user namespace: " in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_root
def test_a_volume_with_an_fs_group_is_used_by_an_engine_that_is_not_root(base):
    """The volume and a directory in it; and again after the kubelet has given all to the group."""
    volume = shared(base)
    for path in (volume, volume / "kv"):
        for _ in range(2):
            assert run_engine(path, uid=1000, group=NOBODY) == "used"
            entries = [path / name for name in ("n" * 64, USAGE_FILE, LOCK_FILE)]
            assert [entry.stat().st_mode & 0o777 for entry in entries] == [0o700, 0o600, 0o600]
            for found in (path, *entries):
                os.chown(found, -1, NOBODY)
                found.chmod(found.stat().st_mode | (0o2770 if found.is_dir() else 0o660))


@needs_root
def test_a_volume_of_a_container_may_be_open_to_all_of_its_users(base):
    """As emptyDir is; the same folder is refused where it is not mounted, or on a machine."""
    if subprocess.run(["unshare", "-m", "-p", "-f", "true"], capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    volume = base / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    mounted = f'mount --bind {volume} {volume} && exec "$0" "$@"'
    container = ("unshare", "-m", "-p", "-f", "--mount-proc")
    for path in (volume, volume / "kv"):
        for command in ((), ("unshare", "-m", "sh", "-ec", mounted), container):
            assert "is world-writable" in run_engine(path, *command)
            assert list(volume.iterdir()) == []
    assert run_engine(volume / "kv", *container, "sh", "-ec", mounted) == "used"
    assert run_engine(volume, *container, "sh", "-ec", mounted) == "used"


@needs_root
def test_root_may_have_no_number_in_a_container(base):
    """As in one that a user starts, where the directories of root belong to nobody."""
    (base / "kv").mkdir(mode=0o700)
    os.chown(base / "kv", 1000, 1000)
    assert run_engine(base / "kv", uid=1000, namespace=1) == "used"


# ---- what people run ----------------------------------------------------------------------------


@needs_root
def test_doctor_says_whose_it_is_and_how_to_mend_it(base):
    base.chmod(0o1777)
    attack(base, "mkdir -m 777 kv")
    for path in (base / "kv", base / "kv" / "below"):
        config = TierConfig.at(f"file://{path}")
        (problem,) = check_tier(config)
        assert f"'{base}/kv' belongs to user 65534, this process is user 0" in problem.found
        assert "use a directory" in problem.fix
    assert list((base / "kv").iterdir()) == []
