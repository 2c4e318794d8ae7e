"""What a tier asks of a bucket.

A request is made with a ticket: what is worked out ahead for many objects at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

Method = Literal["GET", "HEAD", "PUT", "DELETE"]


class Requests(Protocol):
    """Requests of one bucket; they belong to the loop's thread.

    All but `close` raise whatever went wrong; `store.problem_of` says what that means. Nothing is
    tried a second time. A request that is cancelled is over at once.
    """

    async def tickets(self, method: Method, paths: Sequence[str]) -> list[str]:
        """Return what requests for these objects are made with, soon."""

    async def get(self, ticket: str, into: Sequence[memoryview]) -> bool:
        """Read an object; return whether it is as long as the memory that it is read into.

        When this returns or raises, nothing writes to the memory any more. Unless it returned True,
        anything may be in it.
        """

    async def head(self, ticket: str) -> None:
        """Return if there is such an object."""

    async def put(self, ticket: str, data: Sequence[bytes], *, only_new: bool) -> None:
        """Write an object, whole or not at all.

        Args:
            data: its parts, one after another.
            only_new: not if there is one already.
        """

    async def delete(self, ticket: str) -> None:
        """Delete an object."""

    def close(self) -> None:
        """Give back what is held; requests that are under way end by themselves."""
