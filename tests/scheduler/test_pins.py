"""Pins, hints, and requests that leave nothing, on vLLM's real scheduler."""

from typing import Any

import pytest

from safe_offload.scheduler.features.pins.pins import PINS_MAX, PinnedPrompts
from tests.scheduler.features import feature_of
from tests.scheduler.rig import Rig

PIN = {"pin_s": 600}
"""A flood takes up to a minute of the simulator's clock."""
PINNING = {"pin_share": 0.3}
NUM_TOKENS = 33
HYBRID = ("window:10", "full")


def ask(rig: Rig, name: str, prompt: list[int], params: Any = None, max_tokens: int = 4) -> Any:
    """Send a request; returns how many tokens came from the host, and what vLLM hands on."""
    told: list[Any] = []
    finish = rig.connector.request_finished_all_groups

    def see(request: Any, blocks: Any) -> Any:
        answer = finish(request, blocks)
        told.append(answer[1])
        return answer

    rig.connector.request_finished_all_groups = see
    num_hit = rig.run_alone(name, prompt, max_tokens, kv_transfer_params=params)
    rig.connector.request_finished_all_groups = finish
    return num_hit, told[-1]


def flood(rig: Rig, name: str, num_hosts: int = 10) -> None:
    """Fill the host with other prompts, so many times."""
    left = num_hosts * rig.shape.num_slots
    number = 0
    while left > 0:
        rig.run_alone(f"{name}{number}", rig.prompt(65, f"{name} {number}"), max_tokens=1)
        left -= 16
        number += 1
    rig.forget_gpu_cache()


def make(make_rig: Any, **shape: Any) -> Rig:
    extra = {**PINNING, **shape.pop("extra", {})}
    return make_rig(**{"num_blocks": 60, "num_slots": 80, **shape}, extra=extra)


def gauge(rig: Rig, name: str) -> float:
    found: float = rig.planner.gauges()[name]
    return found


@pytest.mark.parametrize("policy", ["lru", "returns"])
@pytest.mark.parametrize("lazy", [False, True])
def test_what_is_pinned_outlasts_ten_hosts_of_others_and_is_gone_after_its_time(
    make_rig, policy, lazy
):
    rig = make(make_rig, extra={"eviction_policy": policy, "lazy_offload": lazy})
    prompt = rig.prompt(NUM_TOKENS, 1)
    assert ask(rig, "a", prompt, PIN) == (0, {"pinned_tokens": 36, "unpinned_tokens": 0})
    flood(rig, "f")
    assert (gauge(rig, "pins"), gauge(rig, "pinned_slots")) == (1, 9)
    assert gauge(rig, "leased_slots") == 0
    assert ask(rig, "b", prompt)[0] == 32
    rig.clock.advance(560)
    flood(rig, "g", 1)
    assert ask(rig, "c", prompt)[0] == 32, "the hit before has renewed it"
    assert rig.clock.now_s > 600
    rig.clock.advance(601)
    flood(rig, "h", 2)
    assert ask(rig, "d", prompt)[0] == 0
    assert gauge(rig, "pins") == gauge(rig, "pinned_slots") == 0
    rig.check_idle()


@pytest.mark.parametrize("groups", [("full",), HYBRID])
def test_of_what_has_no_room_the_head_is_pinned_and_the_client_is_told(make_rig, groups):
    rig = make(make_rig, groups=groups, extra={"pin_share": 0.1 * len(groups)})
    told = ask(rig, "a", rig.prompt(65, 1), PIN)[1]
    assert told["pinned_tokens"] + told["unpinned_tokens"] == 64
    assert 0 < told["pinned_tokens"] <= 32 or groups == HYBRID
    assert rig.counts["unpinned_tokens"] == told["unpinned_tokens"] > 0
    assert gauge(rig, "pinned_slots") <= feature_of(rig.planner, PinnedPrompts).pins.num_slots_max
    flood(rig, "f", 3)
    assert ask(rig, "b", rig.prompt(65, 1))[0] == told["pinned_tokens"]
    assert ask(rig, "c", rig.prompt(65, 2), PIN)[1]["pinned_tokens"] <= 4
    assert ask(rig, "d", rig.prompt(65, 2), {"pin_s": 0})[1]["unpinned_tokens"] == 0
    rig.clock.advance(700)
    rig.run_alone("e", rig.prompt(9, 3))
    rig.check_idle()


def test_without_a_budget_nothing_is_pinned_and_nothing_is_told(make_rig):
    rig = make_rig(num_blocks=60)
    assert ask(rig, "a", rig.prompt(33, 1), PIN) == (0, None)
    rig.check_idle()


