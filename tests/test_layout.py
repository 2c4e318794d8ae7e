"""Where the bytes of a block lie: what vLLM's placements become."""

from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

from safe_offload.compat import specs
from safe_offload.errors import ConfigError
from safe_offload.layout import PAGE_BYTES, Geometry, HostLayout, Segment, make_geometry

PAGE = 96
BLOCKS = 7


def config_of(*tensors: KVCacheTensor, num_blocks: int = BLOCKS) -> KVCacheConfig:
    return KVCacheConfig(num_blocks, list(tensors), [])


def geometry_of(config: KVCacheConfig) -> Geometry:
    size = max(tensor.size for tensor in config.kv_cache_tensors)
    return make_geometry(specs.segments(config), config.num_blocks, size)


def bytes_of_block(segments: tuple[Segment, ...] | list[Segment], block: int) -> Counter[int]:
    """Every byte of a block, and how often it is described."""
    found: Counter[int] = Counter()
    for segment in segments:
        start = segment.offset_bytes + block * segment.stride_bytes
        found.update(range(start, start + segment.length_bytes))
    return found


# ---- vLLM's placements -------------------------------------------------------------------------


REGION = PAGE * BLOCKS
STRIDE = 4 * PAGE


@pytest.mark.parametrize(
    ("tensors", "segments"),
    [
        pytest.param(
            [KVCacheTensor(2 * REGION, list(group), REGION, PAGE) for group in ("ab", "cd", "ef")]
            + [KVCacheTensor(2 * REGION, ["g"], REGION, PAGE)],  # a group with fewer layers
            [Segment(PAGE, 0, PAGE), Segment(PAGE, REGION, PAGE)],
            id="cache groups that overlay one another",
        ),
        pytest.param(
            [
                KVCacheTensor(STRIDE * BLOCKS, ["a"], PAGE, STRIDE),
                KVCacheTensor(STRIDE * BLOCKS, ["b"], PAGE // 2, STRIDE, offset=2 * PAGE),
            ],
            [Segment(STRIDE, 0, PAGE), Segment(STRIDE, 2 * PAGE, PAGE // 2)],
            id="blocks outermost with padding",
        ),
        pytest.param(
            [
                KVCacheTensor(STRIDE * BLOCKS, ["a", "b"], PAGE, STRIDE),
                KVCacheTensor(STRIDE * BLOCKS, ["c"], 3 * PAGE, STRIDE),
                KVCacheTensor(STRIDE * BLOCKS, ["d"], PAGE // 4, STRIDE, offset=3 * PAGE),
            ],
            [Segment(STRIDE, 0, 3 * PAGE + PAGE // 4)],
            id="groups with different page sizes inside a block",
        ),
        # A layer of `layer_stride` bytes holds several regions of `num_blocks * block_stride`.
        pytest.param(
            [KVCacheTensor(4 * REGION, ["a", "b"], 2 * REGION, PAGE)],
            [Segment(PAGE, index * REGION, PAGE) for index in range(4)],
            id="split heads",
        ),
    ],
)
def test_what_vllm_places_is_every_byte_once(tensors, segments):
    assert geometry_of(config_of(*tensors)) == Geometry(tuple(segments), BLOCKS)


LAYOUTS = getattr(kv_cache_interface, "KVCacheLayout", ())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_of_vllm_is_covered_to_the_last_byte(layout):
    num_layers = 3
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=2, dtype=torch.float32)
    strides = kv_cache_interface.compute_layout_strides(spec, BLOCKS, num_layers, layout)
    layer_stride, block_stride, *inner = strides
    layers = [f"layer.{index}" for index in range(num_layers)]
    size = spec.page_size_bytes * num_layers * BLOCKS
    config = KVCacheConfig(
        BLOCKS,
        [KVCacheTensor(size, layers, layer_stride, block_stride)],
        [KVCacheGroupSpec(layers, spec)],
    )
    geometry = geometry_of(config)
    # What the layers' views address, from their strides alone.
    storage = torch.arange(size, dtype=torch.int32)
    shape = (num_layers, BLOCKS, 2, 4, spec.page_size_bytes // 8)
    views = torch.as_strided(storage, shape, (layer_stride, block_stride, *inner))
    for block in range(BLOCKS):
        expected = Counter(views[:, block].flatten().tolist())
        assert bytes_of_block(geometry.segments, block) == expected


# ---- joining -----------------------------------------------------------------------------------


def test_host_memory_has_an_array_for_each_segment():
    geometry = Geometry((Segment(8, 0, 8), Segment(96, 80, 24), Segment(16, 2000, 16)), 10)
    assert geometry.slot_bytes == 48
    layout = HostLayout.in_one_slab(geometry, 5)
    assert layout.array_offsets() == (0, 40, 160)
    assert layout.size_bytes == 5 * geometry.slot_bytes
    assert layout.ranges_of(2) == ((16, 8), (40 + 48, 24), (160 + 32, 16))


@pytest.mark.parametrize("num_slots", [1, 2, 7, 100, 4097])
@pytest.mark.parametrize("slab_bytes", [1, 4096, 10_000, 1 << 30])
def test_slots_in_slabs_have_bytes_of_their_own(num_slots, slab_bytes):
    geometry = Geometry((Segment(8, 0, 8), Segment(96, 80, 24), Segment(16, 2000, 16)), 10)
    layout = HostLayout.in_slabs(geometry, num_slots, slab_bytes)
    ranges = sorted(piece for slot in range(num_slots) for piece in layout.ranges_of(slot))
    assert sum(length for _, length in ranges) == num_slots * geometry.slot_bytes
    ends = [offset + length for offset, length in ranges]
    assert all(end <= start for end, (start, _) in zip(ends, ranges[1:], strict=False))
    assert ends[-1] <= layout.size_bytes
    for slot in range(num_slots):
        slabs = {offset // layout.slab_bytes for offset, _ in layout.ranges_of(slot)}
        assert slabs == {slot // layout.slots_per_slab}
        assert slot < layout.num_slots_within(slabs.pop() + 1)
    assert layout.num_slots_within(layout.num_slabs) == num_slots
    if layout.num_slabs > 1:
        assert layout.slab_bytes % PAGE_BYTES == 0


# ---- conflicts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "segments",
    [
        pytest.param([Segment(64, -8, 64)], id="ahead of the storage"),
        pytest.param([Segment(64, 0, 65)], id="longer than its stride"),
        pytest.param([Segment(64, 0, 0)], id="of no length"),
        pytest.param([Segment(64, 0, 8), Segment(32, 32, 8)], id="two strides"),
        pytest.param([Segment(64, 0, 32), Segment(64, 120, 16)], id="into the next block"),
    ],
)
def test_a_layout_whose_blocks_cannot_be_copied_one_by_one_is_refused(
    segments,
):
    with pytest.raises(ConfigError, match="unsupported KV cache layout"):
        make_geometry(segments, 5, 4096)


@pytest.mark.parametrize(("segments", "num_blocks"), [([], 5), ([Segment(64, 0, 64)], 0)])
def test_a_cache_without_blocks_or_layers_is_refused_as_such(segments, num_blocks):
    with pytest.raises(ConfigError, match="no blocks or no layers"):
        make_geometry(segments, num_blocks, 320)


# ---- properties --------------------------------------------------------------------------------


@st.composite
def segment_lists(draw: st.DrawFn) -> tuple[list[Segment], int]:
    """Any segments at all, near enough to one another to conflict often."""
    num_blocks = draw(st.integers(1, 5))
    strides = st.sampled_from([4, 8, 12]) if draw(st.booleans()) else st.just(8)
    segments = draw(
        st.lists(
            st.builds(Segment, strides, st.integers(0, 60), st.integers(1, 12)),
            min_size=1,
            max_size=6,
        )
    )
    return segments, num_blocks


def is_sound(segments: list[Segment], num_blocks: int, storage_bytes: int) -> bool:
    """Whether no byte belongs to two blocks, and all are there."""
    owners: dict[int, int] = {}
    for block in range(num_blocks):
        for byte in bytes_of_block(segments, block):
            if owners.setdefault(byte, block) != block or not 0 <= byte < storage_bytes:
                return False
    return True


@given(segment_lists(), st.integers(0, 120))
def test_a_geometry_is_every_byte_once_or_it_is_refused(described, storage_bytes):
    segments, num_blocks = described
    try:
        geometry = make_geometry(segments, num_blocks, storage_bytes)
    except ConfigError:
        return
    assert is_sound(segments, num_blocks, storage_bytes)
    for block in range(num_blocks):
        expected = bytes_of_block(segments, block)
        found = bytes_of_block(geometry.segments, block)
        assert set(found) == set(expected)
        assert set(found.values()) == {1}, "a byte would be copied twice"
    assert geometry.slot_bytes == len(bytes_of_block(segments, 0))


@given(segment_lists())
def test_a_sound_layout_with_one_stride_is_accepted(described):
    segments, num_blocks = described
    assume(len({segment.stride_bytes for segment in segments}) == 1)
    assume(all(segment.length_bytes <= segment.stride_bytes for segment in segments))
    assume(is_sound(segments, num_blocks, 1000))
    geometry = make_geometry(segments, num_blocks, 1000)
    assert set(bytes_of_block(geometry.segments, 0)) == set(bytes_of_block(segments, 0))


@given(
    st.integers(2, 6),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 3),
)
def test_placements_as_vllm_makes_them_are_covered(
    num_blocks, pages, num_groups, is_block_outermost, pad
):
    """One spec for each page size, groups that overlay from byte 0, as vLLM places them."""
    block_stride = sum(2 * page for page in pages) + pad
    size = block_stride * num_blocks
    tensors = []
    for _ in range(num_groups):
        offset = 0
        for index, page in enumerate(pages):
            layers = [f"{index}.{layer}" for layer in range(2)]
            if is_block_outermost:
                tensors.append(KVCacheTensor(size, layers, page, block_stride, offset))
                offset += 2 * page
            else:
                tensors.append(KVCacheTensor(size, layers, page * num_blocks, page, offset))
                offset += 2 * page * num_blocks
    geometry = geometry_of(config_of(*tensors, num_blocks=num_blocks))
    assert geometry.slot_bytes == block_stride - pad
    everything: Counter[int] = Counter()
    for block in range(num_blocks):
        everything.update(bytes_of_block(geometry.segments, block))
    assert set(everything.values()) == {1}
    assert len(everything) == (block_stride - pad) * num_blocks
