"""Reads the list `"tiers"`: each tier, and the settings on which all must agree."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from safe_offload.config.printing import NOT_SHOWN, shown, shown_key
from safe_offload.config.settings import (
    Kind,
    NestedKey,
    fix_of_unknown,
    read_settings,
    refuse,
    settings_of,
)
from safe_offload.config.tier_url import FILE, URL_FORMS, URL_KEY, Location
from safe_offload.config.tiers import (
    COMMON,
    KINDS,
    MAX_TIERS,
    OWN,
    TIER_KEYS,
    URL,
    TierConfig,
    schemes_with,
)

_EXAMPLE: Final = '[{"url": "file:///mnt/nvme/kv", "capacity": "1TiB"}]'
# All tiers have these, or none: a spill goes to all of them, under the same namespace.
_FIELDS_ALIKE: Final[Mapping[str, type]] = {"store": str, "model_version": bool}
_ALIKE: Final = "all tiers with it, or all without"
MIXED_KEYS: Final = (
    "anyone who can write to the tier without a key could get forged blocks, and everything "
    "computed from them, sealed with yours"
)


class _Tiers(Kind):
    def __init__(self) -> None:
        self.allowed = 'a list of mappings, each with a "url"'

    def read(self, key: str, value: object) -> tuple[TierConfig, ...]:
        allowed = f"a list of 0 to {MAX_TIERS} mappings, the nearest tier first"
        fix = f'write "{key}": {_EXAMPLE}, or leave it out'
        if not isinstance(value, list | tuple):
            refuse(key, NOT_SHOWN, "this is not a list", allowed, fix)
        if len(value) > MAX_TIERS:
            refuse(key, value, f"these are {len(value)} tiers", allowed, fix)
        found: list[TierConfig] = []
        for index, written in enumerate(value):
            place = f'["{key}"][{index}]'
            tier = _read_tier(key, place, written)
            for other, earlier in enumerate(found):
                if earlier.location == tier.location:
                    what = "directory" if tier.location.scheme == FILE else "url"
                    problem = f'tier {other + 1}, ["{key}"][{other}], has the same {what}'
                    url = written[URL_KEY]
                    fix = "remove one of the two"
                    refuse(NestedKey(URL_KEY, place), url, problem, URL_FORMS, fix)
            found.append(tier)
            _require_alike(found, value, place)
        return tuple(found)


def tiers() -> Kind:
    """Return the kind of a list of tiers, nearest first."""
    return _Tiers()


def _read_tier(key: str, place: str, written: object) -> TierConfig:
    if not isinstance(written, Mapping):
        refuse(
            NestedKey(place, ""),
            NOT_SHOWN,
            "this is not a mapping",
            f"a mapping with the keys {', '.join(TIER_KEYS)}",
            f'write "{key}": {_EXAMPLE}',
        )
    for name in written:
        if name not in TIER_KEYS:
            refuse(
                NestedKey(f"{place}[{shown_key(name)}]", ""),
                NOT_SHOWN,
                "this is not a setting of a tier",
                f"the keys {', '.join(TIER_KEYS)}",
                fix_of_unknown(name, TIER_KEYS),
            )
    if URL_KEY not in written:
        allowed, fix = URL_FORMS, f'write "{URL_KEY}": "file:///mnt/nvme/kv" into it'
        refuse(NestedKey(place, ""), dict(written), f'"{URL_KEY}" is missing', allowed, fix)
    location = URL.kind.read(NestedKey(URL_KEY, place), written[URL_KEY])
    _require_fitting(location, place, written)
    config = KINDS[location.scheme].config
    return config(location, **read_settings(config, written, place))


def _require_fitting(location: Location, place: str, written: Mapping[str, object]) -> None:
    config = KINDS[location.scheme].config
    known = {row.key for row in settings_of(config).values()}
    for row in (row for rows in OWN.values() for row in rows.values()):
        if row.key in written and row.key not in known:
            having = [c for c, rows in OWN.items() if any(r.key == row.key for r in rows.values())]
            problem = f"{location.scheme}:// has no such setting"
            allowed = f"it beside {schemes_with(*having)}"
            fix = f"remove it, or {row.elsewhere}" if row.elsewhere else "remove it"
            refuse(NestedKey(row.key, place), written[row.key], problem, allowed, fix)
    if "hmac_key_file" in written and "encryption_key_file" in written:
        problem, fix = "encryption seals objects too", 'remove "hmac_key_file"'
        refuse(NestedKey("hmac_key_file", place), NOT_SHOWN, problem, "one of the two", fix)
    config.check(location, place, written)


def _require_alike(found: list[TierConfig], value: Sequence[Any], place: str) -> None:
    for field, as_type in _FIELDS_ALIKE.items():
        if as_type(getattr(found[0], field)) == as_type(getattr(found[-1], field)):
            continue
        row = COMMON[field]
        first, last = (value[i].get(row.key, row.default) for i in (0, len(found) - 1))
        more = shown(last if first == row.default else first)
        refuse(
            NestedKey(row.key, place),
            last,
            f"the first tier has {shown(first)}, and all tiers get the same writes",
            _ALIKE,
            f'write "{row.key}": {more} into each tier, or into none',
        )
    if found[0].has_key != found[-1].has_key:
        keyed = found[0] if found[0].has_key else found[-1]
        key = "hmac_key_file" if keyed.hmac_key_file else "encryption_key_file"
        refuse(
            NestedKey(key, place),
            NOT_SHOWN if keyed is found[-1] else None,
            f"the first tier has {'one' if keyed is found[0] else 'none'}: {MIXED_KEYS}",
            _ALIKE,
            f'write "{key}" into each tier, directories too (one file does for all), or into none',
        )
