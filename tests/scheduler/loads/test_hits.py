"""What is found on the host is what vLLM's rules find, and a hit is kept only while it is so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import SpeculativeConfig
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

from safe_offload.compat import cache_hits
from safe_offload.observe.counters import Counters
from safe_offload.scheduler.cache.directory import Directory
from safe_offload.scheduler.cache.slots import SlotPool
from safe_offload.scheduler.eviction.policy import Lru
from safe_offload.scheduler.loads.hits import NO_SLOT, RULES, HostHits, needed
from tests.simulator.groups import BLOCK_TOKENS, Group
from tests.simulator.vllm_setup import EngineShape, make_config, make_kv_cache_config

NUM_BLOCKS = 12
"""Of the longest prompt."""


class Rules(NamedTuple):
    """Hits, and vLLM's coordinator that finds them."""

    hits: HostHits
    coordinator: Any


def rules_of(*groups: str, slots: SlotPool, **shape: Any) -> Rules:
    """The rules of a model with these groups, over some slots."""
    made: list[Any] = []
    make_coordinator = cache_hits.make_coordinator

    def make(*args: Any) -> Any:
        made.append(make_coordinator(*args))
        return made[0]

    engine = EngineShape(groups=groups, **shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_hits, "make_coordinator", make)
        hits = HostHits(make_config(engine), make_kv_cache_config(engine), slots)
    return Rules(hits, made[0])


def slots_of(num_groups: int, num_slots: int = 40) -> SlotPool:
    slots = SlotPool(num_slots, Directory(num_slots, num_groups), Lru(num_slots), Counters())
    slots.open(num_slots)
    return slots


def hits_of(*groups: str, num_slots: int = 40, **shape: Any) -> HostHits:
    return rules_of(*groups, slots=slots_of(len(groups), num_slots), **shape).hits


def hashes_of(num_blocks: int = NUM_BLOCKS) -> list[bytes]:
    return [BlockHash(bytes([n + 1]) * 8) for n in range(num_blocks)]


def fill(hits: HostHits, group_idx: int, hashes: Sequence[bytes]) -> list[int]:
    """Keep what is not kept, and lease nothing; returns the slots it took."""
    slots = store(hits, group_idx, hashes)
    hits.directory.publish(slots)
    hits.slots.release(slots)
    return slots


def store(hits: HostHits, group_idx: int, hashes: Sequence[bytes]) -> list[int]:
    slots = hits.slots.grant(len(hashes))
    table = hits.directory.tables[group_idx]  # what was there may just have been evicted
    wanted = [block_hash for block_hash in hashes if block_hash not in table][: len(slots)]
    hits.slots.release(slots[len(wanted) :])
    hits.directory.begin_store(slots[: len(wanted)], group_idx, wanted, {})
    return slots[: len(wanted)]


def found(hit: Any) -> Any:
    """What matters of a hit."""
    if hit is None:
        return None
    slots = [list(group) for group in hit.slots_by_group]
    return slots, hit.num_tokens, hit.num_computed_tokens


# ---- the rule of full attention ----------------------------------------------------------------

PLAIN = hits_of("full")
with pytest.MonkeyPatch.context() as _patch:
    _patch.setattr(cache_hits, "has_plain_hits", lambda *_: False)
    BY_COORDINATOR = rules_of("full", slots=PLAIN.slots).hits


@given(
    kept=st.sets(st.integers(0, NUM_BLOCKS - 1)),
    storing=st.sets(st.integers(0, NUM_BLOCKS - 1), max_size=2),
    num_hashes=st.integers(0, NUM_BLOCKS),
    num_computed_tokens=st.integers(0, (NUM_BLOCKS + 1) * BLOCK_TOKENS),
    is_aligned=st.booleans(),
    end_max=st.integers(0, (NUM_BLOCKS + 2) * BLOCK_TOKENS),
)
@settings(max_examples=200, deadline=None)
def test_the_plain_rule_finds_what_the_coordinator_finds(
    kept, storing, num_hashes, num_computed_tokens, is_aligned, end_max
):
    hits, hashes = PLAIN, hashes_of()
    hits.slots.forget_all()
    fill(hits, 0, [hashes[n] for n in sorted(kept)])
    unfinished = store(hits, 0, [hashes[n] for n in sorted(storing - kept)])
    if is_aligned:
        num_computed_tokens -= num_computed_tokens % BLOCK_TOKENS
    assert PLAIN.geometry.is_plain
    assert not BY_COORDINATOR.geometry.is_plain
    assert PLAIN.geometry.hash_block_size == BLOCK_TOKENS
    ours = found(PLAIN.find_hit(hashes[:num_hashes], num_computed_tokens, end_max))
    is_more = end_max - num_computed_tokens >= BLOCK_TOKENS
    wanted = hashes[:num_hashes], num_computed_tokens, end_max + is_more
    theirs = found(BY_COORDINATOR.find_hit(*wanted))
    if theirs is not None:
        slots, num_tokens, _ = theirs
        theirs = slots, min(num_tokens, end_max - num_computed_tokens), num_computed_tokens
    assert ours == theirs
    hits.slots.forget(unfinished)
    hits.slots.release(unfinished)


