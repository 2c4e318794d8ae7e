"""All of vLLM's configuration changes the namespace, but what is listed with its reason."""

import copy
import dataclasses
import enum
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from examples.tiny_models import write_tiny_model
from safe_offload.compat import engine_config
from safe_offload.tiers.namespace.engine_facts import (
    IGNORED,
    IGNORED_VARIABLES,
    SHOWN_CHARS_MAX,
    EngineFacts,
    engine_facts,
    package_facts,
)
from tests.simulator.vllm_setup import EngineShape, make_config

KNOWN_FIELDS = Path(__file__).with_name("known_fields.txt")
IGNORED_FIELDS = {
    (owner, name)
    for owners in IGNORED.values()
    for owner in owners
    for name in owners[owner].split()
}


def parts_of(cls: type) -> Iterator[type]:
    """The dataclasses that a configuration is made of, the class itself first."""
    seen, left = set(), [cls]
    while left:
        current = left.pop(0)
        if current in seen:
            continue
        seen.add(current)
        yield current
        hints = list(typing.get_type_hints(current).values())
        while hints:
            hint = hints.pop()
            hints += typing.get_args(hint)
            if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                left.append(hint)


PARTS = list(parts_of(VllmConfig))
FIELDS = [(cls, field.name) for cls in PARTS for field in dataclasses.fields(cls)]


@pytest.fixture(scope="module")
def config():
    """A configuration with every part that it can have."""
    config = make_config(EngineShape())
    fill(config)
    return config


def fill(value: Any) -> None:
    """Put a part, as bare as it can be, wherever there may be one and is none."""
    for name, hint in typing.get_type_hints(type(value)).items():
        classes = [c for c in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(c)]
        found = getattr(value, name, None)
        if found is None and classes:
            found = bare(classes[0])
            object.__setattr__(value, name, found)
        is_ignored = (type(value).__name__, name) in IGNORED_FIELDS
        if is_part(found) and not is_ignored:
            fill(found)


def is_part(value: Any) -> bool:
    """Whether it is gone into; a model's own configuration is not vLLM's."""
    return dataclasses.is_dataclass(value) and not hasattr(value, "to_json_string")


def bare(cls: Any) -> Any:
    """An instance with the defaults of its fields; what has none is None."""
    made = object.__new__(cls)
    for field in dataclasses.fields(cls):
        value = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        object.__setattr__(made, field.name, getattr(value, "default", value))
    return made


def places(value: Any) -> Iterator[Any]:
    """Every part of a configuration that counts."""
    yield value
    for field in dataclasses.fields(value):
        found = getattr(value, field.name, None)
        if is_part(found) and (type(value).__name__, field.name) not in IGNORED_FIELDS:
            yield from places(found)


def other_than(value: Any) -> Any:
    """Another value, of the same kind if it has one."""
    if isinstance(value, enum.Enum):
        others = [member for member in type(value) if member is not value]
        return others[0] if others else "another"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, torch.dtype):
        return torch.float16 if value is not torch.float16 else torch.float32
    if isinstance(value, dict):
        return {**value, "another": 1}
    if isinstance(value, set | frozenset):
        return {*value, "another"}
    if isinstance(value, list | tuple):
        return [*value, "another"]
    return "another"


def facts_of(config: Any) -> EngineFacts:
    return engine_facts(config, engine_config.variable_names())


