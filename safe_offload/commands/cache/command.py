"""List, check and delete objects of a tier; engines may use it meanwhile.

safe-offload cache ls /mnt/nvme/kv
safe-offload cache verify rediss://kv.internal:6379 --password-file /run/secrets/valkey
safe-offload cache rm s3://bucket/kv --all --older-than 7d
safe-offload cache rm /mnt/nvme/kv --all --dry-run
safe-offload cache ls node
"""

from __future__ import annotations

import functools
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from safe_offload.commands.cache import pools
from safe_offload.commands.cache.place import (
    OPTIONS,
    CacheError,
    Place,
    add_options,
    config_of,
    open_place,
)
from safe_offload.config.printing import printable
from safe_offload.config.settings import UNITS_S, read_duration
from safe_offload.config.tiers import TierConfig
from safe_offload.config.units import MIB, format_bytes
from safe_offload.tiers import naming
from safe_offload.tiers.files.directory import NotOursError
from safe_offload.tiers.seals.keys import open_seal
from safe_offload.tiers.seals.seal import NOT_CHECKED, PLAIN, Seal, seal_of
from safe_offload.tiers.store import LISTED_MAX, Item, pages

_BAD_SHOWN_MAX: Final = 20
_NAMES_SHOWN_MAX: Final = 20
_BAD_MAX: Final = 10_000
"""Of bad objects named in JSON."""
_FACTS_BYTES_MAX: Final = 8 * MIB
"""Of descriptions whose facts are kept for JSON; of more, only the model is kept."""
_PLACE_LENGTH_MAX: Final = 200

# ---- arguments --------------------------------------------------------------------------------


def add_arguments(parser: ArgumentParser) -> None:
    """Add the subcommands."""
    commands = parser.add_subparsers(required=True, metavar="ACTION")
    for name, function, what in (
        ("ls", _ls, "namespaces, their models, objects, bytes and age"),
        ("verify", _verify, "check every header and checksum"),
        ("rm", _rm, "delete a namespace, or all; or of these what was not used for long"),
    ):
        command = commands.add_parser(name, help=what, description=f"{what}.".capitalize())
        command.add_argument(
            "place", metavar="URL_OR_DIR", help='url or directory of the tier; "node": shared pools'
        )
        if name == "verify":
            command.add_argument("--delete", action="store_true", help="delete bad objects")
        elif name == "rm":
            command.add_argument(
                "namespace", nargs="?", help="namespace that `ls` shows; a prefix is enough"
            )
            command.add_argument("--all", action="store_true", help="every namespace")
            command.add_argument(
                "--older-than", metavar="AGE", help="only objects unused for this long, such as 7d"
            )
            command.add_argument(
                "--dry-run", action="store_true", help="list what would be deleted"
            )
        command.add_argument("--json", action="store_true", help="print JSON")
        add_options(command)
        command.set_defaults(action=function)


def run_command(arguments: Namespace) -> int:
    """Run the subcommand; return the exit status."""
    if arguments.place == pools.PLACE:
        found, rows, result = pools.run_on_pools(arguments)
        text = json.dumps(found, indent=1) if arguments.json else "\n".join(_table(rows))
        sys.stdout.write(text + "\n")
        return result
    options = {setting: getattr(arguments, setting) for setting in OPTIONS}
    config = config_of(arguments.place, options)
    place = open_place(arguments.place, config)
    try:
        document, text, status = arguments.action(arguments, place, config)
    except OSError as error:
        problem, fix = (
            error.strerror or error,
            "run this as the engines' user, on a writable file system",
        )
        if isinstance(error, NotOursError):
            problem, fix = error.problem, error.fix
        raise CacheError(f"{place.label}: {problem}. Fix: {fix}.") from error
    finally:
        place.close()
    sys.stdout.write((json.dumps(document, indent=1) if arguments.json else text) + "\n")
    return int(status)


Answer = tuple[dict[str, Any], str, int]
"""The output as JSON and as text, and the exit status."""


def _age_s(text: str) -> float:
    age_s = read_duration(text)
    if age_s is None:
        raise CacheError(
            f"--older-than {text}: expected a number with the unit s, m, h or d. Fix: write 7d "
            "for a week."
        )
    return age_s


