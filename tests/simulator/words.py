"""What every word of KV cache should be.

A word stands for what one layer of one rank keeps of one token: a number that is derived from the
whole prefix that ends with the token, from the KV cache group and from the rank. Two different
prefixes have different words at the same position, so a block of another request shows. Its last
bits are the group, whose kind of numbers another group may take for anything.
"""

import functools
import hashlib
from collections.abc import Sequence

VOCABULARY = 50
ZEROED = 0
"""What vLLM's zeroing of a new block leaves."""
_GROUP_BITS = 4
_MASK = (1 << 61) - 1
_WORD_MASK = _MASK >> _GROUP_BITS  # with the group, a word is a signed number of 64 bits


@functools.cache
def place(group_idx: int, rank: int) -> int:
    """What tells the words of one group on one rank from those of another."""
    digest = hashlib.blake2b(f"{group_idx}/{rank}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") << _GROUP_BITS | group_idx


def wrong(word: int, salt: int) -> int:
    """What the forward of rejected draft tokens leaves: a word of no prefix."""
    return -1 - (word ^ salt << _GROUP_BITS)


def group_of(word: int) -> int:
    """The group whose forward has left a word."""
    return (word if word >= 0 else -1 - word) & (1 << _GROUP_BITS) - 1


class Sequel:
    """What a prompt leads to: its tokens, and the word of each position.

    The token that a model samples is a function of the prefix alone, so that an answer that was
    computed from the wrong bytes, or in the wrong order, differs from the one expected. `prompt`:
    token ids; `identity`: what else vLLM keys its cache by, such as the cache salt.
    """

    def __init__(self, prompt: Sequence[int], identity: str = "") -> None:
        self.num_prompt = len(prompt)
        self._tokens = list(prompt)
        digest = hashlib.blake2b(identity.encode(), digest_size=7).digest()
        self._chain: list[int] = []
        self._state = int.from_bytes(digest, "little")
        self._words: dict[int, list[int]] = {}

    def token(self, position: int) -> int:
        while len(self._tokens) <= position:
            self._tokens.append(self._prefix_word(len(self._tokens) - 1) % VOCABULARY)
        return self._tokens[position]

    def answer(self, num_tokens: int) -> list[int]:
        return [self.token(self.num_prompt + i) for i in range(num_tokens)]

    def words(self, place_bits: int, start: int, end: int) -> list[int]:
        """The words of the positions from `start` to `end - 1` in one place (see `place`)."""
        words = self._words.setdefault(place_bits, [])
        if len(words) < end:
            self._prefix_word(end - 1)
            chain = self._chain[len(words) : end]
            words += [(word & _WORD_MASK) << _GROUP_BITS ^ place_bits for word in chain]
        return words[start:end]

    def _prefix_word(self, position: int) -> int:
        chain = self._chain
        while len(chain) <= position:
            before = chain[-1] if chain else self._state
            mixed = (before ^ (self.token(len(chain)) + 1)) * 0x9E3779B97F4A7C15 & _MASK
            chain.append(mixed ^ (mixed >> 29) | 1)
        return chain[position]
