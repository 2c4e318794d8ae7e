"""What a client writes into `kv_transfer_params` of a request, on vLLM's real scheduler."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_offload.scheduler.limits import MAX_TOKENS, NO_LIMITS, read_limits
from tests.scheduler.rig import Rig

HYBRID = ("window:10", "full")
MAMBA = ("mamba", "full")


def ask(rig: Rig, request_id: str, prompt: list[int], params: Any) -> int:
    return rig.run_alone(request_id, prompt, kv_transfer_params=params)


# ---- max_load_tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"), [(0, 0), (3, 0), (4, 4), (7, 4), (39, 36), (40, 40), (99, 40)]
)
@pytest.mark.parametrize("limits", ["loads", "stores"])
def test_no_more_is_loaded_or_stored_than_the_client_allows(make_rig, limits, limit, expected):
    rig = make_rig(num_blocks=60)
    ask(rig, "a", rig.prompt(41, 1), {"max_offload_tokens": limit} if limits == "stores" else {})
    rig.forget_gpu_cache()
    params = {"max_load_tokens": limit} if limits == "loads" else {}
    assert ask(rig, "a2", rig.prompt(41, 1), params) == expected
    rig.check_idle()


@pytest.mark.parametrize("groups", [HYBRID, MAMBA, ("chunk:16", "full")])
@pytest.mark.parametrize("limit", [0, 5, 17, 33])
def test_a_limited_hit_of_a_hybrid_model_ends_where_its_groups_allow(make_rig, groups, limit):
    """Every word that attention reads is checked, so a hit that ends elsewhere is found out."""
    rig = make_rig(num_blocks=90, groups=groups, num_slots=200)
    rig.run_alone("a", rig.prompt(41, 1))
    rig.forget_gpu_cache()
    assert 0 <= ask(rig, "a2", rig.prompt(41, 1), {"max_load_tokens": limit}) <= limit
    rig.forget_gpu_cache()
    assert rig.run_alone("a3", rig.prompt(41, 1)) > 33, "the others are not limited"
    rig.check_idle()


def test_what_the_gpu_has_does_not_count_against_the_limit(make_rig):
    rig = make_rig(num_blocks=60)
    prompt = rig.warm()
    rig.run_alone("head", prompt[:17])  # 16 tokens of it are on the GPU now
    assert ask(rig, "a2", prompt, {"max_load_tokens": 8}) == 8
    rig.check_idle()


# ---- max_offload_tokens ------------------------------------------------------------------------


def test_a_preempted_request_that_allows_nothing_is_not_rescued(make_rig):
    rig = make_rig(num_blocks=60, num_slots=100)
    rig.start()
    params = {"max_offload_tokens": 0}
    rig.add("a", rig.prompt(41, 1), max_tokens=30, kv_transfer_params=params)
    for _ in range(3):
        rig.step()
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.drain()
    rig.check_tokens("a", 30)
    assert rig.counts["stored_blocks"] == rig.counts["rescued_blocks"] == 0
    rig.check_idle()


# ---- junk --------------------------------------------------------------------------------------

SECRET = "what the client asked in confidence"
JUNK = [
    {"max_load_tokens": SECRET},
    {"max_load_tokens": -1},
    {"max_offload_tokens": True},
    {"max_offload_tokens": 1.5},
    {"max_offload_tokens": [SECRET, {SECRET: SECRET}]},
    {"max_offload_tokens": {"max_offload_tokens": 0}},
    {"max_load_tokens": 2**63},
    {"max_load_tokens": float("nan"), "max_offload_tokens": b"0"},
    SECRET,
    [SECRET],
    17,
]


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk)[:40])
def test_a_request_with_junk_is_served_like_one_without(make_rig, junk, package_log):
    rig = make_rig(num_blocks=60)
    ask(rig, "a", rig.prompt(41, 1), junk)
    rig.forget_gpu_cache()
    assert ask(rig, "a2", rig.prompt(41, 1), junk) == 40
    assert rig.counts["bad_request_params"] == 2
    lines = [record.getMessage() for record in package_log]
    assert len([line for line in lines if "kv_transfer_params" in line]) == 1, "not at the second"
    assert not [line for line in lines if SECRET in line]
    rig.check_idle()


@pytest.mark.parametrize("params", [{}, {"do_remote_prefill": False, "x": SECRET}, None])
def test_what_is_meant_for_others_is_left_alone(make_rig, params):
    rig = make_rig(num_blocks=60)
    ask(rig, "a", rig.prompt(41, 1), params)
    rig.forget_gpu_cache()
    assert ask(rig, "a2", rig.prompt(41, 1), params) == 40
    assert rig.counts["bad_request_params"] == 0


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    anything
    | st.dictionaries(st.sampled_from(["max_offload_tokens", "max_load_tokens", "x"]), anything)
)
def test_whatever_is_written_is_a_limit_or_a_problem(params):
    limits, problems = read_limits(params)
    for limit in (limits.store_tokens, limits.load_tokens):
        assert limit is None or (type(limit) is int and 0 <= limit <= MAX_TOKENS)
    if problems:
        assert all("\n" not in problem and len(problem) < 100 for problem in problems)
    elif isinstance(params, dict):
        assert limits.load_tokens == params.get("max_load_tokens")
        assert limits.store_tokens == params.get("max_offload_tokens")
    else:
        assert params is None
        assert limits is NO_LIMITS
