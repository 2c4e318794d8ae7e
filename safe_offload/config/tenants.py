"""Quotas of tenants, by `cache_salt`: a file that may change at any time.

    {"default": "20%", "guaranteed": {
        "chat": {"share": "30%", "prefix": "chat-"},
        "batch": {"share": "10%", "salt_sha256": "9f86d081884c7d65..."}}}

Only the label, the operator's name of a tenant, is shown: a salt is a secret.
"""

import hashlib
import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from safe_offload.config.files import read_file
from safe_offload.errors import ConfigError

logger = logging.getLogger(f"vllm.{__name__}")

REST: Final = "rest"
"""The label of salts that the file does not name, and of requests without a salt."""
WHOLE: Final = 10_000
"""Shares are in hundredths of a percent, so that sums are exact."""
MAX_TENANTS: Final = 32
"""Each has series of its own in the metrics."""
MAX_MARK: Final = 999_999
MAX_FILE_BYTES: Final = 1 << 20
POLL_S: Final = 2.0

_LABEL: Final = re.compile(r"(?!rest$)[A-Za-z0-9][A-Za-z0-9_.-]{0,31}", re.ASCII)
_SHARE: Final = re.compile(r"(\d{1,3})(?:\.(\d{1,2}))? ?%", re.ASCII)
_WAYS: Final = {
    "prefix": re.compile(r".+", re.DOTALL),
    "salt_sha256": re.compile(r"[0-9a-f]{64}", re.ASCII),
}
_WORDS: Final = {"default", "guaranteed", "share", *_WAYS}
_EXAMPLE: Final = '{"default": "20%", "guaranteed": {"chat": {"share": "30%", "prefix": "chat-"}}}'


def payments(sizes: Sequence[int], above: Sequence[int], count: int) -> list[int]:
    """Return how much each tenant gives up of `count`; the sum may be less.

    The tenants furthest above their quota give first, down to one common level.

    Args:
        sizes: the most that each can give.
        above: the amount that each has above its quota; negative if below, which gives nothing.
    """

    def down_to(level: int) -> list[int]:
        return [min(n, max(0, a - level)) for n, a in zip(sizes, above, strict=True)]

    low, high, given = 0, max(above, default=0), down_to(0)
    if sum(given) > count:
        while high - low > 1:  # the first gives too much, or just enough, the second too little
            middle = (low + high) // 2
            low, high = (middle, high) if sum(down_to(middle)) >= count else (low, middle)
        given = down_to(high)
        for tenant, most in enumerate(down_to(low)):
            given[tenant] += min(most - given[tenant], count - sum(given))
    return given


@dataclass(frozen=True, slots=True)
class Tenants:
    """The tenants of a file; number 0 is `REST`."""

    labels: tuple[str, ...] = (REST,)  # by number
    # Of the host slots, and of each directory, guaranteed to each, in parts of `WHOLE`.
    shares: tuple[int, ...] = (0,)
    # The number of each, by prefix or digest of the salt.
    salts: Mapping[tuple[str, str], int] = field(default_factory=dict, repr=False)
    prefix_lengths: tuple[int, ...] = ()  # of those, the longest first

    @property
    def marks(self) -> tuple[int, ...]:
        """Return the numbers that mark objects of each tenant in a directory; 0 for `REST`.

        They follow from the labels alone, so engines that share a directory agree. Collisions are
        improbable.
        """
        digests = (hashlib.sha256(label.encode()).digest() for label in self.labels[1:])
        return (0, *(1 + int.from_bytes(digest[:8]) % MAX_MARK for digest in digests))

    def number_of(self, salt: str | None) -> int:
        """Return the tenant of a salt: by its digest first, then by the longest prefix."""
        if not salt:
            return 0
        digest = hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()
        number = self.salts.get(("salt_sha256", digest))
        for length in self.prefix_lengths if number is None else ():
            if (number := self.salts.get(("prefix", salt[:length]))) is not None:
                break
        return number or 0


