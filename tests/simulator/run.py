"""One run: a profile, a seed, the events that are kept; to its end or to the first finding.

Most profiles have one engine. Those of several share what their tiers hold, and one clock.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore as VllmEngineCore

from safe_offload.errors import InvariantError
from tests.simulator.chance import Chance
from tests.simulator.checkers import Checkers
from tests.simulator.checkers.twin import TwinChecker
from tests.simulator.earnings import Earned, Earnings
from tests.simulator.engine_core import EngineCore
from tests.simulator.events import Abort, Event, Fault, ModelLoad, Reset, Send
from tests.simulator.faults import Faults
from tests.simulator.findings import Finding
from tests.simulator.model_runner import Batch
from tests.simulator.moments import Moments
from tests.simulator.node import Killed, Node
from tests.simulator.profiles import Profile
from tests.simulator.settling import Settling
from tests.simulator.swarm import profile_of
from tests.simulator.tiers import ObjectStore
from tests.simulator.trace import Trace
from tests.simulator.virtual_loop import Clock
from tests.simulator.workload import events_of, make_events

TURNS = (1, 1, 2, 5, 30)
"""Steps of an engine, before the seed chooses the next one."""
STEPS_MAX = 5000
RESET_STEP_S = 0.01
"""How long a step takes in which a reset waits for loads, whatever it takes this machine."""
PINS_S = 1000.0
"""More than any pin lasts."""
WAKE_TICKS, WAKES_MAX = 500, 100
"""More than any operation of a tier takes; more than there are, one after the other."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine is among those that are driven together."""

    number: int = 0
    clock: Clock = field(default_factory=Clock)  # of all of them
    lines: list[str] = field(default_factory=list)  # of the trace of all of them
    label: str = ""  # that lines of this one begin with
    node: Node | None = None  # whose host memory they share


@dataclass(slots=True)
class Result:
    """What became of a run."""

    profile: str
    seed: int
    events: list[Event]
    finding: Finding | None = None  # None if every promise was kept
    trace: list[str] = field(default_factory=list)  # one line for everything that happened
    digest: str = ""  # of the same, without names of ours (see `Trace`)
    num_steps: int = 0  # of all its lives
    counts: Counter[str] = field(default_factory=Counter)  # of the connector
    earned: Earned = field(default_factory=Earned)  # what was stored, loaded and hit
    injected: Counter[str] = field(default_factory=Counter)  # faults, by kinds

    def add(self, fleet: Fleet) -> None:
        """What became of one more life of the engines."""
        self.trace += fleet.lines
        for life in fleet.runs:
            self.digest += life.trace.digest
            self.num_steps += life.core.num_steps
            self.counts.update(life.core.counts)
            self.earned += life.earnings.total()
            self.injected += life.core.injected


