"""A small model of the host cache, on which traces are replayed: prompts, slots, one policy.

A prompt matches the longest run that the GPU's prefix cache holds, then the run behind it that the
host holds. What the host has of the prompt is leased, the rest is stored into slots that are empty
or that the policy gives up, and at its end the prompt releases its slots, tail first.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from safe_offload.errors import InvariantError
from safe_offload.scheduler.eviction.policy import EvictionPolicy
from tests.scheduler.eviction.traces import Prompt

NUM_RUNNING = 4
"""Prompts that keep their leases at the same time."""


class HostModel:
    """Slots by key, and the policy that says which goes next.

    `make_policy`: of the number of slots; `num_slots`: of the host; `num_gpu_blocks`: of the GPU's
    prefix cache, least recently used first.
    """

    def __init__(
        self, make_policy: Callable[..., EvictionPolicy], num_slots: int, num_gpu_blocks: int
    ) -> None:
        self._keys: list[bytes | None] = [None] * num_slots
        self._policy = make_policy(num_slots, self._keys)
        self._now_s = 0.0
        self._empty = list(range(num_slots - 1, -1, -1))
        self._slots: dict[bytes, int] = {}
        self._leases = [0] * num_slots
        self._running: deque[list[int]] = deque()
        self._gpu: OrderedDict[bytes, None] = OrderedDict()
        self._num_gpu_blocks = num_gpu_blocks

    def add(self, prompt: Prompt, now_s: float) -> int:
        """Run a prompt; return how many blocks the host had behind those that the GPU had."""
        self._now_s = now_s
        num_hit = _leading(prompt[_leading(prompt, self._gpu) :], self._slots)
        if len(self._running) == NUM_RUNNING:
            self._release(self._running.popleft())
        before = [self._slots[key] for key in prompt if key in self._slots]
        self._lease(before)
        missing = [key for key in prompt if key not in self._slots]
        num_evicted = len(missing) - len(self._empty)
        if num_evicted > 0:
            last_slot = before[-1] if before else None
            if not self._policy.admits(num_evicted, last_slot, missing[0], now_s):
                missing = []
        for key, slot in zip(missing, self._grant(len(missing)), strict=False):
            self._keys[slot] = key
            self._slots[key] = slot
            self._leases[slot] += 1
        self._running.append([self._slots[key] for key in prompt if key in self._slots])
        self._use_gpu(prompt)
        return num_hit

    def _lease(self, slots: list[int]) -> None:
        for slot in slots:
            self._leases[slot] += 1
        self._policy.lease(slots)

    def _grant(self, count: int) -> list[int]:
        granted = [self._empty.pop() for _ in range(min(count, len(self._empty)))]
        evicted = self._policy.evict(count - len(granted), self._now_s)
        for slot in evicted:
            key, self._keys[slot] = self._keys[slot], None
            if key is None or self._leases[slot]:
                raise InvariantError("I1", f"slot {slot} was evicted though it is empty or leased")
            del self._slots[key]
        return granted + evicted

    def _release(self, slots: list[int]) -> None:
        for slot in slots:
            self._leases[slot] -= 1
        self._policy.release(
            [slot for slot in reversed(slots) if not self._leases[slot]], self._now_s
        )

    def _use_gpu(self, prompt: Prompt) -> None:
        """The tail of a prefix is the first of it to go, on the GPU too."""
        for key in reversed(prompt):
            self._gpu[key] = None
            self._gpu.move_to_end(key)
        while len(self._gpu) > self._num_gpu_blocks:
            self._gpu.popitem(last=False)


def _leading(prompt: Prompt, present: dict[bytes, Any]) -> int:
    for index, key in enumerate(prompt):
        if key not in present:
            return index
    return len(prompt)
