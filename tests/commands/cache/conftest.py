"""Places of tiers with objects in them, each kind spoken to behind the back of the command."""

import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore
from redis import Redis

from safe_offload.commands.cache.place import Place, config_of, open_place
from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.naming import (
    DESCRIPTION_FILE,
    description_key,
    key_of,
    namespace_folder,
    path_of,
)
from safe_offload.tiers.objects import bucket_store as store
from safe_offload.tiers.objects.bucket import open_store
from tests.bucket_server import BucketServer
from tests.commands.cache.calls import (
    AFTER_RESET,
    FIRST,
    caller,
    described,
    value_of,
)
from tests.tiers.contract import name_of
from tests.valkey_server import Server


class Rig(ABC):
    """A place with 10 objects of a namespace, 3 of another, and what is not ours."""

    url: str  # of the tier
    use = "USED"  # what its times are called
    # Names of what is not ours.
    foreign: tuple[str, ...] = ("mine/notes.txt", f"{namespace_folder(FIRST)}/mine.txt")

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all that is there."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def delete(self, name: str) -> None: ...

    def age(self, number: int, age_s: float) -> None:
        """Make an object one that was not used for so long."""
        raise NotImplementedError

    def fill(self) -> None:
        for space, number in ((FIRST, 10), (AFTER_RESET, 3)):
            self.write(self.description(space), described(space))
            for n in range(number):
                self.write(self.name(n, space), value_of(name_of(n, space=space)))
        for name in self.foreign:
            self.write(name, b"mine")

    def name(self, number: int, space: bytes = FIRST) -> str:
        return "/".join((namespace_folder(space), *path_of(name_of(number, space=space))))

    def description(self, space: bytes) -> str:
        return f"{namespace_folder(space)}/{DESCRIPTION_FILE}"

    def there(self, count: int = 10) -> list[bool]:
        """Return which of the first objects are there."""
        names = set(self.names())
        return [self.name(n) in names for n in range(count)]

    def open(self) -> Place:
        return open_place(self.url, config_of(self.url, {}))


class Folder(Rig):
    """The directory of a file tier."""

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, str(root)

    def names(self) -> list[str]:
        files = (path for path in self.root.rglob("*") if path.is_file())
        return sorted(
            str(path.relative_to(self.root)) for path in files if path.parent != self.root
        )

    def write(self, name: str, data: bytes) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(data)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def delete(self, name: str) -> None:
        (self.root / name).unlink()

    def age(self, number: int, age_s: float) -> None:
        at_s = time.time() - age_s
        os.utime(self.root / self.name(number), (at_s, at_s))


class FolderAsBucket(Folder):
    """A folder in the place of a bucket, so that it can be said when objects were written."""

    url, use = "s3://kv-cache/prod", "WRITTEN"

    def __init__(self, root: Path) -> None:
        self.root = root


class Bucket(Rig):
    """A bucket of a real server."""

    url, use = "s3://kv-cache/prod", "WRITTEN"

    def __init__(self, server: BucketServer) -> None:
        self.endpoint = server.endpoint
        self.bucket: Any = open_store(TierConfig.at(self.url, endpoint=server.endpoint))
        if left := self.names():
            obstore.delete(self.bucket, left)

    def names(self) -> list[str]:
        return sorted(meta["path"] for page in obstore.list(self.bucket) for meta in page)

    def write(self, name: str, data: bytes) -> None:
        obstore.put(self.bucket, name, data)

    def read(self, name: str) -> bytes:
        return bytes(obstore.get(self.bucket, name).bytes())

    def delete(self, name: str) -> None:
        obstore.delete(self.bucket, name)


class Keys(Rig):
    """A Valkey server."""

    foreign = ("mine", "safe-offload:mine", "safe-offload:my:own", f"other:{'ab' * 16}:x")

    def __init__(self, server: Server, client: Redis) -> None:
        self.url, self.client = f"redis://{server.host_port}", client
        client.flushall()
        client.config_set("maxmemory-policy", "allkeys-lru")

    def names(self) -> list[str]:
        found: Any = self.client.keys()
        return sorted(map(bytes.decode, found))

    def write(self, name: str, data: bytes) -> None:
        self.client.set(name, data)

    def read(self, name: str) -> bytes:
        found: Any = self.client.get(name)
        return bytes(found)

    def delete(self, name: str) -> None:
        self.client.delete(name)

    def age(self, number: int, age_s: float) -> None:
        dumped: Any = self.client.dump(self.name(number))
        self.client.restore(self.name(number), 0, dumped, replace=True, idletime=int(age_s))

    def name(self, number: int, space: bytes = FIRST) -> str:
        return key_of(name_of(number, space=space)).decode()

    def description(self, space: bytes) -> str:
        return description_key(space).decode()


@pytest.fixture
def keys(server):
    with server.client() as client:
        rig = Keys(server, client)
        rig.fill()
        yield rig


@pytest.fixture
def bucket(bucket_server):
    rig = Bucket(bucket_server)
    rig.fill()
    return rig


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tier").mkdir(mode=0o700)
    rig = Folder(tmp_path / "tier")
    rig.fill()
    return rig


@pytest.fixture
def folder_as_bucket(folder, monkeypatch):
    monkeypatch.setattr(store, "open_store", lambda config: LocalStore(folder.root))
    return FolderAsBucket(folder.root)


RIGS = ("folder", "keys", "bucket")


@pytest.fixture(params=RIGS)
def rig(request):
    found: Rig = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["folder", "keys", "folder_as_bucket"])
def aged(request):
    """A place where objects can be made to look old."""
    found: Rig = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def call(capsys, request):
    """Run the command; buckets are those of the server here."""
    run = caller(capsys)

    def run_here(action: str, place: object, *arguments: object) -> tuple[int, str]:
        if not str(place).startswith("s3://"):
            return run(action, place, *arguments)
        endpoint = request.getfixturevalue("bucket_server").endpoint
        return run(action, place, *arguments, "--endpoint", endpoint)

    return run_here
