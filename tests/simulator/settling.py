"""The last phase of a run: no request comes any more, and everything must settle within a bound."""

import math

from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding
from tests.simulator.groups import BLOCK_TOKENS

TICKS_PER_STEP = 6
"""Of a device, about."""
COPY_ROUNDS = 4
"""Copies that wait for one another in turn, at most, when the last request has been computed."""
TIER_STEPS = 240
"""In which a tier has taken what is still to be written to it, or failed to so often that an idle
engine waits no longer: four times."""


class Settling:
    """Bounds the steps from its making to an idle engine.

    vLLM goes on with the request that it would preempt last, whatever becomes of the others. So all
    of them take no longer than one after the other, each computed from its first token. But a
    request cannot be preempted while it holds blocks for a load. In a pool that is too small for
    two, they may so take turns with every block, and each turn takes a load. `core`: the engine;
    `copy_ticks_max`: how late its copies may end.
    """

    def __init__(self, core: EngineCore, copy_ticks_max: int) -> None:
        self._core = core
        self._began_at = core.num_steps
        copy_steps = copy_ticks_max // TICKS_PER_STEP + 2
        requests = core.scheduler.requests.values()
        num_turns = len(requests)
        ends = [request.num_prompt_tokens + request.max_tokens for request in requests]
        if core.connector.side.hits.geometry.num_blocks_spanned(sum(ends)) > core.shape.num_blocks:
            num_left = (
                end - request.num_tokens for end, request in zip(ends, requests, strict=True)
            )
            num_turns += sum(num_left) // BLOCK_TOKENS
        # A step in which nothing is computed takes a second.
        wait_s = max((tier.wait_s + tier.timeout_s for tier in core.config.tiers), default=0.0)
        tier_steps = math.ceil(wait_s) * num_turns + TIER_STEPS * len(core.stores)
        self.steps_max = tier_steps + (
            copy_steps * (COPY_ROUNDS + num_turns)
            + sum(
                -(-request.num_tokens // core.shape.max_batched_tokens)
                + request.max_tokens
                - request.num_output_tokens
                for request in requests
            )
            * core.queue_size
        )

    def check(self) -> None:
        """No more steps have passed than may."""
        num_steps = self._core.num_steps - self._began_at
        if num_steps > self.steps_max:
            raise Finding(
                "I7",
                f"not settled {num_steps} steps after the last request and the last fault; "
                f"{self.steps_max} may be",
            )
