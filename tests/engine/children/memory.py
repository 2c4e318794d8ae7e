"""Measures what the connector takes of this process's memory, and what it leaves behind."""

import ctypes
import gc
import sys
import threading
import types
from pathlib import Path
from typing import Any

import psutil

from tests.engine.children import engine

# Objects of the interpreter and of vLLM that are there without the connector.
NOT_OURS = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def resident_bytes() -> int:
    """Resident memory of this process, without what is free and malloc keeps for later.

    How much malloc keeps depends on which thread freed what when, and moves by several MB.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def mapped_bytes(start: int, size_bytes: int) -> tuple[int, int]:
    """(mapped, resident) bytes of an address range, from the kernel's list of mappings."""
    mapped = resident = 0
    overlap = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            overlap = max(0, min(last, start + size_bytes) - max(first, start))
            mapped += overlap
        elif head == "Rss:" and overlap:
            resident += int(line.split()[1]) * 1024
    return mapped, resident


def scheduler_bytes(planner: Any) -> int:
    """Bytes of all objects that the planner keeps alive and that vLLM has not without it.

    Every object that can be reached from the planner counts with `sys.getsizeof`, vLLM's rules over
    the host's slots and the hashes included. Not counted are vLLM's `KVCacheBlock` objects; not
    entered are the engine's own objects that the planner only looks at: requests,
    the GPU's block tables and the configuration.
    """
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request

    from safe_offload.scheduler.blocks import BlockTable, GpuBlocks, QueuePlace

    gc.collect()
    foreign = (*NOT_OURS, Request, GpuBlocks, BlockTable, QueuePlace, KVCacheConfig, KVCacheSpec)
    seen: set[int] = set()
    stack, total = [planner], 0
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, foreign):
            continue
        seen.add(id(item))
        if not isinstance(item, KVCacheBlock):
            total += sys.getsizeof(item)
        stack += gc.get_referents(item)
    return total


def num_held_slots(planner: Any) -> int:
    """Slots that hold a block which can be hit."""
    return len(planner.hits.directory.kept())


def measure_running(llm: Any, job: dict[str, Any], planner: Any) -> dict[str, int]:
    """The scheduler side's largest size while one more request runs, after each of its steps."""
    llm_engine = llm.llm_engine
    prompt = {"prompt_token_ids": job["prompts"][job["turns"][0]]}
    llm_engine.add_request("measured", prompt, engine.sampling(job["num_answer_tokens"]))
    largest = {"scheduler_bytes": 0, "leased_slots": 0}
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
        largest["scheduler_bytes"] = max(largest["scheduler_bytes"], scheduler_bytes(planner))
        largest["leased_slots"] = max(largest["leased_slots"], planner.gauges()["leased_slots"])
    return largest


def scenario(job: dict[str, Any]) -> dict[str, Any]:
    """Resident bytes after the turns; with a connector, also what it holds and leaves behind."""
    llm = engine.start(job)
    engine.take_turns(llm, job)
    connector = engine.scheduler_of(llm).connector
    if connector is None:
        return {"resident_bytes": resident_bytes()}
    engine.drain(llm)
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    host = get_kv_transfer_group().side.opened.backend.host
    start, size_bytes = host.tensor.data_ptr(), host.size_bytes
    planner = connector.side
    report: dict[str, Any] = {
        "resident_bytes": resident_bytes(),
        "pool_bytes": size_bytes,
        "pool_mapped_bytes": mapped_bytes(start, size_bytes),
        "num_slots": planner.gauges()["slots"],
        "num_held_slots": num_held_slots(planner),
        "scheduler_bytes": scheduler_bytes(planner),
        "threads": our_threads(),
        "running": measure_running(llm, job, planner),
    }
    del llm, connector, planner, host
    gc.collect()
    return report | {
        "resident_bytes_after": resident_bytes(),
        "pool_mapped_bytes_after": mapped_bytes(start, size_bytes),
        "threads_after": our_threads(),
    }


def our_threads() -> list[str]:
    """Names of the connector's threads."""
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if name.startswith("safe-offload"))
