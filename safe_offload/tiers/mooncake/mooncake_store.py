"""Mooncake Store as a place: objects go from and to host slots, over RDMA or TCP.

A header and the bytes of a slot are the ranges of one object of the store. Calls block, so threads
make them. Objects that the master has evicted, or that were in the memory of an engine that has
ended, are absent. Clients cannot list keys: the pages of the master do. Neither knows when an
object was used.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import IO, Any, Final

from safe_offload.config.printing import printable
from safe_offload.config.tiers import MooncakeConfig
from safe_offload.config.units import MIB, format_bytes
from safe_offload.threads import start_threads
from safe_offload.tiers import naming
from safe_offload.tiers.base import Name, PlaceError, Result
from safe_offload.tiers.batch import Batch
from safe_offload.tiers.guarded_tier import NUM_FETCHES, NUM_SPILLS
from safe_offload.tiers.mooncake.client import ABSENT, NO_ROOM, NOT_FOUND, Client
from safe_offload.tiers.mooncake.settings import complete
from safe_offload.tiers.store import Item, Store, listed, pages

CHUNK_OBJECTS: Final = 256
READ_BYTES: Final = 16 << 20
WRITE_BYTES: Final = 32 << 20
"""Of one call to the store, about: a cancelled batch ends with the calls in flight. A write takes
three round trips to the master; a read is judged while the next one arrives."""
JOBS: Final = 3
"""Threads for a batch: while two move bytes, one computes checksums."""
MOVERS: Final = (NUM_FETCHES + NUM_SPILLS) * JOBS
MOVES: Final = 2
"""Calls in flight: each polls until its bytes have moved, which takes a core."""
QUERY_THREADS: Final = 2
GRACE_S: Final = 0.9
"""How long a cancelled call may go on, before its process is killed: a little less than
`guarded_tier.GRACE_S`."""
DESCRIBED_S: Final = 600.0
"""By then the master may have evicted a description, or restarted."""
PAGES_PORT: Final = 9003
PAGES_TIMEOUT_S: Final = 10.0
PAGES_WHOLE_S: Final = 120.0
PAGES_BYTES_MAX: Final = 512 * MIB
PAGES_LINE_BYTES_MAX: Final = 16 * MIB
PAGES_PIECE_BYTES: Final = 64 << 10
OBJECT_BYTES_MAX: Final = 256 * MIB
"""Of an object that an operator reads: anyone may have written objects of any length."""

Work = Callable[[Batch, Sequence[int]], None]


class MooncakeStore(Store):
    """See `Store`. ConfigError: a package or a device is missing, or the system refuses a thread.

    One process (`Client`) gives memory to the store, queries and deletes. Another one moves bytes,
    and is killed when a transfer fails or hangs, which takes nothing from the store.
    """

    use = "WRITTEN"
    piece_bytes = OBJECT_BYTES_MAX  # an object is read as a whole

    def __init__(self, config: MooncakeConfig, slot_bytes: int = 0) -> None:
        super().__init__(config, slot_bytes)
        config = complete(config)
        self._pages = config.endpoint or f"http://{config.location.host}:{PAGES_PORT}"
        segment_bytes = (config.segment_bytes or 0) if slot_bytes else 0
        self._home = Client(config, segment_bytes, MOVERS + QUERY_THREADS)
        self._mover = Client(config, num_calls=MOVES)
        self._movers = start_threads(MOVERS, "safe-offload-tier-move")
        self._query_threads = start_threads(QUERY_THREADS, "safe-offload-tier-ask")
        self._is_closed = False
        for client in (self._home, self._mover) if slot_bytes else ():
            self._movers.submit(client.running)  # so that no call waits for that

    # ---- engines ------------------------------------------------------------------------------

    async def has(self, names: Sequence[Name]) -> list[bool]:
        found: list[bool] = await self._query(self._home.has, list(map(self.key_of, names)))
        return found

    async def get(self, batch: Batch) -> None:
        await self._run(self._read, READ_BYTES, batch)

    async def put(self, batch: Batch) -> None:
        await self._run(self._write, WRITE_BYTES, batch)

    async def delete(self, keys: Sequence[str]) -> list[bool]:
        codes = await self._query(self._home.delete, keys)
        if failed := [code for code in codes if code not in (0, NOT_FOUND)]:
            raise PlaceError(f"objects cannot be deleted (code {failed[0]})")
        return [code == 0 for code in codes]

    async def describe(self, namespace: bytes, text: bytes) -> float:
        key = naming.description_key(namespace).decode()
        await self._query(self._home.delete, [key])  # a put leaves an existing object unchanged
        codes = await self._query(self._home.put, [key], [(memoryview(bytearray(text)),)])
        if codes != [0]:
            raise PlaceError(
                f"objects cannot be written (code {codes[0]})",
                'Give it memory: "segment" of engines, or mooncake_client on machines',
                is_down=True,
            )
        return DESCRIBED_S

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await asyncio.wait([asyncio.wrap_future(self._query_threads.submit(self._leave))])
            self._query_threads.shutdown(wait=False)

    async def _query(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await asyncio.wrap_future(self._query_threads.submit(call, *arguments))
        except OSError as error:
            raise _no_master(error) from error

    async def _run(self, work: Work, bytes_max: int, batch: Batch) -> None:
        jobs = [self._movers.submit(self._work_off, work, bytes_max, batch) for _ in range(JOBS)]
        loop = asyncio.get_running_loop()

        def end() -> None:
            if not all(job.done() for job in jobs):
                self._mover.kill()
                loop.call_later(GRACE_S, end)

        await batch.outlast(jobs, lambda: loop.call_later(GRACE_S, end))

    # ---- on threads ---------------------------------------------------------------------------

    def _leave(self) -> None:
        self._movers.shutdown(wait=True)
        self._mover.close()
        self._home.close()

    def _work_off(self, work: Work, bytes_max: int, batch: Batch) -> None:
        """Work off a batch, a chunk at a time."""
        chunk: Sequence[int] = ()
        try:
            while chunk := list(_chunk_of(batch, bytes_max)):
                work(batch, chunk)
        except OSError as error:
            is_gone = isinstance(error, ConnectionError)
            self.log.failure(_no_master(error) if is_gone else error)
        finally:
            undone = [index for index in chunk if batch.results[index] is Result.CANCELLED]
            batch.settle([*undone, *(batch.take_left() if undone else ())], Result.FAILED)

    def _read(self, batch: Batch, chunk: Sequence[int]) -> None:
        found = [self.key_of(batch.names[index]) for index in chunk]
        headers = [memoryview(bytearray(naming.HEADER_BYTES)) for _ in chunk]
        ranges = [(h, *batch.slots[i]) for h, i in zip(headers, chunk, strict=True)]
        codes = self._mover.get(found, ranges)
        for index, key, code, header in zip(chunk, found, codes, headers, strict=True):
            if code == batch.size_of(index):
                result = batch.judge(index, bytes(header), batch.slots[index])
            else:
                result = self._result_of(key, code, batch.size_of(index))
            batch.results[index] = result

    def _result_of(self, key: str, code: int, length: int) -> Result:
        """Return the result of a read that did not return the expected length."""
        # The code for an object of another length may mean any other failure, too.
        size_bytes = code if code in ABSENT else self._home.sizes([key])[0]
        if size_bytes in ABSENT:
            return Result.ABSENT
        return Result.CORRUPT if 0 <= size_bytes != length else Result.FAILED

    def _write(self, batch: Batch, chunk: Sequence[int]) -> None:
        self._home.delete([self.key_of(batch.names[i]) for i in chunk if batch.is_bad(i)])
        keys = {index: self.key_of(batch.names[index]) for index in chunk}
        there = self._home.has(list(keys.values()))
        absent = [index for index, is_there in zip(chunk, there, strict=True) if not is_there]
        batch.settle(set(chunk).difference(absent), Result.PRESENT)
        if not absent:
            return
        sealed = map(batch.sealed, absent)
        ranges = [(memoryview(bytearray(header)), *body) for header, body in sealed]
        codes = self._mover.put([keys[index] for index in absent], ranges)
        for index, code in zip(absent, codes, strict=True):
            failed = Result.FULL if code == NO_ROOM else Result.FAILED
            batch.results[index] = Result.DONE if code == 0 else failed

    # ---- operators ----------------------------------------------------------------------------

    async def namespaces(self) -> list[str]:
        return listed(map(naming.namespace_of_key, await self._keys()))

    async def walk(self, namespace: str = "") -> AsyncIterator[list[Item]]:
        keys = await self._keys()
        found = (key for key in keys if not namespace or naming.namespace_of_key(key) == namespace)
        for some in pages(map(bytes.decode, found)):
            sizes = await self._query(self._home.sizes, some)
            # What has no size was evicted meanwhile.
            items = (self._item(*each) for each in zip(some, sizes, strict=True) if each[1] >= 0)
            yield [item for item in items if item is not None]

    def _item(self, key: str, size_bytes: int) -> Item | None:
        namespace = naming.namespace_of_key(key.encode())
        if not namespace or key == self.description_key(namespace):
            return None
        return Item(namespace, key, naming.name_of_key(key.encode()), size_bytes, 0.0)

    async def read(self, key: str, start: int, length: int) -> bytes:
        (size_bytes,) = await self._query(self._home.sizes, [key])
        is_description = key.endswith(f":{naming.DESCRIPTION_FILE}")
        most_bytes = naming.DESCRIPTION_BYTES_MAX if is_description else OBJECT_BYTES_MAX
        if size_bytes > most_bytes:
            problem = f"it has {format_bytes(size_bytes)}, more than {format_bytes(most_bytes)}"
            raise OSError(errno.EFBIG, problem)
        found = memoryview(bytearray(max(size_bytes, 0)))
        codes = await self._query(self._mover.get, [key], [(found,)]) if found else []
        if codes != [size_bytes]:
            raise FileNotFoundError(key)
        return bytes(found[start : start + length])

    async def _keys(self) -> Iterator[bytes]:
        """Return our keys, from a file: their number has no bound."""
        await self._query(self._home.has, [naming.PREFIX])  # without a master there are no pages
        page = f"{self._pages}/get_all_keys"
        try:
            found = await asyncio.wrap_future(self._query_threads.submit(_save_keys, page))
        except (OSError, http.client.HTTPException) as error:
            raise PlaceError(
                f"{page} cannot be read: {printable(str(error))}",
                "Give the address of the master's pages (its metrics_port) with --endpoint",
            ) from error
        return (key[:-1] for key in found)

    def key_of(self, name: Name) -> str:
        return naming.key_of(name).decode()

    def description_key(self, namespace: str) -> str:
        return naming.description_key(bytes.fromhex(namespace)).decode()


def _no_master(error: OSError) -> PlaceError:
    return PlaceError(
        f"there is no connection to the master: {error.strerror or error}",
        "Check the url, the network, and whether mooncake_master runs",
        is_down=True,
    )


def _save_keys(page: str) -> IO[bytes]:
    """Return a file with our keys of a page, one per line.

    OSError, HTTPException: it cannot be read, does not end, or there is no room for the file.
    """
    end_s = time.monotonic() + PAGES_WHOLE_S
    keys = tempfile.TemporaryFile()  # noqa: SIM115 - who reads it drops it
    num_bytes = line_bytes = 0
    line = b""
    with urllib.request.urlopen(page, timeout=PAGES_TIMEOUT_S) as answer:
        while piece := answer.read1(PAGES_PIECE_BYTES):
            num_bytes += len(piece)
            line_bytes = len(piece) + (0 if b"\n" in piece else line_bytes)
            is_long = num_bytes > PAGES_BYTES_MAX or line_bytes > PAGES_LINE_BYTES_MAX
            if is_long or time.monotonic() > end_s:
                raise OSError(errno.EFBIG, f"it has not ended after {format_bytes(num_bytes)}")
            *lines, line = (line + piece).split(b"\n")
            keys.writelines(b"%b\n" % key for key in lines if naming.namespace_of_key(key))
            line = line[: naming.KEY_BYTES_MAX + 1]  # a longer one is not ours
    keys.write(b"%b\n" % line if naming.namespace_of_key(line) else b"")
    keys.seek(0)
    return keys


def _chunk_of(batch: Batch, bytes_max: int) -> Iterator[int]:
    """Yield the objects of the next call, of those not begun."""
    size_bytes = 0
    for count, index in enumerate(batch.take_left(), start=1):
        yield index
        size_bytes += sum(buffer.nbytes for buffer in batch.slots[index])
        if count == CHUNK_OBJECTS or size_bytes >= bytes_max:
            return
