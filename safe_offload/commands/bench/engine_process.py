"""One vLLM engine in a process of its own, which answers one call at a time.

Engines that are compared all stay alive; an idle one sleeps in `poll`. vLLM logs much and ends its
process on an error, so its output goes to a file; an error shows the end of it.
"""

import contextlib
import json
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from safe_offload.errors import SafeOffloadError
from safe_offload.threads import switched_on

_LOG_TAIL_LINES = 30
SPIN_S = 1.2
"""A worker in a process of its own (on a CPU, or on one of several GPUs) spins on its core for 1 s
after its last message, and the next engine needs that core. Source: `SpinCondition` in
vllm/distributed/device_communicators/shm_broadcast.py (0.32.0).
"""

Argument = TypeVar("Argument")
Returned = TypeVar("Returned")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """vLLM's arguments, and the environment that they depend on."""

    arguments: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    fits_model_len: bool = False  # `max_model_len` becomes what the model takes, if that is less


@dataclass(frozen=True, slots=True)
class Started:
    """The engine's own figures, known once it has started."""

    start_s: float
    num_gpu_blocks: int
    max_concurrency: float  # requests of max_model_len tokens that the KV pool holds
    max_model_len: int
    block_size: int
    spin_s: float = SPIN_S  # after an answer, for which the next engine waits


@dataclass(frozen=True, slots=True)
class Question:
    """One greedy request."""

    prompt_token_ids: tuple[int, ...]
    num_answer_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The times and tokens of one request, and where its prompt tokens came from."""

    ttft_s: float
    total_s: float
    token_ids: tuple[int, ...]
    num_gpu_tokens: int
    num_host_tokens: int
    num_computed_tokens: int


class Turns:
    """Delays a call until the engine called before has stopped spinning."""

    def __init__(self, clock: Any = time) -> None:
        self._clock = clock  # has `monotonic` and `sleep`
        self._last: object = None
        self._free_s = 0.0

    def begin(self, engine: object) -> None:
        """Wait while another engine spins."""
        if self._last not in (None, engine):
            self._clock.sleep(max(0.0, self._free_s - self._clock.monotonic()))

    def end(self, engine: object, spin_s: float = SPIN_S) -> None:
        self._last, self._free_s = engine, self._clock.monotonic() + spin_s


_turns = Turns()


class EngineProcess:
    """A handle on the process; use it as a context manager, which ends the engine."""

    def __init__(self, name: str, options: EngineOptions, log_path: Path) -> None:
        self.name = name
        self._log_path = log_path
        self._spin_s = SPIN_S
        context = mp.get_context("spawn")
        self._connection, child_connection = context.Pipe()
        # Not a daemon: those may not have children, and vLLM's engine runs in one.
        self._process = context.Process(
            target=_run_in_child,
            args=(_answer_calls, child_connection, options, str(log_path)),
            name=name,
        )
        with switched_on("PYTHONSAFEPATH"):  # no code from the working directory
            self._process.start()
        child_connection.close()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_started(self, timeout_s: float) -> Started:
        """Return the engine's figures; raise SafeOffloadError if it does not start."""
        started = self._receive(timeout_s)
        assert isinstance(started, Started)
        self._spin_s = started.spin_s
        return started

    def call(
        self, function: Callable[[Any, Argument], Returned], argument: Argument, timeout_s: float
    ) -> Returned:
        """Call a function of a module with the `vllm.LLM` and an argument, in the engine's process.

        SafeOffloadError: the engine dies, or does not return in time.
        """
        _turns.begin(self)
        self._connection.send((function, argument))
        returned: Returned = self._receive(timeout_s)
        _turns.end(self, self._spin_s)
        return returned

    def tell_to_stop(self) -> None:
        """Request the end of the engine; `stop` waits for it."""
        with contextlib.suppress(OSError):
            self._connection.send(None)

    def stop(self, timeout_s: float = 60.0) -> None:
        """End the engine, by SIGKILL after a timeout."""
        self.tell_to_stop()
        self._process.join(timeout_s)
        # The child leads a process group of its own, in which the engine and its workers are.
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _receive(self, timeout_s: float) -> Any:
        """Return the child's next message; raise SafeOffloadError if it dies or time is up."""
        if not self._connection.poll(timeout_s):
            raise self._error(f"no answer within {timeout_s:.0f} s")
        try:
            has_died, message = self._connection.recv()
        except EOFError:
            has_died, message = True, "its process ended without a message"
        if has_died:
            raise self._error(message)
        return message

    def _error(self, what: str) -> SafeOffloadError:
        lines = self._log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        end = "\n".join(lines)
        return SafeOffloadError(f"engine {self.name!r}: {what}. The end of its log:\n{end}")


