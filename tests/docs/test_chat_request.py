"""Chat requests have the length asked for, by the count of the server's own tokenizer."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pydoc_data.topics import topics
from typing import Any

import pytest

from examples.chat_request import make_chat_request
from safe_offload.errors import SafeOffloadError

NUM_TEMPLATE_TOKENS = 11


class TokenizingServer(BaseHTTPRequestHandler):
    """Counts one token for every three characters, and a chat template."""

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = body["messages"][0]["content"]
        self.answer({"count": NUM_TEMPLATE_TOKENS + len(content) // 3})

    def answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), TokenizingServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def make(url: str, num_tokens: int, text: str = "0", question: str = "") -> dict[str, Any]:
    request: dict[str, Any] = json.loads(
        make_chat_request(
            url, num_tokens=num_tokens, num_answer_tokens=7, text=text, question=question
        )
    )
    return request


def content_of(request: dict[str, Any]) -> str:
    content: str = request["messages"][0]["content"]
    return content


@pytest.mark.parametrize("num_tokens", [500, 90_000])
def test_a_prompt_has_the_tokens_asked_for_and_its_seed_s_first_word(url, num_tokens):
    requests = [make(url, num_tokens, seed) for seed in "01"]
    first, second = (content_of(request) for request in requests)
    assert 0.99 * num_tokens <= NUM_TEMPLATE_TOKENS + len(first) // 3 <= num_tokens
    assert first.split()[0] != second.split()[0]
    expected = {"model": "tiny", "max_tokens": 7, "temperature": 0, "ignore_eos": True}
    assert requests[0].items() >= (expected | {"stream": True}).items()


def test_a_page_is_asked_about_and_the_answer_is_a_paragraph(url):
    request = make(url, 4000, "debugger", "How do I set a breakpoint?")
    content = content_of(request)
    assert content.startswith(topics["debugger"].lstrip()[:1000])
    assert content.endswith("\n\nHow do I set a breakpoint?")
    assert 0.99 * 4000 <= NUM_TEMPLATE_TOKENS + len(content) // 3 <= 4000
    assert (request["ignore_eos"], request["stop"]) == (False, ["\n\n"])


def test_a_prompt_shorter_than_the_chat_template_is_an_error(url):
    with pytest.raises(SafeOffloadError, match="no prompt of 5 tokens"):
        make(url, 5)
