"""What the requests of `python -m tests.benchmarks scheduler` are: fixed traces, drawn from a seed.

A trace is a number of users. Each sends a prompt, waits for the answer, pauses, and sends the next
one, so that what arrives when depends on the engine's steps and on nothing else.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

BLOCK_TOKENS = 16
VOCABULARY = 32_000
MAX_BATCHED_TOKENS = 8192
MAX_MODEL_LEN = 131_072
PLAIN = (f"full@{BLOCK_TOKENS}",)
WINDOW_TOKENS = 1024
HYBRID = (f"full@{BLOCK_TOKENS}", f"window:{WINDOW_TOKENS}@{BLOCK_TOKENS}")
WINDOW_BLOCKS_MAX = (WINDOW_TOKENS + MAX_BATCHED_TOKENS) // BLOCK_TOKENS
"""Of one request: the window, and what a step computes."""
LAYOUTS = {"plain": PLAIN, "hybrid": HYBRID}
QUICK_SHARE = 4
"""Of `--quick`; see `make_trace`."""

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a user."""

    token_ids: TokenIds  # what is new in the prompt
    num_answer_tokens: int  # how many are generated
    continues: bool  # the prompt begins with the previous prompt and its answer


@dataclass(frozen=True, slots=True)
class User:
    """Requests that follow each other."""

    name: str  # begins the ids of the requests
    arrival_step: int  # when the first is sent
    pause_steps: int  # from an answer to the next request
    turns: tuple[Turn, ...]  # the requests


@dataclass(frozen=True, slots=True)
class Trace:
    """What is served, and by how large an engine."""

    name: str  # of the trace and the layout of its KV cache
    groups: tuple[str, ...]  # see `EngineShape`
    num_blocks: int  # GPU blocks
    num_slots: int  # host slots
    max_seqs: int  # running at once
    users: tuple[User, ...]  # what they send
    max_batched_tokens: int = MAX_BATCHED_TOKENS  # computed in a step

    @property
    def num_requests(self) -> int:
        return sum(len(user.turns) for user in self.users)


class _Draw:
    """Random numbers that depend on the seed and on what they are for, not on what came before."""

    def __init__(self, *names: object) -> None:
        self._generator = random.Random("/".join(map(str, names)))

    def tokens(self, count: int) -> TokenIds:
        return tuple(self._generator.choices(range(VOCABULARY), k=count))

    def number(self, low: int, high: int) -> int:
        return self._generator.randint(low, high)


def make_trace(name: str, layout: str, *, seed: int = 0, share: int = 1) -> Trace:
    """Return a trace, the same on every machine; `share` divides users, prompts and pool."""
    pool_blocks, num_slots, max_seqs, users = TRACES[name](seed, share)
    groups = LAYOUTS[layout]
    num_blocks = pool_blocks[len(groups) - 1] + 1
    num_slots *= len(groups)
    max_batched_tokens = STEP_TOKENS.get(name, MAX_BATCHED_TOKENS)
    return Trace(
        f"{name} {layout}", groups, num_blocks, num_slots, max_seqs, users, max_batched_tokens
    )


_Made = tuple[tuple[int, int], int, int, tuple[User, ...]]
"""GPU blocks without and with a window, host slots for each group, requests at once, users."""


