"""Names of outside interfaces in the docs and examples, against the vLLM that is installed.

Endpoints and their parameters, flags, environment variables, metrics, keys of --kv-transfer-config,
arguments of Python calls, source files. A wrong one does harm in silence: vLLM answers 200 to a
parameter that it does not know.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safe_offload
from safe_offload.commands.cache.place import OPTIONS
from safe_offload.config.options import VALID_KEYS
from tests.fresh_process import run_script

ROOT = Path(safe_offload.__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("README.md", "docs/**/*.md", "examples/**/*.*")
    for path in ROOT.glob(pattern)
    if path.suffix in (".md", ".py", ".sh", ".yaml")
)

OTHER_FLAGS = {
    "--ulimit": "docker",
    "--shm-size": "docker",
    "--strict": "mypy",
    "--no-counts": "tests.digests",
    "--config": "prometheus",
    "--storage": "prometheus",
    "--web": "prometheus",
    "--log": "prometheus",
    "--homepath": "grafana",
    "--rm": "docker",
    "--network": "docker",
    "--build": "docker compose",
    "--wait": "docker compose",
    "--spider": "wget",
    "--router-mode": "dynamo.frontend",
    **dict.fromkeys(
        (
            *("--aclfile", "--appendonly", "--bind", "--dir", "--io-threads", "--maxmemory"),
            *("--maxmemory-policy", "--port", "--protected-mode", "--save"),
            *("--tls-auth-clients", "--tls-cert-file", "--tls-key-file", "--tls-port"),
            "--tls-ca-cert-file",
        ),
        "valkey-server",
    ),
    **dict.fromkeys(("--user", "--tls", "--cacert"), "valkey-cli"),
    **dict.fromkeys(
        (
            *("--url", "--endpoint-type", "--streaming", "--custom-dataset-type", "--input-file"),
            *("--use-think-time-only", "--concurrency", "--request-count", "--random-seed"),
            "--extra-inputs",
        ),
        "aiperf",
    ),
    **dict.fromkeys(
        (
            *("--rpc_address", "--rpc_port", "--metrics_port", "--default_kv_lease_ttl"),
            "--eviction_high_watermark_ratio",
        ),
        "mooncake_master",
    ),
}
OUR_COMMANDS = ("benchmarks", "gpu", "simulator")
"""Folders of tests that have commands."""
OTHER_VARIABLES = {"VLLM_ARGS": "examples/long_context_back_to_back.sh"}
OTHER_ENDPOINTS = {
    "/register": "dynamo.indexer",
    "/query": "dynamo.indexer",
    "/api/health": "grafana",
}
OTHER_FOLDERS = ("dev", "proc", "mnt", "path", "tmp", "usr", "bin", "sys")
REQUEST_KEYS = ("kv_transfer_params",)
"""vLLM's name in a request for what `Request.kv_transfer_params` is inside."""

Names = dict[str, Any]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    script = Path(__file__).with_name("vllm_names.py").read_text()
    log = run_script(script, tmp_path_factory.mktemp("names"), {})
    found: Names = json.loads(log.splitlines()[-1])
    found["flags"] = {*found["flags"], *our_flags(), *OTHER_FLAGS}
    return found


def our_flags() -> set[str]:
    """Flags of `safe-offload`, the examples, the simulator, the benchmarks and the campaign."""
    folders = [Path(safe_offload.__file__).parent, ROOT / "examples"]
    folders += [ROOT / "tests" / name for name in OUR_COMMANDS]
    options = {f"--{setting.replace('_', '-')}" for setting in OPTIONS}
    return options | {
        node.value
        for folder in folders
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and re.fullmatch("--[a-z][a-z-]+", str(node.value))
    }


# ---- what a page names -------------------------------------------------------------------------


def code_of(page: str) -> list[str]:
    """What stands between backticks, or all of it if the page is no prose."""
    blocks = re.findall(r"^ *```.*?\n(.*?)^ *```", page, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^ *```.*?^ *```", "", page, flags=re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^ {4}(\S.*)$", prose, re.MULTILINE)
    return [*blocks, *re.findall(r"`([^`]+)`", prose)]


def problems_in(page: str, names: Names, *, is_prose: bool = True) -> list[str]:
    """Every name of a page that the installed vLLM does not know."""
    codes = code_of(page) if is_prose else [page]
    found = [problem for code in codes for problem in _problems_in_code(code, names)]
    if is_prose:
        for paragraph in re.split(r"\n\s*\n|\n(?=- |\d+\. |\|)", page):
            found += _problems_in_paragraph(paragraph, names)
        dev_only = set(names["routes"]) - set(names["routes_for_clients"])
        if dev_only & set(_paths(codes)) and "VLLM_SERVER_DEV_MODE=1" not in page:
            found.append("an endpoint needs VLLM_SERVER_DEV_MODE=1, which the page does not say")
    return found


