"""A request that leaves nothing, on real engines: its bytes are looked for everywhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import Job, Report, connector, make_job, run, tier_at
from tests.valkey_server import Server

NUM_TOKENS, NUM_SLOTS = 257, 200
NUM_NEEDLES = 8
OTHERS = ("B", "C", "D", "E")


def job(model: Path, tiers: list[dict[str, Any]], params: dict[str, Any], **extra: Any) -> Job:
    """A secret and a prompt that is none, then others until the GPU has neither any more.

    Each has tokens of its own, so that they are known again in events.
    """
    made = make_job(
        model,
        num_prompt_tokens=NUM_TOKENS,
        num_blocks=20,
        kv_transfer_config=connector(NUM_SLOTS, tiers=tiers, **extra),
        turns=("secret", "plain", *OTHERS),
        prefix_caching_hash_algo="sha256_cbor",
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    )
    prompts = {
        name: [40 * n + i * i % 40 for i in range(NUM_TOKENS)] for n, name in enumerate(made.turns)
    }
    return replace(made, prompts=prompts, options={"params": params})


@pytest.mark.parametrize("lazy", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_what_is_to_leave_nothing_is_in_no_memory_no_file_no_server_and_no_event(
    model, tmp_path, lazy
):
    """The same search finds all of a prompt that is stored, and of the secret without the field."""
    with Server(tmp_path / "one") as one, Server(tmp_path / "other") as other:
        places = (tmp_path / "files", one), (tmp_path / "more-files", other)
        jobs = []
        for (folder, server), params in zip(places, ({"store": "nothing"}, {}), strict=True):
            tiers = [tier_at(folder), tier_at(f"redis://{server.host_port}")]
            jobs.append(job(model("llama"), tiers, params, lazy_offload=lazy))
        reports = run(tmp_path / "engines", *jobs, child="leave_nothing")
        found = [found_in(*each) for each in zip(reports, places, strict=True)]
    everywhere, nowhere = (NUM_NEEDLES, NUM_NEEDLES, NUM_NEEDLES, True), (0, 0, 0, False)
    assert found == [
        {"secret": nowhere, "plain": everywhere},
        {"secret": everywhere, "plain": everywhere},
    ]
    assert reports[0].data["tokens"] == reports[1].data["tokens"]
    for report in reports:
        report.check_well()


def found_in(report: Report, place: tuple[Path, Server]) -> dict[str, tuple[int, int, int, bool]]:
    """How many blocks of a prompt are in memory, files and server; whether events tell of it."""
    folder, server = place
    client = server.client()
    files = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    values = b"".join(client.get(key) or b"" for key in client.keys("safe-offload:*"))
    found = {}
    for name in ("secret", "plain"):
        needles = [bytes.fromhex(needle) for needle in report.data["needles"][name]]
        num_files, num_values = (sum(n in where for n in needles) for where in (files, values))
        is_told = bool(report.data["in_events"][name])
        found[name] = report.data["in_memory"][name], num_files, num_values, is_told
    return found