@pytest.mark.parametrize("groups", [("window:8",), ("mla",), ("full", "window:8"), ("full@8",)])
def test_only_full_attention_or_mla_alone_has_the_plain_rule(groups):
    plain = {("mla",): 4, ("full@8",): 8}.get(groups)
    hits = hits_of(*groups)
    assert (hits.geometry.hash_block_size if hits.geometry.is_plain else None) == plain


@pytest.mark.parametrize("drops_block", [False, True])
def test_with_a_drafter_all_tokens_of_the_last_block_are_computed(monkeypatch, drops_block):
    monkeypatch.setattr(SpeculativeConfig, "use_eagle", lambda self: True)
    monkeypatch.setattr(SpeculativeConfig, "use_eagle_block_drop", lambda self: drops_block)
    hits, hashes = hits_of("full", num_draft_tokens=2), hashes_of()
    slots = fill(hits, 0, hashes[:4])
    num_blocks = 3 - drops_block
    assert found(hits.find_hit(hashes, 0, 15)) == ([slots[:num_blocks]], 4 * num_blocks, 0)


# ---- full attention and windows in a hybrid model ----------------------------------------------

HYBRIDS = {
    groups: rules_of(*groups, slots=slots_of(len(groups), 3 * NUM_BLOCKS + 4))
    for groups in [
        ("full", "window:8"),
        ("window:10", "full"),
        ("full", "window:16@8"),
        ("full@8", "window:8"),
        ("full", "full@8", "window:8"),
        ("full", "full", "window:8"),
        ("window:8", "full", "window:16"),
        ("full", "chunk:16"),
        ("full", "mamba"),
        ("full", "mamba@8"),
        ("mla", "full"),
    ]
}


@contextmanager
def vllms_own_rules(coordinator: Any) -> Iterator[None]:
    """Put vLLM's classes in the place of ours."""
    groups = coordinator.attention_groups
    before, theirs = list(groups), {ours: vllms for vllms, ours in RULES.items()}
    groups[:] = [g._replace(manager_cls=theirs.get(g.manager_cls, g.manager_cls)) for g in before]
    try:
        yield
    finally:
        groups[:] = before


@contextmanager
def attention_groups(coordinator: Any, **changes: Any) -> Iterator[None]:
    """Change what vLLM's coordinator knows of the groups of full attention."""
    groups = coordinator.attention_groups
    before = list(groups)
    groups[:] = [
        group._replace(**changes) if issubclass(group.manager_cls, FullAttentionManager) else group
        for group in before
    ]
    try:
        yield
    finally:
        groups[:] = before


@pytest.mark.parametrize("drops_eagle_block", [False, True])
@pytest.mark.parametrize("groups", HYBRIDS)
def test_our_rules_in_a_hybrid_model_find_what_vllm_finds(groups, drops_eagle_block):
    (hits, coordinator), hashes = HYBRIDS[groups], hashes_of()
    lengths = set()

    @given(
        missing=st.tuples(*[st.sets(st.integers(0, NUM_BLOCKS - 1), max_size=4) for _ in groups]),
        storing=st.tuples(st.integers(0, len(groups) - 1), st.integers(0, NUM_BLOCKS - 1)),
        num_hashes=st.integers(1, NUM_BLOCKS),
        num_computed=st.integers(0, 3),
        end_max=st.integers(1, (NUM_BLOCKS + 2) * BLOCK_TOKENS),
    )
    @settings(max_examples=150, deadline=None)
    def check(
        missing: tuple[set[int], ...],
        storing: tuple[int, int],
        num_hashes: int,
        num_computed: int,
        end_max: int,
    ) -> None:
        hits.slots.forget_all()
        for group_idx, its_missing in enumerate(missing):
            kept = [hashes[n] for n in range(NUM_BLOCKS) if n not in its_missing]
            fill(hits, group_idx, kept)
        unfinished = store(hits, storing[0], hashes[storing[1] : storing[1] + 1])
        wanted = hashes[:num_hashes], num_computed * hits.geometry.alignment_tokens, end_max
        with attention_groups(coordinator, use_eagle=drops_eagle_block):
            ours = found(hits.find_hit(*wanted))
            with vllms_own_rules(coordinator):
                assert ours == found(hits.find_hit(*wanted))
        lengths.add(ours and ours[1])
        hits.slots.forget(unfinished)
        hits.slots.release(unfinished)

    check()
    assert len(lengths) > 1, "or it has shown nothing"


