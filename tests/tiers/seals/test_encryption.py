"""Encrypted objects: what is refused, what is hidden, and the rotation of keys."""

import asyncio
import hmac
import pickle
import random
import struct
from collections import Counter

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError
from safe_offload.tiers import naming
from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.choice import open_tier
from safe_offload.tiers.naming import HEADER_BYTES
from safe_offload.tiers.seals import encryption as encryption_module
from safe_offload.tiers.seals.encryption import Encryption
from safe_offload.tiers.seals.keys import open_seal
from safe_offload.tiers.seals.seal import NOT_CHECKED, PLAIN, Seal
from tests.tiers.contract import (
    ENCRYPTION,
    KEY,
    OTHER,
    SPACE,
    bytes_of,
    fetch_one,
    filled,
    name_of,
    sealed_by,
    slot_of,
    spill_one,
    tier_at,
)
from tests.tiers.files.paths import path_in

NAME = name_of(1)
OLD, NEW = KEY, KEY[::-1]


def judged(stored: bytes, name: Name = NAME, seal: Encryption = ENCRYPTION) -> Result:
    body = memoryview(bytearray(stored[HEADER_BYTES:]))
    return seal.judge(stored[:HEADER_BYTES], name, [body])


# ---- the format -------------------------------------------------------------------------------


def test_the_format_is_the_same_in_every_release(monkeypatch):
    """A cache outlives the process. Raise ENCRYPTED_VERSION if this has to change."""
    salt, data = bytes(range(100, 132)), random.Random(0).randbytes(5000)
    monkeypatch.setattr(encryption_module.secrets, "token_bytes", lambda length: salt[:length])
    stored = sealed_by(ENCRYPTION, NAME, (memoryview(data)[:7], memoryview(data)[7:]))

    def derived(salt: bytes, purpose: bytes) -> bytes:
        return hmac.digest(hmac.digest(salt, KEY, "sha256"), purpose + b"\1", "sha256")

    fields = struct.pack("<8sHHHHQQ", b"SafeKV\r\n", 3, 0, 16, 32, 5000, 0)
    head = (fields + NAME.namespace + NAME.block_hash).ljust(HEADER_BYTES - 64, b"\0")
    head += derived(bytes(32), b"safe_offload: id")[:16] + salt
    whole = AESGCM(derived(salt, b"safe_offload: object")).encrypt(bytes(12), data, head)
    assert stored == head + whole[-16:] + whole[:-16]
    assert ENCRYPTION.facts == {"seal": "aes-256-gcm"}


def test_no_two_objects_have_a_key_or_bytes_in_common():
    slot = filled((4096,))
    stored = {sealed_by(ENCRYPTION, NAME, slot) for _ in range(1000)}
    salts = {each[HEADER_BYTES - 48 : HEADER_BYTES - 16] for each in stored}
    assert len(salts) == len({each[HEADER_BYTES:] for each in stored}) == 1000


def test_the_slot_that_is_written_stays_as_it_is_and_no_byte_of_it_is_stored():
    """Another request may load it at the same time."""
    slot = filled((13, 0, 70_001, 4096))
    before = bytes_of(slot)
    stored = sealed_by(ENCRYPTION, NAME, slot)
    assert bytes_of(slot) == before
    assert not any(before[at : at + 16] in stored for at in range(0, len(before), 16))


def test_a_key_is_not_shown():
    for text in (repr(ENCRYPTION), str(ENCRYPTION), str(ENCRYPTION.facts)):
        assert KEY.hex() not in text
    assert pickle.loads(pickle.dumps(ENCRYPTION)).facts == ENCRYPTION.facts


# ---- somebody who knows everything but the key ------------------------------------------------


def test_ten_thousand_flipped_bits_are_refused():
    good = sealed_by(ENCRYPTION, NAME, filled((8192,)))
    assert judged(good) is Result.DONE
    rng = random.Random(1)
    last = range(8 * (HEADER_BYTES - 64), 8 * HEADER_BYTES)
    bits = {*range(8 * 96), *last, *rng.sample(range(8 * len(good)), 10_000)}
    for bit in bits:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        assert judged(bytes(bad)) is not Result.DONE, bit


def test_two_objects_that_are_swapped_are_refused():
    other = [name_of(2), name_of(1, 1), name_of(1, space=bytes(16)), Name(SPACE, 0, b"short")]
    good = sealed_by(ENCRYPTION, NAME, filled((4096,)))
    for name in other:
        swapped = sealed_by(ENCRYPTION, name, filled((4096,)))
        assert judged(swapped) is Result.FOREIGN
        # Its header says our name, over the key, the salt, the tag and the bytes of the other.
        assert judged(good[: HEADER_BYTES - 64] + swapped[HEADER_BYTES - 64 :]) is Result.CORRUPT
        assert judged(good[:HEADER_BYTES] + swapped[HEADER_BYTES:]) is Result.CORRUPT


