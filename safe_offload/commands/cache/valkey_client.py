"""A synchronous client of the Valkey or Redis servers of a tier, for the tools around it.

It uses the tier's own connections, so servers are trusted no further than the tier trusts them.
No error is shown as it is: an answer of a server may hold anything.
"""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

from safe_offload.commands.cache.store import CacheError, UnreachableError
from safe_offload.config.tiers import TierConfig
from safe_offload.config.units import KIB
from safe_offload.tiers.valkey.commands import DELETING, LOOKING, allowing
from safe_offload.tiers.valkey.login import Login, LoginError, command, explained
from safe_offload.tiers.valkey.names import ALL_KEYS
from safe_offload.tiers.valkey.replies import ErrorReply, Tree
from safe_offload.tiers.valkey.servers import Node, Servers
from safe_offload.tiers.valkey.wire import Wire

TEXT_BYTES_MAX: Final = 192 * KIB
"""Of one answer; it is received into the scratch memory of a connection."""
_NO_TOUCH: Final = (b"CLIENT", b"NO-TOUCH", b"ON")
T = TypeVar("T")


class Client:
    """Asks one server, or all primaries of a cluster, one thing after the other.

    Attributes:
        label: of the tier; no secret is in it.
        keeps_use: asking for a key does not make it one that was used lately.

    Raises:
        CacheError: it cannot be used, with the fix.
        ConfigError: certificates cannot be used.
    """

    def __init__(self, config: TierConfig, timeout_s: float) -> None:
        self.label = config.location.label
        self.keeps_use = True
        self._timeout_s = timeout_s
        self._login = Login(dataclasses.replace(config, timeout_s=timeout_s), name="")
        self._told = weakref.WeakSet[Wire]()
        self._runner = asyncio.Runner()
        self._servers = Servers(self._login, 1)
        try:
            self._run(None, self._servers.refresh(0))
        except CacheError:
            self.close()
            raise

    @property
    def is_cluster(self) -> bool:
        """Return whether keys are spread over several nodes."""
        return self._servers.is_cluster

    @property
    def nodes(self) -> list[Node]:
        """Return all servers that have keys."""
        return self._servers.nodes

    def node_of(self, key: bytes) -> Node:
        """Return the server that has a key."""
        if (owner := self._servers.owner(key)) is None:
            raise CacheError(
                f"{self.label} is a cluster without assigned key slots. Fix: check that all slots "
                "have a node."
            )
        return owner

    def ask(self, node: Node, *commands: Sequence[bytes]) -> list[Tree]:
        """Send commands, and return the answer to each: an `ErrorReply` where it is refused."""
        return self._run(node, self._ask(node, commands))

    def answer(self, node: Node, *words: bytes) -> Tree:
        """Send a command, and return the answer; a CacheError where it is refused."""
        (found,) = self.ask(node, words)
        if isinstance(found, ErrorReply):
            raise self.refusal(found)
        return found

    def close(self) -> None:
        """Close all connections."""
        self._servers.close()
        self._runner.close()

    def refusal(self, error: ErrorReply) -> CacheError:
        """Return what is wrong and the fix, without a word of the server's beside its code."""
        if error.code == "NOPERM":
            problem = "denies this user required commands"
            fix = (
                f"log in as a user whose ACL has ~{ALL_KEYS} {allowing(LOOKING)}, and "
                f"{allowing(DELETING)} to delete"
            )
        elif error.code == "LOADING":
            problem, fix = "is still loading its data", "try again when it has"
        elif error.code in ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"):
            problem = f"is a cluster that is changing ({error.code})"
            fix = "try again later"
        else:
            problem, fix = f"answers with an error ({error.code})", "check the server's log"
        return CacheError(f"{self.label} {problem}. Fix: {fix}.")

    async def _ask(self, node: Node, commands: Sequence[Sequence[bytes]]) -> list[Tree]:
        async def work(wire: Wire) -> list[Tree]:
            if wire not in self._told:  # Valkey and Redis know it from 7.2 on
                if isinstance(await wire.ask_tree([command(*_NO_TOUCH)]), ErrorReply):
                    self.keeps_use = False
                self._told.add(wire)
            asked = [
                wire.ask_tree([command(*words)], text_bytes_max=TEXT_BYTES_MAX)
                for words in commands
            ]
            return [await answer for answer in asked]

        return await node.data.use(work)

    def _run(self, node: Node | None, work: Coroutine[Any, Any, T]) -> T:
        async def in_time() -> T:
            async with asyncio.timeout(self._timeout_s):
                return await work

        try:
            return self._runner.run(in_time())
        except LoginError as error:
            problem = error
        except OSError as error:
            where = self._login.home if node is None else node.address
            problem = explained(error, where, has_tls=self._login.has_tls)
        fix = problem.fix or "Check the server's log"
        kind = UnreachableError if problem.is_down else CacheError
        raise kind(f"{self.label}: {problem.problem}. Fix: {fix[0].lower()}{fix[1:]}.")
