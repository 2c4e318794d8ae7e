"""Names of objects and their header."""

import json

import pytest

from safe_offload.tiers.base import Name, Result
from safe_offload.tiers.naming import (
    HEADER_BYTES,
    NAMESPACE_BYTES,
    compare,
    description,
    facts_of,
    header,
    length_of,
    name_of,
    namespace,
    namespace_folder,
    path_of,
    version_of,
)
from safe_offload.tiers.seals.seal import PLAIN

FACTS = {"model": "m", "layout": [[1, 2], [3, 4]], "rank": 0}
NAME = Name(namespace(FACTS), 258, bytes(range(32)))


def checksum(buffers: list[memoryview]) -> int:
    """Of the bytes of an object, as its header has it."""
    return int.from_bytes(PLAIN.header(NAME, buffers)[24:32], "little")


@pytest.mark.parametrize(
    "other",
    [
        {**FACTS, "model": "n"},
        {**FACTS, "rank": 1},
        {**FACTS, "rank": "0"},
        {**FACTS, "layout": [[1, 2, 3], [4]]},
        {**FACTS, "more": None},
        {},
    ],
)
def test_every_fact_is_part_of_the_namespace(other):
    """So is the generation, and the order is not."""
    assert namespace(other) != namespace(FACTS)
    assert len({namespace(FACTS), namespace(FACTS, "a"), namespace(FACTS, "b")}) == 3
    assert namespace(FACTS) == namespace(dict(reversed(FACTS.items())))
    assert len(namespace(FACTS)) == NAMESPACE_BYTES


def test_the_namespace_is_the_same_in_every_release():
    """A cache outlives the process. Raise FORMAT_VERSION if this has to change."""
    assert namespace({"model": "m"}, "w").hex() == "ac5a8e19c11e869113d8cc243b35b98b"
    assert checksum([memoryview(header(NAME, 5, 6))]) == 15782181309712667410


def test_a_fact_that_has_no_value_of_its_own_is_refused():
    with pytest.raises(TypeError):
        namespace({"model": object()})
    with pytest.raises(ValueError, match="JSON"):
        namespace({"scale": float("nan")})


def test_a_description_can_be_read_back():
    written = description(namespace(FACTS), FACTS)
    assert facts_of(written) == FACTS
    assert json.loads(written)["after_reset"] is False
    assert json.loads(description(namespace(FACTS, "w"), FACTS))["after_reset"] is True
    assert facts_of(b"{") == facts_of(b"[]") == facts_of(b'{"facts": 1}') == facts_of(b"\xff") == {}


def test_names_of_files_are_digests_and_can_be_read_back():
    folder, file = path_of(NAME)
    assert (folder, file) == ("1f", "0102" + bytes(range(32)).hex())
    assert name_of(namespace_folder(NAME.namespace), file) == NAME


@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("..", "0000abcd"),
        (namespace_folder(NAME.namespace), "tmp-1-2-ab"),
        (namespace_folder(NAME.namespace), "0000"),
        (namespace_folder(NAME.namespace), "0000abc"),
        (namespace_folder(NAME.namespace), "0000ABCD"),
        (namespace_folder(NAME.namespace), "0000ab\n"),
        (namespace_folder(NAME.namespace) + "\n", "0000abcd"),
    ],
)
def test_what_no_object_is_called_has_no_name(folder, file):
    assert name_of(folder, file) is None


def test_a_header_with_a_flipped_bit_is_another():
    written = header(NAME, 5, 6)
    assert len(written) == HEADER_BYTES
    assert (version_of(written), length_of(written)) == (1, 5)
    assert version_of(written[:-1]) == 0
    assert compare(written, header(NAME, 5, 6), NAME) is Result.DONE
    for bit in range(HEADER_BYTES * 8):
        bad = bytearray(written)
        bad[bit // 8] ^= 1 << bit % 8
        assert compare(bytes(bad), header(NAME, 5, 6), NAME) in (Result.CORRUPT, Result.FOREIGN)


def test_a_checksum_goes_by_the_bytes_and_not_by_their_buffers():
    data = bytes(range(256)) * 20
    whole = checksum([memoryview(data)])
    assert checksum([memoryview(data)[:7], memoryview(data)[7:]]) == whole
    assert checksum([memoryview(data)[7:], memoryview(data)[:7]]) != whole
