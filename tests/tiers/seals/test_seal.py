"""Objects that are sealed with a key: what is refused, whatever its writer knows."""

import asyncio
import hashlib
import hmac
import logging
import random
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from xxhash import xxh3_64_intdigest

from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError
from safe_offload.tiers.base import Name, Result, Tier
from safe_offload.tiers.choice import open_tier
from safe_offload.tiers.naming import (
    DESCRIPTION_FILE,
    HEADER_BYTES,
    facts_of,
    header,
    is_sealed,
    namespace,
    namespace_folder,
)
from safe_offload.tiers.seals import keys as keys_module
from safe_offload.tiers.seals import seal as seal_module
from safe_offload.tiers.seals.keys import open_seal
from safe_offload.tiers.seals.seal import NOT_CHECKED, PLAIN, Seal, seal_of
from tests.tiers.contract import (
    PATIENCE_S,
    bytes_of,
    fetch_one,
    filled,
    name_of,
    slot_of,
    spill_one,
)
from tests.tiers.files.paths import path_in
from tests.tiers.files.test_file_tier import FilesContract

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
SEAL, OTHER = Seal(KEY), Seal(OTHER_KEY)
LARGE_BYTES = 2 << 20
NAME = name_of(1)


def sealed(data: bytes, name: Name = NAME, seal: Seal = SEAL) -> bytes:
    """An object as it is stored."""
    return seal.header(name, [memoryview(data)]) + data


def config_of(path: object) -> TierConfig:
    config: TierConfig = TierConfig.at("file:///kv", hmac_key_file=path and str(path))
    return config


def judged(stored: bytes, name: Name = NAME, seal: Seal = SEAL) -> Result:
    body = memoryview(stored)[HEADER_BYTES:]
    return seal.judge(stored[:HEADER_BYTES], name, [body])


# ---- the contract of tiers, with a key --------------------------------------------------------


class TestSealedFiles(FilesContract):
    seal = SEAL

    @pytest.fixture
    def root(self, tmp_path):
        return tmp_path / "tier"


# ---- the header -------------------------------------------------------------------------------


def test_the_last_bytes_of_a_header_are_a_hmac_of_all_others():
    data = random.Random(0).randbytes(5000)
    head = SEAL.header(NAME, [memoryview(data)[:7], memoryview(data)[7:]])
    fields = struct.pack("<8sHHHHQQ", b"SafeKV\r\n", 2, 0, 16, 32, 5000, 0)
    signed = (fields + NAME.namespace + NAME.block_hash).ljust(HEADER_BYTES - 64, b"\0")
    signed += blake3(data).digest()
    assert head == signed + hmac.new(KEY, signed, hashlib.sha256).digest()


def test_the_header_is_the_same_in_every_release():
    """A cache outlives the process. Raise SEALED_VERSION if this has to change."""
    head = SEAL.header(Name(bytes(16), 258, bytes(32)), [memoryview(b"abc")])
    assert hashlib.sha256(head).hexdigest() == (
        "d7874028ab5d2337eab13d267086a714df617a516160ae1a81fef0d69d659cdc"
    )
    assert SEAL.facts == {"seal": "hmac-sha256 blake3, key b5487ba74fa9ae11"}


def test_without_a_key_the_header_is_as_it_was():
    body = [memoryview(b"abc")]
    assert PLAIN.header(NAME, body) == header(NAME, 3, xxh3_64_intdigest(b"".join(body)))
    assert PLAIN.facts == {}


