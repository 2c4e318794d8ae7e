"""Checks of our settings, vLLM's arguments and the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from safe_offload.commands.config import check, parse
from safe_offload.commands.doctor.vllm_facts import VllmFacts
from safe_offload.config.options import CAPACITY_KEYS, OffloadConfig
from safe_offload.config.printing import without_arguments
from safe_offload.config.tiers import SHARED_HASH, hash_problem
from safe_offload.config.transfer_config import (
    CONNECTOR_MODULE,
    CONNECTOR_NAME,
    DEFAULT_FAILURE_POLICY,
    DEFAULT_KV_ROLE,
)
from safe_offload.errors import ConfigError
from safe_offload.findings import Finding, error, info, ok, refusal, warning
from safe_offload.start.checks import DEFAULT_HASH

PLUGIN_NAME: Final = "safe_offload"
PLUGINS_VARIABLE: Final = "VLLM_PLUGINS"
ALLOCATOR_VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE: Final = "expandable_segments:True"
"""vLLM 0.31 to 0.33 refuses every KV connector where this spelling is in that variable, unless the
cumem allocator is on; not in PYTORCH_ALLOC_CONF (`VllmConfig._verify_kv_transfer_compat`)."""
ISOLATING_HASHES: Final = ("sha256", "sha256_cbor")
"""Hashes that cannot be made to collide on purpose. Source: vLLM 0.32.0, vllm/config/cache.py."""


@dataclass(frozen=True, slots=True)
class Written:
    """The value of `--kv-transfer-config`.

    Attributes:
        extras: `kv_connector_extra_config` of each of our connectors; the defaults if the text
            cannot be used.
        failure_policy, role: as they would be in force.
    """

    text: str  # empty if it was not given, or in another form than JSON
    extras: tuple[Mapping[str, Any], ...] = ({},)
    failure_policy: str = DEFAULT_FAILURE_POLICY
    role: str = DEFAULT_KV_ROLE
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
        return cls(text, extras, config.kv_load_failure_policy, config.kv_role)

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
    for extra, config in zip(written.extras, written.configs(), strict=True):
        sizes = [key for key in CAPACITY_KEYS if key in extra]
        if len(sizes) > 1:
            yield warning(
                "configuration.size-keys",
                f'{" and ".join(sizes)} are all set; only "{config.capacity_key}" takes effect',
                "one key for the size of the pool",
                "remove the others",
            )
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
    if written.role != DEFAULT_KV_ROLE:
        yield warning(
            "configuration.role",
            f'kv_role "{written.role}" has no effect: {CONNECTOR_NAME} always stores and loads',
            f'"{DEFAULT_KV_ROLE}"',
            'remove "kv_role"',
        )


def check_environment(environment: Mapping[str, str], vllm: VllmFacts) -> Iterator[Finding]:
    """Check that vLLM finds the connector by its name, and accepts connectors at all."""
    is_taken = vllm.engine is not None and not vllm.engine_problem
    if EXPANDABLE in environment.get(ALLOCATOR_VARIABLE, "") and not is_taken:
        yield error(
            "configuration.allocator",
            f"{ALLOCATOR_VARIABLE} has {EXPANDABLE}, with which vLLM rejects every KV connector",
            f"no {EXPANDABLE} there; vLLM does not check PYTORCH_ALLOC_CONF",
            f"remove it from {ALLOCATOR_VARIABLE}, or start vLLM with --enable-sleep-mode",
        )
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


def check_arguments(vllm: VllmFacts, configs: Sequence[OffloadConfig]) -> Iterator[Finding]:
    """Check vLLM's arguments together, and with our settings."""
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
    if any(config.tiers for config in configs):
        yield _tier_hash(vllm.engine.hash_algorithm, has_seed=vllm.engine.has_hash_seed)


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


def _tier_hash(algorithm: str, *, has_seed: bool) -> Finding:
    id = "configuration.tier-hash"
    if algorithm == DEFAULT_HASH:
        algorithm = SHARED_HASH  # as the start does
    problem = hash_problem(algorithm, has_seed=has_seed)
    if problem is None:
        return ok(id, f"other engines can find blocks in the tiers, hashed with {algorithm}")
    what, fix = problem
    return error(
        id,
        f"prefix_caching_hash_algo is {algorithm}, which {what}",
        'hashes that are the same in every process, for "tiers"',
        fix,
    )
