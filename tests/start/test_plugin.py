"""What vLLM gets from our entry points, seen from real processes that import real vLLM.

Each process finds the entry points of pyproject.toml through a distribution that the test writes,
so that the result does not depend on how, or whether, this package is installed.
"""

import json
import logging
import re
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

from safe_offload.start import plugin
from tests.fresh_process import run_script

PROJECT = Path(__file__).parents[2]
GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")

# A connector module of the test's own: what is tested is how vLLM gets to it.
PREAMBLE = """
import dataclasses, io, json, sys, types

module = types.ModuleType("safe_offload.connector")

class SafeCPUOffloadConnector:
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        print("child", json.dumps(extra_config), file=sys.stderr)
        return True

module.SafeCPUOffloadConnector = SafeCPUOffloadConnector
sys.modules["safe_offload.connector"] = module
facts = {}

def outcome(make):
    try:
        config = make()
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
    return [config.kv_connector, config.kv_role]

def our_finders():
    return sum(type(f).__module__ == "safe_offload.compat.wrapping" for f in sys.meta_path)

"""


def entry_points() -> dict[str, dict[str, str]]:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    return {group: project["entry-points"].get(group, {}) for group in GROUPS}


def facts_of(script: str, folder: Path, *groups: str, **environment: str) -> dict[str, Any]:
    """Run a script in a process in which vLLM finds our entry points of these groups."""
    metadata = folder / "under_test-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: under-test\nVersion: 1.0\n")
    declared = entry_points()
    lines = [
        line
        for group in groups
        for line in (f"[{group}]", *(f"{name} = {at}" for name, at in declared[group].items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    tell = "\nopen('facts.json', 'w').write(json.dumps(facts))"
    log = run_script(PREAMBLE + script + tell, folder, environment)
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts | {"log": log}


GENERAL = """
from pydantic import TypeAdapter
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import AsyncEngineArgs
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # before vLLM 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from safe_offload.start.plugin import register

NAME = "SafeCPUOffloadConnector"
# As `vllm serve` does: making the parser loads the plugins, parsing makes the config.
parser = make_arg_parser(FlexibleArgumentParser())

def parse(*arguments):
    namespace = parser.parse_args(["--model", "m", *arguments])
    return AsyncEngineArgs.from_cli_args(namespace).kv_transfer_config

post_init = KVTransferConfig.__post_init__
for _ in range(3):
    register()
facts["post_init_is_kept"] = KVTransferConfig.__post_init__ is post_init
facts["class"] = KVConnectorFactory.get_connector_class_by_name(NAME).__name__

facts["constructor"] = outcome(lambda: KVTransferConfig(kv_connector=NAME))
facts["role_kept"] = outcome(lambda: KVTransferConfig(kv_connector=NAME, kv_role="kv_consumer"))
facts["role_refused"] = outcome(lambda: KVTransferConfig(kv_connector=NAME, kv_role="kv_producer"))
facts["role_wrong"] = outcome(lambda: KVTransferConfig(kv_connector=NAME, kv_role="both"))
facts["validated"] = outcome(
    lambda: TypeAdapter(KVTransferConfig).validate_python({"kv_connector": NAME})
)
facts["line"] = outcome(lambda: parse("--kv-transfer-config", json.dumps({"kv_connector": NAME})))
facts["dotted"] = outcome(lambda: parse("--kv-transfer-config.kv_connector", NAME))
facts["sizes"] = parse(
    "--kv-transfer-config.kv_connector", NAME,
    "--kv-transfer-config.kv_connector_extra_config.cpu_bytes_to_use", "64GiB",
    "--kv-transfer-config.kv_connector_extra_config.lazy_offload", "true",
    "--kv-transfer-config.kv_connector_extra_config.num_cpu_blocks", "128",
).kv_connector_extra_config

def policies(**written):
    line = json.dumps(written)
    dotted = [part for key, value in written.items() if isinstance(value, str)
              for part in (f"--kv-transfer-config.{key}", value)]
    configs = {
        "constructor": KVTransferConfig(**written),
        "copy": dataclasses.replace(KVTransferConfig(**written)),
        "by place": KVTransferConfig(
            written["kv_connector"], **{k: v for k, v in written.items() if k != "kv_connector"}),
        "validated": TypeAdapter(KVTransferConfig).validate_python(written),
        "line": parse("--kv-transfer-config", line),
    }
    if len(dotted) == 2 * len(written):
        configs["dotted"] = parse(*dotted)
    assert len({id(config) for config in configs.values()}) == len(configs)
    return sorted({config.kv_load_failure_policy for config in configs.values()})

facts["policy"] = policies(kv_connector=NAME)
facts["policy_fail"] = policies(kv_connector=NAME, kv_load_failure_policy="fail")
facts["policy_of_others"] = policies(kv_connector="ExampleConnector", kv_role="kv_both")
facts["policy_of_multi"] = policies(
    kv_connector="MultiConnector", kv_role="kv_both",
    kv_connector_extra_config={"connectors": [{"kv_connector": NAME}]})

def parse_error(extra=None, **outer):
    if extra is not None:
        outer["kv_connector_extra_config"] = extra
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        parse("--kv-transfer-config", json.dumps({"kv_connector": NAME, **outer}))
    except SystemExit:
        return sys.stderr.getvalue()
    finally:
        sys.stderr = stderr

facts["wrong_key"] = parse_error({"cpu_bytes_to_uze": "1GiB"})
facts["misplaced"] = parse_error(cpu_bytes_to_use="1GiB")
facts["misspelt"] = parse_error(kv_connector="SafeCpuOffloadConnector")
facts["unknown"] = parse_error(nonsense="1GiB")
args = parser.parse_args(["--model", "m", "--kv-offloading-size", "2",
                          "--kv-offloading-backend", "lmcache",
                          "--kv-transfer-config.kv_connector", NAME])
facts["replaced"] = outcome(AsyncEngineArgs.from_cli_args(args).create_engine_config)
facts["many_ranks"] = parse_error({"cpu_bytes_to_use": "100TiB"})
facts["other_keys"] = outcome(lambda: KVTransferConfig(
    kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config={"any": 1}))

facts["other"] = outcome(lambda: KVTransferConfig(kv_connector="SimpleCPUOffloadConnector"))
facts["none"] = outcome(KVTransferConfig)
children = [{"kv_connector": NAME, "kv_connector_extra_config": {"cpu_bytes_to_use": "1GiB"}}]
facts["multi"] = outcome(lambda: KVTransferConfig(
    kv_connector="MultiConnector", kv_connector_extra_config={"connectors": children}))
facts["child"] = MultiConnector.requires_piecewise_for_cudagraph({"connectors": children})
class Engine:
    kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both",
        kv_connector_extra_config={"connectors": children})
made = MultiConnector._get_connector_classes_and_configs(Engine())
facts["built"] = [[cls.__name__, c.kv_transfer_config.kv_role] for cls, c in made]
"""


@pytest.fixture(scope="module")
def general(tmp_path_factory):
    """Facts from a process that loads the general plugins as `vllm serve` does."""
    return facts_of(GENERAL, tmp_path_factory.mktemp("general"), "vllm.general_plugins")


OURS = ["SafeCPUOffloadConnector", "kv_both"]
COMES_TO = {
    "our name alone is a complete config": dict.fromkeys(
        ("constructor", "validated", "line", "dotted"), OURS
    ),
    "registering again changes nothing": {
        "post_init_is_kept": True,
        "class": "SafeCPUOffloadConnector",
    },
    "a role that the user wrote is kept": {"role_kept": ["SafeCPUOffloadConnector", "kv_consumer"]},
    "settings written as separate flags arrive with their types": {
        "sizes": {"cpu_bytes_to_use": "64GiB", "lazy_offload": True, "num_cpu_blocks": 128}
    },
    "a failed load is recomputed unless the user wrote something else": {
        **{"policy": ["recompute"], "policy_of_multi": ["recompute"]},
        **{"policy_fail": ["fail"], "policy_of_others": ["fail"]},
    },
    "what many ranks may share is no mistake": {"many_ranks": None},
    "settings of other connectors are left alone": {"other_keys": ["ExampleConnector", "kv_both"]},
    "without a connector there is no role": {"none": [None, None]},
    "a child of MultiConnector needs no role": {"child": True, "built": [OURS]},
}
"""What configurations come to, by the names of facts."""

NEEDS_ROLE = "Please specify kv_role"
SAYS = {
    "role_refused": 'Fix: write "kv_role": "kv_both"',
    "role_wrong": "kv_role",
    "wrong_key": (
        'argument --kv-transfer-config: .*Fix: write "cpu_bytes_to_use"[^\n]*remove it. '
        r"\[type=ConfigError\]\s*\Z"
    ),
    "misplaced": '"kv_connector_extra_config": {"cpu_bytes_to_use": "1GiB"}',
    "misspelt": 'Fix: write "kv_connector": "SafeCPUOffloadConnector"',
    "unknown": "Unexpected keyword argument",
    "replaced": "^ConfigError: --kv-offloading-size 2 would replace",
    "other": NEEDS_ROLE,
    "multi": NEEDS_ROLE,
    "log": 'child {"cpu_bytes_to_use": "1GiB"}',
}
"""What a wrong configuration is answered with, or what is logged."""


@pytest.mark.parametrize("facts", COMES_TO.values(), ids=COMES_TO)
def test_what_a_configuration_comes_to(general, facts):
    assert {name: general[name] for name in facts} == facts


@pytest.mark.parametrize(("fact", "words"), SAYS.items(), ids=SAYS)
def test_what_a_wrong_configuration_is_answered_with(general, fact, words):
    assert re.search(words, general[fact], re.DOTALL), general[fact]


def test_registering_is_not_worth_a_line(general):
    assert "safe_offload could not" not in general["log"]
    assert "Another package" not in general["log"]


LLM_FROM_DICT = """
import vllm.entrypoints.llm as entrypoint
from vllm import LLM
from vllm.config import KVTransferConfig

facts["constructor"] = outcome(lambda: KVTransferConfig(kv_connector="SafeCPUOffloadConnector"))

class Reached(Exception):
    pass

def engine_args(**kwargs):
    config = kwargs["kv_transfer_config"]
    facts["llm"] = [config.kv_connector, config.kv_role]
    facts["policy"] = config.kv_load_failure_policy
    raise Reached

# What comes after is the engine: the config has been made by then.
entrypoint.EngineArgs = engine_args
try:
    LLM(model="m", kv_transfer_config={"kv_connector": "SafeCPUOffloadConnector"})
except Reached:
    pass
"""


def test_a_script_may_name_us_before_vllm_loads_its_general_plugins(tmp_path):
    facts = facts_of(LLM_FROM_DICT, tmp_path, *GROUPS)
    assert facts["llm"] == facts["constructor"] == OURS
    assert facts["policy"] == "recompute"


PLATFORM_FIRST = """
from vllm.platforms import current_platform
facts["platform"] = type(current_platform).__name__
facts["config_is_loaded"] = "vllm.config" in sys.modules
from vllm.config import KVTransferConfig
facts["early"] = outcome(lambda: KVTransferConfig(kv_connector="SafeCPUOffloadConnector"))
facts["finders"] = our_finders()
facts["loader"] = type(sys.modules["vllm.config.kv_transfer"].__loader__).__name__
from vllm.plugins import load_general_plugins
load_general_plugins()
facts["late"] = outcome(lambda: KVTransferConfig(kv_connector="SafeCPUOffloadConnector"))
"""


def test_the_early_hook_neither_picks_a_platform_nor_imports_vllm_config_by_itself(tmp_path):
    facts = facts_of(PLATFORM_FIRST, tmp_path / "with", *GROUPS)
    without = facts_of(PLATFORM_FIRST, tmp_path / "without", VLLM_PLUGINS="")
    assert facts["platform"] == without["platform"]
    assert facts["config_is_loaded"] is without["config_is_loaded"] is False
    assert facts["early"] == facts["late"] == OURS
    assert "Please specify kv_role" in without["late"]
    assert facts["finders"] == 0
    assert facts["loader"] == without["loader"]


OUR_CONNECTOR_FIRST = """
del sys.modules["safe_offload.connector"]
import safe_offload.connector
from vllm.config import KVTransferConfig
facts["early"] = outcome(lambda: KVTransferConfig(kv_connector="SafeCPUOffloadConnector"))
"""


def test_a_script_may_import_our_connector_before_all_else(tmp_path):
    facts = facts_of(OUR_CONNECTOR_FIRST, tmp_path, *GROUPS)
    assert facts["early"] == OURS


ERROR_IN_OUR_HOOK = """
import importlib.util
from safe_offload.start import plugin

def raise_error(*args):
    if args not in ((), ("vllm.config.kv_transfer",)):
        return original(*args)
    called.append(args)
    raise RuntimeError("injected")

called = []
original = BROKEN
BROKEN = raise_error
plugin.register_early()
plugin.register_early()
facts["finders"] = our_finders()
import vllm.config.kv_transfer
BROKEN = original
facts["called"] = len(called)
facts["left"] = our_finders()
plugin.register()
facts["late"] = outcome(
    lambda: vllm.config.kv_transfer.KVTransferConfig(kv_connector="SafeCPUOffloadConnector")
)
"""


@pytest.mark.parametrize(
    "broken",
    [
        "plugin._wrap_kv_transfer_config",
        pytest.param("importlib.util.find_spec", marks=pytest.mark.nightly),
    ],
)
def test_an_error_in_the_early_hook_does_not_reach_the_import_of_vllm(tmp_path, broken):
    facts = facts_of(ERROR_IN_OUR_HOOK.replace("BROKEN", broken), tmp_path)
    assert facts["called"] >= 1
    assert facts["finders"] == 1
    assert facts["left"] == 0
    assert facts["late"] == OURS
    assert "injected" not in facts["log"]


TAKEN = """
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from safe_offload.start.plugin import register
KVConnectorFactory.register_connector("SafeCPUOffloadConnector", "json", "JSONDecoder")
register()
register()
facts["class"] = KVConnectorFactory.get_connector_class_by_name("SafeCPUOffloadConnector").__name__
"""


def test_a_name_that_somebody_else_registered_is_left_to_them_and_said_once(tmp_path):
    facts = facts_of(TAKEN, tmp_path)
    assert facts["class"] == "JSONDecoder"
    assert facts["log"].count("Another package has registered") == 1
    assert "kv_connector_module_path" in facts["log"]


WITHOUT_SCHEMA = """
from pydantic_core import core_schema
def refuse(function, *args, **kwargs):
    if function.__module__ != "safe_offload.start.plugin":
        return original(function, *args, **kwargs)
    called.append(function)
    raise TypeError("injected")
called = []
original = core_schema.no_info_before_validator_function
core_schema.no_info_before_validator_function = refuse
from vllm.config import KVTransferConfig
from safe_offload.start.plugin import register
register()
facts["called"] = len(called)
facts["ours"] = outcome(lambda: KVTransferConfig(kv_connector="SafeCPUOffloadConnector"))
facts["policy"] = KVTransferConfig(kv_connector="SafeCPUOffloadConnector").kv_load_failure_policy
"""


def test_with_a_pydantic_that_cannot_do_it_the_rest_works_and_vllms_policy_stays(tmp_path):
    facts = facts_of(WITHOUT_SCHEMA, tmp_path)
    assert facts["called"] == 1
    assert facts["ours"] == OURS
    assert facts["policy"] == "fail"
    assert "injected" not in facts["log"]


MISTAKE_OF_OURS = """
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from safe_offload.start import plugin

def fail(*args):
    raise TypeError("injected")

EngineArgs.create_engine_config = lambda self: "an engine"
plugin.complete = plugin.settle = plugin.prepare_start = plugin.take_offloading_size = fail
plugin.register()
facts["other"] = outcome(
    lambda: KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"))
facts["engine"] = EngineArgs.create_engine_config(None)
"""


def test_a_mistake_of_ours_in_a_check_does_not_reach_vllm(tmp_path):
    facts = facts_of(MISTAKE_OF_OURS, tmp_path)
    assert facts["other"] == ["ExampleConnector", "kv_both"]
    assert facts["engine"] == "an engine"
    assert facts["log"].count("safe_offload could not check the configuration") == 4


def test_a_vllm_that_does_not_fit_is_logged_with_the_fix_and_not_raised(monkeypatch, caplog):
    monkeypatch.setattr(plugin, "_is_registered", False)
    # None in sys.modules makes an import fail, whether or not vLLM is loaded in this process.
    for name in ("distributed.kv_transfer.kv_connector.factory", "config.kv_transfer", "version"):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", None)
    monkeypatch.setitem(sys.modules, "vllm.config", types.ModuleType("vllm.config"))
    # vLLM's logger keeps its records from the root logger, where caplog listens, unless it listens
    # at both: then it has each record twice.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    plugin.register()
    plugin.register_early()
    # One record, which reaches caplog once or twice: vLLM may have changed its loggers before.
    records = {id(record): record for record in caplog.records}
    assert [record.levelname for record in records.values()] == ["ERROR"]
    assert "could not register SafeCPUOffloadConnector" in caplog.text
    assert "Fix: install a version" in caplog.text
