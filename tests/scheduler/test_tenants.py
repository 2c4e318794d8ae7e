"""Tenants on vLLM's scheduler: what each has and hits, as it is counted; and that it may change."""

import json
import logging
from typing import Any

import pytest

from safe_offload.errors import ConfigError
from safe_offload.observe.counters import Count, of_tenant
from safe_offload.scheduler.features.pins.pins import PinnedPrompts
from safe_offload.scheduler.features.tenants import TenantShares
from tests.scheduler.features import feature_of
from tests.scheduler.rig import MakeRig, Rig, times_of_waiting
from tests.scheduler.tiers.tier_rig import WAIT_S, TierRig
from tests.simulator.groups import BLOCK_TOKENS

SALT = "5ecret-9f1c07aa"


def text_of(**shares: str) -> bytes:
    guaranteed = {
        label: {"share": share, "prefix": f"{SALT}-{label}"} for label, share in shares.items()
    }
    return json.dumps({"default": "10%", "guaranteed": guaranteed}).encode()


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Any) -> Rig:
    path = tmp_path / "tenants.json"
    path.write_bytes(text_of(chat="50%", batch="20%"))
    rig = make_rig(num_slots=40, num_blocks=40, extra={"tenants": str(path)})
    rig.start()
    return rig


def ask(
    rig: Rig, name: str, label: str, num_tokens: int = 21, seed: int = 1, **params: Any
) -> None:
    how: dict[str, Any] = {"cache_salt": f"{SALT}-{label}", "kv_transfer_params": params}
    rig.add(name, rig.prompt(num_tokens, seed), 1, **how)
    rig.drain()
    rig.forget_gpu_cache()


def slots_of(rig: Rig) -> dict[str, int]:
    found = zip(
        rig.planner.hits.slots.quotas.tenants.labels,
        rig.planner.hits.slots.quotas.policy.held,
        strict=True,
    )
    return dict(found)


def test_hits_misses_evictions_and_bytes_are_counted_by_tenant(rig):
    ask(rig, "one", "chat")
    ask(rig, "again", "chat")
    ask(rig, "other", "batch")
    for index in range(9):
        ask(rig, f"flood {index}", "nobody", seed=10 + index)
    counts = rig.counts
    assert counts[of_tenant("hit_tokens", "chat")] == 20
    assert counts[of_tenant("missed_tokens", "chat")] == 22
    assert counts[of_tenant("missed_tokens", "batch")] == 21
    assert counts[of_tenant("missed_tokens", "rest")] == 9 * 21 + 2, "with that of the start"
    assert counts[of_tenant("evicted_blocks", "rest")] == 9 * 5 - 30
    assert counts[of_tenant("evicted_blocks", "chat")] == 0
    gauges, slot_bytes = rig.planner.gauges(), rig.planner.options.slot_bytes
    assert gauges[of_tenant("used_bytes", "chat")] == 5 * slot_bytes
    assert gauges[of_tenant("used_bytes", "rest")] == 30 * slot_bytes
    assert gauges[of_tenant("guaranteed_bytes", "chat")] == 20 * slot_bytes


def test_what_two_tenants_compute_in_one_step_is_each_ones_own(rig):
    for label in ("chat", "batch", "nobody"):
        rig.add(label, rig.prompt(2 * BLOCK_TOKENS, 3), 1, cache_salt=f"{SALT}-{label}")
    rig.drain()
    assert slots_of(rig) == {"rest": 2, "chat": 2, "batch": 2}


def test_other_tenants_are_in_force_from_the_next_step_on_and_bad_ones_are_counted(
    rig, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [caplog.handler])
    ask(rig, "one", "chat")
    for text in (text_of(chat="90%", batch="20%"), SALT.encode(), None):
        feature_of(rig.planner, TenantShares).file.use(text)
        ask(rig, f"beside {text!r}", "batch")
    assert slots_of(rig) == {"rest": 0, "chat": 5, "batch": 5}
    assert rig.counts["bad_tenant_files"] == 3
    feature_of(rig.planner, TenantShares).file.use(text_of(chat="10%", late="50%"))
    ask(rig, "late", "late")
    assert slots_of(rig) == {"rest": 5, "chat": 5, "late": 5}
    gauges, slot_bytes = rig.planner.gauges(), rig.planner.options.slot_bytes
    assert gauges[of_tenant("guaranteed_bytes", "batch")] == 0
    assert gauges[of_tenant("guaranteed_bytes", "late")] == 20 * slot_bytes
    told = caplog.text + repr((rig.planner, rig.planner.stores, rig.planner.hits.slots, rig.counts))
    assert SALT not in told
    assert "the shares add up to 120%" in told