class Run:
    """Drives one engine through its events.

    `stores`: of its tiers, as an earlier engine left them; empty ones if not given.
    """

    def __init__(
        self,
        profile: Profile,  # the kind of run
        seed: int | str,  # which one
        events: Sequence[Event],  # what happens in it
        stores: Sequence[ObjectStore] | None = None,
        place: Place | None = None,  # among engines that are driven together
    ) -> None:
        if stores is None:
            stores = [ObjectStore(options) for options in profile.tiers]
        place = place if place is not None else Place()
        self.core = EngineCore(
            profile.shape,
            seed,
            copy_ticks_max=profile.copy_ticks_max,
            stores=stores,
            clock=place.clock,
            engine=place.number,
            node=place.node,
        )
        self.core.process_engine_step = self._step_before_reset
        self.checkers = Checkers(self.core)
        self._twin = TwinChecker(self.core) if profile.has_twin else None
        self.earnings = Earnings(self.core, self.checkers.ledger)
        self.trace = Trace(self.core, place.lines, place.label)
        self._sends = [event for event in events if isinstance(event, Send)]
        self._resets = [event for event in events if isinstance(event, Reset)]
        self._pauses: list[Reset] = []
        self._hidden: Exception | None = None  # by the connector, which contains it in a reset
        self._model_loads = [event for event in events if isinstance(event, ModelLoad)]
        self.core.before_update.append(self._load_while_computing)
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

    def rest(self) -> list[Event]:
        """What has not happened yet, for the next life of an engine that was killed."""
        now = self._now
        rest: list[Event] = [replace(each, step=max(0, each.step - now)) for each in self._sends]
        rest += [replace(each, step=max(0, each.step - now)) for each in self._resets]
        rest += [replace(each, step=max(0, each.step - now)) for each in self._model_loads]
        faults = self._faults.rest()
        return rest + [replace(each, number=max(0, each.number - now)) for each in faults]

    def go(self) -> None:
        """Run to the end."""
        for _ in self.turns():
            pass

    def turns(self) -> Iterator[None]:
        """Run to the end, with a pause after each step."""
        try:
            yield from self._turns()
        except Finding:
            raise
        except InvariantError as error:
            raise Finding(error.invariant, f"own check: {error.detail}") from error
        except Exception as error:
            raise Finding("I7", f"the engine died of {error!r}") from error

    def _turns(self) -> Iterator[None]:
        core = self.core
        while (
            self._sends or self._resets or self._pauses or self._faults.is_pending or core.has_work
        ):
            if core.num_steps > STEPS_MAX:
                raise Finding("I7", f"not idle after {STEPS_MAX} steps")
            self._now += 1
            self._send_due()
            self._reset_due()
            self._reset_if_paused()
            self._load_due(is_computing=False)
            self._settle()
            self._faults.before_step(self._now)
            self._abort(self._moments.before_schedule())
            if core.has_work:
                self._step()
            self._check_answers()
            yield
        self._check_answers()
        if core.config.pin_share:
            self._outlive_pins()
        self._wake()
        self.checkers.after_drain()
        if self._is_faultless:
            self.checkers.progress.check_all_went_well()
        if self._twin is not None:
            self._twin.check()

    def _step(self) -> None:
        self.trace.step(self.core.step())
        self.earnings.after_step()
        self.checkers.after_step()

    def _step_before_reset(self) -> None:
        try:
            self._step()
        except Exception as error:
            self._hidden = error
            raise

    def _outlive_pins(self) -> None:
        """Go on once more when the time of all pins is over."""
        self.core.clock.advance(PINS_S)
        self.core.add("later", [1, 2], 1)
        self.core.drain()

    def _wake(self) -> None:
        """Go on once more if tiers have been silent for so long that the engine stepped no more.

        What comes next notices that they have ended. vLLM's own cache is empty by then, else each
        time lazy stores would find something new to spill.
        """
        core, ledger = self.core, self.checkers.ledger
        for number in range(WAKES_MAX):
            if not (list(ledger.open_tier_transfers()) and ledger.have_tiers_been_silent()):
                return
            core.scheduler.reset_prefix_cache()
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
                kv_transfer_params=send.params,
            )
            self._moments.sent(send, request)
            self._wanted[send.request_id] = send

    def _reset_due(self) -> None:
        for reset in [reset for reset in self._resets if reset.step < self._now]:
            self._resets.remove(reset)
            self.trace.note(str(reset), "reset", reset.name)
            if reset.is_paused:
                self._pauses.append(reset)
                self.core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            else:
                self._reset(reset)

    def _reset_if_paused(self) -> None:
        """Do what `pause_generation` with "keep" does once the engine is idle, and go on."""
        if self._pauses and not self.core.has_work:
            for reset in self._pauses:
                self._reset(reset)
            self._pauses.clear()
            self.core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _reset(self, reset: Reset) -> None:
        clock = itertools.count(0, RESET_STEP_S).__next__
        try:
            with patch("safe_offload.compat.engine_core.resets.monotonic", clock):
                VllmEngineCore.reset_prefix_cache(self.core, reset.running, reset.connector)
        except RuntimeError as error:
            is_local = not self.core.shape.remote  # else loads end when they will
            if self._hidden is None and is_local:
                raise Finding("I7", f"vLLM refused a reset: {error}") from error
            self.trace.note("  refused by vLLM", "refused", reset.name)
        if self._hidden is not None:
            raise self._hidden

    def _load_while_computing(self, _: Batch) -> None:
        self._load_due(is_computing=True)

    def _load_due(self, *, is_computing: bool) -> None:
        """Load weights of which the connector learns only that their number has grown."""
        for load in [load for load in self._model_loads if load.step < self._now]:
            if load.is_late == is_computing:
                self._model_loads.remove(load)
                self.trace.note(str(load), "load weights", load.name)
                self.core.connector.model_loads.count += 1
                self.checkers.contents.turn_old()

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
        """A request that has stopped by itself has the answer that its prompt leads to."""
        for request_id, send in list(self._wanted.items()):
            reason = self.core.finish_reasons.get(request_id)
            if request_id in self.core.scheduler.requests or reason is None:
                continue
            del self._wanted[request_id]
            answer = self.core.answers.get(request_id, [])
            expected = self.core.runner.sequels[request_id].answer(send.max_tokens)
            if reason.name == "LENGTH" and answer != expected:
                raise Finding("I6", f"{request_id} answered {answer}, not {expected}")