def test_a_request_releases_the_pins_of_what_its_prompt_begins_with(make_rig):
    rig = make(make_rig)
    prompt = rig.prompt(17, 1)
    longer = [*prompt, *rig.prompt(16, 2)]
    ask(rig, "a", prompt, PIN)
    ask(rig, "b", longer, PIN)
    ask(rig, "c", rig.prompt(9, 3), PIN)
    assert gauge(rig, "pins") == 3
    ask(rig, "d", prompt, {"pin_s": 0})
    assert gauge(rig, "pins") == 2, "not what begins with it"
    ask(rig, "e", [*longer, 1], {"pin_s": 0})
    assert gauge(rig, "pins") == 1
    assert gauge(rig, "pinned_slots") == 3
    rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert gauge(rig, "pins") == gauge(rig, "pinned_slots") == 0
    rig.check_idle()


def test_what_fails_to_be_stored_is_not_pinned(make_rig):
    rig = make(make_rig)
    rig.start()
    rig.hold_copies(True)
    rig.fail_copies()
    rig.add("a", rig.prompt(33, 1), kv_transfer_params=PIN)
    rig.step_until(lambda: "a" in rig.finish_reasons)
    assert gauge(rig, "pinned_slots") == 9, "it is being stored"
    rig.hold_copies(False)
    rig.drain()
    rig.devices[0].faults.clear()
    rig.run_alone("b", rig.prompt(9, 2))
    assert gauge(rig, "pinned_slots") == 0
    rig.clock.advance(700)
    rig.run_alone("c", rig.prompt(9, 3))
    rig.check_idle()


def test_a_pin_lasts_while_a_request_uses_it_and_its_time_after_the_last(make_rig):
    rig = make(make_rig)
    prompt = rig.prompt(17, 1)
    ask(rig, "a", prompt, {"pin_s": 5})
    rig.add("b", prompt, 30)
    rig.add("c", prompt, 60)
    for _ in range(20):
        rig.step()
        rig.clock.advance(10)
    assert gauge(rig, "pins") == 1
    rig.step_until(lambda: "b" in rig.finish_reasons)
    rig.clock.advance(10)
    rig.step()
    assert gauge(rig, "pins") == 1, "the other one goes on"
    rig.drain()
    rig.run_alone("d", rig.prompt(9, 2))
    rig.clock.advance(5.1)
    rig.run_alone("e", rig.prompt(9, 2))
    assert gauge(rig, "pins") == 0
    rig.check_idle()


def test_the_number_of_pins_is_bounded(make_rig, monkeypatch):
    assert PINS_MAX == 4096
    monkeypatch.setattr("safe_offload.scheduler.features.pins.pins.PINS_MAX", 1)
    rig = make(make_rig)
    ask(rig, "a", rig.prompt(9, 1), PIN)
    assert ask(rig, "b", rig.prompt(9, 2), PIN)[1] == {"pinned_tokens": 0, "unpinned_tokens": 8}
    assert gauge(rig, "pins") == 1


@pytest.mark.parametrize("pin_s", [-1, 86401, float("nan"), True, "600", [600]])
def test_a_time_that_is_none_is_counted(make_rig, pin_s):
    rig = make(make_rig)
    assert ask(rig, "a", rig.prompt(9, 1), {"pin_s": pin_s})[1] is None
    assert rig.counts["bad_request_params"] == 1
    assert gauge(rig, "pins") == 0


@pytest.mark.parametrize("foreign", ["do_remote_decode", "do_remote_prefill"])
def test_where_another_connector_answers_the_client_is_not_told(make_rig, foreign):
    rig = make(make_rig)
    assert ask(rig, "a", rig.prompt(9, 1), {**PIN, foreign: True})[1] is None
    assert gauge(rig, "pins") == 1


# ---- hints -------------------------------------------------------------------------------------

HINTED = {"kv_hints": True, **PINNING}


def envelope(*kinds: str, version: str = "0.1", **payload: Any) -> dict[str, Any]:
    actions = [
        {"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": payload}
        for kind in kinds
    ]
    return {"protocol_version": version, "message_id": "m", "actions": actions}


def as_vllms(written: dict[str, Any]) -> Any:
    """The same as vLLM has it."""
    kv_hints = pytest.importorskip("vllm.v1.kv_hints", reason="vLLM 0.31 on has hints")
    actions = [kv_hints.KvHintAction(**action) for action in written["actions"]]
    return kv_hints.KvHintsEnvelope(**{**written, "actions": actions})


@pytest.mark.parametrize("key", ["kv_hints", "kv_hint"])
def test_retain_is_a_pin(make_rig, key):
    rig = make(make_rig, extra=HINTED)
    told = ask(rig, "a", rig.prompt(33, 1), {key: envelope("kv.retain", ttl_s=600)})[1]
    assert told is None
    assert gauge(rig, "pins") == 1
    assert rig.counts['hints{action="retain"}'] == 1


