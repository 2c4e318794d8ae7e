"""What is filled in and refused around our settings, and that other connectors are left alone."""

from types import SimpleNamespace
from typing import Any

import pytest

from safe_offload.config.transfer_config import CONNECTOR_NAME, complete, settle
from safe_offload.errors import ConfigError

OURS: dict[str, Any] = {"kv_connector": CONNECTOR_NAME}
OTHER: dict[str, Any] = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def multi(*children: dict[str, Any], **outer: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
        **outer,
    }


def settled(**fields: Any) -> SimpleNamespace:
    """A configuration as vLLM has made it, after `settle`."""
    defaults = {"kv_role": None, "kv_load_failure_policy": "fail", "kv_connector_extra_config": {}}
    config = SimpleNamespace(**defaults | fields)
    settle(config)
    return config


# ---- the failure policy ------------------------------------------------------------------------


def test_a_failed_load_is_recomputed_if_the_user_says_nothing():
    assert complete(OURS)["kv_load_failure_policy"] == "recompute"


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_policy_that_the_user_wrote_is_kept(policy):
    written = {**OURS, "kv_load_failure_policy": policy}
    assert complete(written) == written
    assert complete(multi(OURS, **{"kv_load_failure_policy": policy})) == multi(
        OURS, kv_load_failure_policy=policy
    )


def test_under_multi_connector_the_policy_is_filled_in_if_all_children_are_ours():
    assert complete(multi(OURS))["kv_load_failure_policy"] == "recompute"
    assert "kv_load_failure_policy" not in complete(multi(OURS, OTHER))
    assert "kv_load_failure_policy" not in complete(multi(OTHER))
    assert "kv_load_failure_policy" not in complete(multi())


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_child_is_told_the_policy_that_counts_and_the_users_mapping_is_left_alone(policy):
    child = {**OURS, "kv_load_failure_policy": "recompute"}
    written = multi(child, OTHER, kv_load_failure_policy=policy)
    config = settled(**written)
    ours, other = config.kv_connector_extra_config["connectors"]
    ahead = {"kv_connector_extra_config": {"load_in_step": False}}
    assert ours == {**OURS, **ahead, "kv_load_failure_policy": policy}
    assert other == OTHER
    assert written == multi(child, OTHER, kv_load_failure_policy=policy)


@pytest.mark.parametrize(
    "extra", [{}, {"connectors": None}, {"connectors": "x"}, {"connectors": [1]}, None, 7]
)
def test_a_multi_connector_that_makes_no_sense_is_left_to_vllm(extra):
    written = {**multi(), "kv_connector_extra_config": extra}
    assert complete(written) == written
    assert settled(**written).kv_connector_extra_config == extra


@pytest.mark.parametrize("written", [{}, OTHER, {"kv_connector": None}, {"kv_connector": 3}])
def test_other_configurations_are_left_alone(written):
    assert complete(written) == written


# ---- the role ----------------------------------------------------------------------------------


def test_the_role_is_filled_in():
    assert settled(**OURS).kv_role == "kv_both"
    assert settled(**OURS, kv_role="kv_consumer").kv_role == "kv_consumer"


@pytest.mark.parametrize(
    "written",
    [
        {**OURS, "kv_role": "kv_producer"},
        multi(OURS, OTHER, kv_role="kv_producer"),
        multi({**OURS, "kv_role": "kv_producer"}),
    ],
)
def test_a_role_that_does_not_load_is_refused(written):
    with pytest.raises(ConfigError, match='Fix: write "kv_role": "kv_both"'):
        settled(**written)


def test_the_role_of_others_is_none_of_our_business():
    assert settled(**multi(OTHER, kv_role="kv_producer")).kv_role == "kv_producer"


# ---- mistakes around the settings --------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["SafeCpuOffloadConnector", "safecpuoffloadconnector", "SafeCPUOffloadingConnector"]
)
def test_a_name_that_is_nearly_ours_is_refused_with_the_right_one(name):
    for written in ({"kv_connector": name}, {"kv_connector": name, "cpu_bytes_to_use": "1GiB"}):
        with pytest.raises(ConfigError, match='Fix: write "kv_connector": "SafeCPUOffloadC'):
            complete(written)
    with pytest.raises(ConfigError, match='Fix: write "kv_connector": "SafeCPUOffloadC'):
        settled(**multi({"kv_connector": name}))


@pytest.mark.parametrize(
    "written",
    [
        {"kv_connector": "SimpleCPUOffloadConnector"},
        {"kv_connector": "OffloadingConnector"},
        {"kv_connector": "SafeCpuOffloadConnector", "kv_connector_module_path": "theirs"},
    ],
)
def test_the_names_of_others_are_no_misspellings(written):
    assert complete(written) == written


def test_a_setting_beside_the_name_is_refused_with_the_whole_line():
    written = {**OURS, "cpu_bytes_to_use": "64GiB", "kv_connector_extra_config": {"verify": "load"}}
    fix = (
        'Fix: write {"kv_connector": "SafeCPUOffloadConnector", "kv_connector_extra_config": '
        '{"verify": "load", "cpu_bytes_to_use": "64GiB"}}.'
    )
    with pytest.raises(ConfigError) as caught:
        complete(written)
    assert '"cpu_bytes_to_use" = "64GiB" is beside' in str(caught.value)
    assert fix in str(caught.value)
    with pytest.raises(ConfigError, match="is beside"):
        settled(**multi(written))


def test_of_two_of_our_connectors_both_have_keys_or_none():
    """One loads from its tiers what the other stores, and seals."""

    def ours(**tier):
        return {**OURS, "kv_connector_extra_config": {"tiers": [{"url": "file:///kv", **tier}]}}

    key = {"hmac_key_file": "/run/secrets/kv/hmac.key"}
    settled(**multi(ours(), ours(), OURS))
    settled(**multi(ours(**key), ours(**key), OURS))
    for children in ([ours(), ours(**key)], [OURS, ours(**key), OTHER, ours()]):
        with pytest.raises(ConfigError, match='Fix: write "hmac_key_file" into each tier of each'):
            settled(**multi(*children))


def test_a_wrong_setting_of_a_child_is_refused():
    child = {**OURS, "kv_connector_extra_config": {"cpu_bytes_to_uze": "1GiB"}}
    with pytest.raises(ConfigError, match='Fix: write "cpu_bytes_to_use"'):
        settled(**multi(OTHER, child))
