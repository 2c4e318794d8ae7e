"""Chat requests of a given length in tokens, for whatever model a server serves.

Used by examples/long_context_back_to_back.sh: how many words make 90,000 tokens is known to the
model's tokenizer only, so the server is asked. The words are random, or a page of Python's own
documentation, with a question.
"""

import argparse
import json
import random
import re
import sys
import urllib.error
import urllib.request
from pydoc_data.topics import topics
from typing import Any

from safe_offload.errors import SafeOffloadError

_MAX_TRIES = 12
_HTTP_TIMEOUT_S = 120.0
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_chat_request(
    url: str, *, num_tokens: int, num_answer_tokens: int, text: str, question: str = ""
) -> str:
    """Return the JSON body of a streamed greedy chat request.

    Args:
        url: of the server, without a path.
        num_tokens: what the prompt has at most, chat template included; at least 99 % of it.
        num_answer_tokens: of the answer: exactly; with a question at most, in one paragraph.
        text: seed of random words: prompts of different seeds differ from the first word on. With
            a question: a page of Python's documentation, such as `debugger`.
        question: about the page.

    Raises:
        SafeOffloadError: the server does not answer, or no text of that length was found.
    """
    model = _call(f"{url}/v1/models")["data"][0]["id"]
    num_words, found = max(1, num_tokens // 4), 0
    for _ in range(_MAX_TRIES):
        content = _make_text(num_words, text)
        if question:
            content = f"{_read_page(num_words, text)}\n\n{question}"
        messages = [{"role": "user", "content": content}]
        found = _call(f"{url}/tokenize", {"model": model, "messages": messages})["count"]
        if 0.99 * num_tokens <= found <= num_tokens:
            request = {
                "model": model,
                "messages": messages,
                "max_tokens": num_answer_tokens,
                "temperature": 0,
                "ignore_eos": not question,
                "stop": ["\n\n"] if question else None,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            return json.dumps(request)
        # Aimed half a per cent low, so that a small error does not overshoot.
        num_words = max(1, int(num_words * 0.995 * num_tokens / found))
    raise SafeOffloadError(
        f"no prompt of {num_tokens} tokens after {_MAX_TRIES} tries; the last one had {found}. "
        "Ask for more tokens than the model's chat template alone has"
    )


def _read_page(num_words: int, name: str) -> str:
    """Return the first words of a page, with the white space between them."""
    return "".join(re.findall(r"\S+\s*", topics[name])[:num_words])


def _make_text(num_words: int, seed: str) -> str:
    """Return pseudo-words; a longer text of the same seed begins with the shorter one."""
    generator = random.Random(seed)
    return " ".join(
        "".join(generator.choices(_LETTERS, k=generator.randint(2, 9))) for _ in range(num_words)
    )


def _call(url: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON that the server answers, to a POST if there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        detail = error.read(500).decode(errors="replace")
        raise SafeOffloadError(f"{url}: HTTP {error.code}: {detail}") from error
    except OSError as error:
        raise SafeOffloadError(f"{url}: {error}") from error


def main() -> int:
    """Print a request: `chat_request.py URL NUM_TOKENS NUM_ANSWER TEXT [QUESTION]`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("num_tokens", type=int)
    parser.add_argument("num_answer_tokens", type=int)
    parser.add_argument("text")
    parser.add_argument("question", nargs="?", default="")
    arguments = parser.parse_args()
    try:
        request = make_chat_request(
            arguments.url,
            num_tokens=arguments.num_tokens,
            num_answer_tokens=arguments.num_answer_tokens,
            text=arguments.text,
            question=arguments.question,
        )
    except SafeOffloadError as error:
        print(f"chat_request: {error}", file=sys.stderr)
        return 1
    print(request)
    return 0


if __name__ == "__main__":
    sys.exit(main())
