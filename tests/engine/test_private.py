"""Real engines that share a directory, and mean other things by the same names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.engine.engines import Job, connector, make_job, make_prompts, run, tier_at
from tests.tiny_vision import IMAGE_ID, NUM_IMAGE_TOKENS, write_tiny_vision_model

NUM_TOKENS, NUM_BEFORE, BLOCK_SIZE = 129, 40, 32
FLAT = {"do_normalize": False}
HASH = "5e" * 32
CHOSEN: dict[str, dict[str, Any]] = {
    "A": {"uuid": "logo"},
    "B": {"uuid": "logo", "kwargs": FLAT},  # which vLLM makes a hash of
    "C": {"uuid": HASH},
}
CONTENT: dict[str, dict[str, Any]] = {
    "D": {"image": 3},
    "E": {"image": 3, "kwargs": FLAT},
    "F": {"image": 3, "uuid": None},
}


def prompts(image: int) -> dict[str, dict[str, Any]]:
    """Each with text of its own, and an image after the first block."""
    found = {}
    for name, tokens in make_prompts(NUM_TOKENS, "ABCDEF").items():
        tokens[NUM_BEFORE] = IMAGE_ID
        found[name] = {"tokens": tokens, "image": image, **CHOSEN.get(name, {})}
        found[name] |= CONTENT.get(name, {})
    found["only the uuid of A"] = {**found["A"], "image": None}
    return found


def job(model: Path, image: int, tier: Path | None) -> Job:
    tiers = {"tiers": [tier_at(tier)]} if tier is not None else {}
    made = make_job(
        model,
        num_blocks=100,
        num_prompt_tokens=2 * NUM_TOKENS,
        kv_transfer_config=connector(**tiers),
        turns=(*CHOSEN, *CONTENT, "only the uuid of A"),
        prefix_caching_hash_algo="sha256_cbor",
    )
    return replace(made, prompts=prompts(image))


def test_a_uuid_means_something_else_to_another_engine(tmp_path):
    """Client A's "logo" is image 1, client B's is image 2: B's answers are those without a tier.

    What has no uuid, or none of a client's, still comes from the tier.
    """
    model = write_tiny_vision_model(tmp_path / "model")
    tier = tmp_path / "tier"
    one, plain = run(tmp_path / "one", job(model, 1, tier), job(model, 2, None))
    (other,) = run(tmp_path / "other", replace(job(model, 2, tier), in_process=False))
    assert other.tokens == plain.tokens
    assert one.tokens[:3] != plain.tokens[:3], "the image decides the answer"
    num_before = NUM_BEFORE // BLOCK_SIZE * BLOCK_SIZE
    num_all = (NUM_TOKENS + NUM_IMAGE_TOKENS) // BLOCK_SIZE * BLOCK_SIZE
    hits = [answer.num_host for answer in other.answers]
    assert hits[:3] == [num_before] * 3
    assert all(num_hit >= num_all for num_hit in hits[3:6]), hits
    assert other.tokens[6] == other.tokens[0]
    one.check_no_trouble()
    other.check_no_trouble()