# ---- ls ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Listed:
    """A namespace, with the facts of its description; times are seconds since 1970, 0 if unknown.

    `first_used_s` is of the least recently used object. `num_temporaries` are objects being
    written, or abandoned by a writer that died.
    """

    namespace: str
    facts: dict[str, Any] = field(default_factory=dict)
    after_reset: bool = False
    num_objects: int = 0
    size_bytes: int = 0
    last_used_s: float = 0.0
    first_used_s: float = 0.0
    num_temporaries: int = 0

    @property
    def model(self) -> str:
        """Return the name of the model, if it is known."""
        return printable(str(self.facts.get("model", "?")))

    def add(self, item: Item) -> None:
        """Count an object."""
        if item.is_temporary:
            self.num_temporaries += 1
            return
        self.num_objects += 1
        self.size_bytes += item.size_bytes
        self.last_used_s = max(self.last_used_s, item.used_at_s)
        self.first_used_s = min(self.first_used_s or item.used_at_s, item.used_at_s)


def _listed(place: Place, seal: Seal) -> list[Listed]:
    found, left_bytes = {}, _FACTS_BYTES_MAX
    for name in place.namespaces():
        described = place.description(name, seal)
        facts = naming.facts_of(described)
        left_bytes -= len(described)
        if left_bytes < 0:
            facts = {"model": printable(str(facts["model"]))} if "model" in facts else {}
        found[name] = Listed(name, facts, naming.is_after_reset(described))
    for item in place.items():
        if item.namespace in found:
            found[item.namespace].add(item)
    return sorted(found.values(), key=lambda listed: -listed.last_used_s)


def _ls(arguments: Namespace, place: Place, config: TierConfig) -> Answer:
    now_s = time.time()
    listed = _listed(place, open_seal(config))
    total_bytes = sum(each.size_bytes for each in listed)
    document = {
        "tier": place.label,
        "size_bytes": total_bytes,
        "namespaces": [asdict(each) for each in listed],
    }
    rows: list[tuple[str, ...]] = [
        ("NAMESPACE", "OBJECTS", "SIZE", f"LAST {place.use}", "OLDEST", "MODEL")
    ]
    for each in listed:
        model = each.model + (" (after a reset)" if each.after_reset else "")
        ages = [
            _ago(now_s, at_s) if at_s else ("?" if each.num_objects else "-")
            for at_s in (each.last_used_s, each.first_used_s)
        ]
        sizes = f"{each.num_objects:,}", format_bytes(each.size_bytes)
        rows.append((each.namespace, *sizes, ages[0], ages[1], model))
    count = f"{len(listed)} namespace{'s' if len(listed) != 1 else ''}"
    num_objects = sum(each.num_objects for each in listed)
    total = f"{count}, {num_objects:,} objects, {format_bytes(total_bytes)} in {place.label}"
    total += _more_than(listed)
    if not listed:
        return document, f"No engine has stored anything in {place.label}.", 0
    return document, "\n".join([*_table(rows), total]), 0


def _more_than(namespaces: Sequence[object]) -> str:
    """Return a hint if there may be more namespaces than are listed."""
    return "; more may be there" if len(namespaces) >= LISTED_MAX else ""


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()


def _ago(now_s: float, at_s: float) -> str:
    age_s = max(now_s - at_s, 0.0)
    for unit in ("d", "h", "m"):
        if age_s >= UNITS_S[unit]:
            return f"{age_s / UNITS_S[unit]:.0f}{unit}"
    return f"{age_s:.0f}s"


# ---- verify -----------------------------------------------------------------------------------