EDITS = st.one_of(
    st.tuples(st.integers(0, HEADER_BYTES + 99), st.binary(min_size=1, max_size=64)),
    st.tuples(st.integers(HEADER_BYTES - 64, HEADER_BYTES), st.binary(min_size=1, max_size=80)),
)


@given(st.lists(EDITS, min_size=1, max_size=4), st.sampled_from((0, -1, 1, 7)))
def test_an_object_that_somebody_has_edited_is_refused(edits, longer):
    good = sealed_by(ENCRYPTION, NAME, (memoryview(bytearray(range(100))),))
    edited = bytearray(good)
    for at, data in edits:
        edited[at : at + len(data)] = data
    edited = edited[: len(good)] + bytes(max(longer, 0))
    stored = bytes(edited[: len(good) + longer])
    assert (judged(stored) is Result.DONE) == (stored == good)


@pytest.mark.parametrize("seal", [PLAIN, Seal(KEY), OTHER])
async def test_a_planted_object_is_a_miss_and_is_written_over(seal, tmp_path, caplog):
    """A plain one too, so that nobody without the key says what an engine reads."""
    tier = tier_at(TierConfig.at(f"file://{tmp_path}/tier"), seal=ENCRYPTION)
    assert await spill_one(tier, NAME, filled((4096,))) is Result.DONE
    path_in(tmp_path / "tier", NAME).write_bytes(sealed_by(seal, NAME, filled((4096,), 666)))
    target = slot_of((4096,))
    found = Result.UNDECRYPTABLE if seal is OTHER else Result.FOREIGN
    assert await fetch_one(tier, NAME, target) is found
    assert await tier.probe([NAME]) == [False]
    assert caplog.text.count(f"it is {found.value}") == 1
    assert await spill_one(tier, NAME, filled((4096,))) is Result.DONE
    assert await fetch_one(tier, NAME, target) is Result.DONE
    assert bytes_of(target) == bytes_of(filled((4096,)))
    await tier.close()


# ---- keys -------------------------------------------------------------------------------------


def key_file(path, *keys, mode=0o400):
    path.unlink(missing_ok=True)
    path.write_text("".join(f"{key.hex()}\n" for key in keys))
    path.chmod(mode)
    return str(path)


def test_the_first_key_writes_and_all_read():
    both, old, new = Encryption([NEW, OLD]), Encryption([OLD]), Encryption([NEW])
    slot = filled((4096,))
    for writer, of in ((both, new), (old, old), (new, new)):
        stored = sealed_by(writer, NAME, slot)
        assert judged(stored, seal=both) is judged(stored, seal=of) is Result.DONE
        other = old if of is new else new
        assert judged(stored, seal=other) is Result.UNDECRYPTABLE


async def test_keys_are_rotated_under_load(tmp_path, caplog):
    """Engines are restarted one after the other with the next file while all read and write.

    No byte is wrong, and objects are misses for those engines only that do not have their key.
    """
    url, path = f"file://{tmp_path}/tier", tmp_path / "keys"
    third = bytes(range(64, 96))
    # A new key first reads everywhere, then writes, and only then the old one is retired.
    files = [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,), (NEW, third)]
    names, rng = [], random.Random(2)
    keys, written, seen = {}, set(), Counter()

    def engine(file):
        config = TierConfig.at(url, encryption_key_file=key_file(path, *file))
        tier, namespace_of = open_tier(config, 4096, {"a": "b"})
        keys[tier] = file
        names[:] = [name_of(number, space=namespace_of("")) for number in range(64)]
        return tier

    async def work(tier, num_rounds):
        for _ in range(num_rounds):
            number = rng.randrange(len(names))
            target, is_written = slot_of((4096,)), number in written
            result = await fetch_one(tier, names[number], target)
            seen[result] += 1
            if result is Result.DONE:
                assert bytes_of(target) == bytes_of(filled((4096,), number))
                continue
            assert result is (Result.UNDECRYPTABLE if is_written else Result.ABSENT)
            assert not is_written or OLD not in keys[tier], "a miss for a retired key only"
            spilled = await spill_one(tier, names[number], filled((4096,), number))
            assert spilled in (Result.DONE, Result.PRESENT)
            written.add(number)

    engines = [engine(files[0]) for _ in range(2)]
    for file in files:
        for index, before in enumerate(engines):
            await asyncio.gather(*(work(each, 100) for each in engines))
            await before.close()
            engines[index] = engine(file)
    await asyncio.gather(*(work(each, 100) for each in engines))
    for tier in engines:
        await tier.close()
    assert seen[Result.DONE] > 10 * seen[Result.UNDECRYPTABLE] > 0
    assert 1 <= caplog.text.count("it is undecryptable") <= 2 * len(files)
    assert not [each for each in (OLD, NEW, third) if each.hex() in caplog.text]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", r"is not 64 hexadecimal digits \(key 1\)"),
        (KEY[:31].hex().encode(), r"is not 64 hexadecimal digits \(key 1\)"),
        (f"{KEY.hex()}\n{KEY.hex()}00\n".encode(), r"is not 64 hexadecimal digits \(key 2\)"),
        (KEY, r"is not 64 hexadecimal digits \(key 1\)"),
        (b"correct horse battery staple", r"is not 64 hexadecimal digits \(key 1\)"),
        (bytes(32).hex().encode(), "is not random: it has 1 different bytes"),
        (KEY.hex().encode() * 100, "is longer than 4096 bytes"),
    ],
)
def test_keys_that_cannot_be_used_are_refused_at_the_start(tmp_path, content, problem):
    path = tmp_path / "keys"
    path.write_bytes(content)
    path.chmod(0o400)
    config = TierConfig.at(f"file://{tmp_path}/tier", encryption_key_file=str(path))
    with pytest.raises(ConfigError, match=problem) as raised:
        open_tier(config, 4096, {})
    assert '"encryption_key_file"' in str(raised.value)
    assert "Fix: create one with `openssl rand -hex 32`" in str(raised.value)
    assert KEY.hex()[:16] not in str(raised.value)


