"""A Valkey or Redis server on trial: whether it can be used, how it is set, how fast it is.

What is written is written to a namespace of its own, with a time to live of five minutes, and
deleted again.

Source: https://valkey.io/commands/info/ and https://valkey.io/topics/lru-cache/.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from safe_offload.commands.doctor.findings import Finding, error, info, ok, warning
from safe_offload.commands.doctor.tiers.rates import (
    TierTrial,
    trial_facts,
    trial_names,
    try_rates,
    unusable,
)
from safe_offload.config.printing import printable
from safe_offload.config.tiers import ValkeyConfig
from safe_offload.config.units import MIB, format_bytes
from safe_offload.tiers.naming import ALL_KEYS, key_of, namespace
from safe_offload.tiers.valkey.commands import (
    DEL,
    EXISTS,
    GET,
    GETEX,
    NOT_NEEDED,
    PEXPIRE,
    SET,
    SETNAME,
    SLOTS,
    WITH_TTL,
    WRITING,
    allowing,
    sent_by,
    words_of,
)
from safe_offload.tiers.valkey.login import CLIENT_NAME
from safe_offload.tiers.valkey.replies import ErrorReply
from safe_offload.tiers.valkey.servers import Node
from safe_offload.tiers.valkey.valkey_store import ValkeyStore

ANSWER_S: Final = 3.0
TTL_S: Final = 300
_LRU: Final = "allkeys-lru"
_WORD_LENGTH_MAX: Final = 40


@dataclass(frozen=True, slots=True)
class Overfull:
    """A node that uses more than its maxmemory, as it counts when it evicts."""

    used_bytes: int
    maxmemory_bytes: int
    clients_bytes: int  # of it, in buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTrial(TierTrial):
    """What the trial of a server found; None and empty stand for what could not be seen.

    Attributes:
        maxmemory_bytes: of all nodes, as `used_bytes`; 0 for no limit.
        overfull: the node that is furthest above its maxmemory, None if none is.
        denied: commands of the tier that are not allowed, or fail, by their names in an ACL, with
            the code of the answer.
    """

    with_rates = "a responsive server with a few MiB free"
    version: str = ""
    num_nodes: int = 1
    is_cluster: bool = False
    maxmemory_bytes: int | None = None
    used_bytes: int | None = None
    overfull: Overfull | None = None
    policies: tuple[str, ...] = ()
    persistence: tuple[str, ...] | None = None
    num_evicted: int | None = None
    denied: Mapping[str, str] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()

    @property
    def only_reads(self) -> bool:
        """Return whether the user may read all that a tier reads, and write and delete nothing."""
        is_told = set(self.denied.values()) == {"NOPERM"}
        return is_told and {*WRITING} <= set(self.denied) <= {*WRITING, *WITH_TTL}


async def try_server(config: ValkeyConfig) -> ServerTrial:
    """Try the server of a tier."""
    store = ValkeyStore(dataclasses.replace(config, timeout_s=ANSWER_S))
    try:
        nodes = await store.nodes()
        seen = [await look(store, node) for node in nodes]
        refused, is_cluster = await _refusals(store)
        sent = *sent_by(config), *([GET] if GETEX in refused else [])
        denied = {name: refused[name] for name in sent if name in refused}
    finally:
        await store.close()
    rates = 0.0, 0.0
    may_expire = not set(WITH_TTL).intersection(refused)
    # Else what cannot be deleted would stay.
    if not _without_use(denied, is_cluster) and (may_expire or DEL not in refused):
        rates = await try_rates(dataclasses.replace(config, ttl_s=TTL_S if may_expire else None))
    return ServerTrial(
        label=store.label,
        version=next((each["version"] for each in seen if "version" in each), ""),
        num_nodes=len(nodes),
        is_cluster=is_cluster,
        maxmemory_bytes=_sum(seen, "maxmemory"),
        used_bytes=_sum(seen, "used_memory"),
        overfull=_overfullest(seen),
        policies=tuple(sorted({each["policy"] for each in seen if "policy" in each})),
        persistence=_persistence(seen),
        num_evicted=_sum(seen, "evicted_keys"),
        denied=denied,
        unseen=tuple(sorted({name for each in seen for name in each["unseen"]})),
        write_bytes_per_s=rates[0],
        read_bytes_per_s=rates[1],
    )


async def look(store: ValkeyStore, node: Node) -> dict[str, Any]:
    """Return how a node is set, as far as it tells."""
    info, settings = await store.answers(node, (b"INFO",), (b"CONFIG", b"GET", b"save"))
    found: dict[str, Any] = {"unseen": []}
    if isinstance(info, bytes):
        lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
        facts = {name: value for name, _, value in lines}
        try:
            found |= {
                name: int(facts[name]) for name in ("maxmemory", "used_memory", "evicted_keys")
            }
            # Buffers of replicas and of the append-only file do not make a server evict.
            counted = found["used_memory"] - int(facts.get("mem_not_counted_for_evict", 0))
            if 0 < found["maxmemory"] < counted:
                clients_bytes = int(facts.get("mem_clients_normal", 0))
                found["overfull"] = Overfull(counted, found["maxmemory"], clients_bytes)
            name = "Valkey" if "valkey_version" in facts else "Redis"
            version = facts.get("valkey_version") or facts["redis_version"]
            found["version"] = f"{name} {printable(version, _WORD_LENGTH_MAX)}"
            found["policy"] = printable(facts["maxmemory_policy"], _WORD_LENGTH_MAX)
            found["append-only file"] = facts["aof_enabled"] != "0"
        except (KeyError, ValueError):  # a server that speaks the protocol and is none of the two
            found["unseen"].append("parts of INFO")
    else:
        found["unseen"].append("INFO")
    match settings:
        case [b"save", bytes(save)]:
            found["snapshots"] = bool(save)
        case _:
            found["unseen"].append("CONFIG GET save")
    return found


def _sum(seen: list[dict[str, Any]], name: str) -> int | None:
    """Return a sum over all nodes; 0 if one has none, None if one does not tell."""
    values = [each.get(name) for each in seen]
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) < len(values):
        return None
    return 0 if name == "maxmemory" and 0 in numbers else sum(numbers)


def _overfullest(seen: list[dict[str, Any]]) -> Overfull | None:
    nodes: list[Overfull] = [each["overfull"] for each in seen if "overfull" in each]
    return max(nodes, key=lambda node: node.used_bytes - node.maxmemory_bytes, default=None)


def _persistence(seen: list[dict[str, Any]]) -> tuple[str, ...] | None:
    kinds = ("append-only file", "snapshots")
    if not any(kind in each for each in seen for kind in kinds):
        return None
    return tuple(kind for kind in kinds if any(each.get(kind) for each in seen))


async def _refusals(store: ValkeyStore) -> tuple[dict[str, str], bool]:
    """Try what tiers send; return codes of what is refused, and whether there are more nodes."""
    keys = [key_of(name) for name in trial_names(namespace(trial_facts()))]
    node, milliseconds = await store.node_of(keys[0].decode()), b"%d" % (TTL_S * 1000)
    expiry = b"PX", milliseconds

    async def code_of(name: str, *arguments: bytes) -> str:
        (answer,) = await store.answers(node, (*words_of(name), *arguments))
        return answer.code if isinstance(answer, ErrorReply) else ""

    may_ask = await code_of(SLOTS) != "NOPERM"
    codes = {
        SETNAME: await code_of(SETNAME, CLIENT_NAME.encode()),
        SLOTS: "" if may_ask else "NOPERM",
    }
    for name, *arguments in (
        *((SET, b"x", *expiry), (GET,), (GETEX, *expiry), (EXISTS,), (PEXPIRE, milliseconds)),
        (DEL,),
    ):
        codes[name] = await code_of(name, keys[0], *arguments)
    # Where it may not be asked, MOVED is all that tells a node of a cluster.
    is_cluster = store.is_cluster or (
        not may_ask and "MOVED" in [await code_of(EXISTS, key) for key in keys]
    )
    is_told = {name: code for name, code in codes.items() if code and code != "MOVED"}
    return is_told, is_cluster


def _without_use(refused: Collection[str], is_cluster: bool) -> bool:
    """Return whether a tier does not work without what is refused."""
    return not NOT_NEEDED.issuperset(refused) or (is_cluster and SLOTS in refused)


def check_server(config: ValkeyConfig, trial: ServerTrial) -> Iterator[Finding]:
    """Judge what was found."""
    label = trial.label
    if trial.problem:
        expected = "a reachable server that accepts the login"
        yield unusable("tiers.server", trial, expected, "check whether the server hangs")
        return
    nodes = f", a cluster of {trial.num_nodes} nodes with keys" if trial.num_nodes > 1 else ""
    yield ok(
        "tiers.server",
        f"{label} is reachable and accepts the login: {trial.version or 'a server'}{nodes}",
    )
    yield _access(trial)
    yield from _memory(trial)
    yield from _eviction(config, trial)
    if trial.persistence:
        yield warning(
            "tiers.persistence",
            f"{label} writes to disk: {' and '.join(trial.persistence)}",
            "no persistence: a cache refills, and a fork can double the memory use",
            'set save "" and appendonly no',
        )
    elif trial.persistence is not None:
        yield ok("tiers.persistence", f"{label} reports no persistence")
    if trial.unseen:
        yield info(
            "tiers.unseen",
            f"{label} hides some settings from this user: {', '.join(trial.unseen)}; a user with "
            "+info +config|get sees them",
        )


def _access(trial: ServerTrial) -> Finding:
    id, codes = "tiers.access", set(trial.denied.values())
    if not trial.denied:
        return ok(id, f"{trial.label} allows this user to read, write and delete")
    if trial.only_reads:
        return info(
            id,
            f"{trial.label} allows this user only to read: this engine loads what others store "
            "there, and stores nothing",
        )
    denied = ", ".join(f"{name.upper()} ({code})" for name, code in trial.denied.items())
    fix = "check the server's log"
    if "NOPERM" in codes:
        denied_to_user = [name for name, code in trial.denied.items() if code == "NOPERM"]
        fix = f"give the user of the url ~{ALL_KEYS} {allowing(denied_to_user)}"
    elif "OOM" in codes:
        fix = f"raise maxmemory, and set maxmemory-policy {_LRU}, so that it evicts"
    elif "READONLY" in codes:
        fix = "name the primary in the url, not a replica"
    kind = error if _without_use(trial.denied, trial.is_cluster) else warning
    return kind(id, f"{trial.label} refuses {denied}", "all commands of the tier", fix)


def _memory(trial: ServerTrial) -> Iterator[Finding]:
    id = "tiers.memory"
    if trial.maxmemory_bytes is None:
        return
    used = format_bytes(trial.used_bytes or 0)
    if trial.maxmemory_bytes == 0:
        yield warning(
            id,
            f"{trial.label} has no maxmemory, and uses {used}: it grows until its machine runs "
            "out of memory",
            "a limit below the memory of its machine or container",
            "set maxmemory to nine tenths of that memory",
        )
    elif trial.overfull is not None:
        yield _overfull(id, trial, trial.overfull)
    else:
        of = format_bytes(trial.maxmemory_bytes)
        yield ok(id, f"{trial.label} uses {used} of a maxmemory of {of}")


def _overfull(id: str, trial: ServerTrial, node: Overfull) -> Finding:
    who = f"a node of {trial.label}" if trial.num_nodes > 1 else trial.label
    does = "refuses every write" if trial.denied.get(SET) == "OOM" else "evicts with every command"
    found = (
        f"{who} uses {format_bytes(node.used_bytes)}, more than its maxmemory of "
        f"{format_bytes(node.maxmemory_bytes)}, so it {does}"
    )
    if node.clients_bytes > node.used_bytes - node.maxmemory_bytes:
        found += f"; buffers of clients take {format_bytes(node.clients_bytes)} of it"
    return warning(
        id,
        found,
        "a maxmemory above the memory in use",
        f"raise maxmemory to at least {-(-node.used_bytes // MIB)}mb, plus room for the cache; "
        f"maxmemory-policy {_LRU} evicts keys, but not buffers",
    )


def _eviction(config: ValkeyConfig, trial: ServerTrial) -> Iterator[Finding]:
    id = "tiers.eviction"
    fix = f"set maxmemory-policy {_LRU}"
    expected = "least recently used eviction"
    for policy in trial.policies:
        found = f"{trial.label} has the policy {policy}"
        if policy == "noeviction":
            found += ": once it is full, it rejects writes"
            yield warning(id, found, expected, fix)
        elif policy.startswith("volatile") and config.ttl_s is None:
            found += ', which evicts only keys with a time to live, and "ttl" is not set'
            yield warning(id, found, expected, f'{fix}, or set a "ttl" for the tier')
        elif policy.endswith("random"):
            found += ", which also evicts hot keys"
            yield warning(id, found, expected, fix)
        else:
            so_far = (
                ""
                if trial.num_evicted is None
                else (f"; {trial.num_evicted:,} keys evicted so far")
            )
            yield ok(id, f"{found}{so_far}")
