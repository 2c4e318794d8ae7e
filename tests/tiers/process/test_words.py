"""What the process of a tier may say; anything else costs it its life, and nothing more."""

import asyncio
import json
import logging

import pytest

from safe_offload.errors import ConfigError
from safe_offload.tiers.base import Result
from safe_offload.tiers.guarded_tier import GuardedTier
from safe_offload.tiers.process import process_tier
from safe_offload.worker.tier_runner import TierRunner
from tests.tiers.process.slots import NUM_SLOTS, Slots
from tests.tiers.process.test_process_tier import (
    PATIENCE_S,
    directory,
    names,
)

LIAR = """
import socket, sys, time
s = socket.socket(fileno=int(sys.argv[2]))
def say(message, length=None):
    s.sendall((len(message) if length is None else length).to_bytes(4, "big") + message)
s.recv(1 << 20)
say({first!r})
s.recv(1 << 20)
for message in {messages!r}:
    say(message)
if {length!r}:
    say(b"", {length!r})
time.sleep(600)
"""
DEEP = b"[" * 100_000
HUGE = b'["done", 0, [' + b"9" * 5000 + b"]]"
YES = [True] * NUM_SLOTS
WRONG = [
    *(["holds", word, 1] for word in ("x", None, [1], {}, True, 1.5, -2, 1 << 63)),
    *(["holds", 1, word] for word in ("x", None, [1], {}, True, 1.0, -1, 1 << 63)),
    *(["holds"], ["holds", 1], ["holds", 1, 1, 1]),
    *(["done", number, YES] for number in (1, -1, None, "0", 0.0, False, [0], {})),
    *(["done", 0, found] for found in (None, 1, "yes", {}, YES[1:], [*YES, True])),
    *(["done", 0, [word, *YES[1:]]] for word in (1, 0, None, "yes", [], {}, 1.0)),
    *(["done"], ["done", 0], ["done", 0, YES, 1]),
    *(["failed", 0, word] for word in (None, 1, ["x"], {})),
    *(["failed", 1, "x"], ["failed", 0]),
    *(["log", name, 20, "x"] for name in (None, 1, "", "root", "vllm", "vllm..x", "vllm.a b")),
    ["log", "vllm." + "x" * 1000, 20, "x"],
    *(["log", "vllm.x", level, "x"] for level in (None, "INFO", True, 0, -1, 51, 1 << 80)),
    *(["log", "vllm.x", 20, word] for word in (None, 1, ["x"])),
    *(["log"], ["log", "vllm.x", 20]),
    *(["refused"], ["refused", 1], ["refused", "x", "y"], ["ready", 1]),
    *(["ended", 0], ["kill"], [None], [["done", 0, YES]], [], {}, "done", 5, None, True),
]
RAW = [b"", b"{]", b"\xff\xfe", b'["holds", NaN, 1]', b'["holds", 1e999, 1]', DEEP, HUGE]


class NoLoop:
    """Of a loop, what `TierRunner` asks for when it is made."""


@pytest.fixture
def slots():
    return Slots()


@pytest.fixture
def liar(slots, tmp_path, monkeypatch):
    """Return a tier whose process says that it is ready and, when it is asked, some messages."""

    def make(*messages, first=b'["ready"]', length=0):
        script = LIAR.format(first=first, messages=messages, length=length)
        with monkeypatch.context() as patched:
            patched.setattr(process_tier, "_MAIN", script)
            return slots.open(directory(tmp_path / "tier"))

    return make


def runner_of(tier):
    guarded = GuardedTier(tier, tier_config(tier), lambda _: bytes(16), slot_bytes=4096)
    return TierRunner(0, [guarded], None, NoLoop())


def tier_config(tier):
    return directory(tier.label.removeprefix("file://"))


@pytest.mark.parametrize(
    "message", [*(json.dumps(word).encode() for word in WRONG), *RAW], ids=lambda m: repr(m[:40])
)
async def test_a_wrong_word_costs_the_process_that_says_it(liar, message, caplog):
    tier = liar(message)
    runner = runner_of(tier)
    with pytest.raises(OSError, match="its process has ended"):
        await asyncio.wait_for(tier.probe(names()), PATIENCE_S)
    assert "sent an invalid message" in caplog.text
    assert len(caplog.text) < 5000
    assert runner.gauges()['tier_stored_bytes{tier="1"}'] == 0
    assert runner.guarded_tiers[0].take_evicted() == 0


