"""Spills in a shared pool, of slots that another engine overwrites meanwhile."""

from safe_offload.observe.counters import Count
from tests.scheduler.tiers.tier_rig import StandInTier, TierRig
from tests.simulator.node import Node


def test_what_another_has_overwritten_is_not_spilled_under_its_old_name(node: Node) -> None:
    shape = {"num_slots": 80, "num_blocks": 60, "extra": {"share": "node"}}
    one, other = (TierRig(node=node, tier=StandInTier(), **shape) for _ in range(2))
    other.start()
    one.tier.held.add("spill")

    def serve(rig: TierRig, name: str, num_tokens: int) -> None:
        rig.add(name, rig.prompt(num_tokens, int(name.split()[1])), max_tokens=1)
        rig.run_until_finished(name)

    for number in range(5):  # it has all lots, and most of its spills wait
        serve(one, f"one {number}", 61)
    slots = one.planner.hits.slots
    held = one.devices[0].memory.host
    stored = {key: list(held[slot]) for key, slot in slots.directory.tables[0].items()}
    slots.source.sync = lambda: None  # it looks late
    for number in range(8):
        other.add(f"other {number}", other.prompt(61, 100 + number), max_tokens=8)
        one.add(f"tiny {number}", one.prompt(2, 200 + number), max_tokens=8)
        for _ in range(8):  # it gives some lots to the other, which wants them meanwhile
            other.step()
            one.step()
        other.run_until_finished(f"other {number}")
        one.run_until_finished(f"tiny {number}")
    assert other.planner.gauges()["own_slots"] >= 10
    one.finish()
    assert one.counts[Count.DROPPED_SPILLS_EVICTED] > 0
    spilled = {place[3]: words for place, words in one.tier.objects.items() if place[3] in stored}
    assert len(spilled) > 10
    assert all(words == stored[key] for key, words in spilled.items())
    for rig in (one, other):
        rig.close()
