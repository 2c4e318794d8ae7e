"""`safe-offload cache` as a user calls it, and objects for it to find."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from safe_offload.commands.cli import main
from safe_offload.tiers.base import Name
from safe_offload.tiers.naming import HEADER_BYTES, description, namespace
from safe_offload.tiers.seals.seal import PLAIN, Seal
from tests.tiers.contract import filled, sealed_by

FACTS: dict[str, object] = {"model": "meta-llama/Llama-3.1-8B", "rank": 0}
FIRST, AFTER_RESET = namespace(FACTS), namespace(FACTS, "word")
OBJECT_BYTES = 12 << 10
STORED_BYTES = OBJECT_BYTES + HEADER_BYTES
KEY = bytes(range(7, 39))
PASSWORD = "hunter2-secret"
Call = Callable[..., tuple[int, str]]


def caller(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return what runs the command: its exit status, and what it printed."""

    def run(*arguments: object) -> tuple[int, str]:
        status = main(["cache", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.err if status and not captured.out else captured.out

    return run


def read(call: Call, *arguments: object) -> tuple[int, dict[str, Any]]:
    status, text = call(*arguments, "--json")
    return status, json.loads(text)


def value_of(name: Name, seal: Seal = PLAIN) -> bytes:
    """The bytes of a stored object, its header first."""
    slot = filled((OBJECT_BYTES,), name.block_hash[-1])
    return sealed_by(seal, name, slot)


def described(space: bytes, seal: Seal = PLAIN) -> bytes:
    return description(space, {**FACTS, **seal.facts})


def flipped(value: bytes, offset: int) -> bytes:
    changed = bytearray(value)
    changed[offset] ^= 1
    return bytes(changed)


def check_refusal(found: tuple[int, str], *words: str) -> None:
    """One line says what is wrong and the fix, and no secret."""
    status, text = found
    assert status == 1
    for word in (*words, "Fix: "):
        assert word in text
    assert len(text.splitlines()) == 1
    assert "hunter2" not in text