def test_a_bad_file_ends_the_start_with_its_fix(make_rig: MakeRig, tmp_path: Any):
    with pytest.raises(ConfigError, match="it cannot be read"):
        make_rig(extra={"tenants": str(tmp_path / "missing")})


def test_a_spill_says_whose_each_block_is(tmp_path: Any):
    path = tmp_path / "tenants.json"
    path.write_bytes(text_of(chat="50%", batch="20%"))
    rig = TierRig(num_slots=40, num_blocks=40, extra={"tenants": str(path)})
    rig.start()
    del rig.spills[:]
    for label in ("chat", "batch", "nobody"):
        rig.add(label, rig.prompt(2 * BLOCK_TOKENS, 3), 1, cache_salt=f"{SALT}-{label}")
    rig.drain()
    tenants = rig.planner.hits.slots.quotas.tenants
    marks = [mark for spill in rig.spills for mark in spill.marks]
    assert sorted(marks) == sorted(2 * tenants.marks)
    owners = rig.planner.hits.slots.quotas.policy.owners
    for spill in rig.spills:
        assert list(spill.marks) == [tenants.marks[owners[slot]] for slot in spill.slot_ids]
    assert len(set(tenants.marks)) == 3
    rig.close()


def test_whom_no_slot_can_become_free_for_is_not_kept_waiting_for_tiers(tmp_path: Any):
    """Others are guaranteed all there is, and have no more; once they have less, it is fetched."""
    path = tmp_path / "tenants.json"
    shares = {"chat": {"share": "100%", "prefix": f"{SALT}-chat"}}
    path.write_text(json.dumps({"guaranteed": shares}))
    asks = {"max_tokens": 1, "cache_salt": f"{SALT}-nobody"}
    first = TierRig(num_slots=40, num_blocks=40)
    first.start()
    first.add("warm", first.prompt(33, 1), **asks)
    first.drain()
    rig = TierRig(num_slots=40, num_blocks=40, extra={"tenants": str(path)}, tier=first.tier)
    rig.start()
    for number in range(5):
        ask(rig, f"chat {number}", "chat", 33, number)
    assert slots_of(rig) == {"rest": 0, "chat": 40}
    began_s, times = rig.clock.now_s, times_of_waiting(rig, "a")
    rig.add("a", rig.prompt(33, 1), **asks)
    rig.drain()
    assert rig.clock.now_s - began_s < WAIT_S / 2, times
    assert rig.counts["fetch_blocks_no_slot"] == 8
    feature_of(rig.planner, TenantShares).file.use(b"{}")
    rig.forget_gpu_cache()
    rig.add("b", rig.prompt(33, 1), **asks)
    rig.drain()
    assert rig.counts["fetched_blocks"] == 8
    for each in (first, rig):
        each.close()


def test_pins_keep_no_tenant_from_what_it_is_guaranteed(make_rig, tmp_path):
    """Nor do those that were there when more was guaranteed to it."""
    path = tmp_path / "tenants.json"
    path.write_bytes(text_of(batch="40%"))  # 16 slots, 4 for all others, 20 for nobody
    rig = make_rig(num_slots=40, num_blocks=40, extra={"tenants": str(path), "pin_share": 0.9})
    rig.start()
    for index in range(9):
        ask(rig, f"pin {index}", "nobody", seed=10 + index, pin_s=600)
    assert feature_of(rig.planner, PinnedPrompts).pins.num_slots == 24
    assert rig.counts[Count.UNPINNED_TOKENS] == (9 * 5 - 24) * BLOCK_TOKENS
    for index in range(9):
        ask(rig, f"of batch {index}", "batch", seed=30 + index)
    assert slots_of(rig)["batch"] == 16
    feature_of(rig.planner, TenantShares).file.use(text_of(batch="70%"))  # 28
    for index in range(9):
        ask(rig, f"again of batch {index}", "batch", seed=50 + index)
    assert feature_of(rig.planner, PinnedPrompts).pins.num_slots <= 12
    assert slots_of(rig)["batch"] >= 28
    for index in range(9):
        ask(rig, f"pin of batch {index}", "batch", seed=70 + index, pin_s=600)
    assert feature_of(rig.planner, PinnedPrompts).pins.num_slots <= 36
    rig.planner.reset_cache()
    ask(rig, "after a reset", "nobody", seed=90, pin_s=600)
    assert feature_of(rig.planner, PinnedPrompts).pins.num_slots == 5