def _problems_in_code(code: str, names: Names) -> Iterator[str]:
    for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*", code):
        base, *parts = flag.split(".")
        if base not in names["flags"]:
            yield f"flag {base}"
        elif parts and base not in OTHER_FLAGS:
            yield from _unknown_keys({parts[0]: dict.fromkeys(parts[1:])}, names)
    for variable in re.findall(r"\bVLLM_[A-Z_]+\b", code):
        if variable not in (*names["variables"], *OTHER_VARIABLES):
            yield f"variable {variable}"
    for metric in re.findall(r"\bvllm:[a-z]\w*[a-z]\b", code):
        if metric not in names["metrics"] and f"{metric}_total" not in names["metrics"]:
            yield f"metric {metric}"
    for path in re.findall(r"\bvllm/[\w/]+\.py\b", code):
        if not (Path(names["root"]).parent / path).exists():
            yield f"file {path}"
    for path in _paths([code]):
        if path not in names["routes"] and path not in OTHER_ENDPOINTS:
            yield f"endpoint {path}"
    for path, query in re.findall(r"(/[a-z][\w/]*)\?([\w=&]+)", code):
        for parameter in query.split("&"):
            name = parameter.split("=")[0]
            if path in names["routes"] and name not in names["routes"][path]:
                yield f"parameter {name} of {path}"
    for key in re.findall(r"\A(kv_\w+)\Z", code):
        known = (*names["fields"], *names["event_fields"], *names["calls"]["LLM"])
        if key not in (*known, *names["roles"], *VALID_KEYS, *REQUEST_KEYS):
            yield f"key {key}"
    for config in _transfer_configs(code):
        yield from _unknown_keys(config, names)
    yield from _unknown_arguments(code, names)


def _problems_in_paragraph(paragraph: str, names: Names) -> Iterator[str]:
    """`name=value` beside an endpoint is a parameter of it."""
    codes = re.findall(r"`([^`]+)`", paragraph)
    allowed = {name for path in _paths(codes) for name in names["routes"].get(path, ())}
    if any(path in names["routes"] for path in _paths(codes)):
        for code in codes:
            if (match := re.fullmatch(r"([a-z_]+)=\w+", code)) and match[1] not in allowed:
                yield f"parameter {match[1]} of {', '.join(_paths(codes))}"


def _paths(codes: list[str]) -> list[str]:
    """Endpoints: `/reset_prefix_cache`, http://host:8000/v1/models, ${url}/metrics."""
    start = r"(?:\A|(?<=:\d{4})|(?<=localhost)|(?<=url\})|(?<=POST )|(?<=GET ))"
    found = [p for code in codes for p in re.findall(start + r"(/[a-z_][\w/]*)", code)]
    return [path for path in found if path.split("/")[1] not in OTHER_FOLDERS]


def _transfer_configs(code: str) -> Iterator[dict[str, Any]]:
    """JSON objects that name a connector, the outermost of each."""
    decoder, end = json.JSONDecoder(), 0
    for match in re.finditer(r"\{", code):
        if match.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(code, match.start())
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict) and "kv_connector" in value:
            yield value


def _unknown_keys(config: dict[str, Any], names: Names) -> Iterator[str]:
    for key in config:
        if key not in names["fields"]:
            yield f"key {key}"
    extra = config.get("kv_connector_extra_config", {})
    for child in extra.get("connectors", ()):
        yield from _unknown_keys(child, names)
    if config.get("kv_connector", "SafeCPUOffloadConnector") == "SafeCPUOffloadConnector":
        yield from (f"setting {key}" for key in extra if key not in VALID_KEYS)


def _unknown_arguments(code: str, names: Names) -> Iterator[str]:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            for keyword in node.keywords if function in names["calls"] else ():
                if keyword.arg not in names["calls"][function]:
                    yield f"argument {keyword.arg} of {function}"


# ---- the pages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_vllm_knows_every_name_of_a_page(path, names):
    assert problems_in(path.read_text(), names, is_prose=path.suffix == ".md") == []


def test_names_of_every_kind_are_found(names):
    """Else the test above could not fail: on these pages each kind is there, and is looked at."""
    text = "\n".join(path.read_text() for path in PAGES)
    for kind in ("routes", "flags", "variables", "metrics", "fields"):
        without = names | {kind: {} if kind == "routes" else []}
        assert problems_in(text, without), kind
