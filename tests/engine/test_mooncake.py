"""Real engines that share a Mooncake Store: what one has computed, another one answers."""

import threading
import time

import pytest

from tests.engine.engines import connector, make_prompts
from tests.engine.http_server import HttpServer
from tests.mooncake_server import Master, find_master

pytestmark = pytest.mark.skipif(
    find_master() is None, reason="Mooncake is not installed: make servers"
)


class Load(threading.Thread):
    """Asks servers for long prompts in turns; answers of the same prompt must be the same."""

    def __init__(self, servers: list[HttpServer]) -> None:
        super().__init__()
        self.servers = servers
        self.answers: dict[str, list[int]] = {}
        self.num_answers = 0
        self.problems: list[str] = []
        self.is_over = False
        self._prompts = make_prompts(641, "ABCDEF")

    def run(self) -> None:
        while not self.is_over:
            for name, prompt in self._prompts.items():
                for server in list(self.servers):
                    self.ask(server, name, prompt)

    def ask(self, server: HttpServer, name: str, prompt: list[int]) -> None:
        try:
            answer = server.ask(prompt)
        except OSError as error:
            if server in self.servers:  # else it has been killed meanwhile
                self.problems.append(f"{name}: {error}")
            return
        self.num_answers += 1
        if self.answers.setdefault(name, answer) != answer:
            self.problems.append(f"{name}: {answer} after {self.answers[name]}")

    def wait_for_rounds(self, count: int) -> None:
        """Let it ask for every prompt some times more."""
        end = self.num_answers + count * len(self._prompts) * len(self.servers)
        while self.num_answers < end and self.is_alive():
            time.sleep(0.05)


@pytest.mark.nightly
def test_answers_go_on_while_a_master_and_an_engine_are_restarted(model, tmp_path):
    """The first engine gives the store its memory."""
    with Master(tmp_path / "mooncake", client_ttl="3") as master:
        tier = {"url": master.url}
        servers = [
            HttpServer(
                model("llama"),
                tmp_path / name,
                num_blocks=40,
                config=connector(60, tiers=[tier | more]),
            )
            for name, more in (("first", {"segment": "64MiB"}), ("second", {}))
        ]
        first, second = servers
        with first, second:
            for server in servers:
                server.wait_until_healthy()
            load = Load(servers)
            load.start()
            try:
                load.wait_for_rounds(3)
                read_before = second.count("tier_read_objects")
                master.kill()
                load.wait_for_rounds(2)
                master.start()
                load.wait_for_rounds(2)
                servers.remove(first)
                first.kill()
                load.wait_for_rounds(3)
                first.start()
                first.wait_until_healthy()
                servers.append(first)
                load.wait_for_rounds(4)
            finally:
                load.is_over = True
                load.join()
            assert load.problems == []
            assert read_before > 0, "the second engine read what the first had written"
            for server in servers:
                for name in ("contained_errors", "transfer_failures", "checksum_mismatches"):
                    assert server.count(name) == 0, name
