"""A real server on a machine whose copies are wrong: it serves, and the host cache is not used."""

import asyncio
import json

from tests.engine.clients import ask_baseline
from tests.engine.engines import make_prompts
from tests.engine.http_server import HttpServer

FAULTS = {"fail": 0.0, "stall": 0.0, "seed": 1, "corrupt": True}


def test_where_every_copy_is_wrong_requests_are_served_and_nothing_is_stored(model, tmp_path):
    config = {"kv_connector": "SafeCPUOffloadConnector"}
    environment = {"COPY_FAULTS": json.dumps(FAULTS)}
    prompts = make_prompts(321, "AB")
    with HttpServer(
        model("llama"), tmp_path, num_blocks=60, config=config, environment=environment
    ) as server:
        server.wait_until_healthy()
        answers = [
            asyncio.run(ask_baseline(server, list(prompts.values()), num_tokens=4))
            for _ in range(2)
        ]
        metrics = server.metrics()
        assert server.is_healthy()
        log = server.log()
    assert [a.tokens for a in answers[0]] == [a.tokens for a in answers[1]]
    assert metrics["vllm:safe_offload_is_disabled"] == 1
    assert metrics["vllm:safe_offload_stored_blocks_total"] == 0
    assert metrics["vllm:safe_offload_hit_tokens_total"] == 0
    assert metrics["vllm:safe_offload_contained_errors_total"] == 0
    assert "No copy path passed the self-test" in log
    assert "Rank 0 can no longer copy: no copy path passed the self-test." in log