@pytest.mark.parametrize("seal", [PLAIN, SEAL], ids=["plain", "sealed"])
def test_every_flipped_bit_is_refused(seal):
    good = bytearray(sealed(bytes(range(200)), seal=seal))
    assert judged(bytes(good), seal=seal) is Result.DONE
    for bit in range(len(good) * 8):
        good[bit // 8] ^= 1 << bit % 8
        assert judged(bytes(good), seal=seal) is not Result.DONE, bit
        good[bit // 8] ^= 1 << bit % 8


# ---- somebody who knows everything but the key ------------------------------------------------


def forged(data: bytes) -> dict[str, bytes]:
    """Objects with other bytes that are as right as can be without the key."""
    good = sealed(bytes(len(data)))
    tag = good[HEADER_BYTES - 32 : HEADER_BYTES]
    with_digest = good[: HEADER_BYTES - 64] + blake3(data).digest()
    hashed = hashlib.sha256(with_digest).digest()
    return {
        "without a key": sealed(data, seal=PLAIN),
        "another key": sealed(data, seal=OTHER),
        "the right header": good[:HEADER_BYTES] + data,
        "the digest, and an old seal": with_digest + tag + data,
        "the digest, and half an old seal": with_digest + tag[:16] + bytes(16) + data,
        "the digest, and no seal": with_digest + bytes(32) + data,
        "a hash for a seal": with_digest + hashed + data,
        "an empty key": with_digest + hmac.digest(b"", with_digest, "sha256") + data,
        "the version of another": good[:8] + b"\1\0" + good[10:HEADER_BYTES] + data,
        "our version over a checksum": good[:10] + sealed(data, seal=PLAIN)[10:],
    }


async def test_a_server_cannot_make_anything_up_either():
    """Of objects that are large enough to be judged on another thread."""
    for how, stored in forged(random.Random(1).randbytes(LARGE_BYTES)).items():
        head, body = stored[:HEADER_BYTES], memoryview(stored)[HEADER_BYTES:]
        found = await SEAL.judge_async(head, NAME, (body,))
        assert found in (Result.CORRUPT, Result.FOREIGN), how


def test_an_object_of_a_name_of_other_lengths_or_without_our_key_is_foreign():
    longer = Name(NAME.namespace + NAME.block_hash[:1], NAME.group_idx, NAME.block_hash[1:])
    assert judged(sealed(bytes(100), longer)) is Result.FOREIGN
    assert judged(sealed(bytes(100)), seal=PLAIN) is Result.FOREIGN


# ---- engines with different keys, in one place ------------------------------------------------


def key_file(folder: Path, key: bytes, mode: int = 0o400) -> str:
    path = folder / f"{key[0]}.key"
    path.write_text(key.hex() + "\n")
    path.chmod(mode)
    return str(path)


async def test_engines_with_different_keys_do_not_see_or_delete_what_others_wrote(tmp_path):
    url = f"file://{tmp_path}/tier"
    files = [None, key_file(tmp_path, KEY), key_file(tmp_path, OTHER_KEY)]
    tiers: list[tuple[Tier, Name, Any]] = []
    for number, path in enumerate(files):
        tier, namespace_of = open_tier(TierConfig.at(url, hmac_key_file=path), 4096, {"a": "b"})
        tiers.append((tier, name_of(1, space=namespace_of("")), filled((4096,), number)))
    assert tiers[0][1].namespace == namespace({"a": "b"}), "without a key it is what it was"
    for tier, name, source in tiers:
        assert await spill_one(tier, name, source) is Result.DONE
    for tier, name, source in tiers:
        target = slot_of((4096,))
        assert await fetch_one(tier, name, target) is Result.DONE
        assert bytes_of(target) == bytes_of(source)
    for (tier, name, _), seal in zip(tiers, (PLAIN, SEAL, OTHER), strict=True):
        described = tmp_path / "tier" / namespace_folder(name.namespace) / DESCRIPTION_FILE
        assert seal_of(facts_of(described.read_bytes()), SEAL, OTHER) is seal
        assert judged(path_in(tmp_path / "tier", name).read_bytes(), name, seal) is Result.DONE
        await tier.close()


def test_the_fingerprint_of_a_key_tells_keys_apart_and_is_no_seal_of_anything():
    assert SEAL.facts != OTHER.facts
    fingerprint = SEAL.facts["seal"].rpartition(" ")[2]
    assert fingerprint not in sealed(b"").hex()
    assert KEY.hex()[:8] not in SEAL.facts["seal"]
    assert fingerprint != hashlib.sha256(KEY).hexdigest()[: len(fingerprint)]
    assert KEY.hex() not in f"{SEAL!r}{SEAL}"


# ---- the file with the key --------------------------------------------------------------------


TEXT = b"9Tz6vKk1Qe0gXo4n8yB2sLh5uRw7aJ3m+c/dFiEPtZA="
BYTES = b"\n" + random.Random(0).randbytes(31) + b" "


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (KEY.hex().encode(), KEY),
        (KEY.hex().upper().encode() + b" \r\n", KEY),
        (b"\n" + KEY.hex().encode(), KEY),
        (KEY, KEY),
        (TEXT + b"\n", TEXT),
        (BYTES, BYTES),
    ],
    ids=["hexadecimal", "capitals", "an empty line before", "binary", "text", "with white space"],
)
def test_a_key_is_read_without_the_white_space_around_text(tmp_path, content, key):
    path = tmp_path / "key"
    path.write_bytes(content)
    assert open_seal(config_of(path)).facts == Seal(key).facts


