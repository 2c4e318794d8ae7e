"""The interface of a kind of place: verbs for many objects at a time.

A kind is one class, and one line in `config.tiers.KINDS`. It moves bytes and keeps no promise about
them: above it one tier seals and judges (sealed_tier.py), and one withholds (guarded_tier.py). The
commands `cache` and `doctor` use the same verbs.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from safe_offload.config.units import MIB
from safe_offload.findings import Finding, error, ok
from safe_offload.tiers import naming
from safe_offload.tiers.base import Name, PlaceError
from safe_offload.tiers.naming import DESCRIPTION_FILE
from safe_offload.tiers.rare_log import RareLog

if TYPE_CHECKING:
    from safe_offload.config.tiers import TierConfig
    from safe_offload.tiers.batch import Batch

T = TypeVar("T")
PAGE_ITEMS = 1000
"""Of a walk, and of what an operator deletes at a time."""
LISTED_MAX = 100_000
"""Of namespaces."""
TRIAL_OBJECTS = 16


class Item(NamedTuple):
    """An object that was found, by its key in the place, and the name that its header must contain.

    `used_at_s` is since 1970, 0 if unknown. A temporary is being written, or was when its writer
    died.
    """

    namespace: str
    key: str
    name: Name | None
    size_bytes: int
    used_at_s: float
    is_temporary: bool = False


class Store(ABC):
    """A place of one kind. It belongs to the loop's thread.

    A verb that fails raises OSError, a PlaceError where the fix is known, which its caller logs.
    `get` and `put` do not raise: they log the failure, and note it as the result of each object.

    Args:
        config: of the tier; nothing is requested from the place before it is first used.
        slot_bytes: of the largest slot; 0 for an operator, who gets and puts nothing.

    Attributes:
        label: for the log and the metrics; contains no secret.
        log: takes failures; `SealedTier` logs what verbs raise.
        use: what its times are of: "USED" or, where only that is known, "WRITTEN".
        place_id: of the finding that the place can be used.
        piece_bytes: that `read` returns at most.
        used_bytes: of what it holds; -1 if unknown.
        num_evicted: objects that this process has deleted to keep its capacity.
    """

    use = "USED"
    place_id = "tiers.place"
    piece_bytes = 4 * MIB
    used_bytes = -1
    num_evicted = 0

    def __init__(self, config: TierConfig, slot_bytes: int = 0) -> None:
        self.label = config.location.label
        self.log = RareLog(self.label)

    # ---- engines -------------------------------------------------------------------------------

    @abstractmethod
    async def has(self, names: Sequence[Name]) -> list[bool]:
        """Return which objects are there."""

    @abstractmethod
    async def get(self, batch: Batch) -> None:
        """Read the objects that are left of a batch into their slots, and set each result.

        The slot of an object that is not DONE may contain anything. When cancelled, it begins no
        other object; when it ends, nothing touches the slots any more.
        """

    @abstractmethod
    async def put(self, batch: Batch) -> None:
        """Write the objects that are left of a batch, each whole or not at all; ends as `get`.

        An object that is already there is PRESENT, unless it is bad.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> list[bool]:
        """Delete objects; return which existed, or True for all if the place does not say."""

    @abstractmethod
    async def describe(self, namespace: bytes, text: bytes) -> float:
        """Store the description of a namespace; return how many seconds it stays."""

    async def close(self) -> None:  # noqa: B027 - not every place holds something
        """Release descriptors, threads and connections; a second call does nothing."""

    # ---- operators -----------------------------------------------------------------------------

    @abstractmethod
    async def namespaces(self) -> list[str]:
        """Return the names of all namespaces, in order: what `listed` returns."""

    @abstractmethod
    def walk(self, namespace: str = "") -> AsyncIterator[list[Item]]:
        """Yield every object, or those of a namespace; skip what vanishes meanwhile."""

    @abstractmethod
    async def read(self, key: str, start: int, length: int) -> bytes:
        """Return bytes of an object or a description, fewer at its end. FileNotFoundError: none."""

    async def is_ours(self) -> bool:
        """Return whether something may be deleted: always where other names are not touched."""
        return True

    async def recount(self) -> None:  # noqa: B027 - most places count by themselves
        """Update the count that engines share, after an operator has deleted objects."""

    async def forget(self, namespaces: Sequence[str]) -> None:
        """Delete the rest of namespaces whose objects are gone."""
        await self.delete([self.description_key(name) for name in namespaces])

    async def diagnose(self) -> list[Finding]:
        """Return findings for an operator: whether each verb works, and settings to improve.

        Objects are written to a separate namespace, and deleted again. OSError: the place does not
        answer, or refuses every verb.
        """
        space = naming.namespace(trial_facts())
        folder = naming.namespace_folder(space)
        key = self.description_key(folder)
        verbs: dict[str, Callable[[], Awaitable[object]]] = {
            "list": lambda: anext(self.walk(folder), None),
            "write": lambda: self.describe(space, b"x"),
            "read": lambda: self.read(key, 0, 1),
            "delete": lambda: self.delete([key]),
        }
        refused: dict[str, PlaceError] = {}
        for verb, call in verbs.items():
            try:
                await call()
            except FileNotFoundError:
                continue  # a valid answer
            except PlaceError as problem:
                if problem.is_down:
                    raise
                refused[verb] = problem
            except OSError as problem:
                refused[verb] = PlaceError(problem.strerror or str(problem))
        found = [ok(self.place_id, f"{self.label} can be reached")]
        if not refused:
            can = "can be listed, written, read and deleted from"
            return [*found, ok("tiers.access", f"{self.label} {can}")]
        first = next(iter(refused.values()))
        if len(refused) == len(verbs):
            raise first
        why = "; ".join(f"{verb}: {problem.problem}" for verb, problem in refused.items())
        fix = first.fix[:1].lower() + first.fix[1:]
        denied = error("tiers.access", f"{self.label} refuses: {why}", "all four actions", fix)
        return [*found, denied]

    def key_of(self, name: Name) -> str:
        """Return where an object is, or would be."""
        return "/".join((naming.namespace_folder(name.namespace), *naming.path_of(name)))

    def description_key(self, namespace: str) -> str:
        """Return where the description of a namespace is, or would be."""
        return f"{namespace}/{DESCRIPTION_FILE}"


