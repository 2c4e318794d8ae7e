"""The copies of vLLM's own connectors, to be compared with ours. The only import of them.

SimpleCPUOffloadConnector copies by a batched call of the driver. OffloadingConnector loads blocks
of less than 28 KiB by a Triton kernel, and copies all others by the same batched call in C++.

Source: vLLM 0.32.0, v1/simple_kv_offload/cuda_mem_ops.py, v1/kv_offload/cpu/swap_blocks_triton.py
and _select_swap_blocks_fn in v1/kv_offload/cpu/gpu_worker.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.kv_offload.cpu import swap_blocks_triton
from vllm.v1.simple_kv_offload import cuda_mem_ops

from safe_offload.worker.copies.base import Copy, Direction
from safe_offload.worker.copies.ranges import Ranges

CHUNK_BYTES_MAX = 8192
NUM_WORD_BYTES = 8


def batched_call(
    copy: Copy, layers: tuple[list[torch.Tensor], list[torch.Tensor]], stream: Any
) -> Callable[[], None]:
    """Return one copy by vLLM's batched call, descriptors built in the call, as vLLM does.

    `layers` of KV cache and host memory have the shape (num_blocks, range_bytes) each.
    """
    blocks, slots = copy.block_ids.tolist(), copy.slot_ids.tolist()
    caches, hosts = ({str(index): layer for index, layer in enumerate(side)} for side in layers)
    if copy.direction is Direction.STORE:
        order = cuda_mem_ops.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        parameters = cuda_mem_ops.build_params(caches, hosts, stream, order)
        return lambda: cuda_mem_ops.copy_blocks(blocks, slots, parameters)
    order = cuda_mem_ops.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    parameters = cuda_mem_ops.build_params(hosts, caches, stream, order)
    return lambda: cuda_mem_ops.copy_blocks(slots, blocks, parameters)


def has_kernel_for(range_bytes: int, direction: Direction) -> bool:
    """Whether vLLM would copy by its kernel."""
    is_short = range_bytes < swap_blocks_triton.THRESHOLD_BYTES
    return direction is Direction.LOAD and is_short and range_bytes % NUM_WORD_BYTES == 0


def kernel_launch(ranges: Ranges, stream: Any) -> Callable[[], None]:
    """Return one copy by vLLM's kernel; the addresses are worked out beforehand."""
    sources, targets, lengths = (
        torch.from_numpy(words.astype("int64")).pin_memory()
        for words in (ranges.sources, ranges.targets, ranges.lengths)
    )
    chunk_bytes = min(1 << (int(ranges.lengths[0]) - 1).bit_length(), CHUNK_BYTES_MAX)

    def launch() -> None:
        with torch.cuda.stream(stream):
            swap_blocks_triton.swap_blocks_batch(
                sources, targets, lengths, is_src_access_order_any=True, bytes_per_chunk=chunk_bytes
            )

    return launch
