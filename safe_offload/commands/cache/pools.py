"""Pools that engines of this machine share: `safe-offload cache ls node`, and `rm node`."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import Any, Final

from safe_offload.commands.cache.place import CacheError
from safe_offload.config.printing import printable
from safe_offload.config.units import format_bytes
from safe_offload.node.pools import Pool, find_pools, remove_pool, user_folder

PLACE: Final = "node"


def run_on_pools(arguments: Namespace) -> tuple[dict[str, Any], list[tuple[str, ...]], int]:
    """Run the subcommand; return its output for JSON and in rows, and the exit status."""
    try:
        return _run(arguments, find_pools())
    except OSError as error:
        raise CacheError(
            f"{error.filename}: {error.strerror}. Fix: run this as the engines' user."
        ) from error


def _run(
    arguments: Namespace, pools: list[Pool]
) -> tuple[dict[str, Any], list[tuple[str, ...]], int]:
    if arguments.action.__name__ == "_ls":
        return _document(pools), _rows(pools), 0
    if arguments.action.__name__ != "_rm":
        raise CacheError(f"{PLACE}: pools support only `ls` and `rm`. Fix: use one of them.")
    wanted = "" if arguments.all else arguments.namespace
    chosen = [pool for pool in pools if wanted is not None and pool.path.name.startswith(wanted)]
    if not arguments.all and (len(chosen) != 1 or not wanted):
        raise CacheError(
            f"rm: {len(chosen)} pools in {user_folder()} begin with {wanted!r}. Fix: name one "
            "that `safe-offload cache ls node` shows, or --all."
        )
    kept = {pool.path: remove_pool(pool.path, is_dry=arguments.dry_run) for pool in chosen}
    removed = [pool for pool in chosen if not kept[pool.path]]
    frees = "would free" if arguments.dry_run else "freed"
    rows: list[tuple[str, ...]] = [
        (f"{pool.path.name} {why}, stays.",)
        if (why := kept[pool.path])
        else (f"{pool.path.name} {frees} {format_bytes(pool.size_bytes)}.",)
        for pool in chosen
    ]
    did = "Would remove" if arguments.dry_run else "Removed"
    count = f"{len(removed)} pool{'s' if len(removed) != 1 else ''}"
    rows.append((f"{did} {count}, {format_bytes(sum(pool.size_bytes for pool in removed))}.",))
    document = {
        "dry_run": arguments.dry_run,
        **_document(removed),
        "kept": {str(path): why for path, why in kept.items() if why},
    }
    return document, rows, 0 if len(removed) == len(chosen) else 1


def _document(pools: list[Pool]) -> dict[str, Any]:
    return {"pools": [asdict(pool) | {"path": str(pool.path)} for pool in pools]}


def _rows(pools: list[Pool]) -> list[tuple[str, ...]]:
    if not pools:
        return [(f"There are no pools in {user_folder()}.",)]
    rows: list[tuple[str, ...]] = [("POOL", "SIZE", "SLOTS", "FILLED", "ENGINES", "MODEL")]
    for pool in pools:
        numbers = f"{pool.num_slots:,}", f"{pool.num_filled:,}", f"{pool.num_engines}"
        if not pool.num_slots:  # of another version, or damaged
            numbers = "?", "?", "in use" if pool.is_used else "0"
        about = printable(pool.about) or "?"
        rows.append((pool.path.name, format_bytes(pool.size_bytes), *numbers, about))
    return rows
