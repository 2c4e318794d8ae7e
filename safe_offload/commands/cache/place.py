"""The place of a tier that an operator names, with synchronous verbs."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from argparse import ArgumentParser
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import quote

from safe_offload.config.printing import printable, without_secrets
from safe_offload.config.settings import problem_of_path
from safe_offload.config.tier_list import tiers
from safe_offload.config.tier_url import FILE, URL_KEY
from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError, SafeOffloadError
from safe_offload.tiers import naming
from safe_offload.tiers.base import PlaceError
from safe_offload.tiers.choice import open_store
from safe_offload.tiers.naming import DESCRIPTION_BYTES_MAX, HEADER_BYTES
from safe_offload.tiers.seals.seal import PLAIN, Seal
from safe_offload.tiers.store import Item, Store

_ERASE: Final = "\x1b[K"
TIMEOUT_S: Final = 30.0
"""Of each answer."""
OPTIONS: Final = (
    *("password_file", "ca_file", "cert_file", "key_file", "endpoint"),
    *("hmac_key_file", "encryption_key_file"),
)
"""Settings of a tier that are options too."""

T = TypeVar("T")


class CacheError(SafeOffloadError):
    """An operation on a place cannot be done."""


class Place:
    """A `Store` without slots, one operation at a time; `label`, for messages, has no secrets."""

    def __init__(self, store: Store, label: str) -> None:
        self.label = label
        self._store = store
        self._runner = asyncio.Runner()

    @property
    def use(self) -> str:
        """See `Store.use`."""
        return self._store.use

    def require_cache(self) -> None:
        """Raise a CacheError for a place that no tier has used; nothing is changed there."""
        if not self._run(self._store.is_ours()):
            raise CacheError(f"{self.label} is not the directory of a tier. Fix: name one.")

    def namespaces(self) -> list[str]:
        """Return the names of all namespaces, at most LISTED_MAX."""
        return self._run(self._store.namespaces())

    def description(self, namespace: str, seal: Seal) -> bytes:
        """Return the description of a namespace, or nothing; encrypted without its key."""
        try:
            key = self._store.description_key(namespace)
            stored = self._read(key, 0, DESCRIPTION_BYTES_MAX)
        except OSError:
            return b""
        return seal.opened_description(bytes.fromhex(namespace), stored)

    def items(self, namespace: str = "") -> Iterator[Item]:
        """Yield every object, or those of a namespace; objects that vanish are skipped.

        On a terminal, show after each page how many there were.
        """
        pages, count, is_shown = self._store.walk(namespace), 0, sys.stderr.isatty()

        async def following() -> list[Item] | None:
            return await anext(pages, None)

        while (page := self._run(following())) is not None:
            yield from page
            count += len(page)
            if is_shown:
                print(f"{count:,} objects", end="\r", file=sys.stderr, flush=True)
        if is_shown:
            print(_ERASE, end="", file=sys.stderr, flush=True)

    def pieces(self, item: Item) -> Iterator[bytes]:
        """Yield the header of an object, HEADER_BYTES if it has one, and then its bytes.

        FileNotFoundError: it has vanished. OSError: it cannot be read.
        """
        at, length = 0, max(self._store.piece_bytes, HEADER_BYTES)
        while at == 0 or at < item.size_bytes:
            piece = self._read(item.key, at, length)
            if at == 0:
                yield piece[:HEADER_BYTES]
            yield piece[0 if at else HEADER_BYTES :]
            at += len(piece)
            if len(piece) < length:
                break

    def _read(self, key: str, start: int, length: int) -> bytes:
        return self._run(self._store.read(key, start, length))

    def problem_of(self, item: Item, seal: Seal = PLAIN) -> str:
        """Return the defect of an object; empty if there is none, NOT_CHECKED without its key.

        FileNotFoundError: it has vanished.
        """
        try:
            pieces = self.pieces(item)
            found = next(pieces, b"")
            if not naming.version_of(found):
                return "it has no header of this version"
            if item.name is None:
                return "its header names another object"
            return seal.problem_of(found, item.name, map(memoryview, pieces))
        except FileNotFoundError:
            raise
        except OSError as error:
            return f"it cannot be read: {error.strerror}"

    def delete(self, items: Sequence[Item]) -> list[Item]:
        """Delete objects; return those that existed."""
        were_there = self._run(self._store.delete([item.key for item in items]))
        return [item for item, was in zip(items, were_there, strict=True) if was]

    def forget(self, namespaces: Sequence[str]) -> None:
        """Delete the rest of namespaces whose objects are gone."""
        self._run(self._store.forget(namespaces))

    def is_older(self, item: Item, before_s: float) -> bool:
        """Return whether an object was last used before a time; False if it is being written.

        CacheError: the place does not record when objects were used.
        """
        if item.is_temporary:
            return False
        if not item.used_at_s:
            raise CacheError(
                f"{self.label} does not report when objects were last used. Fix: let it evict, or, "
                "on Valkey and Redis, use allkeys-lru instead of allkeys-lfu."
            )
        return item.used_at_s < before_s

    def recount(self) -> None:
        """Update the count that engines share, and delete leftovers of crashes."""
        self._run(self._store.recount())

    def close(self) -> None:
        self._run(self._store.close())
        self._runner.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._runner.run(work)
        except PlaceError as error:
            raise CacheError(error.line_for(self.label)) from None


def add_options(parser: ArgumentParser) -> None:
    """Add the options to reach a tier."""
    for setting in OPTIONS:
        option = f"--{setting.replace('_', '-')}"
        metavar = setting.rpartition("_")[2].upper()
        parser.add_argument(option, metavar=metavar, help=f'as the tier\'s "{setting}"')


def config_of(place: str, options: Mapping[str, Any]) -> TierConfig:
    """Return the tier at a url, or in the directory of a path; None is an option not given."""
    path, url = os.path.abspath(place), place
    if "://" not in place:
        if problem := problem_of_path(path):
            label = printable(without_secrets(place))
            raise ConfigError(f"{label}: {problem}. Fix: name the directory or the url of a tier.")
        url = f"{FILE}://{quote(path)}"
    written = {
        name: os.path.abspath(value) if name.endswith("_file") else value
        for name, value in options.items()
        if value is not None
    }
    config: TierConfig = tiers().read("tiers", [{URL_KEY: url, **written}])[0]
    return config


def open_place(place: str, config: TierConfig) -> Place:
    """Return the place of a tier."""
    location = config.location
    label = location.label
    if location.scheme == FILE:
        label = without_secrets(location.path if "://" in place else place)
    return Place(open_store(dataclasses.replace(config, timeout_s=TIMEOUT_S)), label)