@pytest.mark.parametrize(("mode", "is_refused"), [(0o400, 0), (0o440, 0), (0o404, 1), (0o644, 1)])
def test_keys_that_others_can_read_are_refused(tmp_path, mode, is_refused):
    path = key_file(tmp_path / "keys", NEW, OLD, mode=mode)
    config = TierConfig.at(f"file://{tmp_path}/tier", encryption_key_file=path)
    if not is_refused:
        assert open_seal(config).facts == ENCRYPTION.facts
        return
    with pytest.raises(ConfigError, match=r"can be read by every user.*Fix: set its mode to 0400"):
        open_seal(config)


# ---- beside objects, and for people -----------------------------------------------------------


def test_a_description_is_read_with_the_key_only():
    text = naming.description(SPACE, {"model": "secret-model", **ENCRYPTION.facts})
    stored = ENCRYPTION.closed_description(SPACE, text)
    assert b"secret-model" not in stored
    assert len(stored) < naming.DESCRIPTION_BYTES_MAX
    assert ENCRYPTION.opened_description(SPACE, stored) == text
    assert naming.facts_of(stored) == {}
    for seal in (PLAIN, Seal(KEY), OTHER):
        assert seal.opened_description(SPACE, stored) == stored
    assert ENCRYPTION.opened_description(bytes(16), stored) == stored, "of another namespace"
    for plain in (text, b"", b"x"):
        assert ENCRYPTION.opened_description(SPACE, plain) == plain


GOOD = sealed_by(ENCRYPTION, NAME, (memoryview(bytearray(100)),))
PLAIN_ONE = sealed_by(PLAIN, NAME, (memoryview(bytearray(100)),))


@pytest.mark.parametrize(
    ("stored", "seal", "problem"),
    [
        (GOOD, ENCRYPTION, ""),
        (GOOD, OTHER, NOT_CHECKED),
        (GOOD, PLAIN, NOT_CHECKED),
        (GOOD, Seal(KEY), NOT_CHECKED),
        (sealed_by(Seal(KEY), NAME, ()), ENCRYPTION, NOT_CHECKED),
        (PLAIN_ONE, ENCRYPTION, "it has no header of this version"),
        (GOOD[:-1] + b"x", ENCRYPTION, "its seal is wrong"),
        (GOOD[:-1] + b"x", PLAIN, NOT_CHECKED),
        (GOOD[:-1], ENCRYPTION, "it has 99 bytes, its header says 100"),
        (GOOD[:-1], PLAIN, "it has 99 bytes, its header says 100"),
        (GOOD[:-1], OTHER, "it has 99 bytes, its header says 100"),
        (sealed_by(ENCRYPTION, name_of(2), ()), ENCRYPTION, "its header names another object"),
        (sealed_by(ENCRYPTION, name_of(2), ()), PLAIN, "its header names another object"),
    ],
)
def test_a_problem_is_named_as_far_as_the_keys_show(stored, seal, problem):
    body = memoryview(stored[HEADER_BYTES:])
    pieces = [body[start : start + 30] for start in range(0, body.nbytes, 30)]
    assert seal.problem_of(stored[:HEADER_BYTES], NAME, pieces) == problem
