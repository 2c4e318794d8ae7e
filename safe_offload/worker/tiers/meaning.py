"""What gives the bytes of this rank's blocks their meaning: the facts behind a namespace.

Whoever has the same facts may use the objects, so a fact left out is a wrong answer, and one too
many only a miss. Where the facts do not say what a process computes, what it stores is kept to its
engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from safe_offload import compat
from safe_offload.layout import Geometry, Segment
from safe_offload.tier_config import TierConfig

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
NUM_SAMPLES, SAMPLE_BYTES = 16, 4096
"""What is read of each file of weights: other weights may have the same name and size."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What the bytes of a rank's blocks mean.

    Attributes:
        facts: by name.
        doubts: why they do not say what the engine computes; empty if they do.
        engine: a word that no other engine has.
    """

    facts: Mapping[str, str]
    doubts: tuple[str, ...] = ()
    engine: str = ""

    def facts_of(self, tier: TierConfig) -> dict[str, str]:
        """Return what makes the namespace in a tier; an operator's word for the weights counts."""
        facts = dict(self.facts)
        facts |= {"namespace": tier.namespace, "model_version": tier.model_version}
        if self.is_alone_in(tier):
            facts["engine"] = self.engine
        return facts

    def is_alone_in(self, tier: TierConfig) -> bool:
        """Return whether nothing in a tier can be another engine's, or of this one's next start."""
        return bool(self.doubts) and not tier.model_version


def meaning_of(
    vllm_config: Any, kv_cache_config: Any, geometry: Geometry, copy_rank: int
) -> Meaning:
    """Return what the blocks of a rank mean; the model must have been loaded.

    Args:
        vllm_config: of the engine.
        kv_cache_config: of the rank.
        geometry: of the rank's blocks.
        copy_rank: the first of the ranks that hold the same.
    """
    facts = compat.model_facts(vllm_config)
    doubts = []
    for name, place in compat.model_places(vllm_config).items():
        found = _fingerprint(*place)
        facts[f"{name}_weights"] = found
        if not found and facts["load_format"] != "dummy":
            doubts.append(f'the weights of "{place[0]}" are not files of this machine')
    if compat.uses_adapters(vllm_config):
        doubts.append("LoRA adapters are known by name and path only")
    layers = compat.layer_segments(kv_cache_config)
    places = sorted({(layer, *_place(geometry, segment)) for layer, segment in layers})
    names = dict.fromkeys(layer for layer, *_ in places)
    attention = compat.layer_facts(vllm_config, names)
    facts |= {
        "rank": f"{copy_rank}",
        "groups": "; ".join(compat.group_facts(kv_cache_config)),
        "block_sizes": f"{compat.resolve_block_sizes(kv_cache_config, vllm_config)}",
        "slot_bytes": f"{geometry.slot_bytes}",
        "layers": "; ".join(f"{name}: {attention[name]}" for name in names),
        "layout": "; ".join(f"{layer} {at}+{length}" for layer, at, length in places),
    }
    return Meaning(facts, tuple(doubts), compat.engine_word(vllm_config))


def _place(geometry: Geometry, segment: Segment) -> tuple[int, int]:
    """Return where in a slot a segment is, in bytes, and its length; one of several joined ones."""
    at = 0
    for joined in geometry.segments:
        inside = segment.offset_bytes - joined.offset_bytes
        fits = 0 <= inside <= joined.length_bytes - segment.length_bytes
        if fits and joined.stride_bytes == segment.stride_bytes:
            return at + inside, segment.length_bytes
        at += joined.length_bytes
    raise AssertionError(f"{segment} is in no block")


def _fingerprint(name: str, revision: str | None, download_dir: str | None) -> str:
    """Return a digest of the files of a model's weights; empty if there are none here."""
    try:
        paths = sorted(_weights(name, revision, download_dir))
        digest = xxhash.xxh3_128()
        for path in paths:
            size_bytes = os.stat(path).st_size
            digest.update(f"{os.path.basename(path)} {size_bytes} ".encode())
            for sample in _samples(path, size_bytes):
                digest.update(sample)
    except (OSError, ValueError):  # a ValueError: the name is not one that the hub can have
        return ""
    return digest.hexdigest() if paths else ""


def _weights(name: str, revision: str | None, download_dir: str | None) -> Iterator[str]:
    """Yield the files of a model's weights, a directory's or those of the hub's cache."""
    if os.path.isfile(name):
        yield name
        return
    folder = name
    if not os.path.isdir(name):
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(name, "config.json", download_dir, revision)
        if not isinstance(config, str):
            return
        folder = os.path.dirname(config)
    with os.scandir(folder) as entries:
        yield from (entry.path for entry in entries if entry.name.endswith(WEIGHTS))


def _samples(path: str, size_bytes: int) -> Iterator[bytes]:
    file_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for index in range(NUM_SAMPLES):
            at = max(0, size_bytes - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1)
            yield os.pread(file_fd, SAMPLE_BYTES, at)
    finally:
        os.close(file_fd)