def _chats(seed: int, share: int) -> _Made:
    """Short chats, many at once, in a pool with room for all that run."""
    users = []
    for index in range(480 // share):
        draw = _Draw(seed, "chats", index)
        turn = Turn(draw.tokens(draw.number(64, 512)), draw.number(32, 96), continues=False)
        users.append(User(f"chat{index}", index // 8, 0, (turn,)))
    return (6000 // share, 12_000 // share), 24_000 // share, max(128 // share, 8), tuple(users)


def _turns(seed: int, share: int) -> _Made:
    """Users with one system prompt and five turns each; the pool holds a third of all contexts."""
    system = _Draw(seed, "system").tokens(128 * BLOCK_TOKENS)
    users = []
    for index in range(64 // share):
        draw = _Draw(seed, "turns", index)
        turns = []
        for number in range(5):
            token_ids = draw.tokens(draw.number(300, 600))
            is_first = number == 0
            turns.append(Turn((system if is_first else ()) + token_ids, 64, continues=not is_first))
        users.append(User(f"user{index}", 4 * index, draw.number(20, 80), tuple(turns)))
    num_blocks = max(3600 // share, 600)  # more than one context
    return (num_blocks, num_blocks * 14 // 10), 14_000 // share, max(16 // share, 4), tuple(users)


def _long(seed: int, share: int) -> _Made:
    """Prompts A B C A B C A B C of 90,000 tokens, one by one, in a pool of 1.6 prompts."""
    num_tokens = 90_000 // share
    prompts = [_Draw(seed, "long", name).tokens(num_tokens) for name in "ABC"]
    turns = tuple(Turn(prompts[index % 3], 16, continues=False) for index in range(9))
    num_blocks = num_tokens // BLOCK_TOKENS
    num_hybrid_blocks = num_blocks + min(num_blocks, WINDOW_BLOCKS_MAX)
    pool_blocks = (num_blocks * 16 // 10, num_hybrid_blocks * 16 // 10)
    return pool_blocks, num_blocks * 4, 8, (User("long", 0, 0, turns),)


def _pressure(seed: int, share: int) -> _Made:
    """Many long generations in a pool that holds half of those that run: preemptions."""
    users = []
    for index in range(160 // share):
        draw = _Draw(seed, "pressure", index)
        turn = Turn(draw.tokens(draw.number(128, 384)), draw.number(256, 512), continues=False)
        users.append(User(f"writer{index}", 0, 0, (turn,)))
    return (1400 // share, 2800 // share), 8000 // share, max(64 // share, 8), tuple(users)


def _documents(seed: int, share: int) -> _Made:
    """Short questions about many short documents, which come and go on the GPU and on the host."""
    num_documents, num_users = max(240 // share, 30), max(32 // share, 8)
    documents = []
    for index in range(num_documents):
        draw = _Draw(seed, "document", index)
        documents.append(draw.tokens(draw.number(200, 1700)))
    users = []
    for index in range(num_users):
        draw = _Draw(seed, "documents", index)
        turns = []
        for _ in range(960 // share // num_users):
            document = documents[draw.number(0, num_documents - 1)]
            prompt = document + draw.tokens(draw.number(16, 100))
            turns.append(Turn(prompt, draw.number(16, 64), continues=False))
        users.append(User(f"reader{index}", 0, 0, tuple(turns)))
    num_blocks = max(3000 // share, 600)  # more than what runs
    return (num_blocks, num_blocks * 2), num_documents * 50, num_users, tuple(users)


def _churn(seed: int, share: int) -> _Made:
    """Short prompts and answers in a pool for half of those that run: preemptions, many ends."""
    users = []
    for index in range(128 // share):
        draw = _Draw(seed, "churn", index)
        turns = tuple(
            Turn(draw.tokens(draw.number(16, 200)), draw.number(8, 120), continues=False)
            for _ in range(10)
        )
        users.append(User(f"caller{index}", index // 16, draw.number(0, 4), turns))
    num_blocks = max(500 // share, 125)
    return (num_blocks, num_blocks * 2), 4000 // share, max(96 // share, 16), tuple(users)


TRACES: dict[str, Callable[[int, int], _Made]] = {
    "chats": _chats,
    "turns": _turns,
    "long": _long,
    "pressure": _pressure,
    "documents": _documents,
    "churn": _churn,
}
"""How each trace is made, from the seed and from how many times smaller it is."""
STEP_TOKENS = {"documents": 2048}
"""Where it is not `MAX_BATCHED_TOKENS`."""


def prompt_of(draw_name: str, num_tokens: int, *, seed: int = 0) -> TokenIds:
    """Return random tokens; the same for the same arguments."""
    return _Draw(seed, draw_name).tokens(num_tokens)
