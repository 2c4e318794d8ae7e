"""Whether an object is what its name and its header say."""

from __future__ import annotations

from safe_offload.commands.cache.store import Item, Store
from safe_offload.tiers import naming
from safe_offload.tiers.seal import PLAIN, Seal, seal_of


def seal_for(described: bytes, seal: Seal) -> Seal:
    """Return what checks the objects of a namespace: `seal` if they are sealed with its key.

    Args:
        described: the description of the namespace, empty if it is gone.
        seal: of the key that was given; PLAIN for none.
    """
    facts = naming.facts_of(described)
    return seal_of(facts, seal) or PLAIN if facts else seal


def problem_of(store: Store, item: Item, seal: Seal = PLAIN) -> str:
    """Return what is wrong with an object; empty if nothing is, NOT_CHECKED without its key.

    Raises:
        FileNotFoundError: it is not there any more.
    """
    try:
        pieces = store.pieces(item)
        found = next(pieces, b"")
        if not naming.is_sealed(found) and naming.Header.read(found) is None:
            return "it has no header of this version"
        if item.name is None:
            return "its header names another object"
        return seal.problem_of(found, item.name, map(memoryview, pieces))
    except FileNotFoundError:
        raise
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