@pytest.mark.parametrize("vllms", RULES)
@given(
    missing=st.tuples(*[st.sets(st.integers(0, NUM_BLOCKS - 1), max_size=3) for _ in range(2)]),
    group_ids=st.sampled_from([[0], [1], [0, 1]]),
    end_max=st.integers(0, (NUM_BLOCKS + 2) * BLOCK_TOKENS),
    alignment_tokens=st.sampled_from([4, 6, 8, 12]),
    drops_eagle_block=st.booleans(),
    window=st.integers(1, 20),
    num_context_ranks=st.integers(1, 2),
)
@settings(max_examples=150, deadline=None)
def test_a_rule_in_runs_answers_as_vllms_does(
    vllms,
    missing,
    group_ids,
    end_max,
    alignment_tokens,
    drops_eagle_block,
    window,
    num_context_ranks,
):
    (hits, coordinator), hashes = HYBRIDS["full", "full", "window:8"], hashes_of()
    hits.slots.forget_all()
    for group_idx, its_missing in enumerate(missing):
        fill(hits, group_idx, [hashes[n] for n in range(NUM_BLOCKS) if n not in its_missing])
    is_window = vllms is SlidingWindowManager  # which reads hashes as far as it is told to
    ours, theirs = (
        rule.find_longest_cache_hit(
            block_hashes=hashes,
            max_length=min(end_max, NUM_BLOCKS * BLOCK_TOKENS) if is_window else end_max,
            kv_cache_group_ids=group_ids,
            block_pool=coordinator.block_pool,
            kv_cache_spec=Group("window" if is_window else "full", window).spec(),
            drop_eagle_block=drops_eagle_block,
            alignment_tokens=alignment_tokens,
            dcp_world_size=1 if is_window else num_context_ranks,
        )
        for rule in (RULES[vllms], vllms)
    )
    assert ours == theirs


def test_only_vllms_own_class_of_full_attention_is_replaced():
    _, coordinator = rules_of("full", "window:8", slots=slots_of(2))
    groups = coordinator.attention_groups

    class Later(FullAttentionManager):
        @classmethod
        def find_longest_cache_hit(cls, *, as_of_a_later_vllm: bool) -> Any:
            raise NotImplementedError

    with attention_groups(coordinator, manager_cls=FullAttentionManager):
        before = list(groups)
        cache_hits.replace_rules(coordinator, {FullAttentionManager: Later})
        assert groups == before, "it takes other arguments than vLLM passes"
    with attention_groups(coordinator, manager_cls=Later):
        before = list(groups)
        cache_hits.replace_rules(coordinator, RULES)
        assert groups == before, "the group has rules of its own"
    cache_hits.replace_rules(object(), RULES)


# ---- a hit that is asked for again -------------------------------------------------------------


STEPS = st.one_of(
    st.tuples(
        st.sampled_from(["fill", "store"]),
        st.integers(0, 1),
        st.integers(0, NUM_BLOCKS - 1),
        st.integers(1, NUM_BLOCKS),
    ),
    st.tuples(st.just("publish")),
    st.tuples(st.just("evict"), st.integers(1, 6)),
    st.tuples(st.just("forget"), st.lists(st.integers(0, 23), max_size=2, unique=True)),
    st.tuples(st.just("forget_all")),
    st.tuples(st.just("others"), st.integers(1, 6)),
    st.tuples(st.just("grow"), st.integers(1, 2 * BLOCK_TOKENS)),
    st.tuples(st.just("compute"), st.integers(0, 2)),
)


