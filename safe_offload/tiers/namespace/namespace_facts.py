"""The facts behind a namespace: all that the bytes of this rank's blocks depend on.

An engine with the same facts may use the objects, so a missing fact is a wrong answer, a
superfluous one only a miss: everything counts unless it is known not to matter. The content of
files is learned in the background; before that, there is no namespace. If the facts do not
determine what a process computes, its objects are not shared with other engines.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from safe_offload.compat import engine_config, specs
from safe_offload.config.tiers import TierConfig
from safe_offload.config.units import format_bytes
from safe_offload.layout import Geometry, Segment
from safe_offload.started import process_started_ns
from safe_offload.tiers.namespace.engine_facts import engine_facts
from safe_offload.tiers.namespace.model_files import (
    FileDigests,
    ModelPlace,
    find_files,
    stamp_of,
)

DUMMY_WEIGHTS: Final = "dummy"
KEPT_FOLDER: Final = "safe_offload"
"""In vLLM's cache: the digests of files that have been read."""

_FOREIGN_CODE: Final = re.compile(rb'"([\w.-]+/[\w.-]+)--[\w.]+"')


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why the facts may not determine what an engine computes.

    If `may_be_vouched_for`, `model_version` of a tier stands for what could not be read.
    """

    text: str
    may_be_vouched_for: bool = True


@dataclass(frozen=True, slots=True)
class Learned:
    """The facts in files by name, doubts about them, and a summary for the log."""

    facts: Mapping[str, str]
    doubts: tuple[Doubt, ...]
    summary: str


@dataclass(slots=True)
class NamespaceFacts:
    """All that the bytes of a rank's blocks depend on.

    Attributes:
        facts: by name; complete when the facts of files have been taken.
        doubts: likewise; none if the facts determine what the engine computes.
        places: of files that count, by name.
        required: names of places without which the facts do not determine what it computes.
    """

    facts: dict[str, str]
    doubts: tuple[Doubt, ...] = ()
    places: Mapping[str, ModelPlace] = field(default_factory=dict)
    required: Set[str] = frozenset()

    def facts_of(self, tier: TierConfig) -> MutableMapping[str, str]:
        """Return the facts of the namespace in a tier; they grow with `facts`."""
        words = {"namespace": tier.namespace, "model_version": tier.model_version}
        return ChainMap(words, self.facts)

    def doubts_of(self, tier: TierConfig) -> tuple[str, ...]:
        """Return why a tier's objects cannot be shared with other engines or later starts."""
        is_vouched_for = bool(tier.model_version)
        return tuple(
            doubt.text for doubt in self.doubts if not (is_vouched_for and doubt.may_be_vouched_for)
        )

    def learn(self, is_cancelled: Callable[[], bool]) -> Learned | None:
        """Return the facts in the files, None if cancelled; takes as long as reading them."""
        begin_s = time.monotonic()
        digests = FileDigests(os.path.join(engine_config.cache_root(), KEPT_FOLDER))
        facts: dict[str, str] = {}
        doubts: list[Doubt] = []
        num_files = size_bytes = read_bytes = 0
        for name, place in self.places.items():
            found = digests.digest(place, is_cancelled)
            if found is None:
                return None
            facts[f"files.{name}"] = found.digest
            # Vouching for absent files does not cover local ones that have changed.
            is_here = bool(found.digest)
            if is_here or name in self.required:
                doubts += [Doubt(text, may_be_vouched_for=not is_here) for text in found.doubts]
            num_files += found.num_files
            size_bytes += found.size_bytes
            read_bytes += found.read_bytes
        seconds = time.monotonic() - begin_s
        summary = (
            f"{num_files} files of the model, {format_bytes(size_bytes)}, "
            f"{format_bytes(read_bytes)} of them read in {seconds:.1f} s"
        )
        return Learned(facts, tuple(doubts), summary)

    def take(self, learned: Learned) -> None:
        """Complete the facts."""
        self.facts |= learned.facts
        self.doubts += learned.doubts

    def name_here(self, more: dict[str, str]) -> tuple[str, list[str]]:
        """Return a name that only engines computing the same bytes have, and doubts about that.

        All ranks of an engine get the same name. `more` are facts beside those of the namespace. No
        file is read: on one machine, the identity of a file and the kernel's time of its last
        change determine its content as well as a digest does elsewhere.
        """
        since_ns = process_started_ns()
        all_facts = {name: fact for name, fact in self.facts.items() if name != "rank"} | more
        doubts = [doubt.text for doubt in self.doubts]
        for name, place in self.places.items():
            _, files, found = find_files(place, since_ns)
            try:
                stamps = {file: stamp_of(os.stat(path)) for file, path in sorted(files.items())}
            except OSError as error:
                stamps, found = {}, [*found, f"files of {place.name!r} cannot be seen: {error}"]
            all_facts[f"files.{name}"] = repr(stamps)
            if files or name in self.required:
                doubts += found
                new = [file for file, stamp in stamps.items() if stamp[-1] > since_ns]
                doubts += [f"{file!r} changed after this process started" for file in new[:1]]
        return hashlib.sha256(repr(sorted(all_facts.items())).encode()).hexdigest()[:32], doubts


