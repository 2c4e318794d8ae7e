"""Random interleavings of everything that can happen to transfers, against a model."""

import threading
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safe_offload.errors import TransferError
from safe_offload.protocol import FailureReason
from safe_offload.worker.copies.base import Copy, Direction
from tests.worker.driven import DrivenTransfers, flush, hurry, join, serves, submit
from tests.worker.fake_backend import PATIENCE_S, SLOT_BYTES, FakeBackend, LoopKilled, transfer
from tests.worker.watched_loop import HandClock

MAX_BLOCKS = 4
"""The bound, in blocks; transfers have one to six."""

indices = st.integers(0, 30)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(Direction), st.integers(1, 6)),
        st.tuples(st.just("complete"), indices),
        st.tuples(st.just("fail"), indices),
        st.tuples(st.just("refuse"), st.sampled_from([TransferError("x", "y"), ValueError("z")])),
        st.tuples(st.just("fence"), st.sets(indices, max_size=4), st.booleans()),
        st.tuples(st.just("drain")),
        st.tuples(st.just("flush")),
        st.tuples(st.just("queue"), st.booleans()),
        st.tuples(st.just("pass_deadline")),
    ),
    max_size=40,
)
endings = st.sampled_from(["finish", "close", "kill the main coroutine", "kill a transfer"])


