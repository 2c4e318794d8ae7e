"""The name of the bytes of a rank's blocks on this machine, without reading the model's files.

On one machine, the identity of a file and the kernel's time of its last change determine its
content as well as a digest does elsewhere.
"""

from __future__ import annotations

import hashlib
import os

from safe_offload.started import process_started_ns
from safe_offload.tiers.namespace.model_files import find_files, stamp_of
from safe_offload.tiers.namespace.namespace_facts import NamespaceFacts


def name_here(facts: NamespaceFacts, more: dict[str, str]) -> tuple[str, list[str]]:
    """Return a name that only engines computing the same bytes have, and doubts about that.

    All ranks of an engine get the same name. `more` are facts beside those of the namespace.
    """
    since_ns = process_started_ns()
    all_facts = {name: fact for name, fact in facts.facts.items() if name != "rank"} | more
    doubts = [doubt.text for doubt in facts.doubts]
    for name, place in facts.places.items():
        _, files, found = find_files(place, since_ns)
        try:
            stamps = {file: stamp_of(os.stat(path)) for file, path in sorted(files.items())}
        except OSError as error:
            stamps, found = {}, [*found, f"files of {place.name!r} cannot be seen: {error}"]
        all_facts[f"files.{name}"] = repr(stamps)
        if files or name in facts.required:
            doubts += found
            new = [file for file, stamp in stamps.items() if stamp[-1] > since_ns]
            doubts += [f"{file!r} changed after this process started" for file in new[:1]]
    return hashlib.sha256(repr(sorted(all_facts.items())).encode()).hexdigest()[:32], doubts
