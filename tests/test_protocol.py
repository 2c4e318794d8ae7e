"""The messages between the processes: what survives the way, and what cannot be changed."""

import dataclasses
import functools
import itertools
import pickle

import pytest

from safe_offload.compat.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from safe_offload.errors import ProtocolError
from safe_offload.protocol import (
    EMPTY_PLAN,
    BadSlots,
    Capacity,
    FailureReason,
    HostFacts,
    Keys,
    MemoryFacts,
    MemoryKind,
    Outcome,
    Presence,
    Probe,
    StepPlan,
    StepReport,
    TierTransfer,
    Transfer,
    ids_of,
)

KEYS = Keys(b"\x00\x01", (b"a", b"b"))
PLAN = StepPlan(
    loads=(Transfer(2**40, (1, 2), (3, 4)),),
    stores_before_forward=(Transfer(1, (5,), (6,)),),
    stores_after_forward=(Transfer(2, ids_of([7]), ids_of([8])),),
    fences=(1, 2),
    failures=("request",),
    probes=(Probe(3, KEYS, "word"),),
    fetches=(TierTransfer(4, KEYS, ids_of([1, 2]), "", b"\x01\x00"),),
    spills=(TierTransfer(5, KEYS, ids_of([3, 4])),),
    is_idle=True,
)
MEMORY = MemoryFacts(MemoryKind.PAGE_LOCKED, "99 %", (0, 1))
REPORTS = [
    StepReport(
        outcomes=(Outcome(rank, 1), Outcome(rank, 2, FailureReason.TIMED_OUT, (3,))),
        capacities=(Capacity(rank, 5),),
        bad_slots=(BadSlots(rank, (6, 7)),),
        lost_ranks=(rank,),
        host_facts=(HostFacts(rank, MEMORY, ("batch", "each"), 2, ("doubt",)),),
        presences=(Presence(rank, 3, b"\x01\x00"),),
    )
    for rank in range(3)
]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("message", [PLAN, REPORTS[1], EMPTY_PLAN, StepReport()], ids=repr)
def test_a_message_is_the_same_on_the_other_side(message, protocol):
    arrived = pickle.loads(pickle.dumps(message, protocol))
    assert arrived == message
    assert type(arrived) is type(message)


def test_vllm_takes_the_messages_for_its_own():
    assert isinstance(EMPTY_PLAN, KVConnectorMetadata)
    assert isinstance(StepReport(), KVConnectorWorkerMetadata)


def test_a_report_is_true_even_if_it_is_empty():
    assert StepReport()
    assert StepReport((Outcome(0, 1),))


def test_joining_reports_keeps_everything_in_order():
    joined = functools.reduce(StepReport.aggregate, REPORTS)
    for field in [one for one in dataclasses.fields(StepReport) if one.compare]:
        parts = [getattr(report, field.name) for report in REPORTS]
        assert getattr(joined, field.name) == tuple(itertools.chain(*parts)), field.name


@pytest.mark.parametrize("is_first", [True, False])
def test_a_report_that_is_told_twice_asks_once_more(is_first):
    asking, other = StepReport(later=lambda: StepReport((Outcome(0, 8),))), StepReport()
    joined = asking.aggregate(other) if is_first else other.aggregate(asking)
    assert joined.completed() == StepReport((Outcome(0, 8),))
    assert joined.completed().later is None


def test_a_report_is_not_joined_with_another_connector_s():
    class Foreign(KVConnectorWorkerMetadata):
        def aggregate(self, other):
            return self

    with pytest.raises(ProtocolError, match="expected a StepReport to aggregate, found Foreign"):
        StepReport().aggregate(Foreign())


@pytest.mark.parametrize(
    ("blocks", "slots"), [((), ()), ((1,), ()), ((), (1,)), ((1, 2), (1,)), ((1,), (1, 2))]
)
def test_a_transfer_has_a_slot_for_each_block_and_at_least_one(blocks, slots):
    with pytest.raises(ProtocolError, match="transfer 5: expected as many blocks as slots"):
        Transfer(5, blocks, slots)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Keys(b"", ()), "at least one, found 0 groups and 0 hashes"),
        (lambda: Keys(b"\x00", ()), "found 1 groups and 0 hashes"),
        (lambda: TierTransfer(5, KEYS, ids_of([1])), "found 2 keys and 1 slots"),
        (lambda: TierTransfer(5, KEYS, ids_of([1, 2]), "", b"\x01"), "2 keys and 1 origins"),
    ],
)
def test_a_tier_transfer_has_a_slot_for_each_key_and_an_origin_or_none(make, message):
    with pytest.raises(ProtocolError, match=message):
        make()


@pytest.mark.parametrize(
    "message",
    [
        Transfer(1, (2,), (3,)),
        StepPlan(),
        Outcome(0, 1),
        Capacity(0, 1),
        BadSlots(0, (1,)),
        HostFacts(0, MemoryFacts(MemoryKind.PAGEABLE, "refused"), ("each",)),
        StepReport(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_cannot_be_changed(message):
    for field in dataclasses.fields(message):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(message, field.name, None)
    assert hash(message) == hash(dataclasses.replace(message))
