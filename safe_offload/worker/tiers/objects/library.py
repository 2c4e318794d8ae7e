"""Requests of a bucket that obstore sends, on threads of its own."""

from __future__ import annotations

from collections.abc import Sequence

from safe_offload.worker.tiers.objects.requests import Method
from safe_offload.worker.tiers.objects.store import Store


class LibraryRequests:
    """See `Requests`. A ticket is the path of an object.

    obstore reads the text of an error whole, however long that is, and follows redirects.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def tickets(self, method: Method, paths: Sequence[str]) -> list[str]:
        """See `Requests.tickets`."""
        return list(paths)

    async def get(self, ticket: str, into: Sequence[memoryview]) -> bool:
        """See `Requests.get`."""
        size_bytes = sum(buffer.nbytes for buffer in into)
        found = await self._store.get_async(ticket)
        if found.meta["size"] != size_bytes:
            return False
        chunks: list[bytes] = []
        num_bytes = 0
        async for chunk in found.stream(size_bytes):
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > size_bytes:
                return False
        if num_bytes != size_bytes:
            return False
        data = memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        for buffer in into:
            buffer[:] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]
        return True

    async def head(self, ticket: str) -> None:
        """See `Requests.head`."""
        await self._store.head_async(ticket)

    async def put(self, ticket: str, data: Sequence[bytes], *, only_new: bool) -> None:
        """See `Requests.put`."""
        mode = "create" if only_new else "overwrite"
        await self._store.put_async(ticket, b"".join(data), use_multipart=False, mode=mode)

    async def delete(self, ticket: str) -> None:
        """See `Requests.delete`."""
        await self._store.delete_async(ticket)

    def close(self) -> None:
        """See `Requests.close`."""
        self._store = None
