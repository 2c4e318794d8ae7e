"""What the benchmark of connectors gives to vLLM's own, and makes of what agents had."""

import gzip
import json

import pytest

from safe_offload.commands.bench.engine import BenchOptions
from safe_offload.errors import ConfigError
from tests.benchmarks import agents_engine, agents_traces, connectors
from tests.simulator.peers import PeerEngine, peer_shape

BYTES = 1 << 20


@pytest.mark.parametrize("engine", connectors.PEERS)
def test_vllms_own_connectors_take_the_host_memory_that_is_asked_for(engine):
    """Both give it to `int`, and did not start with "16GiB"."""
    config = connectors.make_config(engine, BenchOptions(cpu_bytes="1MiB"))
    assert config is not None
    extra = config["kv_connector_extra_config"]
    assert extra == {"cpu_bytes_to_use": BYTES}
    assert PeerEngine(peer_shape(config["kv_connector"], extra=extra), 1)


RECORDED = {
    "requests": [
        [0.0, 0.0, 8.0, 2570, 90, [[1, 40]]],
        [408.0, 400.0, 4.0, 2570, 3, [[1, 36], [100, 4]]],
    ],
}
"""A prompt of 40 blocks, then one that shares the first 36 of them."""


def test_a_scaled_prompt_shares_a_block_if_all_its_blocks_were_shared(tmp_path):
    path = tmp_path / "recorded.json.gz"
    path.write_bytes(gzip.compress(json.dumps([RECORDED]).encode()))
    (recorded,) = agents_traces.read(path)
    conversation = agents_traces.scale(recorded, 4)
    first, second = conversation.requests
    assert first.block_ids == (4, 8, 12, 16, 20, 24, 28, 32, 36, 40)
    assert second.block_ids == (4, 8, 12, 16, 20, 24, 28, 32, 36, 103)
    assert (first.num_tokens, first.num_answer_tokens, second.num_answer_tokens) == (642, 22, 1)
    assert second.think_s == 75.0, "nobody thinks longer than 300 s"
    assert agents_traces.mean_context([conversation]) == 642
    for skip in (0, 1):
        (chosen,) = agents_traces.choose([recorded], 1, 5000, skip, 1, "0/1")
        assert chosen.requests == recorded.requests[skip : skip + 1]
    with pytest.raises(ConfigError, match=r"expected 1 conversations .* found 0"):
        agents_traces.choose([recorded], 1, 2000, 0, 1, "0/1")
    one, other = (agents_engine.to_turns(user, conversation) for user in ("2/1/0", "4/1/0"))
    block = agents_traces.BLOCK_TOKENS
    assert one[0][1][: 9 * block] == one[1][1][: 9 * block]
    assert one[0][1][: 9 * block] != other[0][1][: 9 * block]


def test_a_spoiled_block_that_changes_nothing_fails_the_run():
    samples = {"ours": {"hit": [1.0]}}
    assert connectors.Found(samples, {}, 0, (True, True)).is_good
    assert not connectors.Found(samples, {}, 0, (True, False)).is_good
    assert not connectors.Found(samples, {}, 1).is_good
    assert not connectors.Found({}, {}, 0).is_good
