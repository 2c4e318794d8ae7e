"""Ids of media: which of them vLLM has made of content, on its own classes."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from PIL import Image
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs

from safe_offload.compat import media_ids
from safe_offload.start import plugin
from tests.tiny_vision import make_image

LOOKS_LIKE_A_HASH = "5e" * 32
FLAT = {"do_normalize": False}


@pytest.fixture(autouse=True)
def _wrapped():
    plugin.register()
    model = SimpleNamespace(is_multimodal_model=True)
    config: Any = SimpleNamespace(ec_transfer_config=None, model_config=model)
    assert media_ids.tells_media_ids(config)


class Answer:
    """vLLM's request, as far as it is looked at, and the configuration that it comes with."""

    def __init__(self, identifier: str) -> None:
        where = PlaceholderRange(offset=0, length=1)
        feature = MultiModalFeatureSpec(None, "image", identifier, where, identifier)
        self.mm_features = [feature]


def sent(
    image: Image.Image, *, algorithm: Any = "sha256", elsewhere: bool = False, **fields: Any
) -> str:
    """The id of an image as the engine gets it.

    `algorithm`: of vLLM's hashes; `elsewhere`: encoders run in another engine; `fields`: of
    `ProcessorInputs`.
    """
    items = MultiModalDataParser().parse_mm_data({"image": [image]})
    inputs = ProcessorInputs([1], items, **fields)
    return through(inputs.get_mm_hashes("model", algorithm)["image"][0], elsewhere=elsewhere)


def through(identifier: str, *, elsewhere: bool = False) -> str:
    """What becomes of an id in `InputProcessor.process_inputs`, and on its way to the engine."""

    class Processor:
        vllm_config = type("Config", (), {"ec_transfer_config": object() if elsewhere else None})

        def process_inputs(self) -> Answer:
            return Answer(identifier)

    media_ids.wrap_requests(Processor)
    (feature,) = Processor().process_inputs().mm_features
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(feature))
    assert received["mm_hash"] == identifier, "it finds what the processor has cached"
    return str(received["identifier"])


@pytest.mark.parametrize("fields", [{}, {"hf_processor_mm_kwargs": FLAT}], ids=str)
@pytest.mark.parametrize("uuids", [None, {}, {"image": [None]}], ids=str)
def test_what_vllm_makes_of_content_tells_it(fields, uuids):
    found = [sent(make_image(seed), mm_uuid_items=uuids, **fields) for seed in (1, 1, 2)]
    assert all(map(media_ids.tells_content, found))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("fields", [{}, {"hf_processor_mm_kwargs": FLAT}], ids=str)
@pytest.mark.parametrize("chosen", ["logo", LOOKS_LIKE_A_HASH, 2 * LOOKS_LIKE_A_HASH, "chosen:a"])
def test_what_a_client_chose_does_not(fields, chosen):
    uuids = {"image": [chosen]}
    found = [sent(make_image(seed), mm_uuid_items=uuids, **fields) for seed in (1, 2)]
    assert not any(map(media_ids.tells_content, found))
    assert found[0] == found[1], "in one engine it is still vLLM's rule"


def test_the_hash_of_another_image_is_no_way_to_it():
    found = sent(make_image(1))
    forged = sent(make_image(2), mm_uuid_items={"image": [str(found)]})
    assert forged != found
    assert not media_ids.tells_content(forged)
    assert not media_ids.tells_content(through(found)), "nor rendered elsewhere"


def test_ids_stay_as_they_are_where_another_engine_has_the_encoder():
    uuids = {"image": [LOOKS_LIKE_A_HASH]}
    assert sent(make_image(1), elsewhere=True, mm_uuid_items=uuids) == LOOKS_LIKE_A_HASH


@pytest.mark.parametrize("algorithm", ["sha256", "sha512", "blake3"])
def test_every_algorithm_of_vllm_is_known(algorithm):
    assert media_ids.tells_content(sent(make_image(1), algorithm=algorithm))