class Asker:
    """A waiting request that asks for its hit after each thing that happens to the host."""

    def __init__(self, hits: HostHits, num_tokens: int) -> None:
        self.hits = hits
        self.hashes = hashes_of()
        self.storing: list[list[int]] = []
        self.num_others = 0
        self.num_tokens = num_tokens
        self.num_computed_tokens = 0
        self.hit: Any = None
        self.num_kept = 0
        self.num_grown = 0

    @property
    def wanted(self) -> tuple[list[bytes], int, int]:
        known = self.hashes[: self.num_tokens // BLOCK_TOKENS]
        return known, self.num_computed_tokens, self.num_tokens - 1

    def happen(self, what: str, *how: Any) -> None:
        slots, directory = self.hits.slots, self.hits.directory
        if what in ("fill", "store"):
            group_idx, first, count = how
            group_idx = min(group_idx, len(directory.tables) - 1)
            wanted = self.hashes[first : first + count]
            if what == "fill":
                fill(self.hits, group_idx, wanted)
            else:
                self.storing.append(store(self.hits, group_idx, wanted))
        elif what == "publish" and self.storing:
            stored = self.storing.pop(0)
            directory.publish(stored)
            slots.release(stored)
        elif what == "evict":
            slots.release(slots.grant(how[0]))
        elif what == "forget":
            slots.forget(how[0])
        elif what == "forget_all":
            self.hits.slots.forget_all()
        elif what == "others":
            self.num_others += how[0]
            others = range(self.num_others - how[0], self.num_others)
            fill(self.hits, 0, [BlockHash(b"other" + bytes([n])) for n in others])
        elif what == "grow":
            self.num_tokens += how[0]
        elif what == "compute":
            self.num_computed_tokens = how[0] * self.hits.geometry.alignment_tokens

    def ask(self) -> None:
        """As `Loads.match` does; whenever the hit is kept a search would find the same."""
        hits = self.hits
        if self.hit is not None and hits.is_still_longest(self.hit, *self.wanted):
            assert found(hits.find_hit(*self.wanted)) == found(self.hit)
            self.num_kept += 1
            return
        grown = self.hit and hits.grown(self.hit, *self.wanted)
        if grown:
            before = set(self.hit.slots())
            self.hit, new_slots = grown
            assert found(hits.find_hit(*self.wanted)) == found(self.hit)
            assert sorted(self.hit.slots()) == sorted([*new_slots, *before])
            hits.slots.lease(new_slots)
            self.num_grown += 1
            return
        if self.hit is not None:
            hits.slots.release(self.hit.slots())
        self.hit = hits.find_hit(*self.wanted)
        if self.hit is not None:
            hits.slots.lease(self.hit.slots())


@pytest.mark.parametrize(
    "groups", [("full",), ("window:8", "full"), ("full@8", "window:8"), ("full", "chunk:16")]
)
def test_a_hit_is_kept_only_while_a_search_would_find_the_same(groups):
    num_kept = 0

    @given(num_tokens=st.integers(1, 40), steps=st.lists(STEPS, min_size=4, max_size=30))
    # The same examples in each run: of random ones, some keep hardly any hit.
    @settings(max_examples=200, deadline=None, derandomize=True)
    def check(num_tokens: int, steps: list[tuple[Any, ...]]) -> None:
        nonlocal num_kept
        asker = Asker(hits_of(*groups, num_slots=24), num_tokens)
        fill(asker.hits, 0, asker.hashes[:6])
        fill(asker.hits, len(groups) - 1, asker.hashes[:6])
        asker.ask()
        for step in steps:
            asker.happen(*step)
            asker.ask()
        num_kept += asker.num_kept

    check()
    assert num_kept > 100, "or it has shown nothing"


@pytest.mark.parametrize(
    ("groups", "grows"),
    [
        (("full",), True),
        (("window:8", "full"), True),
        (("full", "window:4", "window:12"), True),
        (("full@8", "window:8"), False),  # there is no group that tells where a hit ends
        (("full", "chunk:16"), False),  # seldom: a chunk has no null blocks at its head
    ],
)
def test_a_hit_grows_at_its_head_as_a_search_would_find_it(groups, grows):
    """The GPU loses blocks of a request that waits: a hit begins earlier, and ends where it did."""
    num_grown = 0

    @given(
        num_tokens=st.integers(20, 40),
        missing=st.integers(0, 9),
        steps=st.lists(STEPS, max_size=3),
        num_computed=st.lists(st.integers(0, 6), min_size=2, max_size=5),
    )
    @settings(max_examples=150, deadline=None)
    def check(
        num_tokens: int, missing: int, steps: list[tuple[Any, ...]], num_computed: list[int]
    ) -> None:
        nonlocal num_grown
        asker = Asker(hits_of(*groups, num_slots=40), num_tokens)
        hashes = asker.hashes[:missing] + asker.hashes[missing + 1 :]
        for group_idx in range(len(groups)):
            fill(asker.hits, group_idx, hashes)
        for blocks in sorted(num_computed, reverse=True):
            asker.happen("compute", blocks)
            asker.ask()
            if steps:
                asker.happen(*steps.pop())
        num_grown += asker.num_grown

    check()
    assert num_grown > 0 or not grows


def test_a_hit_that_was_forgotten_is_not_kept_although_it_is_leased():
    hits, hashes = hits_of("full"), hashes_of()
    fill(hits, 0, hashes[:5])
    hit = hits.find_hit(hashes, 0, 40)
    assert hit is not None
    hits.slots.lease(hit.slots())
    hits.slots.forget(hit.slots()[2:3])
    assert not hits.is_still_longest(hit, hashes, 0, 40)
    assert hits.find_hit(hashes, 0, 40) != hit


# ---- how the KV cache is cut -------------------------------------------------------------------


@given(markers=st.lists(st.sampled_from([NO_SLOT, 3, 4]), max_size=8))
def test_what_is_needed_has_a_marker_that_is_not_null(markers):
    items = list(range(len(markers)))
    expected = [item for item in items if markers[item] != NO_SLOT]
    assert needed(items, markers, NO_SLOT) == expected
