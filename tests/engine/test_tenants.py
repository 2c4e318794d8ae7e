"""Real engines that three tenants chat with while a fourth floods them."""

import json
from dataclasses import replace
from pathlib import Path

from examples.tiny_models import write_tiny_model
from tests.engine.engines import Report, connector, make_job, make_prompts, num_hit_tokens, run

NUM_TOKENS, NUM_SLOTS, BLOCK_SIZE = 320, 60, 32
NUM_ROUNDS, NUM_FLOODS = 3, 20  # in each round; all of them are ten times the host and more
CHATTING = "ABC"
SALT = "5ecret-{}-9f1c07aa"
GUARANTEED = {
    f"chat-{name}": {"share": "25%", "prefix": SALT.format(name)[:10]} for name in CHATTING
}


def chat_rates(report: Report, turns: tuple[str, ...]) -> list[float]:
    """Of what each prompt of those that chat could hit, how much it did, from the second on."""
    answers = zip(turns, report.answers, strict=True)
    found = [answer.num_gpu + answer.num_host for turn, answer in answers if turn in CHATTING]
    return [num / num_hit_tokens(NUM_TOKENS) for num in found[len(CHATTING) :]]


def test_a_flood_takes_nothing_from_those_that_chat(tmp_path: Path):
    """And no salt is in anything that the engine prints or counts."""
    model = write_tiny_model("llama", tmp_path / "llama")
    file = tmp_path / "tenants.json"
    file.write_text(json.dumps({"default": "10%", "guaranteed": GUARANTEED}))
    names = [f"flood {index}" for index in range(NUM_ROUNDS * NUM_FLOODS)]
    turns: tuple[str, ...] = tuple(CHATTING)
    for first in range(0, len(names), NUM_FLOODS):
        turns += (*names[first : first + NUM_FLOODS], *CHATTING)
    prompts = {
        name: {"tokens": tokens, "salt": SALT.format(name if name in CHATTING else "flood")}
        for name, tokens in make_prompts(NUM_TOKENS, [*CHATTING, *names]).items()
    }
    assert len(names) * NUM_TOKENS >= 10 * NUM_SLOTS * BLOCK_SIZE

    def job(**extra: str):
        made = make_job(
            model,
            connector(NUM_SLOTS, **extra),
            num_blocks=24,
            num_prompt_tokens=NUM_TOKENS,
            block_size=BLOCK_SIZE,
            turns=turns,
        )
        return replace(made, prompts=prompts)

    divided, shared = run(tmp_path, job(tenants=str(file)), job())
    assert min(chat_rates(divided, turns)) >= 0.95
    assert max(chat_rates(shared, turns)) == 0
    assert divided.tokens == shared.tokens
    assert divided.count("tenant_hit_tokens") == divided.count("hit_tokens") > 0
    assert divided.count("tenant_guaranteed_bytes") > 0
    for piece in ("5ecret", "9f1c07aa"):
        assert piece not in divided.log
        assert piece not in json.dumps(divided.data)
    divided.check_well()
