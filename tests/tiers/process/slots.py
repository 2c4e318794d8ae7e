"""Host slots that the process of a tier can map."""

import itertools
import random

from safe_offload.config.tiers import TierConfig
from safe_offload.layout import Geometry, HostLayout, Segment
from safe_offload.mapped_files import address_of, find_file, map_new
from safe_offload.tiers.process.process_tier import ProcessTier, opener

NUM_SLOTS = 8
LENGTHS = (4096, 512, 8192)
FACTS = {"model": "a"}


class Slots:
    """Host slots of several ranges, in a memfd."""

    def __init__(self, count: int = NUM_SLOTS, lengths: tuple[int, ...] = LENGTHS) -> None:
        offsets = itertools.accumulate(lengths, initial=0)
        segments = [Segment(sum(lengths), *each) for each in zip(offsets, lengths, strict=False)]
        self.layout = HostLayout.in_one_slab(Geometry(tuple(segments), count), count)
        self.slot_bytes = sum(lengths)
        self.memory = memoryview(map_new(self.layout.size_bytes))
        file = find_file(address_of(self.memory))
        assert file is not None
        self.file = file

    def fill(self, seed: int) -> bytes:
        self.memory[:] = content = random.Random(seed).randbytes(len(self.memory))
        return content

    def open(self, config: TierConfig, facts: dict[str, str] = FACTS) -> ProcessTier:
        tier, _ = opener(self.file, self.layout)(config, self.slot_bytes, dict(facts))
        assert isinstance(tier, ProcessTier)
        return tier