def test_every_field_counts_or_is_in_the_list_with_its_reason(config):
    """One at a time, from both sides: what is in the list changes nothing.

    Each part is looked at alone, and once as a part of the whole.
    """
    whole = facts_of(config).facts
    checked, wrong = set(), []
    for part in places(config):
        owner, before, is_seen = type(part).__name__, facts_of(part).facts, False
        for field in dataclasses.fields(part):
            value = getattr(part, field.name, None)
            object.__setattr__(part, field.name, other_than(value))
            is_other = facts_of(part).facts != before
            is_seen = is_seen or (is_other and facts_of(config).facts != whole)
            object.__setattr__(part, field.name, value)
            checked.add((owner, field.name))
            if is_other == ((owner, field.name) in IGNORED_FIELDS):
                wrong.append(f"{owner}.{field.name}: {value!r}, counts: {is_other}")
        assert is_seen or not before.keys() - {"configuration"}, owner
    assert not wrong
    assert facts_of(config).facts == whole
    ignored_parts = {"KVTransferConfig", "KVEventsConfig", "ObservabilityConfig", "ProfilerConfig"}
    unseen = {(cls.__name__, name) for cls, name in FIELDS} - checked - IGNORED_FIELDS
    assert {owner for owner, _ in unseen} <= ignored_parts | {
        *("LoggingConfig", "StructuredOutputsConfig", "ReasoningConfig", "WatermarkConfig"),
        *("AuxOutputConfig", "WeightTransferConfig", "PoolerConfig", "FaultToleranceConfig"),
        "WatchdogConfig",
        *("QuantKey", "ScalarType", "ScaleDesc"),  # of a mapping in quantization_config
    }


def test_each_field_of_this_vllm_was_looked_at():
    """Who brings a new vLLM looks whether its new fields matter, and adds them to the list.

    A field that is not known counts all the same.
    """
    assert set(engine_config.variable_names()) == set(envs.environment_variables)
    known = set(KNOWN_FIELDS.read_text().split())
    found = {f"{cls.__name__}.{name}" for cls, name in FIELDS}
    assert found <= known, sorted(found - known)
    assert {f"{owner}.{name}" for owner, name in IGNORED_FIELDS} <= known
    assert set(envs.environment_variables) <= known, sorted({*envs.environment_variables} - known)


def test_every_variable_counts_or_is_in_the_list(monkeypatch):
    for name in envs.environment_variables:
        monkeypatch.delenv(name, raising=False)
    before = fact_of(1, envs.environment_variables).facts
    ignored = re.compile("|".join(IGNORED_VARIABLES.values()))
    for name in envs.environment_variables:
        monkeypatch.setenv(name, "2")
        more = fact_of(1, envs.environment_variables).facts.items() - before.items()
        assert more == (set() if ignored.fullmatch(name) else {(f"env.{name}", "2")})
        monkeypatch.delenv(name)
    counted = {name for name in envs.environment_variables if not ignored.fullmatch(name)}
    assert {"VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_KV_CACHE_LAYOUT", "VLLM_MLA_DISABLE"} <= counted
    assert not counted & {"VLLM_PORT", "VLLM_LOGGING_LEVEL", "VLLM_API_KEY", "VLLM_CACHE_ROOT"}


def test_variables_that_vllm_does_not_know_do_not_count(config, monkeypatch):
    """Kubernetes puts VLLM_SERVICE_HOST and the like into every pod beside a service `vllm`."""
    before = facts_of(config)
    monkeypatch.setenv("VLLM_SERVICE_HOST", "10.0.0.7")
    assert facts_of(config) == before


# ---- values of all kinds ------------------------------------------------------------------------


class Mode(enum.IntEnum):
    FIRST = 1


class Plain:
    def __init__(self, **fields: Any) -> None:
        self.__dict__ = fields


@dataclasses.dataclass
class Config:
    field: Any


def fact_of(value: Any, variables: Iterable[str] = ()) -> EngineFacts:
    return engine_facts(Config(value), variables)


def test_values_are_told_apart_and_written_the_same_everywhere():
    values = [
        *(None, True, 1, 1.5, "1", "True", "", b"1", [1], [[1]], ["1"], {"a": 1}, {"a": [1]}),
        *({"b": 1}, {1, 2}, Mode.FIRST, torch.float16, torch.device("cpu"), Plain(a=1)),
        *(Plain(a=2), Plain(a=Plain(a=1)), int, dataclasses.replace, Path("/a"), "x" * 1000),
        "x" * 1001,
    ]
    written = [fact_of(value).facts["field"] for value in values]
    assert len(set(written)) == len(written)
    assert all(len(each) <= SHOWN_CHARS_MAX for each in written)
    assert not any(" at 0x" in each for each in written)
    assert [fact_of(value).facts["field"] for value in copy.deepcopy(values)] == written
    assert not any(fact_of(value).unclear for value in values)
    assert fact_of({"a": 1, "b": 2}) == fact_of({"b": 2, "a": 1})
    assert fact_of({"ab", "cd", "ef"}) == fact_of({"ef", "cd", "ab"})