def namespace_facts_of(
    vllm_config: Any, kv_cache_config: Any, geometry: Geometry, copy_rank: int
) -> NamespaceFacts:
    """Return all that the blocks of a rank depend on; the model must have been loaded.

    `copy_rank` is the first of the ranks that hold the same blocks.
    """
    facts, named, unclear = engine_facts(vllm_config, engine_config.variable_names())
    doubts = [Doubt(f"{path} cannot be compared with another engine's") for path in unclear]
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        text = "its KV scales follow from the first requests that it serves"
        doubts.append(Doubt(text, may_be_vouched_for=False))
    layers = specs.layer_segments(kv_cache_config)
    places = sorted({(layer, *_place(geometry, segment)) for layer, segment in layers})
    names = dict.fromkeys(layer for layer, *_ in places)
    attention = engine_config.layer_facts(vllm_config, names)
    facts |= {
        "model": facts["model_config.model"].strip('"'),
        "model_runner": "V2" if engine_config.uses_v2_model_runner(vllm_config) else "V1",
        "rank": f"{copy_rank}",
        "groups": "; ".join(repr(each.kv_cache_spec) for each in kv_cache_config.kv_cache_groups),
        "block_sizes": f"{specs.resolve_block_sizes(kv_cache_config, vllm_config)}",
        "slot_bytes": f"{geometry.slot_bytes}",
        "layers": "; ".join(f"{name}: {attention[name]}" for name in names),
        "layout": "; ".join(f"{layer} {at}+{length}" for layer, at, length in places),
    }
    files, required = _model_places(vllm_config)
    files |= {field: ModelPlace(path) for field, path in named.items()}
    return NamespaceFacts(facts, tuple(doubts), files, required)


def _model_places(vllm_config: Any) -> tuple[dict[str, ModelPlace], set[str]]:
    """Return the places whose files count, and those that must be there.

    Weights are downloaded to `download_dir`, all else to the default cache of the hub.
    """
    load = vllm_config.load_config
    models = {"model": vllm_config.model_config}
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None:
        models["draft_model"] = draft
    places: dict[str, ModelPlace] = {}
    required = set()
    for name, config in models.items():
        revision = _commit_of(config.revision)
        tokenizer_revision = _commit_of(config.tokenizer_revision)
        weights = getattr(config, "model_weights", "") or config.model
        found = {
            f"{name}.weights": ModelPlace(weights, revision, load.download_dir),
            name: ModelPlace(config.model, revision),
            f"{name}.tokenizer": ModelPlace(config.tokenizer, tokenizer_revision),
        }
        if f"{load.load_format}".lower() != DUMMY_WEIGHTS:
            required.add(f"{name}.weights")
        for code in _code_repositories(found[name]) if config.trust_remote_code else ():
            found[f"{name}.code.{code}"] = ModelPlace(code, _commit_of(config.code_revision))
            required.add(f"{name}.code.{code}")
        for key, place in found.items():
            if place.name and place not in places.values():
                places[key] = place
    return places, required & set(places)


def _commit_of(revision: str | None) -> str | None:
    """Return the commit of a revision if vLLM has resolved it (0.32, repo_utils.py)."""
    return getattr(revision, "resolved", None) or revision


def _code_repositories(place: ModelPlace) -> list[str]:
    """Return the other repositories whose code the configurations of a model name."""
    found: set[bytes] = set()
    for name, path in find_files(place, since_ns=0)[1].items():
        if name.endswith("config.json") and os.path.isfile(path):
            with contextlib.suppress(OSError):
                found.update(_FOREIGN_CODE.findall(Path(path).read_bytes()))
    return sorted(name.decode() for name in found)


def _place(geometry: Geometry, segment: Segment) -> tuple[int, int]:
    """Return the offset of a segment in a slot, and its length, both in bytes."""
    at = 0
    for joined in geometry.segments:
        inside = segment.offset_bytes - joined.offset_bytes
        fits = 0 <= inside <= joined.length_bytes - segment.length_bytes
        if fits and joined.stride_bytes == segment.stride_bytes:
            return at + inside, segment.length_bytes
        at += joined.length_bytes
    raise AssertionError(f"{segment} is in no block")
