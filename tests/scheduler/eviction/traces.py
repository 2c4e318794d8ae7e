"""Block-level traces: which blocks each prompt has.

A trace is made of a seed and nothing else. A block is named by a key, as a chained block hash names
it: two prompts share a key only if they share all keys before it.
"""

import heapq
import itertools
import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator

SEED = 1
MOONCAKE_BLOCKS_MAX = 250

Prompt = list[bytes]
"""The keys of its blocks, all of which are full."""


class _Keys:
    """Makes new keys, and draws lengths."""

    def __init__(self, random_: random.Random) -> None:
        self.random = random_
        self._ids = itertools.count()

    def fresh(self, count: int) -> Prompt:
        return [next(self._ids).to_bytes(8, "big") for _ in range(count)]

    def length(self, median: float, sigma: float, most: int) -> int:
        return max(1, min(most, round(self.random.lognormvariate(math.log(median), sigma))))

    def geometric(self, mean: float) -> int:
        return 1 + int(self.random.expovariate(1 / max(mean - 0.5, 0.5)))


class _Zipf:
    """Draws 0 to count - 1, the first most often."""

    def __init__(self, random_: random.Random, count: int, exponent: float) -> None:
        self._random = random_
        weights = (rank**-exponent for rank in range(1, count + 1))
        self._sums = list(itertools.accumulate(weights))

    def __call__(self) -> int:
        return bisect(self._sums, self._random.random() * self._sums[-1])


def _one_off(keys: _Keys, num_prompts: int) -> Iterator[Prompt]:
    """System prompts of many tenants, two fifths of the prompts long and one-off."""
    tenants = [keys.fresh(24) for _ in range(max(4, num_prompts // 10))]
    draw = _Zipf(keys.random, len(tenants), 0.6)
    for _ in range(num_prompts):
        if keys.random.random() < 0.4:
            yield keys.fresh(keys.length(120, 0.5, 400))
        else:
            yield tenants[draw()] + keys.fresh(keys.geometric(3))


def _chat(keys: _Keys, num_prompts: int) -> Iterator[Prompt]:
    """Many users, conversations of 7 turns, one system prompt.

    Gaps of minutes within a conversation, of hours between those of one user.
    """
    system = keys.fresh(8)
    due = [(keys.random.expovariate(1 / 2.0), user) for user in range(max(4, num_prompts // 15))]
    contexts = {user: list(system) for _, user in due}
    heapq.heapify(due)
    for _ in range(num_prompts):
        time, user = heapq.heappop(due)
        contexts[user] = contexts[user] + keys.fresh(keys.geometric(2))
        yield contexts[user]
        contexts[user] = contexts[user] + keys.fresh(keys.geometric(3))  # the answer
        if keys.random.random() < 1 / 7:
            contexts[user] = list(system)
            gap = keys.random.expovariate(1 / 4.0)
        else:
            gap = keys.random.lognormvariate(math.log(0.05), 1.3)
        heapq.heappush(due, (time + gap, user))


def _documents(keys: _Keys, num_prompts: int) -> Iterator[Prompt]:
    """Documents of Zipf popularity as prefixes."""
    system = keys.fresh(4)
    documents = [
        system + keys.fresh(keys.length(24, 0.6, 128)) for _ in range(max(8, num_prompts // 8))
    ]
    draw = _Zipf(keys.random, len(documents), 0.9)
    keys.random.shuffle(documents)
    for _ in range(num_prompts):
        yield documents[draw()] + keys.fresh(keys.geometric(2))


def _agents(keys: _Keys, num_prompts: int) -> Iterator[Prompt]:
    """Each agent's context grows from step to step, until another agent takes its place."""
    system = keys.fresh(12)
    agents = [list(system) for _ in range(24)]
    for _ in range(num_prompts):
        index = keys.random.randrange(len(agents))
        agents[index] = agents[index] + keys.fresh(keys.geometric(4))
        yield agents[index]
        if keys.random.random() < 1 / 20:
            agents[index] = list(system)


def _mooncake(keys: _Keys, num_prompts: int) -> Iterator[Prompt]:
    """A mixture shaped after Mooncake's published traces (docs/benchmarks.md).

    Blocks of 512 tokens. One block starts every prompt. Half are calls of tools: system prompts
    that many share, of a dozen blocks in the middle, and a short tail. Half are conversations:
    lengths with a long tail, many of one turn only, gaps drawn.
    """
    first = keys.fresh(1)
    tools = [first + keys.fresh(keys.length(12, 0.4, 40)) for _ in range(max(4, num_prompts // 80))]
    draw = _Zipf(keys.random, len(tools), 1.0)
    waiting: list[tuple[float, Prompt]] = []
    for index in range(num_prompts):
        if waiting and waiting[0][0] <= index:
            prompt = heapq.heappop(waiting)[1] + keys.fresh(keys.geometric(4))
        elif keys.random.random() < 0.5:
            yield tools[draw()] + keys.fresh(keys.geometric(3))
            continue
        else:
            prompt = first + keys.fresh(keys.length(17, 1.05, MOONCAKE_BLOCKS_MAX))
        yield prompt
        if keys.random.random() < 0.5:
            gap = keys.random.lognormvariate(math.log(num_prompts / 30), 1.0)
            heapq.heappush(waiting, (index + gap, prompt))


GENERATORS: dict[str, Callable[[_Keys, int], Iterator[Prompt]]] = {
    "one-off": _one_off,
    "chat": _chat,
    "documents": _documents,
    "agents": _agents,
    "mooncake": _mooncake,
}


def make_trace(name: str, num_prompts: int) -> list[Prompt]:
    """Draw prompts, in the order of their arrival."""
    keys = _Keys(random.Random(f"{SEED} {name}"))
    return list(GENERATORS[name](keys, num_prompts))
