"""Lookups: what each request waits for from tiers, and for how long (docs/guarantees.md: I9).

At the limit (`_wait_limit_s`), a request continues with the blocks that the host has by then. It
starts another lookup only after it has run and was preempted.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safe_offload.errors import InvariantError
from safe_offload.observe.counters import TIER_WAIT_S, Count
from safe_offload.scheduler.loads.cost import Offer, TierCosts
from safe_offload.scheduler.requests import RequestQueue

if TYPE_CHECKING:
    from safe_offload.scheduler.pending import Fetch
    from safe_offload.scheduler.requests import RequestState
    from safe_offload.scheduler.tiers.context import TierContext
    from safe_offload.scheduler.tiers.fetches import Fetches
    from safe_offload.scheduler.tiers.probes import PendingProbe, Probes


class LookUpState(enum.Enum):
    """The state of a request's lookup."""

    IDLE = "idle"
    """It may start: the request is new, or has run since the last one."""
    ASKING = "asking"
    """Probes are in flight."""
    WANTING = "wanting"
    """All probes are answered; the fetch is not decided, or there is no room for it."""
    FETCHING = "fetching"
    """Fetches are in flight."""
    OVER = "over"
    """The wait is over. Fetched blocks stay leased until the request matches."""


_EDGES: dict[LookUpState, frozenset[LookUpState]] = {
    LookUpState.IDLE: frozenset({LookUpState.ASKING, LookUpState.WANTING, LookUpState.OVER}),
    LookUpState.ASKING: frozenset({LookUpState.WANTING, LookUpState.OVER}),
    LookUpState.WANTING: frozenset({LookUpState.FETCHING, LookUpState.OVER}),
    LookUpState.FETCHING: frozenset({LookUpState.OVER}),
    LookUpState.OVER: frozenset({LookUpState.IDLE}),
}


@dataclass(slots=True, eq=False)
class LookUp:
    """The lookups of one request over its life; only `LookUps` changes it."""

    user: RequestState
    number: int  # in the order of arrival
    state: LookUpState = LookUpState.IDLE
    is_asked: bool = False  # vLLM has asked about the request since the lookup started
    is_roomless: bool = False  # there was no slot for its fetch
    # It continues although it is not expected to pay: a hint requests it, or it keeps the estimates
    # current.
    is_trial: bool = False
    num_computed_tokens: int = 0  # tokens in the GPU's prefix cache at the last check
    # `first_token`, `end_token`: of the blocks that tiers may supply, or do.
    first_token: int = 0
    end_token: int = 0
    waited_s: float = 0.0  # over the life of the request, up to `asked_s`
    asked_s: float | None = None  # when vLLM last asked, while the request waits; otherwise None
    last_gap_s: float = 0.0  # between the last two questions; 0 at first
    wait_max_s: float = 0.0  # of the tiers that are waited for
    probes: Sequence[PendingProbe] = ()
    num_unanswered: int = 0
    # Begun for it, or for another that needs the same, in the order of their tokens.
    fetches: Sequence[Fetch] = ()
    # By fetch, the token that a request can reach without it and the later ones.
    starts: Sequence[int] = ()
    brought: Sequence[Fetch] = ()  # fetches followed by a hit

    def move(self, state: LookUpState) -> None:
        """Change the state; see the table above."""
        if state not in _EDGES[self.state]:
            change = f"from {self.state.value} to {state.value}"
            raise InvariantError("I4", f"a look-up cannot go {change}")
        self.state = state

    def end(self) -> None:
        """End the wait; the caller releases the fetches and probes."""
        if self.state is not LookUpState.OVER:
            self.move(LookUpState.OVER)
        self.probes = ()

    @property
    def is_active(self) -> bool:
        """Return whether probes or fetches are waited for."""
        return self.state is not LookUpState.OVER and self.state is not LookUpState.IDLE

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that tiers may add to those of GPU and host."""
        return self.end_token - max(self.first_token, self.num_computed_tokens)

    def end_max(self, num_computed_tokens: int) -> int:
        """Return the upper limit of the end of the request's hit, as a token."""
        num_tokens: int = self.user.request.num_tokens - 1
        if self.user.limits.load_tokens is not None:
            num_tokens = min(num_tokens, num_computed_tokens + self.user.limits.load_tokens)
        return num_tokens

    def ask(self, probes: Sequence[PendingProbe]) -> None:
        """Wait for the answers to these probes, of which there are none yet."""
        self.move(LookUpState.ASKING)
        self.probes, self.num_unanswered = probes, len(probes)

    def answered(self) -> bool:
        """A probe is answered; return whether it was the last one."""
        self.num_unanswered -= 1
        return not self.num_unanswered

    def share(self) -> float:
        """Return the share of the tokens that can be hit by now: up to the first missing piece."""
        for fetch, start in zip(self.fetches, self.starts, strict=True):
            if not fetch.is_whole:
                num_come = max(0, start - self.first_token)
                return num_come / (self.end_token - self.first_token)
        return 1.0 if self.fetches else 0.0

    @property
    def has_arrived(self) -> bool:
        """Return whether fetches in flight cannot extend the hit, because they follow a gap."""
        pairs = zip(self.fetches, self.starts, strict=True)
        late = [(fetch, start) for fetch, start in pairs if not fetch.is_whole]
        return not late or any(not fetch.ranks_left for fetch, start in late if start == late[0][1])


