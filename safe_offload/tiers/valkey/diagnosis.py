"""Diagnoses the server of a tier: login, rights, memory, eviction, persistence.

A key written to try it has a time to live of five minutes, and is deleted again.

Source: https://valkey.io/commands/info/ and https://valkey.io/topics/lru-cache/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from safe_offload.config.printing import printable
from safe_offload.config.tiers import ValkeyConfig
from safe_offload.config.units import MIB, format_bytes
from safe_offload.findings import Finding, error, info, ok, warning
from safe_offload.tiers.naming import ALL_KEYS, key_of
from safe_offload.tiers.store import trial_names
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
from safe_offload.tiers.valkey.replies import ErrorReply, Tree
from safe_offload.tiers.valkey.servers import Node

TRIAL_TTL_S: Final = 300.0
_LRU: Final = "allkeys-lru"
_WORD_LENGTH_MAX: Final = 40
_INFO, _SAVE = "INFO", "CONFIG GET save"


@dataclass(frozen=True, slots=True)
class Seen:
    """The state that one server reports; `used_bytes` as counted for eviction."""

    version: str
    maxmemory_bytes: int  # 0 for no limit
    used_bytes: int
    num_evicted: int
    policy: str
    has_append_only_file: bool

    @classmethod
    def read(cls, reply: Tree) -> Seen | None:
        """Return the state in a reply to INFO; None if a field is missing."""
        if not isinstance(reply, bytes):
            return None
        lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
        facts = {name: value for name, _, value in lines}
        try:
            name = "Valkey" if "valkey_version" in facts else "Redis"
            version = facts.get("valkey_version") or facts["redis_version"]
            # Buffers of replicas and of the append-only file do not make a server evict.
            not_counted = int(facts.get("mem_not_counted_for_evict", 0))
            return cls(
                version=f"{name} {printable(version, _WORD_LENGTH_MAX)}",
                maxmemory_bytes=int(facts["maxmemory"]),
                used_bytes=int(facts["used_memory"]) - not_counted,
                num_evicted=int(facts["evicted_keys"]),
                policy=printable(facts["maxmemory_policy"], _WORD_LENGTH_MAX),
                has_append_only_file=facts["aof_enabled"] != "0",
            )
        except (KeyError, ValueError):
            return None


class Servers(Protocol):
    """The server or cluster of a tier; see `ValkeyStore`."""

    label: str

    @property
    def is_cluster(self) -> bool: ...

    async def nodes(self) -> list[Node]: ...

    async def node_of(self, key: str) -> Node: ...

    async def answers(self, node: Node, *commands: Sequence[bytes]) -> list[Tree]: ...


async def diagnose(store: Servers, config: ValkeyConfig) -> list[Finding]:
    """Return the findings of a server or cluster; see `Store.diagnose`."""
    nodes = await store.nodes()
    seen: list[Seen] = []
    persistence, hidden = set[str](), set[str]()
    for node in nodes:
        reply, save = await store.answers(node, (b"INFO",), (b"CONFIG", b"GET", b"save"))
        if (facts := Seen.read(reply)) is None:
            hidden.add(_INFO)
        else:
            seen.append(facts)
            persistence |= {"append-only file"} if facts.has_append_only_file else set()
        match save:
            case [b"save", bytes(rules)]:
                persistence |= {"snapshots"} if rules else set()
            case _:
                hidden.add(_SAVE)
    refused, is_cluster = await _refusals(store)
    sent = *sent_by(config), *([GET] if GETEX in refused else [])
    denied = {name: refused[name] for name in sent if name in refused}
    cluster = f", a cluster of {len(nodes)} nodes with keys" if len(nodes) > 1 else ""
    version = seen[0].version if seen else "a server"
    login = f"{store.label} is reachable and accepts the login: {version}{cluster}"
    return [
        ok("tiers.server", login),
        access_of(store.label, denied, is_cluster=is_cluster),
        *([] if _INFO in hidden else memory_of(store.label, seen)),
        *eviction_of(store.label, seen, has_ttl=config.ttl_s is not None),
        *persistence_of(store.label, persistence, hidden),
    ]


async def _refusals(store: Servers) -> tuple[dict[str, str], bool]:
    """Try the commands of tiers; return the codes of refused ones, and whether it is a cluster."""
    keys = [key_of(name) for name in trial_names()]
    node, milliseconds = await store.node_of(keys[0].decode()), b"%d" % (TRIAL_TTL_S * 1000)
    expiry = b"PX", milliseconds

    async def code_of(name: str, *arguments: bytes) -> str:
        (answer,) = await store.answers(node, (*words_of(name), *arguments))
        return answer.code if isinstance(answer, ErrorReply) else ""

    sees_slots = await code_of(SLOTS) != "NOPERM"
    codes = {
        SETNAME: await code_of(SETNAME, CLIENT_NAME.encode()),
        SLOTS: "" if sees_slots else "NOPERM",
    }
    for name, *arguments in (
        *((SET, b"x", *expiry), (GET,), (GETEX, *expiry), (EXISTS,), (PEXPIRE, milliseconds)),
        (DEL,),
    ):
        codes[name] = await code_of(name, keys[0], *arguments)
    # If CLUSTER SLOTS is denied, only MOVED reveals a cluster.
    is_cluster = store.is_cluster or (
        not sees_slots and "MOVED" in [await code_of(EXISTS, key) for key in keys]
    )
    return {name: code for name, code in codes.items() if code not in ("", "MOVED")}, is_cluster


def access_of(label: str, denied: Mapping[str, str], *, is_cluster: bool = False) -> Finding:
    """Judge the commands of a tier that are refused, by their names in an ACL, with their codes."""
    id, codes = "tiers.access", set(denied.values())
    if not denied:
        return ok(id, f"{label} allows this user to read, write and delete")
    if codes == {"NOPERM"} and {*WRITING} <= {*denied} <= {*WRITING, *WITH_TTL}:
        return info(
            id,
            f"{label} allows this user only to read: this engine loads what others store there, "
            "and stores nothing",
        )
    fix = "check the server's log"
    if "NOPERM" in codes:
        missing = [name for name, code in denied.items() if code == "NOPERM"]
        fix = f"give the user of the url ~{ALL_KEYS} {allowing(missing)}"
    elif "OOM" in codes:
        fix = f"raise maxmemory, and set maxmemory-policy {_LRU}, so that it evicts"
    elif "READONLY" in codes:
        fix = "name the primary in the url, not a replica"
    works = NOT_NEEDED.issuperset(denied) and not (is_cluster and SLOTS in denied)
    commands = ", ".join(f"{name.upper()} ({code})" for name, code in denied.items())
    kind = warning if works else error
    return kind(id, f"{label} refuses {commands}", "all commands of the tier", fix)


def memory_of(label: str, seen: Sequence[Seen]) -> Iterator[Finding]:
    """Judge the limits of memory of all nodes."""
    id, used = "tiers.memory", format_bytes(sum(node.used_bytes for node in seen))
    fullest = max(seen, key=lambda node: node.used_bytes - node.maxmemory_bytes)
    if not all(node.maxmemory_bytes for node in seen):
        yield warning(
            id,
            f"{label} has no maxmemory, and uses {used}: it grows until its machine runs out of "
            "memory",
            "a limit below the memory of its machine or container",
            "set maxmemory to nine tenths of that memory",
        )
    elif fullest.used_bytes > fullest.maxmemory_bytes:
        yield warning(
            id,
            f"{'a node of ' if len(seen) > 1 else ''}{label} uses "
            f"{format_bytes(fullest.used_bytes)}, more than its maxmemory of "
            f"{format_bytes(fullest.maxmemory_bytes)}: it evicts, or refuses writes, all the time",
            "a maxmemory above the memory in use",
            f"raise maxmemory to at least {-(-fullest.used_bytes // MIB)}mb, plus room for the "
            f"cache; maxmemory-policy {_LRU} evicts keys, but not buffers of clients",
        )
    else:
        limit = format_bytes(sum(node.maxmemory_bytes for node in seen))
        yield ok(id, f"{label} uses {used} of a maxmemory of {limit}")


def eviction_of(label: str, seen: Sequence[Seen], *, has_ttl: bool) -> Iterator[Finding]:
    """Judge the eviction policies of the nodes."""
    id, expected = "tiers.eviction", "least recently used eviction"
    fix = f"set maxmemory-policy {_LRU}"
    for policy in sorted({node.policy for node in seen}):
        found = f"{label} has the policy {policy}"
        if policy == "noeviction":
            yield warning(id, f"{found}: once it is full, it rejects writes", expected, fix)
        elif policy.startswith("volatile") and not has_ttl:
            found += ', which evicts only keys with a time to live, and "ttl" is not set'
            yield warning(id, found, expected, f'{fix}, or set a "ttl" for the tier')
        elif policy.endswith("random"):
            yield warning(id, f"{found}, which also evicts hot keys", expected, fix)
        else:
            evicted = sum(node.num_evicted for node in seen)
            yield ok(id, f"{found}; {evicted:,} keys evicted so far")


def persistence_of(label: str, kinds: set[str], hidden: set[str]) -> Iterator[Finding]:
    """Judge the kinds of persistence, and name the settings hidden from the user."""
    if kinds:
        yield warning(
            "tiers.persistence",
            f"{label} writes to disk: {' and '.join(sorted(kinds))}",
            "no persistence: a cache refills, and a fork can double the memory use",
            'set save "" and appendonly no',
        )
    elif not hidden:
        yield ok("tiers.persistence", f"{label} reports no persistence")
    if hidden:
        yield info(
            "tiers.unseen",
            f"{label} hides some settings from this user: {', '.join(sorted(hidden))}; a user "
            "with +info +config|get sees them",
        )