def _verify(arguments: Namespace, place: Place, config: TierConfig) -> Answer:
    @functools.cache
    def key_seal() -> Seal:  # lazy: an unreadable place is reported before an unreadable key
        return open_seal(config)

    @functools.lru_cache(LISTED_MAX)
    def seal_of_namespace(namespace: str) -> Seal:
        return _seal_for(place.description(namespace, key_seal()), key_seal())

    num_objects, size_bytes, num_sealed, num_bad = 0, 0, 0, 0
    bad: list[dict[str, str]] = []
    for item in place.items():
        if item.is_temporary:
            continue
        try:
            problem = place.problem_of(item, seal_of_namespace(item.namespace))
        except FileNotFoundError:
            continue  # evicted meanwhile
        if problem == NOT_CHECKED:
            num_sealed += 1
            continue
        num_objects += 1
        size_bytes += item.size_bytes
        if problem:
            num_bad += 1
            if num_bad <= _BAD_MAX:
                bad.append({"file": item.key, "problem": problem})
            if arguments.delete:
                place.delete([item])
    has_key = bool(key_seal().facts)
    is_well = not bad or arguments.delete
    document = {
        "tier": place.label,
        "num_objects": num_objects,
        "size_bytes": size_bytes,
        "num_sealed": num_sealed,
        "num_bad": num_bad,
        "bad": bad,
        "deleted": bool(bad) and arguments.delete,
    }
    lines = [
        f"{printable(each['file'], _PLACE_LENGTH_MAX)}: {each['problem']}"
        for each in bad[:_BAD_SHOWN_MAX]
    ]
    if num_bad > _BAD_SHOWN_MAX:
        lines.append(f"… and {num_bad - _BAD_SHOWN_MAX} more; --json prints {_BAD_MAX:,}")
    lines.append(f"{num_objects:,} objects, {format_bytes(size_bytes)} checked: {num_bad} bad.")
    if bad:
        lines[-1] += (
            " They were deleted."
            if arguments.delete
            else " Engines never use them. Fix: run this again with --delete."
        )
    if num_sealed:
        lines.append(
            f"{num_sealed:,} more objects are sealed with {'another' if has_key else 'a'} "
            "key and were not checked. Fix: pass it with --hmac-key-file or --encryption-key-file."
        )
    return document, "\n".join(lines), 0 if is_well and not num_sealed else 1


def _seal_for(described: bytes, seal: Seal) -> Seal:
    """Return the seal that checks the objects of a namespace.

    `described` is its description, empty if it is gone; `seal` that of the given key, or PLAIN.
    """
    facts = naming.facts_of(described)
    return seal_of(facts, seal) or PLAIN if facts else seal


# ---- rm ---------------------------------------------------------------------------------------


def _rm(arguments: Namespace, place: Place, config: TierConfig) -> Answer:
    if (arguments.namespace is None) == (not arguments.all):
        raise CacheError("rm: no namespace given. Fix: add one that `ls` shows, or --all.")
    age = arguments.older_than
    before_s = None if age is None else time.time() - _age_s(age)
    place.require_cache()
    chosen = place.namespaces()
    if not arguments.all:
        chosen = [name for name in chosen if name.startswith(arguments.namespace)]
        if len(chosen) != 1 or not arguments.namespace:
            found = "no namespace begins" if not chosen else f"{len(chosen)} namespaces begin"
            raise CacheError(
                f"rm: {found} with {arguments.namespace!r} in {place.label}. "
                f"Fix: run `safe-offload cache ls {place.label}` and "
                "write one of them."
            )
    num_objects, size_bytes = 0, 0
    for batch in pages(place.items("" if arguments.all else chosen[0])):
        due = batch
        if before_s is not None:
            due = [item for item in batch if place.is_older(item, before_s)]
        for item in due if arguments.dry_run else place.delete(due):
            num_objects += not item.is_temporary
            size_bytes += 0 if item.is_temporary else item.size_bytes
    if age is None and not arguments.dry_run:
        place.forget(chosen)
    elif not arguments.dry_run:
        place.recount()
    document = {
        "tier": place.label,
        "dry_run": arguments.dry_run,
        "namespaces": chosen,
        "num_objects": num_objects,
        "size_bytes": size_bytes,
    }
    names = ", ".join(chosen[:_NAMES_SHOWN_MAX]) or "nothing"
    if len(chosen) > _NAMES_SHOWN_MAX:
        names += f" and {len(chosen) - _NAMES_SHOWN_MAX:,} more"
    deleted = "Would delete" if arguments.dry_run else "Deleted"
    older = "" if age is None else f" older than {age}"
    text = f"{deleted} {names}: {num_objects:,} objects{older}, {format_bytes(size_bytes)}"
    return document, f"{text}{_more_than(chosen)}.", 0
