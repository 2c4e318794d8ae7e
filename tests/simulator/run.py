"""One run: a profile, a seed, the events that are kept; to its end or to the first finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from safe_offload.errors import InvariantError
from tests.simulator.checkers import Checkers
from tests.simulator.earnings import Earned, Earnings
from tests.simulator.engine_core import EngineCore
from tests.simulator.events import Abort, Event, Fault, Reset, Send
from tests.simulator.faults import Faults
from tests.simulator.findings import Finding
from tests.simulator.moments import Moments
from tests.simulator.profiles import Profile
from tests.simulator.settling import Settling
from tests.simulator.swarm import profile_of
from tests.simulator.tiers import ObjectStore
from tests.simulator.trace import Trace
from tests.simulator.workload import make_events

STEPS_MAX = 5000
WAKE_TICKS, WAKES_MAX = 500, 100
"""More than any operation of a tier takes; more than there are, one after the other."""


@dataclass(slots=True)
class Result:
    """What became of a run.

    Attributes:
        finding: None if every promise was kept.
        trace: one line for everything that happened.
        digest: of the same, without names of ours (see `Trace`).
        num_steps: of all its lives.
        counts: of the connector.
        earned: what was stored, loaded and hit.
    """

    profile: str
    seed: int
    events: list[Event]
    finding: Finding | None = None
    trace: list[str] = field(default_factory=list)
    digest: str = ""
    num_steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    earned: Earned = field(default_factory=Earned)

    def add(self, life: Run) -> None:
        """What became of one more life of the engine."""
        self.trace += life.trace.lines
        self.digest += life.trace.digest
        self.num_steps += life.core.num_steps
        self.counts.update(life.core.counts)
        self.earned += life.earnings.total()


class Run:
    """Drives one engine through its events.

    Args:
        profile: the kind of run.
        seed: which one.
        events: what happens in it.
        stores: of its tiers, as an earlier engine left them; empty ones if not given.
    """

    def __init__(
        self,
        profile: Profile,
        seed: int | str,
        events: Sequence[Event],
        stores: Sequence[ObjectStore] | None = None,
    ) -> None:
        if stores is None:
            stores = [ObjectStore(options) for options in profile.tiers]
        self.core = EngineCore(
            profile.shape, seed, copy_ticks_max=profile.copy_ticks_max, stores=stores
        )
        self.checkers = Checkers(self.core)
        self.earnings = Earnings(self.core, self.checkers.ledger)
        self.trace = Trace(self.core)
        self._sends = [event for event in events if isinstance(event, Send)]
        self._resets = [event for event in events if isinstance(event, Reset)]
        self._moments = Moments(
            self.core, self.checkers, [event for event in events if isinstance(event, Abort)]
        )
        faults = [event for event in events if isinstance(event, Fault)]
        ids = sorted({send.request_id for send in self._sends})
        self._faults = Faults(self.core, self.checkers, faults, [*ids, "never-sent"])
        self._is_faultless = not profile.faults
        self._settles = profile.settles
        self._copy_ticks_max = profile.copy_ticks_max
        self._settling: Settling | None = None
        self._wanted: dict[str, Send] = {}
        self._now = 0

    def go(self) -> None:
        """Run to the end.

        Raises:
            Finding: a promise was broken.
        """
        try:
            self._go()
        except Finding:
            raise
        except InvariantError as error:
            raise Finding(error.invariant, f"own check: {error.detail}") from error
        except Exception as error:
            raise Finding("I7", f"the engine died of {error!r}") from error

    def _go(self) -> None:
        core = self.core
        while self._sends or self._resets or self._faults.is_pending or core.has_work:
            if core.num_steps > STEPS_MAX:
                raise Finding("I7", f"not idle after {STEPS_MAX} steps")
            self._now += 1
            self._send_due()
            self._reset_due()
            self._settle()
            self._faults.before_step(self._now)
            self._abort(self._moments.before_schedule())
            if core.has_work:
                batch = core.step()
                self.trace.step(batch)
                self.earnings.after_step()
                self.checkers.after_step()
            self._check_answers()
        self._check_answers()
        self._wake()
        self.checkers.after_drain()
        if self._is_faultless:
            self.checkers.progress.check_all_went_well()

    def _wake(self) -> None:
        """Go on once more if tiers have been silent for so long that the engine stepped no more.

        What comes next notices that they have ended.
        """
        core, ledger = self.core, self.checkers.ledger
        for number in range(WAKES_MAX):
            if not (list(ledger.open_tier_transfers()) and ledger.have_tiers_been_silent()):
                return
            for _ in range(WAKE_TICKS):
                for worker in core.workers:
                    worker.loop.turn()
                    worker.device.tick()
            core.add(f"wake{number}", [1, 2], 1)
            core.drain()

    def _send_due(self) -> None:
        for send in [send for send in self._sends if send.step < self._now]:
            # vLLM's frontend gives no id out again while the scheduler or a step in flight has it.
            if send.request_id in self.core.scheduler.requests or self.core.is_in_flight(
                send.request_id
            ):
                continue
            self._sends.remove(send)
            self._check_answers()
            self.trace.note(str(send), "send", send.name, send.request_id)
            request = self.core.add(
                send.request_id,
                list(send.prompt),
                send.max_tokens,
                priority=send.priority,
                cache_salt=send.salt,
            )
            self._moments.sent(send, request)
            self._wanted[send.request_id] = send

    def _reset_due(self) -> None:
        for reset in [reset for reset in self._resets if reset.step < self._now]:
            self._resets.remove(reset)
            self.trace.note(str(reset), "reset", reset.name)
            try:
                self.core.scheduler.reset_prefix_cache(
                    reset_running_requests=reset.running, reset_connector=reset.connector
                )
            except RuntimeError as error:
                # vLLM refuses it while a request waits for a load, and answers so to the caller.
                if "waiting for remote KV transfer" not in str(error):
                    raise
                self.trace.note("  refused by vLLM", "refused", reset.name)

    def _settle(self) -> None:
        """After the last request: faults and clients that go end, and what is left has a bound."""
        if self._sends or self._resets or not (self._settles or self._is_faultless):
            return
        if self._settling is None:
            if self._settles:
                self.trace.note("no more faults, no more aborts", "calm")
                self._faults.stop()
                self._moments.stop()
            self._settling = Settling(self.core, self._copy_ticks_max)
        self._settling.check()

    def _abort(self, aborts: Iterable[Abort]) -> None:
        for abort in aborts:
            self.trace.note(str(abort), "client goes", abort.name)
            self.core.abort(self._moments.request_id(abort))

    def _check_answers(self) -> None:
        """Whoever has stopped by itself has the answer that its prompt leads to."""
        for request_id, send in list(self._wanted.items()):
            reason = self.core.finish_reasons.get(request_id)
            if request_id in self.core.scheduler.requests or reason is None:
                continue
            del self._wanted[request_id]
            answer = self.core.answers.get(request_id, [])
            expected = self.core.runner.sequels[request_id].answer(send.max_tokens)
            if reason.name == "LENGTH" and answer != expected:
                raise Finding("I6", f"{request_id} answered {answer}, not {expected}")


def run(
    profile: str,
    seed: int,
    *,
    only: Iterable[str] | None = None,
    internal_checks: bool = False,
) -> Result:
    """Make a run and let it go to its end, or to the first finding.

    Args:
        profile: a name of `swarm.NAMES`.
        seed: which run.
        only: names of the events that are kept; all if not given.
        internal_checks: let our own `check_invariants` run after each step too.
    """
    chosen = profile_of(profile, seed)
    if internal_checks:
        extra: dict[str, Any] = {**chosen.shape.extra, "check_invariants": True}
        chosen = replace(chosen, shape=replace(chosen.shape, extra=extra))
    events = make_events(chosen, seed)
    if only is not None:
        kept = set(only)
        events = [event for event in events if event.name in kept]
    stores = [ObjectStore(options) for options in chosen.tiers]
    result = Result(profile, seed, events)
    for life in range(chosen.num_lives):
        if life:
            result.trace.append(f"---- life {life + 1}")
            for store in stores:
                store.restart()
        current = Run(chosen, f"{seed}/life {life}" if life else seed, events, stores)
        try:
            current.go()
        except Finding as found:
            result.finding = found
        finally:
            current.core.close()
        result.add(current)
        if result.finding is not None:
            break
    return result


def findings_of(profile: Profile, seeds: Iterable[int]) -> list[Finding]:
    """Run seeds of a profile; return what their checkers found."""
    findings = []
    for seed in seeds:
        current = Run(profile, seed, make_events(profile, seed))
        try:
            current.go()
        except Finding as finding:
            findings.append(finding)
        finally:
            current.core.close()
    return findings
