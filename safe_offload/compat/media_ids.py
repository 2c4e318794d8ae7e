"""Distinguishes ids of media that vLLM computed from content from ids that a client chose.

Block hashes include the ids of images, audio and video. A client may choose an id (`uuid`,
`multi_modal_uuids`, `mm_hashes`) that looks like a hash. The API server's process therefore marks
the ids that vLLM computes from content, and prefixes every other id that looks like one.

Source: vLLM 0.32.0, vllm/multimodal/processing/inputs.py, vllm/v1/engine/input_processor.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from safe_offload.compat.wrapping import is_wrapped, wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CHOSEN: Final = "chosen:"
_CONTENT: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
_HASHES: Final = "get_mm_hashes"
_REQUESTS: Final = "process_inputs"


class ContentId(str):
    """An id that vLLM computed from the content, within the API server's process."""

    __slots__ = ()


def tells_content(identifier: str) -> bool:
    """Return whether an id, as it reaches the engine, was computed from the content."""
    return _CONTENT.fullmatch(identifier) is not None


def wrap_hashes(inputs_class: Any) -> None:
    """Let vLLM's ProcessorInputs mark the ids that it computes from content."""

    def around(get: Callable[..., Any], inputs: Any, /, *args: Any, **kwargs: Any) -> Any:
        found: Mapping[str, list[str]] = get(inputs, *args, **kwargs)
        given = inputs.mm_uuid_items or {}
        marked = {}
        for modality, ids in found.items():
            chosen = given.get(modality) or [None] * len(ids)
            pairs = zip(ids, chosen, strict=True)
            marked[modality] = [ContentId(i) if own is None else i for i, own in pairs]
        return marked

    wrap(inputs_class, _HASHES, around)


def wrap_requests(processor_class: Any) -> None:
    """Let vLLM's InputProcessor prefix chosen ids, unless encoders run elsewhere."""

    def around(process: Callable[..., Any], processor: Any, /, *args: Any, **kwargs: Any) -> Any:
        request = process(processor, *args, **kwargs)
        is_alone = processor.vllm_config.ec_transfer_config is None
        for feature in request.mm_features or ():
            i = feature.identifier
            is_false = is_alone and tells_content(i) and not isinstance(i, ContentId)
            # Plain strings again: vLLM's messages do not accept subclasses.
            feature.identifier = CHOSEN + i if is_false else str(i)
            feature.mm_hash = feature.mm_hash and str(feature.mm_hash)
        return request

    wrap(processor_class, _REQUESTS, around)


def tells_media_ids(vllm_config: VllmConfig) -> bool:
    """Return whether `tells_content` can be trusted for the requests of this engine."""
    if vllm_config.ec_transfer_config is not None:
        return False
    if not vllm_config.model_config.is_multimodal_model:
        return False
    from vllm.multimodal.processing.inputs import ProcessorInputs
    from vllm.v1.engine.input_processor import InputProcessor

    # Wrapped here, hence in the API server too: all processes of an engine load the same plugins.
    methods = (ProcessorInputs, _HASHES), (InputProcessor, _REQUESTS)
    return all(is_wrapped(*method) for method in methods)
