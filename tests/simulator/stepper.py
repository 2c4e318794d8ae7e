"""vLLM's scheduler with one connector, stepped: whatever computes and copies for it.

The simulator's ranks (`EngineCore`) and the stand-ins for other connectors' workers (`PeerEngine`)
are two things that it is stepped with.
"""

from collections import Counter
from collections.abc import Sequence
from copy import copy
from typing import Any

from tests.simulator.remote import ours_of
from tests.simulator.vllm_setup import OURS, EngineShape, as_model_runner, make_scheduler


class Stepper:
    """The scheduler, its requests and their answers. `shape`: what the engine is made of."""

    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape
        # Tokens by request id, of those that are not finished too.
        self.answers: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, Any] = {}  # by request id
        self.counts: Counter[str] = Counter()  # what our connector has counted
        with as_model_runner(shape):
            self.scheduler, self._hasher = make_scheduler(shape)

    @property
    def connector(self) -> Any:
        """The scheduler side of the connector, ours of several; None if there is none."""
        connector = self.scheduler.connector
        return ours_of(connector.sub_connectors) if self.shape.remote else connector

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_requests())

    def send(self, request_id: str, prompt: Sequence[int], max_tokens: int, **options: Any) -> Any:
        """Send a request; returns vLLM's object. `options` are those of vLLM's `Request`."""
        request = self.make_request(prompt, request_id, max_tokens, **options)
        self.answers.pop(request_id, None)
        self.finish_reasons.pop(request_id, None)
        self.scheduler.add_request(request)
        return request

    def make_request(
        self,
        prompt: Sequence[int],
        request_id: str = "",
        max_tokens: int = 1,
        kv_transfer_params: Any = None,
        **options: Any,
    ) -> Any:
        """Make a request that is not sent."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        extra = {"kv_transfer_params": copy(kv_transfer_params)}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        return Request(request_id, list(prompt), params, None, block_hasher=self._hasher, **options)

    def schedule(self) -> Any:
        with as_model_runner(self.shape):
            return self.scheduler.schedule()

    def update(self, scheduled: Any, output: Any) -> list[str]:
        """Give the scheduler what came of it; returns the ids of the requests that finished."""
        with as_model_runner(self.shape):
            by_client = self.scheduler.update_from_output(scheduled, output)
        finished = []
        for outputs in by_client.values():
            stats = outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                found = stats.kv_connector_stats
                own = found.get(OURS, {}) if self.shape.remote else found
                self.counts.update(own.get("counts", {}))
            for item in outputs.outputs:
                self.answers.setdefault(item.request_id, []).extend(item.new_token_ids)
                if item.finish_reason is not None:
                    self.finish_reasons[item.request_id] = item.finish_reason
                    finished.append(item.request_id)
        return finished

    def step(self) -> Any:
        raise NotImplementedError

    def drain(self, max_steps: int = 3000) -> int:
        for count in range(max_steps):
            if not self.has_work:
                return count
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps")
