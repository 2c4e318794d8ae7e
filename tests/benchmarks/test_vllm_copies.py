"""What vLLM's copies are asked for; vLLM's own code is replaced where it needs a GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from safe_offload.commands.bench.transfer_cases import Case, Traffic
from safe_offload.worker.copies.base import Direction
from safe_offload.worker.copies.ranges import Ranges

pytest.importorskip("vllm.v1.simple_kv_offload.cuda_mem_ops")
pytest.importorskip("vllm.v1.kv_offload.cpu.swap_blocks_triton")

from tests.benchmarks import vllm_copies


@pytest.mark.parametrize("direction", Direction)
def test_the_batched_call_goes_the_right_way(direction: Direction, monkeypatch) -> None:
    calls: list[tuple[Any, ...]] = []
    operations = vllm_copies.cuda_mem_ops
    monkeypatch.setattr(operations, "build_params", lambda *arguments: arguments)
    monkeypatch.setattr(operations, "copy_blocks", lambda *arguments: calls.append(arguments))
    (copy,) = Case(8, 5, 2).make_copies(Traffic(direction.value))
    caches, hosts = ([torch.zeros(5, 8) for _ in range(2)] for _ in range(2))
    vllm_copies.batched_call(copy, (caches, hosts), "a stream")()
    blocks, slots = copy.block_ids.tolist(), copy.slot_ids.tolist()
    ((from_ids, to_ids, (sources, targets, stream, order)),) = calls
    assert stream == "a stream"
    if direction is Direction.STORE:
        assert (from_ids, to_ids) == (blocks, slots)
        assert sources["1"] is caches[1]
        assert targets["0"] is hosts[0]
        assert order == operations.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    else:
        assert (from_ids, to_ids) == (slots, blocks)
        assert sources["1"] is hosts[1]
        assert targets["0"] is caches[0]
        assert order == operations.CU_MEMCPY_SRC_ACCESS_ORDER_ANY


def test_the_kernel_is_for_short_loads_of_whole_words() -> None:
    assert vllm_copies.has_kernel_for(4096, Direction.LOAD)
    assert not vllm_copies.has_kernel_for(4096, Direction.STORE)
    assert not vllm_copies.has_kernel_for(28 << 10, Direction.LOAD)
    assert not vllm_copies.has_kernel_for(4097, Direction.LOAD)


@pytest.mark.parametrize(("range_bytes", "chunk_bytes"), [(4096, 4096), (5000, 8192), (9000, 8192)])
def test_the_kernel_is_given_addresses(range_bytes: int, chunk_bytes: int, monkeypatch) -> None:
    calls: list[tuple[list[list[int]], dict[str, Any]]] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(
        vllm_copies.swap_blocks_triton,
        "swap_blocks_batch",
        lambda *tensors, **options: calls.append(([t.tolist() for t in tensors], options)),
    )
    words = [np.array(values, np.uint64) for values in ([1, 2], [3, 4], [range_bytes] * 2)]
    vllm_copies.kernel_launch(Ranges(*words), "a stream")()
    ((numbers, options),) = calls
    assert numbers == [[3, 4], [1, 2], [range_bytes] * 2], "sources come first there"
    assert options == {"is_src_access_order_any": True, "bytes_per_chunk": chunk_bytes}
