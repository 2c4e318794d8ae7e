"""Tiers behind the worker's hooks: real threads, real host memory, a tier in a dictionary."""

from typing import Any

import pytest

from safe_offload.observe.counters import Counters
from safe_offload.protocol import (
    EMPTY_PLAN,
    IDLE_PLAN,
    FailureReason,
    Keys,
    Probe,
    StepPlan,
    TierTransfer,
    Transfer,
    ids_of,
)
from safe_offload.tiers.base import Result
from safe_offload.tiers.namespace.namespace_facts import Doubt, NamespaceFacts
from safe_offload.worker.bridge import IDLE_WAIT_S
from safe_offload.worker.self_test import SelfTest
from tests.worker.hand_tier import HandTier
from tests.worker.memory.pools import is_closed
from tests.worker.test_bridge import BLOCKS, SLOT_BYTES, Worker
from tests.worker.waiting import wait_until

TIERS = [{"url": "file:///near"}, {"url": "file:///far"}]
A, B, C = (bytes([letter]) * 32 for letter in b"abc")


class TieredWorker(Worker):
    """A worker with two tiers in dictionaries."""

    def __init__(self, **options: Any) -> None:
        self.tiers: dict[str, HandTier] = {}
        self.facts: list[dict[str, str]] = []
        self.doubts: tuple[str, ...] = options.pop("doubts", ())
        extra = {"tiers": TIERS, **options.pop("extra", {})}
        super().__init__(
            extra=extra,
            open_tier=self._open_tier,
            namespace_facts_of=self._namespace_facts_of,
            **options,
        )

    def _open_tier(self, config, slot_bytes, facts):
        assert slot_bytes == SLOT_BYTES
        self.facts.append(facts)
        tier = self.tiers[config.location.path] = HandTier(config.location.path)
        return tier, lambda generation: repr((sorted(facts.items()), generation)).encode()

    def _namespace_facts_of(self, geometry, copy_rank):
        facts = {"rank": str(copy_rank), "bytes": str(geometry.slot_bytes)}
        return NamespaceFacts(facts, tuple(map(Doubt, self.doubts)))

    @property
    def near(self) -> HandTier:
        return self.tiers["/near"]

    def answered(self, *numbers: int) -> dict[int, Any]:
        """Step until these have been answered; return the answers."""
        found: dict[int, Any] = {}

        def are_all_there() -> bool:
            self.step(EMPTY_PLAN)
            for report in self.reports:
                found.update({each.probe_id: each.tiers for each in report.presences})
                for outcome in report.outcomes:
                    found[outcome.transfer_id] = outcome.failure or outcome.missing
            return all(number in found for number in numbers)

        wait_until(are_all_there)
        return {number: found[number] for number in numbers}


@pytest.fixture
def make_worker():
    workers: list[TieredWorker] = []

    def make(**options: Any) -> TieredWorker:
        workers.append(TieredWorker(**options))
        return workers[-1]

    yield make
    for worker in workers:
        for tier in worker.tiers.values():
            tier.holds = set()
            tier.release()
        worker.bridge.shutdown()


def keys(*hashes: bytes) -> Keys:
    return Keys(bytes(len(hashes)), hashes)


def moved(number: int, slot_ids: list[int], *hashes: bytes) -> tuple[TierTransfer, ...]:
    return (TierTransfer(number, keys(*hashes), ids_of(slot_ids)),)


def test_without_tiers_every_message_fails_and_is_answered(make_worker):
    worker = make_worker(extra={"tiers": []}).register()
    assert worker.bridge.opened.tiers is None
    probes = (Probe(3, keys(A, B)),)
    worker.step(StepPlan(probes=probes, fetches=moved(1, [0], A), spills=moved(2, [1], A)))
    failed = FailureReason.NOT_RUNNING
    assert worker.answered(1, 2, 3) == {1: failed, 2: failed, 3: bytes(2)}


def test_after_shutdown_every_message_fails_and_is_answered(make_worker):
    worker = make_worker().register()
    worker.bridge.shutdown()
    worker.step(StepPlan(probes=(Probe(3, keys(A)),), fetches=moved(1, [0], A)))
    assert worker.answered(1, 3) == {1: FailureReason.NOT_RUNNING, 3: bytes(1)}


def test_tiers_go_on_while_vllm_sleeps(make_worker):
    worker = make_worker().register()
    worker.bridge.unregister_kv_caches()
    worker.step(StepPlan(spills=moved(1, [0], A), probes=(Probe(2, keys(A)),)))
    assert worker.answered(1)[1] == ()


def test_shutdown_leaves_a_hanging_tier_behind_with_the_memory(make_worker, monkeypatch, caplog):
    worker = make_worker().register()
    worker.near.holds, worker.near.ignores_cancel = {"fetch"}, True
    worker.step(StepPlan(fetches=moved(1, [0], A)))
    wait_until(lambda: "fetch 1" in worker.near.calls)
    transfers = worker.bridge.opened.transfers
    monkeypatch.setattr(transfers, "close", lambda close=transfers.close: close(timeout_s=0.05))
    worker.bridge.shutdown()
    assert "A copy or a tier did not end within 5 s of shutdown" in caplog.text
    assert not is_closed(worker.host)
    worker.near.release()
    worker.loop.join()
    assert is_closed(worker.host)


