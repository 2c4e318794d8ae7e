"""Real engines that three tenants chat with while a fourth floods them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.tiny_models import write_tiny_model
from safe_offload.tiers.naming import HEADER_BYTES
from tests.engine.engines import (
    Job,
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
    """They find theirs after a restart, although ten times the directory was stored after it."""
    model = write_tiny_model("llama", tmp_path / "llama")
    tenants = {"tenants": write_tenants(tmp_path)}
    flood = tuple(f"flood {index}" for index in range(NUM_ROUNDS * NUM_FLOODS))

    def jobs(*turns: str) -> list[Job]:
        tiers = [
            tier_at(tmp_path / name, capacity=CAPACITY_BYTES) for name in ("divided", "shared")
        ]
        more = {"prefix_caching_hash_algo": "sha256_cbor"}
        return [
            make_turns(model, turns, {"tiers": [tier], **extra}, **more)
            for tier, extra in zip(tiers, (tenants, {}), strict=True)
        ]

    firsts = run(tmp_path / "first", *jobs(*CHATTING, *flood))
    object_bytes = HEADER_BYTES + firsts[0].count("capacity_bytes") / NUM_SLOTS
    num_blocks = len(flood) * (NUM_TOKENS // BLOCK_SIZE)  # on a slow disk some are dropped
    assert num_blocks * object_bytes > 10 * CAPACITY_BYTES
    divided, shared = run(tmp_path / "second", *jobs(*CHATTING))
    assert [each.num_host for each in divided.answers] == [num_hit_tokens(NUM_TOKENS)] * 3
    assert [each.num_host for each in shared.answers] == [0] * 3
    assert divided.tokens == shared.tokens
    for report in (*firsts, divided, shared):
        report.check_well()
        for piece in ("5ecret", "9f1c07aa"):
            assert piece not in report.log + json.dumps(report.data), "no salt is shown"
