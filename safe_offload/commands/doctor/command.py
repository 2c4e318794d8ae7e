"""Find problems of a server on this machine before it starts.

    safe-offload doctor
    safe-offload doctor MODEL --kv-transfer-config '{"kv_connector":"SafeCPUOffloadConnector"}'
    safe-offload doctor MODEL -tp 8 --max-model-len 32768 --kv-transfer-config '{...}'

Pass the arguments of `vllm serve`: vLLM's own parser reads all but those below. Each finding says
what was found and, for a problem, what was expected and the fix. The exit status is 0 if there is
nothing to change, else 1. Nothing is started; objects written to try a tier are deleted again.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Final

from safe_offload.commands.doctor import configuration, memory, tiers, versions
from safe_offload.commands.doctor.machine import Machine, read_machine
from safe_offload.commands.doctor.report import exit_status, guarded, render
from safe_offload.commands.doctor.vllm_facts import VllmFacts, VllmProbe
from safe_offload.config.options import OffloadConfig
from safe_offload.config.tier_url import FILE
from safe_offload.config.transfer_config import CONNECTOR_NAME
from safe_offload.errors import ConfigError
from safe_offload.findings import Finding, Severity
from safe_offload.worker.copies.row_kernel import installed_cupy

_DEFAULT_CONFIG: Final = json.dumps({"kv_connector": CONNECTOR_NAME})
_PASTED: Final = ("vllm", "serve")
_FLAG: Final = re.compile(r"^--[^=.]+")
_CUT_SHORT: Final = "--kv-t"
"""vLLM reads any beginning of --kv-transfer-config, and its keys after a dot."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command; unknown ones are for vLLM."""
    parser.usage = (
        "safe-offload doctor [--json] [--fail-on error] [MODEL] [any argument of `vllm serve`]"
    )
    parser.allow_abbrev = False
    parser.set_defaults(rest=[])
    _add_options(parser)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--fail-on",
        choices=[Severity.ERROR.value, Severity.WARNING.value],
        default=Severity.WARNING.value,
        help="lowest severity with exit status 1 (%(default)s)",
    )
    parser.add_argument("--kv-transfer-config", metavar="JSON", default="", help="vLLM's argument")


def run_command(arguments: Namespace) -> int:
    """Run all checks, print the findings, and return the exit status."""
    # Log lines come back as findings.
    logging.getLogger("vllm").addHandler(logging.NullHandler())
    rest = read_rest(arguments)
    written = configuration.Written.read(arguments.kv_transfer_config)
    probe = VllmProbe(vllm_arguments(rest, written))
    findings = examine(written, probe, read_machine())
    text = render(findings)
    if arguments.json:
        text = json.dumps({"findings": [found.to_json() for found in findings]}, indent=1)
    sys.stdout.write(f"{text}\n")
    return exit_status(findings, Severity(arguments.fail_on))


def read_rest(arguments: Namespace) -> list[str]:
    """Return the arguments of `vllm serve`; our options may stand among them, also after `--`."""
    rest = [
        _FLAG.sub(lambda flag: flag[0].replace("_", "-"), argument)  # as vLLM reads them
        for argument in arguments.rest
        if argument != "--"
    ]
    while rest and rest[0] in _PASTED:
        rest.pop(0)
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    _add_options(parser)
    return parser.parse_known_args(rest, arguments)[1]


def vllm_arguments(rest: Sequence[str], written: configuration.Written) -> list[str]:
    """Return the arguments for vLLM's parser, without a transfer config that we alone reject."""
    if any(argument.startswith((_CUT_SHORT, "--config")) for argument in rest):
        return list(rest)
    text = written.text if written.text and not written.problem else _DEFAULT_CONFIG
    return [*rest, "--kv-transfer-config", text]


def examine(written: configuration.Written, probe: VllmProbe, machine: Machine) -> list[Finding]:
    """Run every check; return the findings by theme."""
    found = guarded("configuration", configuration.check_written, written)
    vllm = probe.facts()
    configs = _configs(written, vllm)
    pools = memory.pools_of(configs, vllm, machine.shared_memory)
    found += guarded("configuration", configuration.check_environment, machine.environment, vllm)
    found += guarded("configuration", configuration.check_arguments, vllm)
    found += guarded("versions", versions.check_versions, vllm)
    found += guarded("versions", versions.check_cupy, vllm, installed_cupy())
    found += guarded("memory", memory.check_pool, machine, pools)
    found += guarded("memory", memory.check_shared_memory, machine.shared_memory, pools)
    is_mla = bool(vllm.model and vllm.model.is_mla and vllm.engine and vllm.engine.num_ranks > 1)
    found += guarded("memory", memory.check_huge_pages, machine, pools, has_copies_for_all=is_mla)
    found += guarded("model", memory.check_model, vllm, configs)
    found += guarded("tiers", _check_tiers, configs, vllm)
    if any(tier.location.scheme != FILE for config in configs for tier in config.tiers):
        found += guarded("tiers", tiers.check_user, is_root=machine.is_root)
    order = ("configuration", "versions", "memory", "model", "tiers")
    return sorted(found, key=lambda one: order.index(one.id.partition(".")[0]))


def _configs(written: configuration.Written, vllm: VllmFacts) -> Sequence[OffloadConfig]:
    """Return our settings, shared by as many ranks as the engine has."""
    num_ranks = 1 if vllm.engine is None else vllm.engine.num_ranks
    if vllm.engine and (not written.text or vllm.engine.other_offloading_gib is not None):
        # It was written as --kv-transfer-config.x, in a file, or as --kv-offloading-size.
        written = configuration.Written.read(json.dumps(vllm.engine.transfer_config))
    try:
        return written.configs(num_ranks)
    except ConfigError:
        return written.configs()


def _check_tiers(configs: Sequence[OffloadConfig], vllm: VllmFacts) -> Iterator[Finding]:
    token_bytes = 0 if vllm.model is None else int(vllm.model.token_bytes)
    for config in configs:
        for tier in config.tiers:
            yield from tiers.check_tier(tier, token_bytes)