def _run_in_child(
    run: Callable[[Connection, EngineOptions], None],
    connection: Connection,
    options: EngineOptions,
    log_path: str,
) -> None:
    """Run the child: send output to the log, and an error to the parent."""
    os.setsid()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.environ.update(options.environment)
    print("engine arguments:", json.dumps(options.arguments), flush=True)
    try:
        run(connection, options)
    except EOFError:
        pass  # the benchmark is gone
    except BaseException:
        connection.send((True, traceback.format_exc()))
        raise


def _answer_calls(connection: Connection, options: EngineOptions) -> None:
    """Start the engine, then serve calls until the parent sends None."""
    from vllm import LLM

    from safe_offload.compat.engine_config import is_worker_beside_scheduler

    start = time.perf_counter()
    engine = LLM(**_fit_model_len(options))
    vllm_config = engine.llm_engine.vllm_config
    cache_config = vllm_config.cache_config
    started = Started(
        start_s=time.perf_counter() - start,
        num_gpu_blocks=cache_config.num_gpu_blocks or 0,
        max_concurrency=cache_config.kv_cache_max_concurrency or 0.0,
        max_model_len=vllm_config.model_config.max_model_len,
        block_size=cache_config.block_size,
        spin_s=0.0 if is_worker_beside_scheduler(vllm_config.parallel_config) else SPIN_S,
    )
    # A closed pipe means that the benchmark has died. This process waits for its engine's processes
    # when it ends, so it must shut the engine down in that case too.
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send((False, started))
        while (call := connection.recv()) is not None:
            function, argument = call
            connection.send((False, function(engine, argument)))
    # Without a timeout, vLLM kills its engine, which leaves shared memory behind.
    engine.llm_engine.engine_core.shutdown(timeout=30.0)


def _fit_model_len(options: EngineOptions) -> dict[str, Any]:
    """Return vLLM's arguments, `max_model_len` no larger than what the model's config allows."""
    if not options.fits_model_len:
        return options.arguments
    from vllm.engine.arg_utils import EngineArgs

    arguments = dict(options.arguments)
    wanted = arguments.pop("max_model_len")
    fields = {
        name: arguments[name] for name in arguments if name in EngineArgs.__dataclass_fields__
    }
    allowed = EngineArgs(**fields).create_model_config().max_model_len
    return arguments | {"max_model_len": min(wanted, allowed)}


# ---- in the engine's process -------------------------------------------------------------------


def answer(engine: Any, question: Question) -> Answer:
    """Run one request alone and measure it."""
    before = count_prompt_tokens(engine)
    start = time.perf_counter()
    prompts, numbers = [question.prompt_token_ids], [question.num_answer_tokens]
    (output,) = generate(engine, prompts, numbers)
    total_s = time.perf_counter() - start
    after = count_prompt_tokens(engine)
    return Answer(
        ttft_s=output.metrics.first_token_latency,
        total_s=total_s,
        token_ids=tuple(output.outputs[0].token_ids),
        num_gpu_tokens=after["local_cache_hit"] - before["local_cache_hit"],
        num_host_tokens=after["external_kv_transfer"] - before["external_kv_transfer"],
        num_computed_tokens=after["local_compute"] - before["local_compute"],
    )


def generate(
    engine: Any, prompts: Sequence[Sequence[int]], nums_answer_tokens: Sequence[int]
) -> list[Any]:
    """Return vLLM's outputs for simultaneous greedy requests, each of a fixed length."""
    from vllm import SamplingParams

    how: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    sampling = [SamplingParams(max_tokens=n, **how) for n in nums_answer_tokens]
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs: list[Any] = engine.generate(inputs, sampling, use_tqdm=False)
    return outputs


def count_prompt_tokens(engine: Any) -> dict[str, int]:
    """Return the engine's counters of prompt tokens, by source.

    Source: `PromptTokenStats` in vllm/v1/metrics/stats.py (0.32.0).
    """
    counts = {"local_cache_hit": 0, "external_kv_transfer": 0, "local_compute": 0}
    for metric in engine.get_metrics():
        if metric.name == "vllm:prompt_tokens_by_source":
            counts[metric.labels["source"]] += metric.value
    return counts
