"""`safe-offload cache ls node` and `rm node`: pools in use, idle, damaged, and of others."""

import json
import os
import shutil
from pathlib import Path

import pytest

from safe_offload.errors import SharingError
from safe_offload.node import pools
from safe_offload.node.pools import find_pools, remove_pool
from tests.commands.cache.calls import caller, check_refusal, read
from tests.node.engines import Engine, hash_of, pools_in, wanted

SLOTS = 256


@pytest.fixture
def call(capsys):
    return caller(capsys)


@pytest.fixture
def base(tmp_path):
    """Where pools are; there is one that nobody uses."""
    with pools_in(tmp_path):
        engine = Engine(SLOTS)
        engine.store(hash_of(1, 1))
        engine.close()
        engine.file.locks.close()
        (pools.user_folder() / "pool").rename(pools.user_folder() / "idle")
        yield pools.user_folder()


@pytest.fixture
def engine(base):
    """It uses `pool`."""
    engine = Engine(SLOTS)
    yield engine
    engine.close()
    engine.file.locks.close()


def make_other_version(pool: Path) -> None:
    """A table that this version cannot read."""
    with (pool / pools.TABLE).open("r+b") as file:
        file.seek(len(b"safe_offload node "))
        file.write(b"9")


def names_in(base: Path) -> list[str]:
    return sorted(path.name for path in base.iterdir() if path.name != "lock")


def test_a_pool_is_shown_with_its_engines(call, base, engine):
    _, text = call("ls", "node")
    rows = [line.split() for line in text.splitlines()]
    assert [(row[0], *row[3:]) for row in rows[1:]] == [
        ("idle", "256", "1", "0", "model"),
        ("pool", "256", "0", "1", "model"),
    ]
    make_other_version(base / "pool")
    _, text = call("ls", "node")
    assert text.splitlines()[2].split()[3:] == ["?", "?", "in", "use", "model"]


@pytest.mark.parametrize("is_other_version", [False, True])
def test_a_dry_run_says_of_each_pool_what_is_done_then(call, base, engine, is_other_version):
    if is_other_version:
        make_other_version(base / "pool")
        make_other_version(base / "idle")
        uses = "is in use by an engine that is starting or has another version"
    else:
        uses = "is in use by 1 engine"
    size = (base / "idle" / "table").stat().st_size
    status, text = call("rm", "node", "--all", "--dry-run")
    first, second, last = text.splitlines()
    assert first.startswith("idle would free ")
    assert second == f"pool {uses}, stays."
    assert last.startswith("Would remove 1 pool, ")
    assert status == 1
    assert names_in(base) == ["idle", "pool"]
    dry = read(call, "rm", "node", "--all", "--dry-run")
    done = read(call, "rm", "node", "--all")
    assert done == (1, {**dry[1], "dry_run": False})
    assert done[1]["kept"] == {str(base / "pool"): uses}
    assert done[1]["pools"][0]["size_bytes"] > size
    assert names_in(base) == ["pool"]
    assert engine.table.living
    status, text = call("rm", "node", "pool")
    assert (status, text.splitlines()[0]) == (1, f"pool {uses}, stays.")


def test_a_pool_is_in_use_while_a_process_holds_its_memory_and_has_not_joined(base):
    file = pools.open_rank(wanted(SLOTS))
    assert "is in use by an engine that is starting" in remove_pool(base / "pool")
    file.locks.close()
    assert remove_pool(base / "pool") == ""


def test_a_pool_that_lost_its_table_can_be_removed(call, base):
    (base / "idle" / pools.TABLE).unlink()
    (base / "idle" / pools.NEW).touch()
    status, text = call("rm", "node", "idle")
    assert (status, names_in(base)) == (0, [])
    assert text.startswith("idle freed ")


def test_what_is_no_part_of_a_pool_is_not_deleted(call, base):
    (base / "idle" / "notes.txt").write_text("mine")
    (base / "idle" / "rank1").symlink_to("/etc/passwd")
    for more in ((), ("--dry-run",)):
        status, text = call("rm", "node", "--all", *more)
        assert status == 1
        assert "idle has 'notes.txt' in it, which is not part of a pool, stays." in text
    assert len(list((base / "idle").iterdir())) == 5


def test_what_a_pool_says_of_itself_is_read_as_far_as_it_fits(call, base):
    (base / "idle" / pools.ABOUT).write_bytes(b"\xff\x1b" * pools.ABOUT_BYTES_MAX)
    status, text = call("ls", "node", "--json")
    (pool,) = json.loads(text)["pools"]
    assert (status, len(pool["about"])) == (0, pools.ABOUT_BYTES_MAX)
    (base / "idle" / pools.ABOUT).unlink()
    (base / "idle" / pools.ABOUT).symlink_to("/etc/passwd")
    assert call("ls", "node")[1].splitlines()[1].endswith("?")


def test_a_link_is_no_pool_and_is_not_followed(call, base, tmp_path):
    shutil.move(base / "idle", tmp_path / "aside")
    (base / "idle").symlink_to(tmp_path / "aside")
    assert find_pools() == []
    assert call("rm", "node", "--all") == (0, "Removed 0 pools, 0 bytes.\n")
    with pytest.raises(OSError, match="Not a directory"):
        remove_pool(base / "idle")
    assert len(list((tmp_path / "aside").iterdir())) == 3


@pytest.mark.parametrize("whose", ["open to all", "a link", "another's"])
def test_a_folder_that_others_can_write_is_not_looked_into(call, base, tmp_path, whose):
    if whose == "open to all":
        base.chmod(0o1777)
    elif whose == "a link":
        shutil.move(base, tmp_path / "aside")
        base.symlink_to(tmp_path / "aside")
    elif os.geteuid():
        pytest.skip("only root can give a folder to another user")
    else:
        os.chown(base, 65534, 65534)
    for arguments in (
        ("ls", "node"),
        ("rm", "node", "--all"),
        ("rm", "node", "--all", "--dry-run"),
    ):
        check_refusal(call(*arguments), "is not a folder owned by this user with mode 0700")
    with pytest.raises(SharingError, match="owned by this user"):
        remove_pool(base / "idle")
    assert (base / "idle" / pools.TABLE).exists()


def test_there_may_be_no_pools(call, tmp_path):
    with pools_in(tmp_path):
        assert call("ls", "node") == (0, f"There are no pools in {pools.user_folder()}.\n")
        assert call("rm", "node", "--all", "--dry-run") == (0, "Would remove 0 pools, 0 bytes.\n")
    assert list(tmp_path.iterdir()) == []
