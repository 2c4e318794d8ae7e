"""`safe-offload cache`: what a directory of a file tier holds, also while engines use it."""

import asyncio
import fcntl
import io
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from safe_offload.commands.cli import main
from safe_offload.config.tier_url import Location
from safe_offload.config.tiers import FileConfig
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.files import file_store as store
from safe_offload.tiers.files import upkeep
from safe_offload.tiers.files.capacity import LOCK_FILE, keep
from safe_offload.tiers.files.directory import open_root
from safe_offload.tiers.naming import namespace_folder, path_of
from tests.commands.cache.calls import AFTER_RESET, FACTS, FIRST, OBJECT_BYTES, STORED_BYTES, read
from tests.tiers.contract import filled, name_of, tier_at


@pytest.fixture
def root(tmp_path):
    """A directory with 10 objects of a namespace, and 3 of another."""
    root = tmp_path / "tier"
    fill(root, [name_of(n, space=FIRST) for n in range(10)])
    fill(root, [name_of(n, space=AFTER_RESET) for n in range(3)])
    return root


def fill(root: Path, names: list[Name]) -> None:
    async def spill() -> None:
        tier = tier_at(
            FileConfig(Location("file", str(root)), capacity_bytes=1 << 30), OBJECT_BYTES, FACTS
        )
        results = await tier.spill(names, [filled((OBJECT_BYTES,))] * len(names))
        assert set(results) <= {Result.DONE, Result.PRESENT}
        await tier.close()

    asyncio.run(spill())


def path_in(root: Path, number: int, space: bytes = FIRST) -> Path:
    return root.joinpath(namespace_folder(space), *path_of(name_of(number, space=space)))


# ---- ls ---------------------------------------------------------------------------------------


def test_an_empty_directory_holds_nothing(call, tmp_path):
    assert call("ls", tmp_path) == (0, f"No engine has stored anything in {tmp_path}.\n")


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e\r"
"""A terminal that is sent this gets another title, and is emptied; the rest is read backwards."""


def check_printed(text: str) -> None:
    """Nothing in it moves a cursor, and its length is ours."""
    for line in text.splitlines():
        assert line.isprintable(), ascii(line)
        assert len(line) < 400
    assert "\\x1b" in text, "it is shown for what it is"


def test_what_a_directory_says_of_itself_is_printed_escaped(call, root):
    (root / namespace_folder(FIRST) / "namespace.json").write_text(
        json.dumps({"facts": {"model": HOSTILE * 1000}}, ensure_ascii=False)
    )
    (root / namespace_folder(AFTER_RESET) / "namespace.json").write_text("[" * 100_000)
    status, text = call("ls", root)
    assert status == 0
    check_printed(text)
    assert {row.split()[-1][-3:] for row in text.splitlines()[1:3]} == {"...", "?"}


def test_names_of_files_are_printed_escaped(call, root):
    folder = path_in(root, 0).parent
    (folder / f"{HOSTILE}x").write_bytes(b"x")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe")).write_bytes(b"x")
    status, text = call("verify", root)
    assert status == 1
    check_printed(text)
    assert "\\udcff" in text
    assert "2 bad" in text


# ---- verify -----------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_verify_shows_the_first_of_many(call, root):
    fill(root, [name_of(n, space=FIRST) for n in range(30)])
    for number in range(30):
        flip(path_in(root, number), 5000)
    _, text = call("verify", root)
    assert len(text.splitlines()) == 22
    assert "… and 10 more" in text


# ---- rm ---------------------------------------------------------------------------------------


def test_rm_deletes_what_crashes_left(call, root):
    old, young = (path_in(root, 0).with_name(name) for name in ("tmp-1-2-ab", "tmp-1-2-cd"))
    for path, at_s in ((old, 0.0), (young, time.time())):
        path.write_bytes(b"x")
        os.utime(path, (at_s, at_s))
    by_age = ("rm", root, "--all", "--older-than", "1d")
    would = read(call, *by_age, "--dry-run")[1]
    assert old.exists()
    assert {**would, "dry_run": False} == read(call, *by_age)[1]
    assert (old.exists(), young.exists(), would["num_objects"]) == (False, True, 0)
    would = read(call, "rm", root, "--all", "--dry-run")[1]
    assert {**would, "dry_run": False} == read(call, "rm", root, "--all")[1]


def test_engines_know_of_the_room_that_was_made(call, root):
    async def fill_up() -> None:
        limit = 20 * STORED_BYTES
        tier = tier_at(
            FileConfig(Location("file", str(root)), capacity_bytes=limit, num_threads=1),
            OBJECT_BYTES,
            FACTS,
        )
        names = [name_of(n, space=FIRST) for n in range(10, 17)]
        slots = [filled((OBJECT_BYTES,))] * 7
        assert set(await tier.spill(names, slots)) == {Result.DONE}
        assert await asyncio.to_thread(main, ["cache", "rm", str(root), "--all"]) == 0
        more = [name_of(n, space=FIRST) for n in range(100, 107)]
        assert set(await tier.spill(more, slots)) == {Result.DONE}
        assert set(await tier.spill(names, slots)) == {Result.DONE}
        assert await tier.probe(more) == [True] * 7, "nothing had to go"
        await tier.close()

    asyncio.run(fill_up())