async def test_a_message_that_is_too_long_is_not_read(liar, caplog):
    tier = liar(length=process_tier.MESSAGE_BYTES_MAX + 1)
    with pytest.raises(OSError, match="its process has ended"):
        await tier.probe(names())
    assert "sent an invalid message" in caplog.text
    await tier.close()


@pytest.mark.parametrize("word", ["doner", "", "DONE", 1, None, True, ["done"]])
async def test_a_result_that_is_none_costs_the_process(liar, word):
    tier = liar(json.dumps(["done", 0, [word, *["done"] * (NUM_SLOTS - 1)]]).encode())
    with pytest.raises(OSError, match="its process has ended"):
        await tier.fetch(names(), range(NUM_SLOTS))
    await tier.close()


async def test_what_was_deleted_never_grows_less(liar):
    """A counter that did would be an exception on vLLM's thread."""
    tier = liar(b'["holds", 7, 5]', b'["holds", 7, 4]')
    with pytest.raises(OSError, match="its process has ended"):
        await tier.probe(names())
    assert (tier.used_bytes, tier.num_evicted) == (7, 5)
    await tier.close()


async def test_loggers_are_not_made_without_end(liar):
    lines = (
        json.dumps(["log", f"vllm.lie.n{number}", 20, "x"]).encode()
        for number in range(process_tier.LOGGERS_MAX + 1)
    )
    tier = liar(*lines)
    with pytest.raises(OSError, match="its process has ended"):
        await tier.probe(names())
    await tier.close()


async def test_what_is_right_is_taken(liar, caplog):
    caplog.set_level(logging.INFO)
    text = "a\x1b[2J\nline " + "x" * 5000 + "\ud800\n" * 500
    answer = ["done", 0, ["done", "absent", *["corrupt"] * (NUM_SLOTS - 2)]]
    messages = [["holds", -1, 0], ["holds", 1 << 62, 3], ["log", "vllm.some.where", 30, text]]
    tier = liar(*(json.dumps(message).encode() for message in [*messages, answer]))
    found = await tier.fetch(names(), range(NUM_SLOTS))
    assert found[:3] == [Result.DONE, Result.ABSENT, Result.CORRUPT]
    assert (tier.used_bytes, tier.num_evicted) == (1 << 62, 3)
    (record,) = (each for each in caplog.records if each.name == "vllm.some.where")
    assert record.levelname == "WARNING"
    lines = record.getMessage().split("\n")
    assert lines[0] == "a\\x1b[2J"
    assert len(lines) <= process_tier.LINES_MAX
    assert max(map(len, lines)) < process_tier.LINE_LENGTH_MAX + 10
    assert record.getMessage().isascii()
    tier.process.kill()
    await tier.process.ended()


async def test_a_failure_says_why_in_lines_that_move_no_cursor(liar):
    tier = liar(json.dumps(["failed", 0, "no\x1b[2J"]).encode())
    with pytest.raises(OSError, match=r"no\\x1b\[2J"):
        await tier.probe(names())
    tier.process.kill()
    await tier.process.ended()


@pytest.mark.parametrize(
    "first",
    [b"", b"{]", b"[]", b"5", b"null", b'["yes"]', b'["ready", 1]', b'["refused"]'],
    ids=repr,
)
@pytest.mark.parametrize("more", [b"", b"x"])
def test_a_first_word_that_is_none_is_a_config_error(liar, first, more):
    with pytest.raises(ConfigError, match=r"does not start.*Fix: "):
        liar(first=first + more if more and first else first)


def test_a_refusal_that_is_no_text_is_a_config_error(liar):
    with pytest.raises(ConfigError, match="does not start"):
        liar(first=b'["refused", 1]')
    with pytest.raises(ConfigError, match=r"^no \\x1b$"):
        liar(first=b'["refused", "no \\u001b"]')


def test_a_first_word_without_end_is_not_waited_for(slots, tmp_path, monkeypatch):
    script = LIAR.replace("say({first!r})", "s.sendall(bytes(3) + b'\\x09[')").format(
        first=b"", messages=(), length=0
    )
    monkeypatch.setattr(process_tier, "_MAIN", script)
    monkeypatch.setattr(process_tier, "START_S", 0.5)
    with pytest.raises(ConfigError, match="does not start"):
        slots.open(directory(tmp_path / "tier"))
