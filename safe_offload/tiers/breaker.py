"""A circuit breaker: after repeated failures no call is made for a while, then one as a trial."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable

logger = logging.getLogger(f"vllm.{__name__}")

FAILURES_MAX = 3
"""In a row, before the circuit opens."""
PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""At first and at most. Each is twice as long as the one before, and 0.5 to 1.5 times that, so that
engines do not retry at the same time."""


class BreakerState(enum.Enum):
    """Of a circuit breaker; READY and TRYING are half open."""

    CLOSED = "closed"
    """Calls go through."""
    OPEN = "open"
    """None does."""
    READY = "ready"
    """The pause is over; the next call is a trial."""
    TRYING = "trying"
    """The trial runs, and no other call."""


_NEXT = {
    BreakerState.CLOSED: {BreakerState.OPEN},
    BreakerState.OPEN: {BreakerState.READY, BreakerState.CLOSED},
    BreakerState.READY: {BreakerState.TRYING, BreakerState.CLOSED},
    BreakerState.TRYING: {BreakerState.OPEN, BreakerState.CLOSED, BreakerState.READY},
}


class Breaker:
    """A circuit breaker for one kind of call to a tier; it belongs to the loop's thread.

    It joins `together`, the breakers of its tier: one log line covers an outage that opens several.
    """

    def __init__(self, name: str, chance: Callable[[], float], together: list[Breaker]) -> None:
        self._name = name
        self._chance = chance
        self._together = together
        together.append(self)
        self.state = BreakerState.CLOSED
        self._num_failures = 0
        self._pause_s = PAUSE_S

    def __repr__(self) -> str:
        return f"<Breaker of {self._name}, {self.state.value}>"

    def admits(self) -> bool:
        """Return whether a call may be made; if so, one of the three methods below must follow."""
        if self.state is BreakerState.READY:
            self._become(BreakerState.TRYING)
            return True
        return self.state is BreakerState.CLOSED

    def withdraw(self) -> None:
        """Make the next call the trial, as the one that was has been cancelled."""
        if self.state is BreakerState.TRYING:
            self._become(BreakerState.READY)

    def succeed(self) -> None:
        """Record a call that succeeded."""
        self._num_failures = 0
        if self.state is not BreakerState.CLOSED:
            self._become(BreakerState.CLOSED)
            self._pause_s = PAUSE_S
            level = logging.DEBUG if self._is_one_of_several() else logging.INFO
            logger.log(level, "%s works again.", self._name)

    def fail(self, problem: str, *, is_logged: bool = False) -> None:
        """Record a call that failed; `is_logged`: the log has a line about it, with the fix."""
        self._num_failures += 1
        if self.state is BreakerState.CLOSED and self._num_failures >= FAILURES_MAX:
            is_logged = is_logged or self._is_one_of_several()
            logger.log(
                logging.DEBUG if is_logged else logging.WARNING,
                "%s has failed %d times in a row, last because %s. Circuit breaker open: the next "
                "attempt is in about %g s, later ones less often. Requests bypass the tier.",
                *(self._name, self._num_failures, problem, self._pause_s),
            )
        elif self.state is not BreakerState.TRYING:
            return
        self._become(BreakerState.OPEN)
        pause_s = self._pause_s * (0.5 + self._chance())
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        asyncio.get_running_loop().call_later(pause_s, self._end_pause)

    def _is_one_of_several(self) -> bool:
        return any(it.state is not BreakerState.CLOSED for it in self._together if it is not self)

    def _end_pause(self) -> None:
        if self.state is BreakerState.OPEN:
            self._become(BreakerState.READY)

    def _become(self, state: BreakerState) -> None:
        assert state in _NEXT[self.state], (self.state, state)
        self.state = state
