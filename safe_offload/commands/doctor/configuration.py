"""Checks of our settings, vLLM's arguments and the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from safe_offload.commands.config import check, parse
from safe_offload.commands.doctor.vllm_facts import VllmFacts
from safe_offload.config.options import OffloadConfig
from safe_offload.config.printing import without_arguments
from safe_offload.config.transfer_config import (
    CONNECTOR_MODULE,
    CONNECTOR_NAME,
    DEFAULT_FAILURE_POLICY,
)
from safe_offload.errors import ConfigError
from safe_offload.findings import Finding, error, info, ok, refusal, warning

PLUGIN_NAME: Final = "safe_offload"
PLUGINS_VARIABLE: Final = "VLLM_PLUGINS"
ISOLATING_HASHES: Final = ("sha256", "sha256_cbor")
"""Hashes that cannot be made to collide on purpose. Source: vLLM 0.32.0, vllm/config/cache.py."""


@dataclass(frozen=True, slots=True)
class Written:
    """The value of `--kv-transfer-config`, and its effective failure policy.

    `extras` are the settings of each of our connectors; the defaults if the text cannot be used.
    """

    text: str  # empty if it was not given, or in another form than JSON
    extras: tuple[Mapping[str, Any], ...] = ({},)
    failure_policy: str = DEFAULT_FAILURE_POLICY
    problem: str = ""  # why it cannot be used; empty if it can

    @classmethod
    def read(cls, text: str) -> Written:
        """Check the text as the start of an engine does."""
        if not text:
            return cls(text)
        try:
            config, ours = check(parse(text))
        except ConfigError as problem:
            return cls(text, problem=str(problem))
        extras = tuple(each.get("kv_connector_extra_config") or {} for each in ours.values())
        return cls(text, extras, config.kv_load_failure_policy)

    def configs(self, world_size: int = 1) -> Sequence[OffloadConfig]:
        """Return the settings of each of our connectors."""
        return [OffloadConfig.from_extra_config(e, world_size=world_size) for e in self.extras]


def check_written(written: Written) -> Iterator[Finding]:
    """Check our settings and the fields beside them, without vLLM."""
    id = "configuration.settings"
    if written.problem:
        expected = "a valid configuration"
        yield refusal(id, written.problem, expected, "see `safe-offload config --explain`")
        return
    if written.text:
        yield ok(id, "all keys and values of --kv-transfer-config are valid")
    else:
        yield info(id, f"no --kv-transfer-config in JSON: the defaults of {CONNECTOR_NAME}")
    yield from _check_policy(written)


def _check_policy(written: Written) -> Iterator[Finding]:
    id = "configuration.failure-policy"
    if written.failure_policy == "fail":
        yield warning(
            id,
            'kv_load_failure_policy is "fail": failed loads end their request with an error',
            f'"{DEFAULT_FAILURE_POLICY}", so that the tokens are recomputed',
            f'write "kv_load_failure_policy": "{DEFAULT_FAILURE_POLICY}" beside "kv_connector", '
            "under MultiConnector beside its name",
        )
    else:
        yield ok(id, "tokens of failed loads are recomputed")


def check_environment(environment: Mapping[str, str], vllm: VllmFacts) -> Iterator[Finding]:
    """Check that vLLM finds the connector by its name."""
    id = "configuration.plugin"
    wanted = f"vLLM loads the plugin {PLUGIN_NAME}"
    allowed = environment.get(PLUGINS_VARIABLE)
    names = [] if allowed is None else [name.strip() for name in allowed.split(",")]
    if allowed is not None and PLUGIN_NAME not in names:
        listed = ",".join([*filter(None, names), PLUGIN_NAME])
        yield error(
            id,
            f'{PLUGINS_VARIABLE} is "{allowed}", so vLLM does not load {PLUGIN_NAME}',
            wanted,
            f"export {PLUGINS_VARIABLE}={listed}, or unset it",
        )
    elif not vllm.version:
        return  # versions.vllm reports it
    elif vllm.connector_problem:
        yield error(
            id,
            f"vLLM does not know {CONNECTOR_NAME}: {vllm.connector_problem}",
            wanted,
            "install safe-offload in vLLM's environment, with a tested version of vLLM",
        )
    elif vllm.connector and vllm.connector != CONNECTOR_MODULE:
        yield error(
            id,
            f"another package has registered {CONNECTOR_NAME}: {vllm.connector}",
            f"the one of {CONNECTOR_MODULE}",
            f'add "kv_connector_module_path": "{CONNECTOR_MODULE}" to --kv-transfer-config',
        )
    elif vllm.connector:
        yield ok(id, f"{wanted} and knows {CONNECTOR_NAME}")


def check_arguments(vllm: VllmFacts) -> Iterator[Finding]:
    """Check vLLM's arguments, by vLLM and by the checks of our connector's start."""
    id = "configuration.arguments"
    problem = without_arguments(vllm.arguments_problem) or vllm.engine_problem
    if problem:
        yield refusal(
            id,
            f"vLLM rejects its arguments: {problem}",
            "valid arguments",
            "correct the argument that the message names; if MODEL cannot be read here, name a "
            "folder with its config.json",
        )
    elif vllm.engine is not None:
        yield ok(id, "vLLM accepts them")
    if vllm.engine is None:
        return
    yield from _check_prefix_caching(vllm)
    yield from _check_hash(vllm.engine.hash_algorithm)


def _check_prefix_caching(vllm: VllmFacts) -> Iterator[Finding]:
    assert vllm.engine is not None
    id = "configuration.prefix-caching"
    if vllm.engine.prefix_caching:
        yield ok(id, "prefix caching is on")
        return
    yield error(
        id,
        f"prefix caching is off, so {CONNECTOR_NAME} does nothing",
        "prefix caching on, the default for most models",
        "remove --no-enable-prefix-caching; without that flag, vLLM disables it for this model: "
        "try --enable-prefix-caching",
    )


def _check_hash(algorithm: str) -> Iterator[Finding]:
    id = "configuration.hash"
    if algorithm in ISOLATING_HASHES:
        yield ok(id, f"blocks are hashed with {algorithm}, which resists forged collisions")
    else:
        yield warning(
            id,
            f"blocks are hashed with {algorithm}: a client could forge a collision with another's "
            "prompt",
            f"{ISOLATING_HASHES[0]}, unless you trust every client",
            f"remove --prefix-caching-hash-algo, or write {ISOLATING_HASHES[0]}",
        )
