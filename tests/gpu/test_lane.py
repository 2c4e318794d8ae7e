"""Who gives copies to the driver of a GPU, and which way they go."""

import pytest
import torch

from safe_offload.layout import Segment, make_geometry
from safe_offload.worker.copies.base import CopyPath
from safe_offload.worker.copies.rows import Rows
from safe_offload.worker.loop_thread import LoopThread
from safe_offload.worker.self_test import SelfTest
from safe_offload.worker.transfers import Transfers
from tests.gpu.torch_gpu import TorchSubject
from tests.worker.copies import lane_storm

NUM_BLOCKS, NUM_LAYERS, ROW_BYTES = 256, 32, 16 << 10


@pytest.mark.parametrize("path", CopyPath)
def test_copies_of_every_size_keep_to_their_own_bytes_when_some_are_given_up(path):
    num_slots = lane_storm.NUM_BLOCKS
    subject = TorchSubject(lane_storm.geometry(), num_slots, path, slots_per_slab=num_slots)
    try:
        counts = lane_storm.run_storm(subject, seed=1, num_rounds=20)
    finally:
        subject.end()
    assert counts[True] >= 4 * 20


def test_both_ways_are_timed_on_the_blocks_of_the_model(caplog):
    layer_bytes = NUM_BLOCKS * ROW_BYTES
    segments = [Segment(ROW_BYTES, layer_bytes * i, ROW_BYTES) for i in range(NUM_LAYERS)]
    geometry = make_geometry(segments, NUM_BLOCKS, NUM_LAYERS * layer_bytes)
    subject = TorchSubject(geometry, NUM_BLOCKS, slots_per_slab=NUM_BLOCKS)
    before, _ = subject.fill(1)
    transfers = Transfers(subject.backend, LoopThread(), 1 << 30)
    try:
        storage = subject.storage.untyped_storage()
        device = subject.storage.device
        rows = Rows(storage, device, geometry, subject.device.bind_thread)
        host = subject.host.tensor.numpy()
        with caplog.at_level("INFO"):
            assert SelfTest(transfers, subject.backend, rows, host, subject.layout).run()
        assert "load by kernel" in caplog.text
        assert "store by batch" in caplog.text
        print(caplog.text)  # for the report: what this GPU copies
        torch.cuda.synchronize()
        assert (subject.read_storage() == before).all()
    finally:
        transfers.close()
