"""Messages to tiers: each is answered exactly once, and no slot is touched after that."""

import itertools
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from safe_offload.config.tier_url import Location
from safe_offload.config.tiers import TierConfig
from safe_offload.observe.counters import Counters
from safe_offload.protocol import (
    FailureReason,
    Keys,
    Outcome,
    Presence,
    Probe,
    TierTransfer,
    ids_of,
)
from safe_offload.tiers.base import Buffers, Name, Result
from safe_offload.tiers.breaker import FAILURES_MAX, PAUSE_S, PAUSE_S_MAX
from safe_offload.tiers.guarded_tier import GRACE_S, LEFT_ALONE, GuardedTier, Operation
from safe_offload.tiers.namespace.namespace_facts import Doubt, Learned, NamespaceFacts
from safe_offload.tiers.tiered_probe import HEAD_START_S, WAIT_SHARE
from safe_offload.worker.copies.base import Direction
from safe_offload.worker.memory.shared_memory import Share
from safe_offload.worker.tier_runner import PendingMessage, TierRunner
from safe_offload.worker.transfers import Transfers
from tests.worker.fake_backend import FakeBackend, transfer
from tests.worker.hand_tier import HandLoop, HandTier
from tests.worker.waiting import wait_until

RANK = 3
NUM_SLOTS = 40
SLOT_BYTES = 6
TIMEOUT_S = 5.0
CONFIG = TierConfig(Location("file", "/nowhere"), timeout_s=TIMEOUT_S)
A, B, C, D = (bytes([letter]) * 32 for letter in b"abcd")


class Memory:
    """Two ranges of each slot."""

    num_usable_slots = NUM_SLOTS

    def __init__(self) -> None:
        self.bytes = bytearray(NUM_SLOTS * SLOT_BYTES)

    def slot(self, slot_id: int) -> Buffers:
        at = slot_id * SLOT_BYTES
        view = memoryview(self.bytes)
        return view[at : at + 2], view[at + 2 : at + SLOT_BYTES]

    def __getitem__(self, slot_id: int) -> bytes:
        return bytes(self.bytes[slot_id * SLOT_BYTES : (slot_id + 1) * SLOT_BYTES])

    def __setitem__(self, slot_id: int, content: bytes) -> None:
        self.bytes[slot_id * SLOT_BYTES : (slot_id + 1) * SLOT_BYTES] = content


class ClosingBackend(FakeBackend):
    """Notices when its memory is freed under a tier."""

    def __init__(self, tiers: tuple[HandTier, ...]) -> None:
        super().__init__()
        self.tiers = tiers

    def close(self) -> None:
        assert not any(tier.touching for tier in self.tiers)
        super().close()


class Rig:
    """A runner over hand-driven tiers, on a loop with transfers as in a worker."""

    def __init__(self, *tiers: HandTier, config: TierConfig = CONFIG, **options: Any) -> None:
        self.tiers = tiers or (HandTier(),)
        keeping = options.get("keeping", ())
        self.tier = self.tiers[0]
        self.memory = Memory()
        self.loop = HandLoop()
        self.guarded_tiers = [
            GuardedTier(
                tier,
                replace(config, keep=tier in keeping),
                namespace,
                slot_bytes=SLOT_BYTES,
                write_bytes_per_s=config.write_bytes_per_s,
                chance=options.get("chance", lambda: 0.5),
            )
            for tier in self.tiers
        ]
        self.runner = TierRunner(
            RANK,
            self.guarded_tiers,
            self.memory,  # which says how many slots there are
            self.loop,
            slot_of=self.hold_memory(),
            share=options.get("share", Share()),
            verifier=options.get("verifier"),
            namespace_facts=options.get("namespace_facts"),
        )
        self.backend = ClosingBackend(self.tiers)
        self.transfers = Transfers(self.backend, self.loop, 1 << 20, tiers=self.runner)
        self.presences: list[Presence] = []
        self.outcomes: list[Outcome] = []

    def hold_memory(self) -> Callable[[int], Buffers]:
        """Return what holds the memory for the runner; `holding` says whether it does still."""
        slot_of = partial(self.memory.slot)
        self.holding = weakref.ref(slot_of)
        return slot_of

    def drain(self) -> None:
        self.loop.turn()
        answers = self.runner.drain()
        self.presences += answers.presences
        self.outcomes += answers.outcomes
        for found in (self.presences, self.outcomes):
            assert all(each.rank == RANK for each in found)
        for ids in (
            [presence.probe_id for presence in self.presences],
            [outcome.transfer_id for outcome in self.outcomes],
        ):
            assert len(set(ids)) == len(ids), "answered twice"

    def is_left_alone(self, kind: str) -> bool:
        return f"({kind}), open>" in repr(self.guarded_tiers[0])

    def is_half_open(self, kind: str) -> bool:
        return f"({kind}), ready>" in repr(self.guarded_tiers[0])

    def probe(self, number: int, *hashes: bytes, generation: str = "") -> bytes | None:
        """Ask; return the answer if there is one at once."""
        self.runner.probe(Probe(number, keys(*hashes), generation))
        return self.presence(number)

    def presence(self, number: int) -> bytes | None:
        self.drain()
        found = [presence.tiers for presence in self.presences if presence.probe_id == number]
        return found[0] if found else None

    def fetch(self, number: int, slot_ids: list[int], *hashes: bytes, origins: bytes = b"") -> Any:
        """Fetch; return the failure or the missing places, None if it is not over."""
        self.runner.fetch(TierTransfer(number, keys(*hashes), ids_of(slot_ids), origins=origins))
        return self.outcome(number)

    def spill(
        self,
        number: int,
        slot_ids: list[int],
        *hashes: bytes,
        generation: str = "",
        origins: bytes = b"",
    ) -> Any:
        self.runner.spill(
            TierTransfer(number, keys(*hashes), ids_of(slot_ids), generation, origins)
        )
        return self.outcome(number)

    def outcome(self, number: int) -> Any:
        self.drain()
        found = [outcome for outcome in self.outcomes if outcome.transfer_id == number]
        return (found[0].failure or found[0].missing) if found else None

    def close(self) -> bool:
        return self.transfers.close()

    def fail(self, kind: str, times: int = FAILURES_MAX) -> None:
        """Let a tier fail some times in a row."""
        for _ in range(times):
            self.tier.answers[kind] = [OSError(5, "input or output")]
            number = next(NUMBERS)
            if kind == "probe":
                self.probe(number, A)
            else:
                getattr(self, kind)(number, [0], A)


