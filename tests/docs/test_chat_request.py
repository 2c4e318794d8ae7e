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


@pytest.fixture
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


@pytest.mark.parametrize("num_tokens", [500, 16_000, 90_000])
def test_a_prompt_has_the_tokens_asked_for(url, num_tokens):
    found = NUM_TEMPLATE_TOKENS + len(content_of(make(url, num_tokens))) // 3
    assert 0.99 * num_tokens <= found <= num_tokens


def test_the_request_is_greedy_streamed_and_of_a_known_length(url):
    request = make(url, 500)
    assert request["model"] == "tiny"
    assert (request["max_tokens"], request["temperature"], request["ignore_eos"]) == (7, 0, True)
    assert request["stream"] is True


def test_prompts_of_different_seeds_differ_from_the_first_word_on(url):
    first, second = (content_of(make(url, 500, seed)).split() for seed in "01")
    assert first[0] != second[0]


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
