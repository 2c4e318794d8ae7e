"""An engine over two machines, here two servers on loopback, each with a directory of its own."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine import http_server
from tests.engine.children.engine import force_prefix_caching
from tests.engine.engines import EVERY_HIT, make_prompts, num_hit_tokens, tier_at
from tests.engine.http_server import HttpServer, find_free_port

pytestmark = pytest.mark.nightly

NUM_TOKENS = 641
NUM_HIT = num_hit_tokens(NUM_TOKENS)
PROMPTS = make_prompts(NUM_TOKENS, "ABC")
NUM_OBJECTS = 3 * NUM_HIT // 32
NOTICE = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60"}
"""After which vLLM ends an engine that has lost a rank; 300 by default."""


class Node(HttpServer):
    """One machine; of the second `vllm serve --headless`, which has no front."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._run = _run_node


def _run_node(arguments: list[str], folder: Path) -> None:
    if "CPU_MLA" in arguments:
        force_prefix_caching()
    if "--headless" not in arguments:
        http_server._run_fork(arguments, folder)
        return
    http_server._end_with_the_test()
    os.chdir(folder)
    from vllm.entrypoints.cli.serve import ServeSubcommand

    from safe_offload.compat.versions import make_serve_parser

    ServeSubcommand.cmd(make_serve_parser().parse_args(arguments))


@dataclass
class Engine:
    """Both servers, and what a prompt was answered with."""

    nodes: tuple[HttpServer, HttpServer]

    @property
    def front(self) -> HttpServer:
        return self.nodes[0]

    def ask(self, names: str) -> list[list[int]]:
        answers = [self.front.ask(PROMPTS[name], 8) for name in names]
        self.front.settle()
        return answers

    def num_hit(self) -> float:
        return self.front.count("hit_tokens")


@contextlib.contextmanager
def engine(
    model: Path,
    folder: Path,
    tiers: list[Path],
    *,
    num_blocks: int = 35,
    arguments: tuple[str, ...] = (),
) -> Iterator[Engine]:
    """Two nodes with a rank each; `tiers`: the directory of each."""
    folder.mkdir()
    address = ("--master-addr", "127.0.0.1", "--master-port", str(find_free_port()))
    nodes = []
    with contextlib.ExitStack() as stack:
        for rank, directory in enumerate(tiers):
            config = {
                "kv_connector": "SafeCPUOffloadConnector",
                "kv_connector_extra_config": {
                    "num_cpu_blocks": 300,
                    "check_invariants": True,
                    "tiers": [tier_at(directory)],
                    **EVERY_HIT,
                },
            }
            layout = ("-tp", "2", "--nnodes", "2", "--node-rank", str(rank), *address)
            executor = ("--distributed-executor-backend", "mp", *("--headless",) * rank)
            hashes = ("--prefix-caching-hash-algo", "sha256_cbor")
            node = Node(
                model,
                folder / f"node {rank}",
                num_blocks=num_blocks,
                config=config,
                arguments=(*layout, *executor, *hashes, *arguments),
                environment=NOTICE,
            )
            nodes.append(stack.enter_context(node))
        made = Engine((nodes[0], nodes[1]))
        made.front.wait_until_healthy()
        yield made


@pytest.fixture(scope="module")
def stored(model, tmp_path_factory):
    """What a first engine has answered and left in the directories of its nodes."""
    folder = tmp_path_factory.mktemp("nodes")
    tiers = [folder / "disk 0", folder / "disk 1"]
    with engine(model("llama"), folder / "first", tiers) as first:
        answers = first.ask("ABC")
        assert first.num_hit() == 0
        first.front.wait_for(
            lambda: all(count_objects(tier) == NUM_OBJECTS for tier in tiers), "all to be written"
        )
    return answers, tiers


def count_objects(tier: Path) -> int:
    return sum(path.is_file() and path.name != "namespace.json" for path in tier.glob("*/**/*"))


def test_after_a_restart_each_node_reads_its_own_disk(stored, model, tmp_path):
    answers, tiers = stored
    with engine(model("llama"), tmp_path / "again", tiers) as again:
        assert again.ask("ABC") == answers
        assert again.num_hit() == 3 * NUM_HIT
        assert again.front.count("tier_read_objects") == 2 * NUM_OBJECTS
        assert "one copy for 2 ranks" not in again.front.log()


def test_a_killed_node_ends_the_engine_and_the_next_finds_everything(stored, model, tmp_path):
    answers, tiers = stored
    with engine(model("llama"), tmp_path / "killed", tiers) as killed:
        assert killed.ask("A") == answers[:1]
        killed.nodes[1].kill()
        with contextlib.suppress(OSError):  # an error, or nothing listens any more
            pytest.fail(f"an answer without the second rank: {killed.front.ask(PROMPTS['B'], 8)}")
        killed.front.wait_for_end()
    with engine(model("llama"), tmp_path / "next", tiers) as after:
        assert after.ask("ABC") == answers
        assert after.num_hit() == 3 * NUM_HIT


def test_ranks_of_mla_on_two_machines_keep_a_copy_each(model, tmp_path):
    """On a CPU what follows a hit is rounded in another way than what follows none."""
    tiers = [tmp_path / "disk 0", tmp_path / "disk 1"]
    mla = ("--attention-backend", "CPU_MLA", "--max-num-batched-tokens", "2048")
    with engine(
        model("deepseek"), tmp_path / "engine", tiers, num_blocks=70, arguments=mla
    ) as made:
        made.ask("ABC")
        assert made.num_hit() == 0
        from_host = made.ask("ABC")
        num_hit = made.num_hit()
        assert num_hit > 0
        assert made.ask("ABC") == from_host
        assert made.num_hit() == 2 * num_hit
        assert "one copy for 2 ranks" not in made.front.log()
        assert count_objects(tiers[0]) == count_objects(tiers[1]) > 0