def trial_facts() -> dict[str, str]:
    """Return the facts of a namespace that no engine uses."""
    return {"model": "safe-offload doctor", "trial": secrets.token_hex(8)}


def trial_names(namespace: bytes | None = None) -> list[Name]:
    """Return names of trial objects, by default in a namespace that no engine uses."""
    space = naming.namespace(trial_facts()) if namespace is None else namespace
    return [Name(space, 0, index.to_bytes(32, "big")) for index in range(TRIAL_OBJECTS)]


def listed(found: Iterable[str]) -> list[str]:
    """Return the namespaces among names, in order; the first LISTED_MAX that are found."""
    names = set[str]()
    for name in found:
        if naming.is_namespace_folder(name):
            names.add(name)
        if len(names) >= LISTED_MAX:
            break
    return sorted(names)


def pages(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield lists of at most PAGE_ITEMS."""
    left = iter(items)
    while page := list(islice(left, PAGE_ITEMS)):
        yield page


def item_at(key: str, size_bytes: int, used_at_s: float) -> Item | None:
    """Return the object at a key of `Store.key_of`; None if it is none of ours."""
    namespace, _, rest = key.partition("/")
    folder, _, file = rest.partition("/")
    if not naming.is_namespace_folder(namespace) or not naming.is_object_folder(folder):
        return None
    name = naming.name_of(namespace, file)
    if name is not None and naming.path_of(name)[0] != folder:
        name = None
    return Item(namespace, key, name, size_bytes, used_at_s)