def test_tiers_are_closed_where_no_way_to_copy_is_right(make_worker, monkeypatch):
    monkeypatch.setattr(SelfTest, "run", lambda *_, **__: False)
    worker = make_worker().register()
    assert worker.near.is_closed
    worker.step(StepPlan(probes=(Probe(3, keys(A)),)))
    assert worker.answered(3) == {3: bytes(1)}


def test_a_slot_that_was_fetched_is_verified_like_one_that_was_stored(make_worker):
    worker = make_worker(extra={"verify": "load"}).register()
    for block in range(BLOCKS):
        worker.write_block(block, 10 * block)
    worker.step(StepPlan(stores_after_forward=(Transfer(1, ids_of([2]), ids_of([4])),)))
    worker.settle()
    worker.step(StepPlan(spills=moved(2, [4], A)))
    worker.answered(2)
    worker.step(StepPlan(fetches=moved(3, [9], A)))
    worker.answered(3)
    worker.step(StepPlan(loads=(Transfer(4, ids_of([8]), ids_of([9])),)))
    assert worker.settle()[4] is None
    worker.host.tensor[worker.layout.ranges_of(9)[0][0]] ^= 1
    worker.step(StepPlan(loads=(Transfer(5, ids_of([8]), ids_of([9])),)))
    assert worker.settle()[5] is FailureReason.CHECKSUM_MISMATCH


def test_what_tiers_do_is_counted(make_worker):
    worker = make_worker().register()
    worker.step(StepPlan(spills=moved(1, [0, 1], A, B)))
    worker.answered(1)
    worker.near.answers["fetch"] = [[Result.CORRUPT, Result.ABSENT, Result.DONE]]
    worker.near.num_evicted = 7
    worker.near.num_restarts = 2
    worker.step(StepPlan(fetches=moved(2, [2, 3, 4], A, C, B)))
    worker.answered(2)
    counters = Counters()
    worker.bridge.take_changes(counters)
    assert {name: count for name, count in counters.take().items() if name.startswith("tier")} == {
        'tier_written_objects{tier="1"}': 2,
        'tier_written_bytes{tier="1"}': 2 * SLOT_BYTES,
        'tier_written_objects{tier="2"}': 2,
        'tier_written_bytes{tier="2"}': 2 * SLOT_BYTES,
        'tier_read_objects{tier="1"}': 1,
        'tier_read_bytes{tier="1"}': SLOT_BYTES,
        'tier_misses{tier="1",reason="corrupt"}': 1,
        'tier_misses{tier="1",reason="absent"}': 1,
        'tier_read_objects{tier="2"}': 1,
        'tier_read_bytes{tier="2"}': SLOT_BYTES,
        'tier_misses{tier="2",reason="absent"}': 1,
        'tier_evicted_objects{tier="1"}': 7,
        'tier_restarts{tier="1"}': 2,
    }
    observed = counters.take_observed()
    assert (
        sum(n for n, _ in observed['tier_call_seconds{tier="1",operation="spill"}'].values()) == 1
    )
    worker.bridge.take_changes(counters)
    assert counters.take() == {}


# ---- steps that compute nothing ----------------------------------------------------------------


def make_watched(make_worker) -> tuple[TieredWorker, list[float]]:
    """A worker whose copies and tiers rest, and the limits of its waits from now on.

    Each waits as long as it takes, while tiers let go of what they hold.
    """
    worker = make_worker().register()
    worker.settle()
    limits: list[float] = []
    wait = worker.loop.wait

    def wait_long(event, timeout_s):
        limits.append(timeout_s)
        wait_until(lambda: wait(event, 0.01) or worker.near.release())
        return True

    worker.loop.wait = wait_long
    return worker, limits


def test_a_step_that_computes_nothing_waits_for_news(make_worker):
    """What is answered while it waits is in its own report."""
    worker, limits = make_watched(make_worker)
    worker.near.holds = {"probe", "spill"}
    worker.step(StepPlan(probes=(Probe(1, keys(A)),), is_idle=True))
    assert [each.probe_id for each in worker.reports[-1].presences] == [1]
    worker.step(StepPlan(spills=moved(2, [4], A), is_idle=True))
    assert [each.transfer_id for each in worker.reports[-1].outcomes] == [2]
    assert limits == [IDLE_WAIT_S] * 2


def test_a_step_waits_for_nothing_if_it_may_compute_or_nothing_is_under_way(make_worker):
    worker, limits = make_watched(make_worker)
    worker.step(IDLE_PLAN)
    assert not limits, "nothing is under way"
    worker.near.holds = {"probe"}
    worker.step(StepPlan(probes=(Probe(1, keys(A)),)))
    assert not limits, "it may compute"


def test_what_is_reported_has_been_counted_in_its_own_step(make_worker):
    """vLLM asks what was counted first, and after the last report it may ask no more."""
    worker, _ = make_watched(make_worker)
    worker.near.holds = {"spill"}
    worker.bridge.bind_connector_metadata(StepPlan(spills=moved(1, [4], A), is_idle=True))
    counters = Counters()
    worker.bridge.take_changes(counters)
    report = worker.bridge.build_connector_worker_meta()
    assert [each.transfer_id for each in report.outcomes] == [1]
    assert counters.take()['tier_written_objects{tier="1"}'] == 1