def test_without_a_file_there_is_no_key():
    assert open_seal(config_of(None)) is PLAIN


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "has 0 bytes; expected at least 32"),
        (b"\n", "has 0 bytes; expected at least 32"),
        (KEY[:31].hex().encode(), "has 31 bytes; expected at least 32"),
        (b"correct horse battery staple", "has 28 bytes; expected at least 32"),
        (bytes(32).hex().encode(), "is not random: it has 1 different bytes"),
        (b"x" * 40, "is not random: it has 1 different bytes"),
        (random.Random(0).randbytes(5000), "is longer than 4096 bytes"),
    ],
)
def test_a_key_that_can_be_guessed_is_refused(tmp_path, content, problem):
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as raised:
        open_seal(config_of(path))
    assert "openssl rand -hex 32" in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_file_that_cannot_be_read_is_refused_when_the_tier_is_opened(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        config = TierConfig.at(f"file://{tmp_path}/tier", hmac_key_file=str(path))
        with pytest.raises(ConfigError, match=r"cannot be read: .*Fix: .*openssl rand -hex 32"):
            open_tier(config, 4096, {})
    assert not (tmp_path / "tier").exists()


@pytest.mark.parametrize(("mode", "is_warned"), [(0o400, 0), (0o440, 0), (0o604, 1), (0o644, 1)])
def test_a_key_that_everybody_can_read_is_warned_of(tmp_path, mode, is_warned, caplog):
    with caplog.at_level(logging.WARNING, logger=keys_module.logger.name):
        open_seal(config_of(key_file(tmp_path, KEY, mode)))
    assert caplog.text.count("can be read by every user") == is_warned
    assert KEY.hex() not in caplog.text


# ---- beside an event loop ---------------------------------------------------------------------


class SlowDigest:
    """Takes as long as a test wants, and says which threads it ran on."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> Any:
        self.threads.append(threading.current_thread().name)
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE_S)
        return blake3()


@pytest.fixture
def digest(monkeypatch):
    digest = SlowDigest()
    monkeypatch.setattr(seal_module, "blake3", digest)
    yield digest
    digest.may_end.set()


async def test_bytes_can_be_added_to_the_digest_as_they_come():
    first, second = slot = filled((1000, 3000))
    head = PLAIN.header(NAME, slot)
    for pieces, result in (((first, second), Result.DONE), ((second, first), Result.CORRUPT)):
        digest = PLAIN.begin_digest()
        assert digest is not None
        for piece in pieces:
            digest.update(piece)
        assert await PLAIN.judge_async(head, NAME, slot, digest) is result
    assert SEAL.begin_digest() is None


async def test_what_takes_long_is_done_on_another_thread(digest):
    digest.may_end.set()
    for lengths in ((LARGE_BYTES,), (LARGE_BYTES // 2, LARGE_BYTES // 2), (4096,)):
        slot = filled(lengths)
        head, body = await SEAL.seal_async(NAME, slot)
        assert (head, body) == (SEAL.header(NAME, slot), slot)
        assert await SEAL.judge_async(head, NAME, slot) is Result.DONE
        assert await SEAL.judge_async(head, name_of(2), slot) is Result.FOREIGN
    aside = [name.startswith("safe-offload-seal") for name in digest.threads]
    assert aside == [True, False, True, True] * 2 + [False] * 4


async def test_nothing_reads_the_buffers_once_it_was_cancelled(digest):
    task = asyncio.ensure_future(SEAL.seal_async(NAME, filled((LARGE_BYTES,))))
    await asyncio.to_thread(digest.has_begun.wait, PATIENCE_S)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
    digest.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PATIENCE_S)


async def test_what_was_not_begun_is_given_up_at_once(digest):
    slot = filled((LARGE_BYTES,))
    tasks = [asyncio.ensure_future(SEAL.seal_async(NAME, slot)) for _ in range(9)]
    await asyncio.to_thread(digest.has_begun.wait, PATIENCE_S)
    tasks[-1].cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    is_given_up = tasks[-1].cancelled()
    digest.may_end.set()
    assert is_given_up
    assert len({head for head, _ in await asyncio.gather(*tasks[:-1])}) == 1
    assert len(digest.threads) == 8


# ---- for people -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "seal", "problem"),
    [
        (sealed(bytes(100)), SEAL, ""),
        (sealed(bytes(100), seal=PLAIN), PLAIN, ""),
        (sealed(bytes(100)), PLAIN, NOT_CHECKED),
        (sealed(bytes(100)), OTHER, "its seal is wrong"),
        (sealed(bytes(100), seal=PLAIN), SEAL, "it has no header of this version"),
        (bytes(5000), SEAL, "it has no header of this version"),
        (b"short", PLAIN, "it has no header of this version"),
        (sealed(bytes(100))[:-1] + b"x", SEAL, "its seal is wrong"),
        (sealed(bytes(100), seal=PLAIN)[:-1] + b"x", PLAIN, "its checksum is wrong"),
        (sealed(bytes(100), name_of(2)), SEAL, "its header names another object"),
        (sealed(bytes(100))[:-1], SEAL, "it has 99 bytes, its header says 100"),
    ],
)
def test_a_problem_is_named(stored, seal, problem):
    body = memoryview(stored[HEADER_BYTES:])
    pieces = (body[start : start + 30] for start in range(0, body.nbytes, 30))
    assert seal.problem_of(stored[:HEADER_BYTES], NAME, pieces) == problem
    assert is_sealed(stored) == (stored[8:9] == b"\2")


def test_the_seal_of_a_namespace_follows_from_its_facts():
    assert seal_of({"model": "a"}, SEAL) is PLAIN
    assert seal_of({"model": "a", **SEAL.facts}, OTHER, SEAL) is SEAL
    assert seal_of({**SEAL.facts}, OTHER) is None
    assert seal_of({**SEAL.facts}) is None