class Fleet:
    """One engine, or several that share what their tiers hold, in turns that the seed chooses."""

    def __init__(
        self,
        profile: Profile,  # the kind of run
        seed: int,  # which one
        events: Sequence[Event],  # what happens in it, to one engine or another
        stores: Sequence[Sequence[ObjectStore]],  # see `make_stores`
        life: int = 0,  # how often they have been started before
    ) -> None:
        self.lines: list[str] = []
        name: int | str = f"{seed}/life {life}" if life else seed
        self._chance = Chance(f"turns/{name}")
        self._node: Node | None = None
        if profile.num_engines == 1:
            alone = Place(lines=self.lines)
            self.runs = [Run(profile, name, events, stores[0], alone)]
            return
        clock = Clock()
        if profile.shape.extra.get("share"):
            self._node = Node()

        def make(number: int, again: str, events: Sequence[Event]) -> Run:
            place = Place(number, clock, self.lines, f"{number}| ", self._node)
            return Run(profile, f"{name}/engine {number}{again}", events, stores[number], place)

        self._make = make
        self.runs = [
            make(number, "", events_of(events, seed, number, profile.num_engines))
            for number in range(profile.num_engines)
        ]

    def go(self) -> None:
        """Run to the end."""
        going = {number: current.turns() for number, current in enumerate(self.runs)}
        alive = dict(enumerate(self.runs))
        for turn in itertools.count():
            if not going:
                return
            number = self._chance.choose(list(going), "engine", turn)
            if self._node is not None:
                self._node.mortal = alive[number].core
            try:
                for _ in range(self._chance.choose(TURNS, "turns", turn)):
                    if next(going[number], self) is self:  # it has ended
                        del going[number]
                        break
            except Killed:
                alive[number] = self._start_again(alive[number], turn)
                going[number] = alive[number].turns()

    def _start_again(self, dead: Run, turn: int) -> Run:
        """An engine was killed: start it on what has not happened yet."""
        assert self._node is not None
        self._node.mortal = None
        number = dead.core.engine
        dead.trace.note("killed", "killed")
        dead.core.injected["die"] += 1
        dead.core.die(self._chance.below(40, "ticks after death", turn))
        self._node.ledgers.remove(dead.checkers.ledger)
        again = self._make(number, f"/again {turn}", dead.rest())
        self.runs.append(again)
        return again

    def close(self) -> None:
        if self._node is not None:
            self._node.mortal = None
        for current in self.runs:
            current.core.close()
        if self._node is not None:
            self._node.close()


def make_stores(profile: Profile) -> list[list[ObjectStore]]:
    """What the tiers of each engine hold: the same for all, but for what each has of its own."""
    common = [ObjectStore(options) for options in profile.tiers]
    return [
        [ObjectStore(store.options) if store.options.is_local else store for store in common]
        for _ in range(profile.num_engines)
    ]


def run(
    profile: str,  # a name of `swarm.NAMES`
    seed: int,  # which run
    *,
    only: Iterable[str] | None = None,  # names of the events that are kept; all if not given
    internal_checks: bool = False,  # let our own `check_invariants` run after each step too
) -> Result:
    """Make a run and let it go to its end, or to the first finding."""
    chosen = profile_of(profile, seed)
    if internal_checks:
        extra: dict[str, Any] = {**chosen.shape.extra, "check_invariants": True}
        chosen = replace(chosen, shape=replace(chosen.shape, extra=extra))
    events = make_events(chosen, seed)
    if only is not None:
        kept = set(only)
        events = [event for event in events if event.name in kept]
    stores = make_stores(chosen)
    result = Result(profile, seed, events)
    for life in range(chosen.num_lives):
        if life:
            result.trace.append(f"---- life {life + 1}")
            for store in {id(store): store for of_one in stores for store in of_one}.values():
                store.restart()
        fleet = Fleet(chosen, seed, events, stores, life)
        result.finding = _finding_of(fleet)
        result.add(fleet)
        if result.finding is not None:
            break
    return result


def never_injected(profile: str, seeds: Iterable[int], injected: Counter[str]) -> list[str]:
    """Return the kinds of faults that these runs of a profile name and that happened in none."""
    named = {kind.value for seed in seeds for kind in profile_of(profile, seed).faults}
    return sorted(named - {*+injected})


def findings_of(profile: Profile, seeds: Iterable[int]) -> list[Finding]:
    """Run seeds of a profile; return what their checkers found."""
    fleets = (Fleet(profile, s, make_events(profile, s), make_stores(profile)) for s in seeds)
    findings = [_finding_of(fleet) for fleet in fleets]
    return [finding for finding in findings if finding is not None]


def _finding_of(fleet: Fleet) -> Finding | None:
    try:
        fleet.go()
    except Finding as finding:
        return finding
    finally:
        fleet.close()
    return None
