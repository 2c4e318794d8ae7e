"""The messages between the processes: what survives the way, and what cannot be changed."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_offload.compat.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from safe_offload.errors import ProtocolError
from safe_offload.protocol import (
    EMPTY_PLAN,
    BadSlots,
    Capacity,
    FailureReason,
    HostFacts,
    MemoryFacts,
    MemoryKind,
    Outcome,
    StepPlan,
    StepReport,
    Transfer,
)

ids = st.integers(0, 2**40)
transfers = st.builds(
    lambda transfer_id, pairs: Transfer(
        transfer_id, tuple(block for block, _ in pairs), tuple(slot for _, slot in pairs)
    ),
    ids,
    st.lists(st.tuples(ids, ids), min_size=1, max_size=8),
)
some_transfers = st.lists(transfers, max_size=4).map(tuple)
plans = st.builds(
    StepPlan,
    loads=some_transfers,
    stores_before_forward=some_transfers,
    stores_after_forward=some_transfers,
    fences=st.lists(ids, max_size=4).map(tuple),
    failures=st.lists(st.text(max_size=8), max_size=4).map(tuple),
)
outcomes = st.builds(Outcome, ids, ids, st.none() | st.sampled_from(FailureReason))
reports = st.builds(
    StepReport,
    outcomes=st.lists(outcomes, max_size=6).map(tuple),
    capacities=st.lists(st.builds(Capacity, ids, ids), max_size=3).map(tuple),
    bad_slots=st.lists(
        st.builds(BadSlots, ids, st.lists(ids, max_size=3).map(tuple)), max_size=2
    ).map(tuple),
    host_facts=st.lists(
        st.builds(
            HostFacts,
            ids,
            st.builds(
                MemoryFacts,
                st.sampled_from(MemoryKind),
                st.text(max_size=4),
                st.lists(ids, max_size=2).map(tuple),
            ),
            st.lists(st.text(max_size=4), max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
)


@given(plans | reports, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_a_message_is_the_same_on_the_other_side(message, protocol):
    arrived = pickle.loads(pickle.dumps(message, protocol))
    assert arrived == message
    assert type(arrived) is type(message)


def test_a_reason_is_the_same_object_on_the_other_side():
    outcome = pickle.loads(pickle.dumps(Outcome(0, 1, FailureReason.FENCE_TIMEOUT)))
    assert outcome.failure is FailureReason.FENCE_TIMEOUT


def test_vllm_takes_the_messages_for_its_own():
    assert isinstance(EMPTY_PLAN, KVConnectorMetadata)
    assert isinstance(StepReport(), KVConnectorWorkerMetadata)


def test_a_plan_without_anything_is_the_empty_plan():
    assert StepPlan() == EMPTY_PLAN
    assert pickle.loads(pickle.dumps(EMPTY_PLAN)) == EMPTY_PLAN


def test_a_report_is_true_even_if_it_is_empty():
    assert StepReport()
    assert StepReport((Outcome(0, 1),))


@given(st.lists(reports, min_size=1, max_size=5))
def test_joining_reports_keeps_everything_in_order(parts):
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.aggregate(part)
    assert joined.outcomes == tuple(o for part in parts for o in part.outcomes)
    assert joined.capacities == tuple(c for part in parts for c in part.capacities)
    assert joined.bad_slots == tuple(b for part in parts for b in part.bad_slots)
    assert joined.host_facts == tuple(f for part in parts for f in part.host_facts)


def test_joining_changes_neither_report_and_counts_nothing():
    outcome = Outcome(0, 7)
    one, other = StepReport((outcome,)), StepReport((outcome,), (Capacity(1, 5),))
    joined = one.aggregate(other)
    assert joined.outcomes == (outcome, outcome), "a report that comes twice has to be seen as such"
    assert one == StepReport((outcome,))
    assert other == StepReport((outcome,), (Capacity(1, 5),))


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


@pytest.mark.parametrize("kind", [Transfer, Outcome, Capacity, BadSlots, HostFacts, MemoryFacts])
def test_what_there_are_many_of_has_slots(kind):
    assert not hasattr(kind, "__dict__") or "__dict__" not in dir(kind)


def test_reasons_have_names_that_can_be_logged():
    assert [reason.value for reason in FailureReason] == [
        reason.name.lower() for reason in FailureReason
    ]