def test_what_cannot_be_compared_is_said():
    for value in (lambda config: config, object(), [object()], {"a": iter(())}, Plain(a=object())):
        assert fact_of(value).unclear == ("field",)


def test_a_file_that_a_field_names_is_to_be_read(tmp_path):
    file = tmp_path / "scales.json"
    file.write_text("{}")
    assert fact_of(str(file)).files == {"field": str(file)}
    assert fact_of({"a": [str(file)]}).files == {"field": str(file)}
    assert not fact_of(str(tmp_path)).files
    assert not fact_of("scales.json").files


def test_no_secret_is_among_the_facts(config, monkeypatch):
    secret = "swordfish7"
    before = facts_of(config)
    config = copy.deepcopy(config)
    config.model_config.hf_token = secret
    keys = ("password", "hf_token", "aws_secret_access_key", "s3_access_key_id", "api_key")
    config.load_config.model_loader_extra_config = {
        "deep": dict.fromkeys(keys, secret),
        **dict.fromkeys(keys, secret),
    }
    config.watermark_config.key = 7
    for name in ("VLLM_API_KEY", "S3_SECRET_ACCESS_KEY", "S3_ACCESS_KEY_ID"):
        monkeypatch.setenv(name, secret)
    after = facts_of(config)
    assert secret not in str(after)
    monkeypatch.undo()
    config.load_config.model_loader_extra_config = {"deep": {}}
    assert facts_of(config) == after != before
    config.load_config.model_loader_extra_config = {"deep": {}, "uri": f"s3://{secret}"}
    assert facts_of(config) != after
    assert secret not in str(facts_of(config))


def test_the_place_of_a_model_on_this_machine_does_not_count(config, tmp_path):
    """What is in its files does. On the hub the name counts."""
    config = copy.deepcopy(config)
    found = []
    for parent in (tmp_path / "blue", tmp_path / "green"):
        (parent / "model").mkdir(parents=True)
        config.model_config.model = config.model_config.tokenizer = f"{parent}/model/"
        found.append(facts_of(config))
    assert found[0] == found[1]
    config.model_config.model = "some/model"
    assert facts_of(config).facts["model_config.model"] == '"some/model"'


def test_packages_that_compute_count(config, monkeypatch):
    before = facts_of(config).facts
    assert before["package.torch"]
    assert "package.safe-offload" not in before
    package_facts.cache_clear()
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"9 {name}")
    changed = facts_of(config).facts.items() - before.items()
    package_facts.cache_clear()
    assert {"package.vllm", "package.torch", "package.transformers"} < {name for name, _ in changed}


# ---- what operators change from one start to the next --------------------------------------------


OTHER_LIMITS = {
    **{"max_num_seqs": 7, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.3},
    **{"num_gpu_blocks_override": 77, "served_model_name": ["other"], "disable_log_stats": True},
    **{"max_logprobs": 3, "scheduling_policy": "priority", "async_scheduling": False},
    **{"prefix_cache_retention_interval": 0, "enable_prefix_caching": True},
    **{"generation_config": "vllm", "shutdown_timeout": 30},
}


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_restart_with_other_limits_stays_warm(enforce_eager, small_model):
    """From the arguments on, as vLLM derives much of its configuration from others of it."""
    found = []
    for more in ({}, OTHER_LIMITS):
        args = EngineArgs(
            model=str(small_model),
            max_model_len=1024,
            enforce_eager=enforce_eager,
            skip_tokenizer_init=True,
            **{k: v for k, v in more.items() if k in EngineArgs.__dataclass_fields__},
        )
        found.append(facts_of(args.create_engine_config()))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    return write_tiny_model("llama", tmp_path_factory.mktemp("model"))