NUMBERS = itertools.count(10_000)


def namespace(generation: str) -> bytes:
    return b"namespace" + generation.encode()


def keys(*hashes: bytes) -> Keys:
    return Keys(bytes(len(hashes)), hashes)


def name(block_hash: bytes, generation: str = "") -> Name:
    return Name(namespace(generation), 0, block_hash)


def content(word: int) -> bytes:
    return bytes([word]) * SLOT_BYTES


@pytest.fixture
def make_rig():
    rigs: list[Rig] = []

    def make(*tiers: HandTier, **options: Any) -> Rig:
        rigs.append(Rig(*tiers, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        for tier in rig.tiers:
            tier.holds = set()
            tier.release()
        rig.close()
        rig.drain()
        assert not rig.runner.statistics()
        assert all(tier.is_closed for tier in rig.tiers)
        assert rig.backend.is_closed
        assert rig.holding() is None


# ---- before the namespace is known ---------------------------------------------------------------


class HandFacts(NamespaceFacts):
    """Is learned when the test says so."""

    def __init__(self, *doubts: Doubt) -> None:
        super().__init__({})
        self.learned: Learned | None = Learned({"files": "1"}, doubts, "two files")
        self.is_released = threading.Event()

    def learn(self, is_cancelled: Callable[[], bool]) -> Learned | None:
        while not self.is_released.wait(0.001):
            if is_cancelled():
                return None
        return self.learned

    def release(self, rig: Rig) -> None:
        self.is_released.set()
        wait_until(lambda: (rig.drain(), not rig.runner.gauges()["tiers_not_ready"])[1])
        rig.drain()


def test_before_the_namespace_is_known_nothing_is_asked_and_what_is_spilled_waits(make_rig):
    namespace_facts = HandFacts()
    rig = make_rig(namespace_facts=namespace_facts)
    rig.memory[4] = content(1)
    assert rig.spill(1, [4], A) is None
    assert rig.probe(2, A) is None
    rig.loop.pass_time(CONFIG.wait_s)
    assert rig.presence(2) == bytes(1), "no request waits longer"
    assert rig.probe(3, A) == bytes(1), "and no other one at all"
    assert rig.fetch(4, [5], A) == (0,)
    rig.loop.pass_time(1000)
    assert rig.outcome(1) is None
    assert rig.tier.calls == ["probe 1"], "whether it can be reached"
    namespace_facts.release(rig)
    assert rig.outcome(1) == ()
    assert rig.probe(5, A) == bytes([1])
    assert namespace_facts.facts == {"files": "1"}


def test_a_probe_goes_on_as_soon_as_the_namespace_is_known(make_rig):
    namespace_facts = HandFacts()
    rig = make_rig(namespace_facts=namespace_facts)
    rig.tier.objects[name(A)] = content(1)
    assert rig.probe(1, A) is None
    namespace_facts.release(rig)
    assert rig.presence(1) == bytes([1])


def test_in_doubt_only_what_has_a_generation_of_the_engines_own_is_asked_and_written(make_rig):
    namespace_facts = HandFacts(Doubt("who knows"))
    rig = make_rig(namespace_facts=namespace_facts)
    rig.tier.objects[name(A)] = content(1)
    assert rig.spill(1, [4], B) is None
    namespace_facts.release(rig)
    assert rig.runner.doubts == ("who knows",)
    assert rig.outcome(1) == (0,)
    assert rig.probe(2, A) == bytes(1)
    assert rig.fetch(3, [4], A) == (0,)
    assert rig.spill(4, [5], B, generation="own") == ()
    assert list(rig.tier.objects) == [name(A), name(B, "own")]


def test_files_that_cannot_be_read_are_a_doubt(make_rig, caplog):
    namespace_facts = HandFacts()
    namespace_facts.learn = lambda _: 1 / 0  # type: ignore[method-assign]
    rig = make_rig(namespace_facts=namespace_facts)
    wait_until(lambda: (rig.drain(), rig.runner.doubts)[1])
    assert "its files could not be read" in rig.runner.doubts[0]


def test_shutdown_does_not_wait_for_the_namespace(make_rig):
    rig = make_rig(namespace_facts=HandFacts())
    assert rig.spill(1, [4], A) is None
    assert rig.probe(2, A) is None
    rig.close()
    assert rig.outcome(1) is FailureReason.CANCELLED
    assert rig.presence(2) == bytes(1)


def two_tiers(
    make_rig: Callable[..., Rig], near: str = "", far: str = ""
) -> tuple[Rig, HandTier, HandTier]:
    """A rig with a near and a far tier that have objects of these letters."""
    tiers = HandTier("near"), HandTier("far")
    for tier, letters in zip(tiers, (near, far), strict=True):
        tier.objects = {name(x.encode() * 32): content(ord(x)) for x in letters}
    return make_rig(*tiers), *tiers


# ---- what the messages do ------------------------------------------------------------------------


def test_the_nearest_tier_that_has_it_is_named_and_read(make_rig):
    rig, near, far = two_tiers(make_rig)
    near.objects = {name(A): content(1)}
    far.objects = {name(A): content(9), name(B): content(2)}
    assert rig.probe(1, A, B, C) == bytes([1, 2, 0])
    assert (near.calls, far.calls) == (["probe 3"], ["probe 2"])
    assert rig.fetch(2, [0, 1, 2], A, B, C) == (2,)
    assert (rig.memory[0], rig.memory[1]) == (content(1), content(2))
    assert (near.calls[1:], far.calls[1:]) == (["fetch 3"], ["fetch 2"])
    assert rig.probe(3, A) == bytes([1])
    assert rig.fetch(4, [0], A) == ()
    assert len(far.calls) == 2, "it is not asked for what a near one has"


@pytest.mark.parametrize(
    ("third", "again"), [(Result.PRESENT, 0b10), (Result.DONE, 0b11)], ids=["full", "has room"]
)
def test_a_spill_goes_to_every_tier_and_is_missing_only_where_none_took_it(make_rig, third, again):
    """What one tier had no room for is written to it again if it had room for others."""
    rig, near, far = two_tiers(make_rig)
    near.answers["spill"] = [[Result.FULL, Result.FULL, third]]
    far.answers["spill"] = [[Result.DONE, Result.FAILED, Result.PRESENT]]
    assert rig.spill(1, [0, 1, 2], A, B, C) == (1,)
    assert rig.outcomes[-1].again == bytes([again])
    far.holds = {"spill"}
    assert rig.spill(2, [3], D) is None, "the far tier still reads the slot"
    far.release()
    assert rig.outcome(2) == ()


AGAIN = (
    (Result.FAILED, 0b1),
    (Result.CANCELLED, 0b1),
    (Result.ABSENT, 0b1),
    (Result.FULL, 0),
    (Result.STILL_FULL, 0),
    (Result.REFUSED, 0),
    (Result.UNREADABLE, 0),
)


@pytest.mark.parametrize(("result", "again"), AGAIN)
def test_what_failed_is_to_be_written_again_and_what_was_refused_is_not(make_rig, result, again):
    rig = make_rig()
    rig.tier.answers["spill"] = [[result, result]]
    assert rig.spill(1, [0, 1], A, B) == (0, 1)
    assert rig.outcomes[-1].again == bytes([again, again])
    rig.fail("spill")
    assert rig.spill(2, [0], A) == (0,), "it is left alone"
    assert rig.outcomes[-1].again == bytes([0b1])


def test_what_one_of_several_tiers_failed_to_take_goes_to_that_one_only(make_rig):
    rig, near, far = two_tiers(make_rig)
    far.answers["spill"] = [[Result.DONE, Result.FAILED]]
    assert rig.spill(1, [0, 1], A, B) == (1,)
    assert rig.outcomes[-1].again == bytes([0b10])
    num_calls = len(near.calls)
    rig.runner.spill(TierTransfer(2, keys(B), ids_of([1]), targets=rig.outcomes[-1].again))
    assert rig.outcome(2) == ()
    assert len(near.calls) == num_calls
    assert far.calls[-1] == "spill 1"


def test_a_tier_is_told_whose_each_object_is_that_this_rank_writes(make_rig):
    rig, marks = make_rig(share=Share(1, 2)), ids_of([7, 8, 9, 0])
    message = keys(A, B, C, D), ids_of([0, 1, 2, 3])
    rig.runner.spill(TierTransfer(2, *message, marks=marks))
    rig.drain()
    assert {name(A): 7, name(B): 8, name(C): 9, name(D): 0}.items() > {
        written: written.mark for written in rig.tier.objects
    }.items()
    assert len(rig.tier.objects) == 2
    assert any(written.mark for written in rig.tier.objects)


def test_ranks_with_one_copy_divide_what_is_moved_and_not_what_is_asked(make_rig):
    found = {name(x): content(5) for x in (A, B, C, D)}
    ranks = [make_rig(HandTier(objects=dict(found)), share=Share(i, 3)) for i in range(3)]
    for rig in ranks:
        assert rig.probe(1, A, B, C, D) == bytes([1, 1, 1, 1])
        assert rig.fetch(2, [0, 1, 2, 3], A, B, C, D) == ()
    filled = [{i for i in range(4) if rig.memory[i] == content(5)} for rig in ranks]
    assert sorted(itertools.chain(*filled)) == [0, 1, 2, 3]
    # One object is one rank's; the others report at once that they have nothing to do with it.
    for rig in ranks:
        rig.tier.objects.clear()
        assert rig.fetch(4, [9], A) in ((), (0,))
    assert sum(rig.outcome(4) == (0,) for rig in ranks) == 1


@pytest.mark.parametrize("slot_ids", [[0, NUM_SLOTS], [-1, 0]])
def test_slots_that_are_not_there_are_refused(make_rig, slot_ids, caplog):
    rig = make_rig()
    assert rig.fetch(1, slot_ids, A, B) is FailureReason.BAD_PLAN
    assert rig.spill(2, slot_ids, A, B) is FailureReason.BAD_PLAN
    assert rig.tier.calls == []
    assert "slots that do not exist" in caplog.text


def test_what_was_fetched_has_its_checksum_noted_before_it_is_reported(make_rig):
    noted = []

    class Verifier:
        async def record(self, slot_ids):
            assert not rig.outcomes
            noted.append(slot_ids.tolist())

    rig = make_rig(verifier=Verifier())
    rig.tier.objects = {name(A): content(1), name(C): content(3)}
    assert rig.fetch(1, [5, 6, 7], A, B, C) == (1,)
    assert noted == [[5, 7]]
    assert rig.fetch(2, [5], D) == (0,)
    assert len(noted) == 1


def test_a_fetch_whose_checksums_cannot_be_noted_has_failed(make_rig, caplog):
    class Verifier:
        async def record(self, slot_ids):
            raise RuntimeError("no threads")

    rig = make_rig(verifier=Verifier())
    rig.tier.objects = {name(A): content(1)}
    assert rig.fetch(1, [5], A) is FailureReason.COPY_FAILED
    assert "no threads" in caplog.text


def test_a_slot_whose_bytes_have_changed_is_not_spilled(make_rig, caplog):
    class Verifier:
        async def changed(self, slot_ids):
            return [slot_id for slot_id in slot_ids.tolist() if slot_id in (4, 6)]

    rig = make_rig(verifier=Verifier())
    assert rig.spill(1, [3, 4, 5], A, B, C) == (1,)
    assert rig.tier.objects.keys() == {name(A), name(C)}
    assert rig.spill(2, [4, 6], A, B) == (0, 1)
    assert "are not written to tiers" in caplog.text


# ---- several tiers -------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["near", "far"])
def test_the_nearest_tier_is_named_whoever_answers_first(make_rig, first):
    rig, near, far = two_tiers(make_rig, "a", "ab")
    near.holds, far.holds = {"probe"}, {"probe"}
    rig.probe(1, A, B, C)
    rig.loop.pass_time(HEAD_START_S)
    for tier in (near, far) if first == "near" else (far, near):
        assert rig.presence(1) is None
        tier.release()
    assert rig.presence(1) == bytes([1, 2, 0])


def test_a_far_probe_that_is_not_needed_is_given_up_and_tells_nothing(make_rig, caplog):
    rig, near, far = two_tiers(make_rig, "a", "b")
    for number in range(2 * FAILURES_MAX):
        near.holds, far.holds = {"probe"}, {"probe"}
        rig.probe(number, A)
        rig.loop.pass_time(HEAD_START_S)
        near.release()
        assert rig.presence(number) == bytes([1])
        assert len(far.calls) == number + 1
    rig.loop.pass_time(2 * TIMEOUT_S)
    near.holds, far.holds = set(), set()
    assert rig.probe(100, B) == bytes([2])
    assert "Circuit breaker open" not in caplog.text


def test_a_trial_that_is_not_needed_is_followed_by_another(make_rig):
    rig, near, far = two_tiers(make_rig, "a", "b")
    far.answers["probe"] = [OSError(5, "input or output")] * FAILURES_MAX
    for number in range(FAILURES_MAX):
        assert rig.probe(number, B) == bytes([0])
    rig.loop.pass_time(PAUSE_S_MAX)
    near.holds, far.holds = {"probe"}, {"probe"}
    rig.probe(10, A)
    rig.loop.pass_time(HEAD_START_S)
    assert len(far.calls) == FAILURES_MAX + 1
    near.release()
    assert rig.presence(10) == bytes([1])
    near.holds, far.holds = set(), set()
    assert rig.probe(11, B) == bytes([2])


def test_a_near_tier_that_hangs_hides_nothing_and_is_left_alone_in_time(make_rig, caplog):
    rig, near, _ = two_tiers(make_rig, "a", "ab")
    near.holds, near.ignores_cancel = {"probe"}, True
    for number in range(FAILURES_MAX):
        assert rig.probe(number, A, B) is None
        rig.loop.pass_time(HEAD_START_S)
        assert rig.presence(number) == bytes([2, 2])
    assert "Circuit breaker open" not in caplog.text
    rig.loop.pass_time(TIMEOUT_S)
    assert "Circuit breaker open" in caplog.text
    assert rig.probe(10, A, B) == bytes([2, 2]), "at once"


def test_a_near_tier_that_is_late_gets_as_long_again_as_a_far_one_took(make_rig):
    rig, near, far = two_tiers(make_rig, "a", "b")
    near.holds, far.holds = {"probe"}, {"probe"}
    rig.probe(1, A, B)
    rig.loop.pass_time(HEAD_START_S)
    rig.loop.pass_time(0.1)
    far.release()
    assert rig.presence(1) is None
    rig.loop.pass_time(HEAD_START_S + 0.09)
    assert rig.presence(1) is None
    rig.loop.pass_time(0.02)
    assert rig.presence(1) == bytes([0, 2])


def test_a_far_tier_that_is_not_waited_for_is_judged_all_the_same(make_rig, caplog):
    rig, _, far = two_tiers(make_rig, "a", "b")
    far.holds = {"probe"}
    for number in range(FAILURES_MAX):
        rig.probe(number, A, B)
        rig.loop.pass_time(CONFIG.wait_s / WAIT_SHARE)
        assert rig.presence(number) == bytes([1, 0])
    rig.loop.pass_time(TIMEOUT_S)
    assert "Circuit breaker open" in caplog.text
    assert rig.probe(10, A, B) == bytes([1, 0]), "at once"


def test_a_fetch_looks_first_where_it_was_found_and_then_elsewhere(make_rig):
    rig, near, far = two_tiers(make_rig, "abc", "bd")
    assert rig.fetch(1, [0, 1, 2, 3], A, B, C, D, origins=bytes([1, 2, 2, 2])) == ()
    assert (near.calls, far.calls) == (["fetch 1", "fetch 1"], ["fetch 3"])
    assert [rig.memory[slot_id] for slot_id in range(4)] == [content(x) for x in b"abcd"]
    assert rig.fetch(2, [4, 5], D, C, origins=bytes([1, 9])) == ()
    assert (rig.memory[4], rig.memory[5]) == (content(ord("d")), content(ord("c")))


def test_what_comes_from_a_far_tier_is_written_to_nearer_ones_that_keep(make_rig):
    tiers = [HandTier(f"tier {index}") for index in range(4)]
    rig = make_rig(*tiers, keeping=(tiers[0], tiers[2]))
    assert rig.spill(1, [0, 1, 2, 3], A, B, C, D, origins=bytes([0, 2, 3, 4])) == ()
    letters = ["".join(chr(n.block_hash[0]) for n in tier.objects) for tier in tiers]
    assert letters == ["abcd", "a", "ad", "a"]
    assert rig.spill(2, [0, 1], A, B, origins=bytes([1, 2])) == (0,), "none is nearer"


@pytest.mark.parametrize("kind", ["fetch", "spill"])
def test_a_transfer_that_is_given_up_waits_for_every_tier_that_touches_its_slots(make_rig, kind):
    """One tier is cancelled while it waits for its turn, the other cannot be."""
    rig, near, far = two_tiers(make_rig, "ab", "ab")
    for tier in (near, far):
        tier.holds = {kind}
        tier.ignores_cancel = True
    move = getattr(rig, kind)
    for number in (1, 2):  # they take the turns in the near tier
        move(number, [number], A, origins=bytes([1 if kind == "fetch" else 0]))
    both = {"origins": bytes([1, 2])} if kind == "fetch" else {}
    if kind == "spill":
        far.holds = set()
        far.release()
        rig.loop.turn()
        far.holds = {kind}
    assert move(3, [3, 4], A, B, **both) is None
    (pending,) = [pending for pending in rig.runner.statistics() if pending.number == 3]
    num_touching = far.touching
    assert num_touching
    pending.task.cancel()
    rig.loop.turn()
    assert far.touching == num_touching
    assert rig.outcome(3) is None
    far.release()
    assert rig.outcome(3) is FailureReason.CANCELLED


# ---- what tiers do wrong -------------------------------------------------------------------------

LIES = [
    [],
    [True] * 3,
    None,
    (True, True),
    ["yes", "no"],
    [Result.DONE],
    [Result.DONE] * 3,
    ["done", "done"],
    {A: Result.DONE},
    OSError(5, "input or output"),
    ValueError("defect"),
]


@pytest.mark.parametrize("lie", LIES, ids=repr)
def test_a_tier_that_raises_or_lies_about_length_has_nothing(make_rig, lie):
    for kind, expected in [("probe", bytes(2)), ("fetch", (0, 1)), ("spill", (0, 1))]:
        rig = make_rig()
        rig.tier.objects = {name(A): content(1), name(B): content(2)}
        rig.tier.answers[kind] = [lie]
        slots = [] if kind == "probe" else [[0, 1]]
        assert getattr(rig, kind)(1, *slots, A, B) == expected
        # Once is no reason to leave it alone.
        assert rig.probe(2, A, C) == bytes([1, 0])


@pytest.mark.parametrize("result", [r for r in Result if r is not Result.DONE])
def test_only_what_is_done_has_come(make_rig, result):
    rig = make_rig()
    rig.tier.answers["fetch"] = [[result, Result.DONE]]
    assert rig.fetch(1, [0, 1], A, B) == (0,)


def test_a_probe_is_answered_in_time_with_what_is_known(make_rig):
    rig, near, far = two_tiers(make_rig)
    near.objects = {name(A): content(1)}
    far.holds, far.ignores_cancel = {"probe"}, True
    assert rig.probe(1, A, B) is None
    rig.loop.pass_time(CONFIG.wait_s / WAIT_SHARE - 0.1)
    assert rig.presence(1) is None
    rig.loop.pass_time(0.1)
    assert rig.presence(1) == bytes([1, 0]), "there is time left to fetch it"
    far.release()  # what comes late changes nothing
    assert rig.presence(1) == bytes([1, 0])


@pytest.mark.parametrize("kind", ["fetch", "spill"])
def test_at_its_deadline_a_transfer_gives_up_what_was_not_begun(make_rig, kind):
    rig = make_rig()
    rig.tier.holds = {kind}
    assert getattr(rig, kind)(1, [0, 1], A, B) is None
    rig.loop.pass_time(TIMEOUT_S - 0.1)
    assert rig.outcome(1) is None
    rig.loop.pass_time(0.1)
    assert rig.outcome(1) == (0, 1)


@pytest.mark.parametrize("kind", ["fetch", "spill"])
def test_slots_that_a_hanging_tier_may_touch_are_not_given_back(make_rig, kind, caplog):
    rig = make_rig()
    rig.tier.objects = {name(A): content(1)}
    rig.tier.holds, rig.tier.ignores_cancel = {kind}, True
    getattr(rig, kind)(1, [0], A)
    for _ in range(20):
        rig.loop.pass_time(100)
        assert rig.outcome(1) is None
    assert caplog.text.count("has not returned") == 1
    rig.tier.release()
    assert rig.outcome(1) == (), "late, and right"


def test_writing_keeps_to_its_rate(make_rig):
    config = TierConfig(Location("file", "/nowhere"), write_bytes_per_s=SLOT_BYTES)
    rig = make_rig(config=config)
    assert rig.spill(1, [0, 1, 2], A, B, C) == ()
    assert rig.spill(2, [3], D) is None
    rig.loop.pass_time(2.9)
    assert rig.outcome(2) is None
    rig.loop.pass_time(0.2)
    assert rig.outcome(2) == ()


def test_what_is_not_written_does_not_count_against_the_rate(make_rig):
    config = TierConfig(Location("file", "/nowhere"), write_bytes_per_s=SLOT_BYTES)
    rig = make_rig(config=config)
    for number in range(FAILURES_MAX):
        rig.tier.answers["spill"] = [OSError("read-only")]
        rig.loop.pass_time(1)
        rig.spill(number, [0], A)
    assert rig.spill(7, [0, 1, 2], A, B, C) == (0, 1, 2)
    assert rig.spill(8, [3], D) == (0,)


# ---- the breaker ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["probe", "fetch", "spill"])
def test_a_tier_that_fails_is_left_alone_and_tried_again(make_rig, kind, caplog):
    caplog.set_level("INFO")
    rig = make_rig()
    rig.fail(kind, FAILURES_MAX - 1)
    assert not rig.guarded_tiers[0].is_out
    rig.fail(kind, 1)
    assert rig.guarded_tiers[0].is_out is (kind != "spill")
    assert rig.guarded_tiers[0].is_out_for_writing is (kind == "spill")
    before = list(rig.tier.calls)
    rig.tier.objects = {name(A): content(1)}
    if kind == "probe":
        assert rig.probe(1, A) == bytes([0])
    else:
        assert getattr(rig, kind)(1, [0], A) == (0,)
    assert rig.tier.calls == before
    rig.loop.pass_time(PAUSE_S)
    assert not rig.is_left_alone(kind)
    if kind == "probe":
        assert rig.probe(2, A) == bytes([1])
    else:
        assert getattr(rig, kind)(2, [0], A) == ()
    assert not rig.guarded_tiers[0].is_out
    assert not rig.guarded_tiers[0].is_out_for_writing
    assert caplog.text.count("Circuit breaker open") == 1
    assert caplog.text.count("works again") == 1


def test_a_tier_that_hangs_is_out_during_its_trials_too(make_rig):
    """Else an alert that waits for ten minutes of it never fires."""
    rig = make_rig()
    rig.tier.holds = {"fetch"}
    states = []
    for number in range(30):
        rig.fetch(next(NUMBERS), [number], A)
        rig.loop.pass_time(TIMEOUT_S)
        rig.loop.pass_time(60 - TIMEOUT_S)
        gauges = rig.runner.gauges()
        states.append(gauges['tier_is_out{tier="1",operation="read"}'])
    assert len(rig.tier.calls) > FAILURES_MAX + 2, "it was tried again"
    assert states == sorted(states)
    assert states.index(1) < FAILURES_MAX


def test_a_tier_that_cannot_work_says_so_before_the_first_request(make_rig, caplog):
    near, far = HandTier("near"), HandTier("far")
    near.answers["probe"] = [OSError("nobody is there")] * 100
    rig = make_rig(near, far, namespace_facts=NamespaceFacts({}, ()))
    assert (near.calls, far.calls) == (["probe 1"] * FAILURES_MAX, ["probe 1"])
    assert "Tier near (probe) has failed" in caplog.text
    assert "nobody is there" in caplog.text
    assert [guarded.is_out for guarded in rig.guarded_tiers] == [True, False]


def test_success_in_between_keeps_it_in_use(make_rig):
    rig = make_rig()
    for _ in range(3):
        rig.fail("probe", FAILURES_MAX - 1)
        assert rig.probe(next(NUMBERS), A) == bytes([0])
    assert not rig.guarded_tiers[0].is_out


def test_probes_that_work_do_not_hide_fetches_that_fail(make_rig):
    rig = make_rig()
    rig.tier.objects = {name(A): content(1)}
    for _ in range(FAILURES_MAX):
        assert rig.probe(next(NUMBERS), A) == bytes([1])
        rig.fail("fetch", 1)
    assert rig.guarded_tiers[0].is_out
    assert rig.probe(1, A) == bytes([0]), "what cannot be read is not there"
    rig.loop.pass_time(PAUSE_S)
    assert rig.probe(2, A) == bytes([1])


def test_what_cannot_be_written_can_still_be_read(make_rig):
    rig = make_rig()
    rig.tier.objects = {name(A): content(1)}
    rig.fail("spill")
    assert rig.probe(1, A) == bytes([1])
    assert rig.fetch(2, [0], A) == ()
    assert not rig.guarded_tiers[0].is_out


def test_a_full_tier_is_not_one_that_fails(make_rig):
    rig = make_rig()
    for _ in range(FAILURES_MAX + 1):
        rig.tier.answers["spill"] = [[Result.FULL]]
        assert rig.spill(next(NUMBERS), [0], A) == (0,)
    assert not rig.guarded_tiers[0].is_out_for_writing


def test_a_tier_that_stays_full_is_left_alone_and_all_it_drops_counts_as_full(make_rig):
    rig, counters = make_rig(), Counters()
    for _ in range(FAILURES_MAX):
        rig.tier.answers["spill"] = [[Result.FULL, Result.STILL_FULL]]
        assert rig.spill(next(NUMBERS), [0, 1], A, B) == (0, 1)
    assert rig.guarded_tiers[0].is_out_for_writing
    rig.runner.count_into(counters)
    dropped = {name: n for name, n in counters.take().items() if "dropped" in name and n}
    assert dropped == {'tier_dropped_spills{tier="1",reason="full"}': 2 * FAILURES_MAX}


def test_only_of_a_directory_it_is_said_what_it_holds(make_rig):
    assert make_rig().runner.gauges()['tier_stored_bytes{tier="1"}'] == 0
    rig = make_rig(config=replace(CONFIG, location=Location("redis", host="kv.internal")))
    assert 'tier_stored_bytes{tier="1"}' not in rig.runner.gauges()


def test_a_slow_tier_that_delivers_is_not_one_that_fails(make_rig):
    rig = make_rig()
    for _ in range(FAILURES_MAX + 1):
        rig.tier.holds = {"fetch"}
        rig.tier.ignores_cancel = True
        rig.tier.answers["fetch"] = [[Result.DONE, Result.CANCELLED]]
        number = next(NUMBERS)
        rig.fetch(number, [0, 1], A, B)
        rig.loop.pass_time(TIMEOUT_S)
        rig.tier.release()
        assert rig.outcome(number) == (1,)
    assert not rig.guarded_tiers[0].is_out


@pytest.mark.parametrize("ignores_cancel", [False, True])
@pytest.mark.parametrize("kind", ["probe", "fetch", "spill"])
def test_time_outs_are_failures(make_rig, kind, ignores_cancel, caplog):
    rig = make_rig()
    rig.tier.holds, rig.tier.ignores_cancel = {kind}, ignores_cancel
    for number in range(FAILURES_MAX):
        slots = [] if kind == "probe" else [[number]]
        getattr(rig, kind)(number, *slots, A)
        rig.loop.pass_time(TIMEOUT_S)
        assert "Circuit breaker open" not in caplog.text or number == FAILURES_MAX - 1
        rig.loop.pass_time(GRACE_S)
    assert f"Tier hand ({kind}) has failed {FAILURES_MAX} times in a row" in caplog.text


def test_one_call_at_a_time_tries_it_again(make_rig):
    rig = make_rig()
    rig.fail("fetch")
    rig.loop.pass_time(PAUSE_S)
    rig.tier.objects = {name(A): content(1)}
    rig.tier.holds = {"fetch"}
    num_calls = len(rig.tier.calls)
    assert rig.fetch(1, [1], A) is None
    assert rig.fetch(2, [2], A) == (0,)
    assert len(rig.tier.calls) == num_calls + 1
    rig.tier.release()
    assert rig.outcome(1) == ()
    rig.tier.holds = set()
    assert rig.fetch(3, [3], A) == ()


@pytest.mark.parametrize("kind", ["fetch", "spill"])
def test_a_trial_that_its_caller_gives_up_says_nothing_of_the_tier(make_rig, kind):
    rig = make_rig()
    rig.fail(kind)
    rig.loop.pass_time(PAUSE_S)
    rig.tier.holds = {kind}
    assert getattr(rig, kind)(1, [1, 2], A, B) is None
    give_up(rig)
    assert rig.outcome(1) is not None
    assert rig.is_half_open(kind)
    rig.tier.holds = set()
    rig.fail(kind, 1)
    assert rig.is_left_alone(kind), "the next one is the trial"


@pytest.mark.parametrize("kind", ["fetch", "spill"])
def test_what_its_caller_gives_up_forgives_no_failure_before_it(make_rig, kind):
    rig = make_rig()
    rig.fail(kind, FAILURES_MAX - 1)
    rig.tier.holds = {kind}
    assert getattr(rig, kind)(1, [1], A) is None
    give_up(rig)
    assert rig.outcome(1) is not None
    rig.tier.holds = set()
    rig.fail(kind, 1)
    assert rig.is_left_alone(kind)


def give_up(rig: Rig) -> None:
    """Cancel who waits for a tier."""
    for pending in rig.runner.statistics():
        assert pending.task is not None
        pending.task.cancel()


def test_pauses_grow_up_to_a_bound_and_begin_again_small(make_rig):
    rig = make_rig(chance=lambda: 0.5)
    rig.fail("probe")
    lengths = []
    for _ in range(9):
        begin_s = rig.loop.now_s()
        while rig.is_left_alone("probe"):
            rig.loop.pass_time(0.25)
        lengths.append(rig.loop.now_s() - begin_s)
        rig.fail("probe", 1)
    assert lengths == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert lengths[-1] == PAUSE_S_MAX
    rig.loop.pass_time(PAUSE_S_MAX)
    assert rig.probe(1, A) == bytes([0])
    rig.fail("probe")
    rig.loop.pass_time(PAUSE_S)
    assert not rig.is_left_alone("probe")


@pytest.mark.parametrize(("chance", "pause_s"), [(0.0, 0.5), (0.999, 1.499)])
def test_pauses_have_a_jitter(make_rig, chance, pause_s):
    rig = make_rig(chance=lambda: chance)
    rig.fail("probe")
    rig.loop.pass_time(pause_s - 0.01)
    assert rig.is_left_alone("probe")
    rig.loop.pass_time(0.02)
    assert not rig.is_left_alone("probe")


# ---- the end -------------------------------------------------------------------------------------


def test_a_loop_that_dies_while_a_tier_copies_leaves_the_memory_to_it(make_rig):
    rig = make_rig()
    rig.tier.holds = {"fetch"}
    rig.fetch(1, [1], A)
    assert not rig.runner.end()
    assert rig.holding() is not None
    rig.tier.release()
    rig.loop.turn()
    assert rig.runner.end()
    assert rig.holding() is None


def test_nothing_is_begun_while_it_closes(make_rig):
    rig, near, far = two_tiers(make_rig)
    near.holds, near.ignores_cancel = {"fetch"}, True
    near.answers["fetch"] = [[Result.ABSENT]]
    rig.fetch(1, [1], A)
    assert not rig.close()
    assert rig.fetch(2, [2], A) is FailureReason.NOT_RUNNING
    assert rig.probe(3, A) == bytes([0])
    near.release()
    assert rig.outcome(1) == (0,)
    assert near.calls[0] == "fetch 1"
    assert not [call for call in near.calls[1:] + far.calls if call.startswith(("fetch", "probe"))]


def test_what_comes_in_at_the_very_moment_of_closing_does_not_kill_the_loop(make_rig, monkeypatch):
    rig = make_rig()
    rig.tier.holds = {"probe"}
    rig.probe(1, A)
    rig.transfers.submit(Direction.LOAD, transfer(7))
    task, late = PendingMessage.task, iter([Probe(2, keys(B))])

    def read(pending: PendingMessage) -> Any:
        for probe in late:  # vLLM's thread goes on while the loop's looks at what there is
            rig.runner.probe(probe)
        return task.__get__(pending)

    monkeypatch.setattr(PendingMessage, "task", property(read, task.__set__))
    assert not rig.close(), "before its copy has ended"
    rig.backend.complete_all()
    assert (rig.presence(1), rig.presence(2)) == (bytes(1), bytes(1))
    assert rig.transfers.drain() == [(7, None)]


# ---- what is told of it --------------------------------------------------------------------------


def test_calls_are_kept_with_what_they_did(make_rig):
    rig = make_rig()
    guarded = rig.guarded_tiers[0]
    rig.spill(1, [0, 1], A, B)
    rig.tier.holds = {"fetch"}
    rig.fetch(2, [2, 3], A, C)
    rig.loop.pass_time(0.5)
    rig.tier.release()
    rig.drain()
    spill, fetch = guarded.take_calls()
    assert (spill.operation, spill.results, spill.size_bytes) == (
        Operation.SPILL,
        {"done": 2},
        2 * SLOT_BYTES,
    )
    assert (fetch.operation, fetch.seconds, fetch.size_bytes) == (Operation.FETCH, 0.5, SLOT_BYTES)
    assert fetch.results == {"done": 1, "absent": 1}
    rig.tier.holds = set()
    rig.fail("fetch")
    guarded.take_calls()
    rig.fetch(3, [4], A)
    assert [call.results for call in guarded.take_calls()] == [{LEFT_ALONE: 1}]
    counters = Counters()
    rig.runner.count_into(counters)
    rig.fetch(4, [4], A)
    rig.runner.count_into(counters)
    assert counters.take() == {'tier_misses{tier="1",reason="left_alone"}': 1}
    assert counters.take_observed() == {}, "it was not called"


# ---- all orders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_every_message_is_answered_once_in_any_order(seed):
    """Random calls, failures, time and a random end: what was asked is answered, once."""
    chance = random.Random(seed)
    tiers = [HandTier(f"tier {index}") for index in range(chance.randint(1, 3))]
    rig = Rig(*tiers, chance=chance.random)
    probes, transfers = set(), set()
    free = list(range(NUM_SLOTS))
    held: dict[int, list[int]] = {}
    for number in range(1, 80):
        tier = chance.choice(tiers)
        tier.holds = {kind for kind in ("probe", "fetch", "spill") if chance.random() < 0.3}
        tier.ignores_cancel = chance.random() < 0.3
        if chance.random() < 0.3:
            kind = chance.choice(["probe", "fetch", "spill"])
            tier.answers[kind] = [chance.choice(LIES) for _ in range(chance.randint(1, 5))]
        hashes = [bytes([chance.randrange(9)]) * 32 for _ in range(chance.randint(1, 4))]
        if chance.random() < 0.4 or len(free) < 4:
            rig.runner.probe(Probe(number, keys(*hashes)))
            probes.add(number)
        else:
            held[number] = [free.pop() for _ in hashes]
            message = TierTransfer(number, keys(*hashes), ids_of(held[number]))
            chance.choice([rig.runner.fetch, rig.runner.spill])(message)
            transfers.add(number)
        if chance.random() < 0.5:
            chance.choice(tiers).release(chance.randint(1, 3))
        rig.loop.pass_time(chance.choice([0, 0, 0.1, 2, 7]))
        num_outcomes = len(rig.outcomes)
        rig.drain()
        for outcome in rig.outcomes[num_outcomes:]:
            free += held.pop(outcome.transfer_id)
    if chance.random() < 0.3:
        rig.loop.kill()
    for tier in tiers:
        tier.holds = set()
        tier.release()
    rig.close()
    rig.loop.pass_time(10)
    rig.drain()
    assert {presence.probe_id for presence in rig.presences} == probes
    assert {outcome.transfer_id for outcome in rig.outcomes} == transfers
    assert rig.backend.is_closed
