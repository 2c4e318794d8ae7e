"""Real engines that three tenants chat with while a fourth floods them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.tiny_models import write_tiny_model
from safe_offload.tiers.naming import HEADER_BYTES
from tests.engine.engines import (
    Job,
    Report,
    connector,
    make_job,
    make_prompts,
    num_hit_tokens,
    run,
    tier_at,
)

NUM_TOKENS, NUM_SLOTS, BLOCK_SIZE = 320, 60, 32
CAPACITY_BYTES = 2 << 20
NUM_ROUNDS, NUM_FLOODS = 3, 20  # in each round; all of them are ten times the host and more
CHATTING = "ABC"
SALT = "5ecret-{}-9f1c07aa"
GUARANTEED = {
    f"chat-{name}": {"share": "25%", "prefix": SALT.format(name)[:10]} for name in CHATTING
}


def write_tenants(folder: Path) -> str:
    file = folder / "tenants.json"
    file.write_text(json.dumps({"default": "10%", "guaranteed": GUARANTEED}))
    return str(file)


def make_turns(model: Path, turns: tuple[str, ...], extra: dict[str, Any], **more: Any) -> Job:
    """Each prompt with the salt of who chats, or of the flood."""
    prompts = {
        name: {"tokens": tokens, "salt": SALT.format(name if name in CHATTING else "flood")}
        for name, tokens in make_prompts(NUM_TOKENS, dict.fromkeys(turns)).items()
    }
    made = make_job(
        model,
        connector(NUM_SLOTS, **extra),
        num_blocks=24,
        num_prompt_tokens=NUM_TOKENS,
        block_size=BLOCK_SIZE,
        turns=turns,
        **more,
    )
    return replace(made, prompts=prompts)


def test_a_flood_takes_nothing_of_a_directory_from_those_that_chat(tmp_path: Path):
    """They find theirs after a restart, although ten times the directory was stored after it.

    Without shares it takes all (tests/tiers/files/test_shares.py).
    """
    model = write_tiny_model("llama", tmp_path / "llama")
    tier = tier_at(tmp_path / "divided", capacity=CAPACITY_BYTES)
    extra = {"tiers": [tier], "tenants": write_tenants(tmp_path)}
    flood = tuple(f"flood {index}" for index in range(NUM_ROUNDS * NUM_FLOODS))

    def answered(name: str, *turns: str) -> Report:
        job = make_turns(model, turns, extra, prefix_caching_hash_algo="sha256_cbor")
        return run(tmp_path / name, job)[0]

    first = answered("first", *CHATTING, *flood)
    object_bytes = HEADER_BYTES + first.count("capacity_bytes") / NUM_SLOTS
    num_blocks = len(flood) * (NUM_TOKENS // BLOCK_SIZE)  # on a slow disk some are dropped
    assert num_blocks * object_bytes > 10 * CAPACITY_BYTES
    second = answered("second", *CHATTING)
    assert [each.num_host for each in second.answers] == [num_hit_tokens(NUM_TOKENS)] * 3
    assert second.tokens == first.tokens[:3]
    for report in (first, second):
        report.check_well()
        for piece in ("5ecret", "9f1c07aa"):
            assert piece not in report.log + json.dumps(report.data), "no salt is shown"