def nothing(path: Path) -> None:
    """Leave nothing there, nor in it."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


STRANGE = {
    "a link": lambda path, aside: path.symlink_to(aside),
    "a link to a file": lambda path, aside: path.symlink_to(aside / "mine"),
    "a pipe": lambda path, aside: os.mkfifo(path),
    "a folder": lambda path, aside: path.mkdir(),
    "a file": lambda path, aside: path.write_bytes(b"x"),
}
"""What anyone who may write to a directory can put in the place of something of ours."""
PLACES = {
    "a namespace": lambda root: root / ("0" * 32),
    "the namespace of an engine": lambda root: root / namespace_folder(FIRST),
    "a folder of objects": lambda root: path_in(root, 0).parent,
    "an object": lambda root: path_in(root, 0),
    "an object being written": lambda root: path_in(root, 0).with_name("tmp-1-2-ab"),
    "a description": lambda root: root / namespace_folder(FIRST) / "namespace.json",
    "the file of what is used": lambda root: root / "usage",
    "the lock": lambda root: root / "evict.lock",
}


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("where", PLACES)
def test_what_is_not_what_it_should_be_is_passed_over_and_all_is_deleted(
    call, root, tmp_path, where, what
):
    aside = tmp_path / "aside"
    aside.mkdir()
    (aside / "mine").write_bytes(b"mine")
    path = PLACES[where](root)
    nothing(path)
    STRANGE[what](path, aside)
    assert call("ls", root)[0] == 0
    assert call("verify", root)[0] == ((where, what) == ("an object", "a file"))
    assert call("rm", root, "--all", "--older-than", "1d")[0] == 0
    assert call("rm", root, "--all")[0] == 0
    left = {path.name for path in root.iterdir()} - {"usage", "evict.lock"}
    assert left <= {path.name} & {"0" * 32, namespace_folder(FIRST)}
    assert [path.name for path in root.iterdir() if path.is_dir() and not path.is_symlink()] == []
    assert (aside / "mine").read_bytes() == b"mine"


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("where", list(PLACES)[:-2])
def test_an_engine_evicts_what_is_beside_it(root, tmp_path, where, what):
    aside = tmp_path / "aside"
    aside.mkdir()
    (aside / "mine").write_bytes(b"mine")
    nothing(PLACES[where](root))
    STRANGE[what](PLACES[where](root), aside)
    root_fd = open_root(str(root))
    kept = keep(root_fd, 1)
    os.close(root_fd)
    assert kept is not None
    assert kept.num_evicted >= 3
    found = (Path(folder) / file for folder, _, files in os.walk(root) for file in files)
    left = {path.name for path in found if path.is_file() and not path.is_symlink()}
    assert left <= {"usage", "evict.lock", "namespace.json", "tmp-1-2-ab", PLACES[where](root).name}
    assert (aside / "mine").read_bytes() == b"mine"


def test_what_is_in_a_folder_in_the_place_of_a_file_stays(call, root):
    for path in (path_in(root, 0), root / namespace_folder(FIRST) / "namespace.json"):
        path.unlink()
        path.mkdir()
        (path / "mine").write_bytes(b"mine")
    assert call("rm", root, "--all")[0] == 0
    assert sorted(path.name for path in root.rglob("*") if path.is_file()) == [
        *("evict.lock", "mine", "mine", "usage")
    ]


def test_what_cannot_be_replaced_is_said_with_its_own_fix(call, root):
    for file in ("evict.lock", "usage"):
        (root / file).unlink()
        (root / file).mkdir()
        (root / file / "mine").write_bytes(b"mine")
        status, text = call("rm", root, "--all")
        assert (status, text.count("Fix: "), f"rm -r '{root}/{file}'" in text) == (1, 1, True)
        shutil.rmtree(root / file)


# ---- what is wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "{root}/nowhere"), "cannot be opened: No such file or directory"),
        (("verify", "{root}/usage"), "cannot be opened: Not a directory"),
        (("rm", "{root}", "--all", "--older-than", "soon"), "write 7d for a week"),
        (("rm", "{root}/..", "--all"), "is not the directory of a tier"),
        (("rm", "{root}"), "add one that `ls` shows, or --all"),
        (("rm", "{root}", "abc", "--all"), "no namespace given"),
        (("rm", "{root}", "xyz"), "no namespace begins with 'xyz'"),
        (("rm", "{root}", ""), "2 namespaces begin with ''"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_fix(call, root, arguments, message):
    status, text = call(*(argument.format(root=root) for argument in arguments))
    assert status == 1
    assert message in text
    assert "Fix: " in text
    assert len([p for p in root.rglob("*") if p.is_file()]) == 13 + 2 + 2


def test_who_evicts_is_waited_for(call, root, monkeypatch):
    monkeypatch.setattr(store, "PATIENCE_S", 0.0)
    lock_fd = os.open(root / LOCK_FILE, os.O_RDWR)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    status, text = call("rm", root, "--all", "--older-than", "1d")
    assert status == 1
    assert "an engine is evicting. Fix: try again in a minute." in text
    os.close(lock_fd)
    assert call("rm", root, "--all", "--older-than", "1d")[0] == 0


def test_ctrl_c_ends_rm_and_what_is_left_can_be_used(root, call, monkeypatch):
    delete, num_deleted = upkeep.delete, 0

    def interrupted(*arguments):
        nonlocal num_deleted
        num_deleted += 1
        if num_deleted == 3:
            signal.raise_signal(signal.SIGINT)
        return delete(*arguments)

    monkeypatch.setattr(upkeep, "delete", interrupted)
    assert call("rm", root, "--all") == (130, "safe-offload: ended by Ctrl-C.\n")
    assert num_deleted == 3
    assert call("rm", root, "--all")[0] == 0
    assert not [path for path in root.rglob("*") if path.is_file() and path.parent != root]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_many_objects_there_were(root, call, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert call("verify", root)[0] == 0
    assert terminal.getvalue() == "13 objects\r\x1b[K"