class Run:
    """Transfers, and what is expected of them."""

    def __init__(self) -> None:
        self.backend = FakeBackend()
        self.backend.on_issue = self._on_issue
        self.clock = HandClock()
        self.transfers = DrivenTransfers(
            self.backend, MAX_BLOCKS * SLOT_BYTES, make_event_loop=self.clock.new_event_loop
        )
        self.submitted: list[int] = []
        self.num_blocks: dict[int, int] = {}
        self.urgent: set[int] = set()
        self.poisoned: set[int] = set()
        self.failed: set[int] = set()
        self.refusals: list[Exception] = []
        self.reported: list[tuple[int, FailureReason | None]] = []
        self.over_bound: list[int] = []
        self.kill_next = False
        self.killed = threading.Event()
        self.overdue: set[int] = set()

    def _on_issue(self, copy: Copy) -> None:
        name = int(copy.block_ids[0])
        if self.kill_next:
            self.killed.set()
            raise LoopKilled
        if self.refusals:
            self.failed.add(name)
            raise self.refusals.pop()
        # A copy that was hurried may have got in between the turn of this one and its issue.
        running = [
            c
            for c in self.backend.running
            if c.copy.direction is copy.direction and c.name not in self.urgent | self.overdue
        ]
        is_below = sum(c.size_bytes for c in running) < MAX_BLOCKS * SLOT_BYTES
        if not is_below and name not in self.urgent:
            self.over_bound.append(name)

    def submit(self, direction: Direction, num_blocks: int) -> None:
        transfer_id = 1000 * len(self.submitted)
        self.submitted.append(transfer_id)
        self.transfers.submit(direction, transfer(transfer_id, num_blocks))

    def complete(self, index: int) -> None:
        if running := self.backend.running:
            running[index % len(running)].future.set_result(None)

    def fail(self, index: int) -> None:
        if running := self.backend.running:
            completion = running[index % len(running)]
            self.failed.add(completion.name)
            completion.future.set_exception(TransferError(FailureReason.COPY_FAILED, "told to"))

    def refuse(self, error: Exception) -> None:
        self.refusals.append(error)

    def fence(self, picked: set[int], is_kept: bool) -> None:
        known = tuple(self.submitted[i] for i in picked if i < len(self.submitted))
        transfer_ids = *known, 77  # which never was
        self.urgent.update(transfer_ids)

        def answer(completion) -> bool:
            if not is_kept:
                self.poisoned.add(completion.name)
            return is_kept

        self.backend.on_fence = answer
        self.transfers.fence(transfer_ids)
        # What was fenced has been issued, or has settled without.
        assert not {*transfer_ids} & {*self.transfers.statistics().undecided_ids}

    def queue(self, queues: bool) -> None:
        self.backend.queues = queues

    def pass_deadline(self) -> None:
        self.flush()
        self.overdue.update(completion.name for completion in self.backend.running)
        self.clock.advance(self.transfers.loop, 31.0)
        assert self.transfers.statistics().undecided_ids == ()

    def drain(self) -> None:
        self.reported += self.transfers.drain()

    def flush(self) -> None:
        flush(self.transfers)

    def finish(self) -> None:
        """Let every copy end well."""
        self.flush()
        while self.backend.running:
            self.backend.complete_all()
            self.flush()
        self.drain()

    def end_while_copies_run(self, ending: str) -> None:
        if ending == "close":
            self.transfers.close(timeout_s=0.0)
        elif ending == "kill the main coroutine":
            self.transfers.loop.kill()
        else:
            self.kill_next = True
            submit(self.transfers, Direction.STORE, 777)
            self.submitted.append(777)
            hurry(self.transfers, 777)
            assert self.killed.wait(PATIENCE_S)
        self.flush()
        self.drain()
        early = {transfer_id for transfer_id, _ in self.reported}
        assert early.isdisjoint(completion.name for completion in self.backend.running)
        self.submit(Direction.LOAD, 1)
        self.backend.complete_all()
        join(self.transfers)
        self.submit(Direction.STORE, 1)
        self.transfers.fence(tuple(self.submitted))
        self.drain()

    def check(self, ending: str) -> None:
        counts = Counter(transfer_id for transfer_id, _ in self.reported)
        assert counts == Counter(self.submitted)
        assert self.over_bound == []
        unfinished = {FailureReason.NOT_RUNNING, FailureReason.CANCELLED}
        ended = {completion.name for completion in self.backend.issued}
        taken_back = {c.name for c in self.backend.issued if c.future.cancelled()}
        for transfer_id, failure in self.reported:
            if failure is FailureReason.TIMED_OUT:
                assert transfer_id not in ended or transfer_id in taken_back
            elif failure in unfinished:
                assert ending != "finish"
                assert ending != "close" or transfer_id not in ended
            elif transfer_id in self.failed:
                assert failure is FailureReason.COPY_FAILED
            elif transfer_id in self.poisoned:
                assert failure is FailureReason.FENCE_TIMEOUT
            else:
                assert failure is None


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(operations=operations, ending=endings)
def test_every_transfer_is_reported_exactly_once_and_as_what_became_of_it(operations, ending):
    run = Run()
    try:
        for name, *arguments in operations:
            getattr(run, name)(*arguments)
        if ending == "finish":
            run.finish()
            run.refusals.clear()
            assert serves(run.transfers, run.backend)
        else:
            run.end_while_copies_run(ending)
        run.check(ending)
    finally:
        run.refusals.clear()
        run.transfers.close(timeout_s=0.0)
        flush(run.transfers)
        run.backend.complete_all()
        join(run.transfers)
    assert run.backend.is_closed


@pytest.mark.parametrize("num_rounds", [300])
def test_transfers_from_a_thread_that_never_waits_are_all_reported(num_rounds):
    backend = FakeBackend()
    transfers = DrivenTransfers(backend, 3 * SLOT_BYTES)
    done = threading.Event()

    def end_copies() -> None:
        while not done.is_set() or backend.running:
            backend.complete_all()

    ender = threading.Thread(target=end_copies, daemon=True)
    ender.start()
    reported: list[int] = []
    try:
        for transfer_id in range(num_rounds):
            submit(transfers, Direction.STORE if transfer_id % 3 else Direction.LOAD, transfer_id)
            if transfer_id % 5 == 0:
                transfers.fence((transfer_id, transfer_id - 3))
            reported += [i for i, failure in transfers.drain() if failure is None]
        transfers.fence(tuple(range(num_rounds)))
        flush(transfers)
        reported += [i for i, failure in transfers.drain() if failure is None]
    finally:
        done.set()
        ender.join(PATIENCE_S)
        assert transfers.close(PATIENCE_S)
    assert sorted(reported) == list(range(num_rounds))