class LookUps:
    """The lookups of all requests (`RequestState.lookup`)."""

    def __init__(
        self, context: TierContext, costs: TierCosts, probes: Probes, fetches: Fetches
    ) -> None:
        self._hits = context.hits
        self._gpu = context.gpu
        self._counters = context.counters
        self._wait_max_s = max(config.wait_s for config in context.configs)
        self._costs = costs
        self._probes = probes
        self._fetches = fetches
        self._book = context.book
        self._num_begun = 0
        self.wanting = RequestQueue()  # requests whose fetch is to be decided. Read only outside.

    def __repr__(self) -> str:
        return f"LookUps({self.num_active} are active)"

    def see(self, user: RequestState) -> None:
        """Look a new request up while it is queued."""
        self._num_begun += 1
        lookup = user.lookup = LookUp(user, self._num_begun)
        self._begin(lookup, self._gpu.num_cached_tokens(user.request))

    def _begin(self, lookup: LookUp, num_computed_tokens: int) -> None:
        """Probe for blocks that the host lacks, unless that cannot pay."""
        user, end_max = lookup.user, lookup.end_max(num_computed_tokens)
        wanted, is_fetched = self._missing(user, num_computed_tokens, end_max)
        is_missing = any(wanted)
        if not (is_missing or is_fetched):
            return  # its turn may come when the host has lost something
        first_token = self.first_missing(user, num_computed_tokens, end_max)
        num_tokens = end_max - first_token
        offer = Offer(num_tokens, user.request.num_tokens - end_max)
        is_trial = user.limits.is_fetched
        num_blocks = self._hits.geometry.num_blocks_held(num_tokens)
        if not (is_trial or self._costs.probe_pays(offer, num_blocks)):
            is_trial = self._costs.tries_all_the_same()
            if not is_trial:
                lookup.end()
                return
        lookup.is_asked = lookup.is_roomless = False
        lookup.is_trial, lookup.wait_max_s = is_trial, self._wait_max_s
        lookup.num_computed_tokens = num_computed_tokens
        lookup.first_token, lookup.end_token = first_token, end_max
        if is_missing:
            self._counters[Count.TIER_LOOKUPS] += 1
            lookup.ask(self._probes.ask(wanted, user))
        else:
            self._want(lookup)

    def first_missing(self, user: RequestState, num_computed_tokens: int, end_max: int) -> int:
        """Return the token that a request can reach without tiers."""
        hit = self._hits.find_hit(user.request.block_hashes, num_computed_tokens, end_max)
        return num_computed_tokens + (hit.num_tokens if hit is not None else 0)

    def _missing(
        self, user: RequestState, num_computed_tokens: int, end_max: int
    ) -> tuple[list[list[bytes]], bool]:
        """Return by group the hashes that the host lacks, and whether others are being fetched."""
        hits, private = self._hits, self._hits.directory.private
        wanted: list[list[bytes]] = [[] for _ in hits.geometry.group_block_sizes]
        is_fetched = False
        if num_computed_tokens >= end_max:
            return wanted, is_fetched
        for group_idx in hits.geometry.group_ids:
            size = hits.geometry.group_block_sizes[group_idx]
            table = hits.directory.tables[group_idx]
            span = slice(num_computed_tokens // size, end_max // size)
            hashes = hits.geometry.hashes_of(user.request, group_idx)[span]
            wanted[group_idx] = [h for h in hashes if h not in table and h not in private]
            if self._fetches and not is_fetched:
                slots = [table[h] for h in hashes if h in table]
                is_fetched = bool(self._fetches.under_way(slots))
        return wanted, is_fetched

    def _want(self, lookup: LookUp) -> None:
        lookup.move(LookUpState.WANTING)
        self.wanting.add(lookup.user)

    def waits(self, user: RequestState, num_computed_tokens: int, now_s: float) -> bool:
        """Return whether a request waits for tiers, when vLLM asks for its hit."""
        lookup = user.lookup
        if lookup is None:
            return False
        if lookup.state is LookUpState.IDLE:
            self._begin(lookup, num_computed_tokens)
            if lookup.state is LookUpState.IDLE:
                lookup.end()
        if lookup.state is LookUpState.OVER:
            if lookup.asked_s is not None:
                self._answer(lookup, now_s)
            return False
        lookup.last_gap_s = 0.0 if lookup.asked_s is None else now_s - lookup.asked_s
        lookup.waited_s += lookup.last_gap_s
        lookup.is_asked = True
        lookup.asked_s, lookup.num_computed_tokens = now_s, num_computed_tokens
        if lookup.num_tokens > 0:
            # vLLM asks again in a step, which is expected to take as long as the last one.
            if lookup.waited_s + lookup.last_gap_s < self._wait_limit_s(lookup):
                return True
            self._counters[Count.TIER_WAITS_CUT] += 1
        self.finish(lookup)
        self._answer(lookup, now_s)
        return False

    def _wait_limit_s(self, lookup: LookUp) -> float:
        if lookup.user.limits.is_fetched:
            return lookup.wait_max_s
        num_tokens = lookup.num_tokens
        num_left = lookup.user.request.num_tokens - lookup.num_computed_tokens - num_tokens
        limit_s = self._costs.wait_max_s(Offer(num_tokens, num_left), lookup.share())
        return lookup.wait_max_s if limit_s is None else min(limit_s, lookup.wait_max_s)

    def _answer(self, lookup: LookUp, now_s: float) -> None:
        assert lookup.asked_s is not None
        lookup.waited_s += now_s - lookup.asked_s
        lookup.asked_s = None
        if lookup.waited_s:
            self._counters.observe(TIER_WAIT_S, lookup.waited_s)

    def fetch(
        self,
        lookup: LookUp,
        fetches: Sequence[Fetch],
        starts: Sequence[int],
        span: tuple[int, int],
        wait_max_s: float,
    ) -> None:
        """Fetches of these tokens have begun; see `LookUp`."""
        self.wanting.discard(lookup.user)
        self._probes.release(lookup.probes, lookup.user)
        lookup.move(LookUpState.FETCHING)
        lookup.fetches, lookup.starts, lookup.wait_max_s = fetches, starts, wait_max_s
        lookup.first_token, lookup.end_token = span
        lookup.probes = ()

    def finds_no_room(self, lookup: LookUp) -> None:
        """There is no slot for the fetch of a lookup."""
        lookup.is_roomless = True

    def finish(self, lookup: LookUp) -> None:
        """End the wait; fetched blocks stay leased until the request has matched."""
        self._probes.release(lookup.probes, lookup.user)
        self.wanting.discard(lookup.user)
        lookup.end()

    def _release(self, lookup: LookUp) -> None:
        if lookup.is_active:
            self.finish(lookup)
        if lookup.fetches:
            self._fetches.release(lookup.fetches, lookup.user)
            lookup.brought, lookup.fetches, lookup.starts = lookup.fetches, (), ()

    def matched(self, user: RequestState) -> None:
        """The hit of a request, if any, is reported and has its own lease."""
        lookup = user.lookup
        if lookup is not None and lookup.fetches:
            self._release(lookup)

    def hit_tokens(self, user: RequestState, first_token: int, num_tokens: int) -> dict[int, int]:
        """Return the tokens of a load by the farthest tier of their blocks; 0 is the host."""
        lookup, geometry = user.lookup, self._hits.geometry
        tiers: dict[tuple[int, bytes], int] = {}
        for fetch in lookup.brought if lookup is not None else ():
            keys = fetch.message.keys
            for idx, key in enumerate(zip(keys.group_ids, keys.hashes, strict=True)):
                if fetch.failure is None and not fetch.ranks_left and idx not in fetch.missing:
                    tiers[key] = fetch.message.origins[idx]
        groups = {idx: geometry.hashes_of(user.request, idx) for idx in geometry.group_ids}
        counts, size = Counter[int](), geometry.hash_block_size
        for token in range(first_token, first_token + num_tokens, size):
            farthest = 0
            for group_idx, hashes in groups.items() if tiers else ():
                idx = token // geometry.group_block_sizes[group_idx]
                if idx < len(hashes):
                    farthest = max(farthest, tiers.get((group_idx, hashes[idx]), 0))
            counts[farthest] += min(size, first_token + num_tokens - token)
        return counts

    def scheduled(self, user: RequestState, num_tokens: int) -> None:
        """vLLM has allocated blocks to a request, to load `num_tokens` tokens or to run."""
        lookup = user.lookup
        if lookup is not None:
            self._release(lookup)
            if not num_tokens and lookup.state is LookUpState.OVER:
                lookup.move(LookUpState.IDLE)  # when it is preempted, it may look up again

    def end(self, user: RequestState) -> None:
        """A request has ended."""
        lookup, user.lookup = user.lookup, None
        if lookup is not None:
            self._release(lookup)

    def answered(self, probe: PendingProbe) -> None:
        """All ranks have answered a probe."""
        for lookup in self._of(probe.users):
            if lookup.answered() and lookup.state is LookUpState.ASKING:
                self._want(lookup)

    def fetched(self, fetch: Fetch) -> None:
        """A fetch has ended."""
        for lookup in self._of(fetch.users):
            if lookup.state is LookUpState.FETCHING and lookup.has_arrived:
                lookup.end()

    def stop(self) -> None:
        """End all lookups; transfers in flight continue."""
        for lookup in self._of(self._book):
            self._release(lookup)
            if lookup.state is LookUpState.IDLE:
                lookup.end()

    def give_up(self) -> None:
        """After an internal error, drop all lookups."""
        for state in self._book:
            state.lookup = None
        self.wanting.clear()

    def _of(self, users: Iterable[RequestState]) -> list[LookUp]:
        return [lookup for user in users if (lookup := user.lookup) is not None]

    @property
    def num_active(self) -> int:
        """The number of requests that wait for tiers, or will when vLLM asks about them."""
        return sum(lookup.is_active for lookup in self._of(self._book))