def parse(text: bytes | None) -> Tenants:
    """Return the tenants of a file's text; None is a file that cannot be read.

    Raises:
        ConfigError: with the fix, but without salts and without labels that may be salts.
    """
    if text is None:
        _refuse("it cannot be read")
    try:
        written = json.loads(text, object_pairs_hook=_object)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        place = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        _refuse(f"this is not JSON{place}")
    if not isinstance(written, dict) or not written.keys() <= {"default", "guaranteed"}:
        _refuse("expected an object with the keys default and guaranteed")
    guaranteed = written.get("guaranteed", {})
    if not isinstance(guaranteed, dict) or len(guaranteed) > MAX_TENANTS:
        _refuse(f"guaranteed is not an object of at most {MAX_TENANTS} labels")
    labels, shares = [REST], [_share("default", written.get("default", "0%"))]
    salts: dict[tuple[str, str], int] = {}
    for label, value in guaranteed.items():
        if not _LABEL.fullmatch(label) or not isinstance(value, dict):
            # It may be a salt, written where its label belongs.
            what = 'a label of letters, digits and _.-, other than "rest", with an object'
            _refuse(f"entry {len(labels)} of guaranteed is not {what}")
        ways = value.keys() & _WAYS
        if not ways or value.keys() - _WAYS != {"share"}:
            _refuse(f'"{label}" needs share, and prefix or salt_sha256, and no other key')
        shares.append(_share(f'share of "{label}"', value["share"]))
        labels.append(label)
        for way in ways:
            for each in value[way] if isinstance(value[way], list) else [value[way]]:
                if not isinstance(each, str) or not _WAYS[way].fullmatch(each):
                    form = "64 digits of 0-9a-f" if way == "salt_sha256" else "not empty"
                    _refuse(f'{way} of "{label}" is not text, or a list of texts, {form}')
                if salts.setdefault((way, each), len(labels) - 1) != len(labels) - 1:
                    _refuse(f'a {way} of "{label}" belongs to another label too')
    if (total := sum(shares)) > WHOLE:
        _refuse(f"the shares add up to {total / 100:g}%, more than 100%")
    lengths = sorted({len(text) for way, text in salts if way == "prefix"}, reverse=True)
    return Tenants(tuple(labels), tuple(shares), salts, tuple(lengths))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; refuse duplicate keys."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        is_label = _LABEL.fullmatch(twice) and isinstance(found[twice], dict)  # else maybe a salt
        shown = f'"{twice}"' if is_label or twice in _WORDS else "a key"
        _refuse(f"{shown} is duplicated")
    return found


def _share(what: str, value: object) -> int:
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    parts = int(match[1]) * 100 + int((match[2] or "").ljust(2, "0")) if match else -1
    if not 0 <= parts <= WHOLE:
        _refuse(f'{what} is not "0%" to "100%"')
    return parts


def _refuse(problem: str) -> NoReturn:
    raise ConfigError(f'the file of "tenants": {problem}. Fix: write it as {_EXAMPLE}.') from None


class TenantsFile:
    """The `tenants` of a file; `num_bad` versions of it were invalid and had no effect.

    Only its thread changes its state, because reading a file may be slow.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self.num_bad = 0
        self._ended = threading.Event()
        self._text = self._read()
        self.tenants = parse(self._text)

    def start(self) -> None:
        """Poll the file until `close`."""
        threading.Thread(target=self._watch, name="safe-offload-tenants", daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            self.use(self._read())

    def shares_by_mark(self) -> dict[int, int]:
        """Read the file now, and return the quota of each mark."""
        self.use(self._read())
        return dict(zip(self.tenants.marks, self.tenants.shares, strict=True))

    def use(self, text: bytes | None) -> None:
        """Use the text of the file, None if it cannot be read, if it is new and valid."""
        if text == self._text:
            return
        self._text = text
        try:
            tenants = parse(text)
            logger.info(
                'The file of "tenants" has changed: %d tenants with quotas of %g%% in total.',
                len(tenants.labels) - 1,
                sum(tenants.shares) / 100,
            )
            self.tenants = tenants
        except ConfigError as error:
            logger.error("Keeping the previous file: %s", error)
            self.num_bad += 1

    def _read(self) -> bytes | None:
        try:
            return read_file(str(self._path), MAX_FILE_BYTES)[0]
        except OSError:
            return None

    def close(self) -> None:
        """Stop polling."""
        self._ended.set()
