"""Where a request is with what tiers could bring it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safe_offload.errors import InvariantError

if TYPE_CHECKING:
    from safe_offload.scheduler.pending import Fetch
    from safe_offload.scheduler.requests import RequestState
    from safe_offload.scheduler.tiers.probes import Question


class Stage(enum.Enum):
    """Where the look-up of a request is."""

    IDLE = "idle"
    """It may begin: the request is new, or has run since the last one."""
    ASKING = "asking"
    """The tiers are asked what they have."""
    WANTING = "wanting"
    """They have answered; what to fetch is not decided, or there is no room for it."""
    FETCHING = "fetching"
    """Blocks are on their way."""
    OVER = "over"
    """Nothing is waited for any more. What has come stays leased until the request matches."""


_EDGES: dict[Stage, frozenset[Stage]] = {
    Stage.IDLE: frozenset({Stage.ASKING, Stage.WANTING, Stage.OVER}),
    Stage.ASKING: frozenset({Stage.WANTING, Stage.OVER}),
    Stage.WANTING: frozenset({Stage.FETCHING, Stage.OVER}),
    Stage.FETCHING: frozenset({Stage.OVER}),
    Stage.OVER: frozenset({Stage.IDLE}),
}


@dataclass(slots=True, eq=False)
class LookUp:
    """What one request does with tiers over its life; changed by its methods only.

    Attributes:
        number: those of earlier requests are lower.
        is_asked: vLLM has asked about the request since the look-up began.
        is_trial: it is not expected to pay, and measures whether that is still so.
        is_roomless: there was no slot for what it wants.
        num_computed_tokens: that the GPU's prefix cache had when it was looked at last.
        first_token, end_token: of what tiers may bring, or do.
        waited_s: over the life of the request, up to `asked_s`.
        asked_s: when vLLM asked last, while the request waits; else None.
        last_gap_s: from the question before that to it; 0 at first.
        wait_max_s: of the tiers that are waited for.
        questions: asked for it.
        fetches: begun for it, or for another that needs the same, in the order of their tokens.
        starts: for each of them, up to which token a request can go without it and what follows.
    """

    state: RequestState
    number: int
    stage: Stage = Stage.IDLE
    is_asked: bool = False
    is_roomless: bool = False
    is_trial: bool = False
    num_computed_tokens: int = 0
    first_token: int = 0
    end_token: int = 0
    waited_s: float = 0.0
    asked_s: float | None = None
    last_gap_s: float = 0.0
    wait_max_s: float = 0.0
    questions: Sequence[Question] = ()
    fetches: Sequence[Fetch] = ()
    starts: Sequence[int] = ()

    def _move(self, stage: Stage) -> None:
        """Change the stage.

        Raises:
            InvariantError: the table above has no such edge.
        """
        if stage not in _EDGES[self.stage]:
            raise InvariantError(
                "I4", f"a look-up cannot go from {self.stage.value} to {stage.value}"
            )
        self.stage = stage

    def begin(
        self,
        num_computed_tokens: int,
        span: tuple[int, int],
        wait_max_s: float,
        *,
        is_trial: bool,
    ) -> None:
        """Tiers may bring the tokens of a span."""
        self.is_asked = self.is_roomless = False
        self.is_trial = is_trial
        self.num_computed_tokens, self.wait_max_s = num_computed_tokens, wait_max_s
        self.first_token, self.end_token = span

    def ask(self, questions: Sequence[Question]) -> None:
        """The tiers are asked."""
        self._move(Stage.ASKING)
        self.questions = questions

    def want(self) -> None:
        """It is known what tiers have."""
        self._move(Stage.WANTING)

    def finds_no_room(self) -> None:
        """There is no slot for what it wants."""
        self.is_roomless = True

    def fetch(
        self,
        fetches: Sequence[Fetch],
        starts: Sequence[int],
        span: tuple[int, int],
        wait_max_s: float,
    ) -> None:
        """Blocks of a span are on their way."""
        self._move(Stage.FETCHING)
        self.fetches, self.starts, self.wait_max_s = fetches, starts, wait_max_s
        self.first_token, self.end_token = span
        self.questions = ()

    def end(self) -> None:
        """Nothing is waited for any more; what is held is let go of by the caller."""
        if self.stage is not Stage.OVER:
            self._move(Stage.OVER)
        self.questions = ()

    def let_go(self) -> None:
        """What has come is of no interest any more."""
        self.fetches = self.starts = ()

    def ran(self) -> None:
        """The request runs: when it is preempted, it may look up again."""
        self._move(Stage.IDLE)

    def asked(self, num_computed_tokens: int, now_s: float) -> None:
        """vLLM asks about the request."""
        self.last_gap_s = 0.0 if self.asked_s is None else now_s - self.asked_s
        self.waited_s += self.last_gap_s
        self.is_asked = True
        self.asked_s, self.num_computed_tokens = now_s, num_computed_tokens

    def answered(self, now_s: float) -> None:
        """vLLM is told what it has asked: from now on the request does not wait."""
        if self.asked_s is not None:
            self.waited_s += now_s - self.asked_s
            self.asked_s = None

    @property
    def is_active(self) -> bool:
        """Whether something is waited for."""
        return self.stage is not Stage.OVER and self.stage is not Stage.IDLE

    @property
    def num_tokens(self) -> int:
        """How many tokens tiers may bring beyond what the GPU and the host had."""
        return self.end_token - max(self.first_token, self.num_computed_tokens)

    @property
    def is_answered(self) -> bool:
        """Whether all that was asked is answered."""
        return all(question.is_answered for question in self.questions)

    def share(self) -> float:
        """Return the part of the tokens that can be hit by now: up to what has not come."""
        for fetch, start in zip(self.fetches, self.starts, strict=True):
            if not fetch.is_whole:
                num_come = max(0, start - self.first_token)
                return num_come / (self.end_token - self.first_token)
        return 1.0 if self.fetches else 0.0

    @property
    def has_arrived(self) -> bool:
        """Whether what is still under way brings the request no further: it is behind a gap."""
        pairs = zip(self.fetches, self.starts, strict=True)
        late = [(fetch, start) for fetch, start in pairs if not fetch.is_whole]
        return not late or any(not fetch.ranks_left for fetch, start in late if start == late[0][1])
