"""Checks of the host memory: how much there is, in which pages, how much of a model it holds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from safe_offload.commands.doctor.machine import Machine, SharedMemory
from safe_offload.commands.doctor.vllm_facts import ModelFacts, VllmFacts
from safe_offload.config.options import OffloadConfig
from safe_offload.config.units import format_bytes
from safe_offload.errors import ConfigError
from safe_offload.findings import Finding, error, info, ok, refusal, warning
from safe_offload.node.pools import Pool, room_problem
from safe_offload.tiers.files.diagnosis import MEMORY
from safe_offload.worker.memory.host_memory import check_host_bytes
from safe_offload.worker.memory.huge_pages import HugePages

TABLE_PERCENT: Final = 1
"""Maximum share of the table of a shared pool and its checksums, beside the slots."""


@dataclass(frozen=True, slots=True)
class HostPool:
    """The host memory of one of our connectors, on this machine."""

    config: OffloadConfig
    rank_bytes: int | None  # None if it is set in blocks whose size is not known
    num_ranks: int  # of all engines on this machine, of one if they share it
    made: Pool | None = None  # by engines that share it: one of this model and size is there

    @property
    def bytes(self) -> int | None:
        """Return the memory of all ranks."""
        return None if self.rank_bytes is None else self.rank_bytes * self.num_ranks


def pools_of(
    configs: Sequence[OffloadConfig], vllm: VllmFacts, shared: SharedMemory | None
) -> list[HostPool]:
    """Return the pool of each connector, as far as engine and model are known."""
    engine, model = vllm.engine, vllm.model
    pools = []
    for config in configs:
        num_ranks = 1 if engine is None else engine.num_local_ranks
        rank_bytes: int | None = config.cpu_bytes_per_rank
        if config.num_slots is not None:
            block_bytes = None if model is None else model.block_bytes // config.world_size
            rank_bytes = None if block_bytes is None else config.num_slots * block_bytes
        pool = HostPool(config, rank_bytes, num_ranks)
        if config.sharing is not None:
            pool = replace(pool, num_ranks=config.world_size)
            pool = replace(pool, made=_made_pool(shared, vllm.model_name, pool.bytes or 0))
        pools.append(pool)
    return pools


def _made_pool(shared: SharedMemory | None, model_name: str, size_bytes: int) -> Pool | None:
    """Return the pool of a model, of any if it has no name, that has a size; else one is made.

    Slots are whole, and a table comes with them.
    """
    for pool in shared.pools if shared is not None else ():
        is_its = not model_name or pool.about == model_name
        if is_its and 15 * size_bytes < 16 * pool.size_bytes < 17 * size_bytes:
            return pool
    return None


def check_pool(machine: Machine, pools: Sequence[HostPool]) -> Iterator[Finding]:
    """Compare the pools of all ranks with the memory that machine and cgroups leave."""
    id = "memory.pool"
    limit = ""
    if machine.available_bytes < machine.machine_available_bytes:
        size = format_bytes(machine.machine_available_bytes)
        limit = f" (the cgroup's limit; the machine has {size})"
    for pool in pools:
        if pool.made is not None:
            continue  # its memory is taken already; `check_shared_memory` reports it
        if pool.rank_bytes is None:
            yield info(id, 'MODEL is needed to convert "num_cpu_blocks" to bytes')
            continue
        try:
            check_host_bytes(
                pool.config,
                bytes_per_rank=pool.rank_bytes,
                num_ranks_on_host=pool.num_ranks,
                available_bytes=machine.available_bytes,
            )
        except ConfigError as problem:
            expected = f"a pool that fits{limit}"
            yield refusal(id, str(problem), expected, "lower the pool size")
            continue
        ranks = f" for {pool.num_ranks} ranks" if pool.num_ranks > 1 else ""
        yield ok(
            id,
            f"{format_bytes(pool.bytes or 0)}{ranks} of {format_bytes(machine.available_bytes)} "
            f"available{limit}",
        )


def check_shared_memory(
    shared: SharedMemory | None, pools: Sequence[HostPool]
) -> Iterator[Finding]:
    """Compare shared pools with the room in shared memory."""
    id = "memory.shared-memory"
    for pool in pools:
        if pool.config.sharing is None or shared is None:
            continue
        room = f"{format_bytes(shared.free_bytes)} is free in {shared.folder}"
        if shared.problem:
            yield error(
                id,
                f'"share": "node" is unusable for user {os.geteuid()}: {shared.problem}',
                "a tmpfs folder that this user can write",
                f"mount a tmpfs at {shared.folder} that this user can write (in Kubernetes an "
                "emptyDir with medium: Memory), and let its folder there belong to this user alone",
            )
        elif shared.file_system and shared.file_system not in MEMORY:
            yield warning(
                id,
                f"{shared.folder} is on {shared.file_system}, so the pool is on disk",
                "a tmpfs",
                f"mount -t tmpfs tmpfs {shared.folder} (docker run --shm-size; in Kubernetes an "
                "emptyDir with medium: Memory, mounted there)",
            )
        elif pool.made is not None:
            yield info(
                id,
                f"{pool.made.path.name} of {format_bytes(pool.made.size_bytes)} exists for "
                f"{pool.made.about}; an engine with other settings creates another: {room}",
            )
        elif pool.bytes is None:
            yield info(id, f"{room}; MODEL is needed to compute the pool's size")
        elif problem := room_problem(
            shared.folder, shared.free_bytes, pool.bytes * (100 + TABLE_PERCENT) // 100
        ):
            yield refusal(id, problem, "room for the whole pool", "")
        else:
            yield ok(id, f"{room}, of which the pool takes {format_bytes(pool.bytes)}")


def check_huge_pages(
    machine: Machine, pools: Sequence[HostPool] = (), *, has_copies_for_all: bool = False
) -> Iterator[Finding]:
    """Check whether the kernel gives huge pages on request, as each pool does.

    `has_copies_for_all`: ranks share one copy (MLA).
    """
    id = "memory.huge-pages"
    kinds: dict[str, HugePages] = {}
    for pool in pools:
        if pool.config.sharing is not None and machine.shared_memory is not None:
            kinds["files in shared memory"] = machine.shared_memory.huge_pages
        elif pool.config.tiers or has_copies_for_all:
            kinds["memory that several processes map"] = machine.huge_pages_memfd
        else:
            kinds["private memory"] = machine.huge_pages
    for kind, setting in (kinds or {"private memory": machine.huge_pages}).items():
        if not setting.word:
            yield info(id, f"the system does not report transparent huge pages of {kind}")
        elif setting.is_given:
            yield ok(id, f'transparent huge pages of {kind} are "{setting.word}", as requested')
        else:
            yield warning(
                id,
                f'transparent huge pages of {kind} are "{setting.word}", and the pool is such: '
                "allocating it takes longer",
                "the kernel gives them to memory that asks",
                f"{setting.fix}, on the host",
            )


def check_model(vllm: VllmFacts, configs: Sequence[OffloadConfig]) -> Iterator[Finding]:
    """Report the tokens that the pools hold, and compare them with the longest request."""
    if not vllm.model_name:
        reason = "no MODEL was given" if vllm.engine else "vLLM did not get as far as MODEL"
        yield info("model.facts", f"{reason}: the capacity in tokens is unknown")
        return
    if vllm.model is None:
        yield warning(
            "model.facts",
            f"{vllm.model_name} cannot be examined: {vllm.model_problem or vllm.problem}",
            "a model whose config.json can be read here",
            "name a folder with its config.json, or a model in this machine's cache; the server "
            "logs the capacity in tokens when it starts",
        )
        return
    model = vllm.model
    groups = "" if model.num_groups == 1 else f" in {model.num_groups} KV cache groups"
    yield info(
        "model.facts",
        f"a token takes {model.token_bytes / 1024:.1f} KiB{groups}; a request of max_model_len "
        f"({model.max_model_len} tokens) takes "
        f"{format_bytes(model.num_request_blocks * model.block_bytes)} over all ranks",
    )
    for config in configs:
        yield _tokens(model, config)


def _tokens(model: ModelFacts, config: OffloadConfig) -> Finding:
    id = "model.tokens"
    pool_bytes = config.cpu_bytes_per_rank * config.world_size
    num_blocks = config.num_slots or pool_bytes // model.block_bytes
    num_requests = num_blocks / model.num_request_blocks
    num_tokens = int(num_requests * model.max_model_len)
    holds = f'"{config.capacity_key}" holds about {num_tokens} tokens'
    if num_requests >= 1:
        return ok(id, f"{holds}, or {num_requests:.1f} requests of max_model_len")
    value = config.value_for(model.num_request_blocks, model.block_bytes // config.world_size)
    fix = f'write "{config.capacity_key}": {value} or more'
    if not num_blocks:
        return error(
            id,
            f'"{config.capacity_key}" is less than one block ({format_bytes(model.block_bytes)} '
            "over all ranks), so vLLM would not start",
            "room for a request of max_model_len",
            fix,
        )
    return warning(
        id,
        f"{holds}, less than one request of max_model_len ({model.max_model_len}), which does not "
        "fit",
        "room for a request of max_model_len",
        f"{fix}, or a smaller --max-model-len",
    )