@pytest.mark.parametrize(
    ("pin_s", "ttls_s", "lasts_s"),
    [
        (600, [0.1], 600),
        (600, [0], 600),
        (60, [600], 600),
        (0, [600], 600),
        (None, [600, 0.1], 600),
        (None, [0, 600, 0], 600),
    ],
)
def test_of_what_a_client_and_hints_ask_for_the_longer_time_counts(
    make_rig, pin_s, ttls_s, lasts_s
):
    rig = make(make_rig, extra=HINTED)
    prompt = rig.prompt(33, 1)
    hints = envelope()
    for ttl_s in ttls_s:
        hints["actions"] += envelope("kv.retain", ttl_s=ttl_s)["actions"]
    ask(rig, "a", prompt, {"kv_hints": hints} | ({} if pin_s is None else {"pin_s": pin_s}))
    rig.run_alone("b", rig.prompt(9, 2))
    rig.clock.advance(lasts_s - 10)
    rig.run_alone("c", rig.prompt(9, 2))
    assert gauge(rig, "pins") == 1
    rig.clock.advance(11)
    rig.run_alone("d", rig.prompt(9, 2))
    assert gauge(rig, "pins") == 0
    assert rig.counts['hints{action="retain"}'] == len(ttls_s)
    rig.check_idle()


SECRET = "what the client asked in confidence"
OTHERS = [
    (envelope("kv.fetch", version=SECRET), "protocol_version is missing or unsupported"),
    ({"protocol_version": "0.1", "actions": SECRET}, "actions is of type str"),
    (envelope(SECRET, SECRET), "action_type is another."),
    (envelope("kv.retain", ttl_s=SECRET), "ttl_s of kv.retain is of type str, or out of range"),
    ({"protocol_version": "0.1", "actions": [{SECRET: SECRET}]}, "action_version is missing"),
]


@pytest.mark.parametrize(("hint", "problem"), OTHERS, ids=[problem for _, problem in OTHERS])
def test_a_line_says_what_is_wrong_with_a_hint_without_a_word_of_it(
    make_rig, hint, problem, logged
):
    """At the first, the tenth and the hundredth such request."""
    rig = make(make_rig, extra=HINTED)
    for number in range(10):
        ask(rig, f"{number}", rig.prompt(9, number), {"kv_hints": hint})
    lines = [line for record in logged if "Invalid hints in" in (line := record.getMessage())]
    assert [line.split()[3] for line in lines] == ["1", "10"]
    assert all(f"in the last one, {problem}" in line for line in lines)
    assert not [record for record in logged if SECRET in record.getMessage()]


def test_hints_in_the_field_of_vllm_are_read_too(make_rig):
    rig = make(make_rig, extra=HINTED)
    hints = as_vllms(envelope("kv.retain", "kv.share", ttl_s=60))
    rig.add("a", rig.prompt(9, 1), kv_hints=hints)
    rig.drain()
    assert rig.counts['hints{action="retain"}'] == rig.counts['hints{action="unknown"}'] == 1
    assert gauge(rig, "pins") == 1


def test_hints_are_not_read_unless_the_operator_allows_it(make_rig):
    rig = make(make_rig)
    ask(rig, "a", rig.prompt(9, 1), {"kv_hints": envelope("kv.retain", ttl_s=60)})
    assert gauge(rig, "pins") == 0
    assert not rig.counts['hints{action="retain"}']


# ---- requests that leave nothing ---------------------------------------------------------------

NOTHING = {"store": "nothing"}


def test_what_another_has_computed_too_is_that_of_the_other(make_rig):
    rig = make_rig(num_blocks=60, num_slots=400, extra={"lazy_offload": True})
    prompt = rig.prompt(33, 1)
    rig.run_alone("a", prompt)
    ask(rig, "b", prompt, NOTHING)
    for number in range(12):
        rig.run_alone(f"f{number}", rig.prompt(41, 10 + number), 1)
    rig.forget_gpu_cache()
    assert ask(rig, "c", prompt)[0] == 32
    assert ask(rig, "d", prompt, NOTHING) == (0, None), "the GPU has it"
    rig.forget_gpu_cache()
    assert ask(rig, "e", prompt, NOTHING)[0] == 32, "it may read what is there"


def test_of_requests_that_leave_nothing_no_hash_is_kept_for_long(make_rig, monkeypatch):
    monkeypatch.setattr("safe_offload.scheduler.stores.lazy.SWEEP_MIN", 8)
    rig = make_rig(num_blocks=30, extra={"lazy_offload": True})
    for number in range(30):
        ask(rig, f"s{number}", rig.prompt(41, number), NOTHING)
    assert len(rig.planner.policy.left_out_hashes) < 80
    assert rig.counts["stored_blocks"] == 0


@pytest.mark.parametrize("word", ["everything", 1, ["nothing"], {}])
def test_another_word_is_counted(make_rig, word):
    rig = make_rig(num_blocks=60)
    ask(rig, "a", rig.prompt(33, 1), {"store": word})
    assert rig.counts["bad_request_params"] == 1
    assert rig.counts["stored_blocks"] > 0


def test_hints_and_pins_change_nothing_for_what_leaves_nothing(make_rig):
    rig = make(make_rig, extra=HINTED)
    ask(rig, "a", rig.prompt(33, 1), {**NOTHING, "kv_hints": envelope("kv.retain", ttl_s=60)})
    assert ask(rig, "b", rig.prompt(33, 2), {**NOTHING, "pin_s": 60}) == (0, None)
    assert gauge(rig, "used_slots") == gauge(rig, "pins") == 0
