"""Order on the device: fences, loads behind the compute stream, bytes of every neighbour."""

import asyncio

import numpy as np
import pytest
import torch

from safe_offload.layout import Segment, make_geometry
from safe_offload.worker.copies.base import CopyPath, Direction
from tests.gpu.torch_gpu import TorchSubject, sleep_on
from tests.worker.copies.contract import PATIENCE_S

NUM_BLOCKS, NUM_SLOTS, NUM_LAYERS, ROW_BYTES = 64, 64, 4, 16 << 10
PATHS = [CopyPath.BATCH, CopyPath.KERNEL]


@pytest.fixture(params=PATHS, ids=[path.value for path in PATHS])
def subject(request):
    layer_bytes = NUM_BLOCKS * ROW_BYTES
    segments = [Segment(ROW_BYTES, layer_bytes * i, ROW_BYTES) for i in range(NUM_LAYERS)]
    geometry = make_geometry(segments, NUM_BLOCKS, NUM_LAYERS * layer_bytes)
    made = TorchSubject(geometry, NUM_SLOTS, request.param, slots_per_slab=16)
    yield made
    made.end()


def blocks_of(subject: TorchSubject) -> torch.Tensor:
    """The storage as (layers, blocks, bytes)."""
    return subject.storage[: NUM_LAYERS * NUM_BLOCKS * ROW_BYTES].view(NUM_LAYERS, NUM_BLOCKS, -1)


def row_values(subject: TorchSubject, slot: int) -> set[int]:
    """All values in a slot."""
    host = subject.read_host()
    rows = subject.layout.ranges_of(slot)
    return {int(v) for offset, length in rows for v in np.unique(host[offset : offset + length])}


async def count_torn_stores(subject: TorchSubject, num_rounds: int, *, is_fenced: bool) -> int:
    """Stores that are held back while a kernel overwrites their blocks right behind the fence."""
    blocks, num_torn = blocks_of(subject), 0
    for index in range(num_rounds):
        value, block = index % 200 + 1, index % NUM_BLOCKS
        blocks[:, block] = value
        sleep_on(subject.stream(Direction.STORE), (index % 4) / 10)
        completion = subject.issue(Direction.STORE, [block], [block])
        if is_fenced:
            assert subject.backend.fence(completion, PATIENCE_S)
        blocks[:, block] = 255
        await completion.wait()
        num_torn += row_values(subject, block) != {value}
    return num_torn


async def test_no_store_is_torn_behind_a_fence(subject):
    assert await count_torn_stores(subject, 1000, is_fenced=True) == 0


async def test_stores_are_torn_without_the_fence(subject):
    """The test above can fail."""
    assert await count_torn_stores(subject, 50, is_fenced=False) > 0


async def test_a_load_lands_behind_what_zeroes_its_blocks(subject):
    blocks = blocks_of(subject)
    subject.write_host(np.full(subject.layout.size_bytes, 7, np.uint8))
    for index in range(200):
        block = index % NUM_BLOCKS
        sleep_on(torch.cuda.current_stream(), (index % 4) / 10)
        blocks[:, block] = 0
        await subject.copy(Direction.LOAD, [block], [index % NUM_SLOTS])
        assert blocks[:, block].unique().tolist() == [7]


async def test_a_load_runs_beside_what_came_after_its_mark(subject):
    """As the forward of the step that the load belongs to."""
    blocks, forward = blocks_of(subject), torch.cuda.current_stream()
    subject.write_host(np.full(subject.layout.size_bytes, 7, np.uint8))
    blocks[:, 1] = 0
    mark = subject.backend.mark()
    end_forward = subject.hold_stream(forward)
    loading = subject.issue(Direction.LOAD, [1], [1], mark)
    await asyncio.wait_for(loading.wait(), PATIENCE_S)
    assert not forward.query(), "the forward is still held"
    end_forward()
    assert blocks[:, 1].unique().tolist() == [7]
