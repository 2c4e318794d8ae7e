"""Starts real vLLM engines, each in a process of its own, and reads what they report.

Two vLLM engines in one process share state (distributed groups, forward context, metrics), so every
engine runs in a child (`children/`), which does the turns of a `Job` and writes its report as JSON.
When a child fails, the test shows the end of what it printed.

An engine computes with one thread, so that two of them can run beside each other on two cores.
"""

import contextlib
import importlib
import json
import os
import random
import signal
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from examples.tiny_models import ModelKind, count_prompt_blocks
from tests.engine.children import engine
from tests.fresh_process import ENVIRONMENT, start_engine

CHILD_TIMEOUT_S = 1000
"""Of what would never end: a busy machine is no failure."""
ABORT_TIMEOUT_S = 10
MAX_CHILDREN = 2

NUM_PROMPT_TOKENS = 2000
NUM_ANSWER_TOKENS = 8
CHUNK_TOKENS = 512
"""Tokens of a step: a prompt takes several."""

RESET_GPU_CACHE, EMPTY_FOLDER = engine.RESET_GPU_CACHE, engine.EMPTY_FOLDER
"""Turns that are no prompts."""

LONG_WAIT_S = 600
"""Of transfers, and of calls of tiers: none is cut short where a machine is busy."""

ABC_TWICE = ("A", "B", "C", "A", "B", "C")

TROUBLE = (
    "contained_errors",
    "transfer_failures",
    "overdue_transfers",
    "checksum_mismatches",
    "given_up_requests",
    "unusable_hits",
    "stale_reports",
    "duplicate_reports",
    "dropped_ids",
)
"""Counters that stay 0 as long as nothing goes wrong."""


@dataclass(frozen=True)
class Job:
    """What one engine is to do."""

    arguments: dict[str, Any]  # of `vllm.LLM`
    # Names of prompts, answered one after the other; `RESET_GPU_CACHE`, or `EMPTY_FOLDER`, which
    # is the one that `options["folder"]` names.
    turns: tuple[str, ...] = ABC_TWICE
    # Token ids, or what `as_vllm_reads` in children/engine.py makes of a mapping.
    prompts: Mapping[str, Any] = field(default_factory=dict)
    num_answer_tokens: int = NUM_ANSWER_TOKENS
    in_process: bool = True  # the scheduler runs in the child itself, so that it can be looked at
    # Keep vLLM from switching prefix caching off for MLA on a CPU.
    force_prefix_caching: bool = False
    # What only some jobs need.
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """One request: its greedy tokens, and where the tokens of its prompt came from.

    The numbers are vLLM's own: `RequestOutput.num_cached_tokens`, and the growth of its metric
    prompt_tokens_by_source (GPU's prefix cache, connector, computed).
    """

    token_ids: list[int]
    num_cached: int
    num_gpu: int
    num_host: int
    num_computed: int


class Report:
    """What an engine reported."""

    def __init__(self, data: dict[str, Any], log: str) -> None:
        self.data = data
        self.log = log
        self.answers = [Answer(**answer) for answer in data.get("answers", ())]

    @property
    def tokens(self) -> list[list[int]]:
        """The greedy tokens of every answer."""
        return [answer.token_ids for answer in self.answers]

    def count(self, name: str) -> float:
        """A counter or gauge of the connector, as vLLM publishes it; 0 if nothing was counted."""
        count: float = self.data["metrics"].get(f"vllm:safe_offload_{name}", 0)
        return count

    def check_no_trouble(self) -> None:
        """No error was contained, no transfer failed, no report or finished id was dropped."""
        found = {name: self.count(name) for name in TROUBLE if self.count(name)}
        assert not found, found

    def check_everything_is_free(self) -> None:
        """No GPU block, host slot, lease or transfer is held."""
        audit = self.data["audit"]
        assert audit["num_free_blocks"] == audit["num_blocks"] - 1, audit
        assert audit["referenced_blocks"] == {}, audit
        gauges = audit["gauges"]
        assert gauges["leased_slots"] == 0, audit
        assert gauges["stores_in_flight"] == gauges["loads_in_flight"] == 0, audit
        assert audit["num_leases"] == 0, audit

    def check_well(self) -> None:
        """Nothing went wrong, and nothing is held."""
        self.check_no_trouble()
        self.check_everything_is_free()

    def check_second_round_hits(self, num_hit_tokens: int) -> None:
        """A, B, C, then the same answers with this many tokens from the host, none of the GPU's.

        That the GPU has none is what makes it the host's doing: the pool is so small that the two
        prompts in between have taken every block of the first.
        """
        first, second = self.answers[:3], self.answers[3:]
        assert self.tokens[3:] == self.tokens[:3]
        assert len({tuple(tokens) for tokens in self.tokens[:3]}) == 3, "the prompts look alike"
        for answer in first:
            assert (answer.num_gpu, answer.num_host) == (0, 0), self.answers
        for answer in second:
            assert (answer.num_gpu, answer.num_host) == (0, num_hit_tokens), self.answers
            assert answer.num_cached == num_hit_tokens
        self._check_loads(3 * num_hit_tokens)

    def check_hits_of_mla(self) -> None:
        """Of `MLA_TURNS`, hits of the host have the answers of hits in the GPU's own cache.

        On a CPU vLLM computes a prompt from its start with one MLA kernel and the rest of a prompt
        behind a hit with another, and the two round differently: what follows *any* hit may differ
        from what follows a prompt computed from its start. That is why vLLM switches prefix caching
        off for MLA there (CpuPlatform.check_and_update_config, without AMX), which the child
        undoes.
        """
        num_hit = NUM_MLA_HIT_TOKENS
        places = [(0, 0), (num_hit, 0)] * 3 + [(0, num_hit)] * 3
        assert [(answer.num_gpu, answer.num_host) for answer in self.answers] == places
        assert self.tokens[6:] == self.tokens[1:6:2]
        assert len({tuple(tokens) for tokens in self.tokens[6:]}) == 3, "the prompts look alike"
        self._check_loads(3 * num_hit)

    def _check_loads(self, num_tokens: int) -> None:
        assert self.count("hit_tokens") == self.count("loaded_tokens") == num_tokens
        assert self.count("loaded_blocks") > 0


def make_prompts(num_tokens: int, names: Iterable[str] = "ABC") -> dict[str, list[int]]:
    """Distinct prompts of random bytes, the same in every run."""
    prompts = {}
    for name in names:
        rng = random.Random(name)
        prompts[name] = [rng.randrange(256) for _ in range(num_tokens)]
    return prompts


def num_hit_tokens(num_prompt_tokens: int, block_size: int = 32) -> int:
    """What of a prompt can be hit: whole blocks, without the last token, which is computed."""
    return (num_prompt_tokens - 1) // block_size * block_size


def num_pool_blocks(
    kind: str,
    num_prompt_tokens: int = NUM_PROMPT_TOKENS,
    *,
    block_size: int = 32,
) -> int:
    """Blocks of a GPU pool that holds 1.6 prompts, with their answers and the null block."""
    num_blocks = count_prompt_blocks(
        cast(ModelKind, kind),
        num_prompt_tokens + NUM_ANSWER_TOKENS,
        block_size=block_size,
        max_num_batched_tokens=CHUNK_TOKENS,
    )
    return int(1.6 * num_blocks) + 1


def make_job(
    model: Path,  # folder, which has the name of its kind unless `num_blocks` is given
    kv_transfer_config: dict[str, Any] | None = None,  # None for an engine without connector
    *,
    num_blocks: int | None = None,
    num_prompt_tokens: int = NUM_PROMPT_TOKENS,
    block_size: int = 32,
    turns: tuple[str, ...] = ABC_TWICE,
    in_process: bool = True,
    force_prefix_caching: bool = False,
    **arguments: Any,  # more arguments of `vllm.LLM`
) -> Job:
    """A job with the settings that all engines here have in common.

    `num_blocks`: of the GPU's pool, vLLM's null block included; by default of 1.6 prompts.
    """
    if num_blocks is None:
        num_blocks = num_pool_blocks(model.name, num_prompt_tokens, block_size=block_size)
    common: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",  # in bfloat16 a hit may round differently and flip a greedy choice
        "max_model_len": num_prompt_tokens + 64,
        "num_gpu_blocks_override": num_blocks,
        "block_size": block_size,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "enforce_eager": True,
        "disable_log_stats": False,
    }
    if force_prefix_caching:
        common["attention_backend"] = "CPU_MLA"  # the one with AMX takes no float32
    if kv_transfer_config is not None:
        common["kv_transfer_config"] = kv_transfer_config
    return Job(
        arguments=common | arguments,
        turns=turns,
        prompts=make_prompts(num_prompt_tokens),
        in_process=in_process,
        force_prefix_caching=force_prefix_caching,
    )


MLA: dict[str, Any] = {
    "num_prompt_tokens": 993,
    "block_size": 16,
    "max_num_batched_tokens": 2048,  # on a CPU, vLLM has no chunked prefill for MLA
    "force_prefix_caching": True,
}
"""What engines of a model with multi-head latent attention have in common here."""
NUM_MLA_HIT_TOKENS = num_hit_tokens(MLA["num_prompt_tokens"], MLA["block_size"])
MLA_TURNS = ("A", "A", "B", "B", "C", "C", "A", "B", "C")
"""Each is computed, then a hit of the GPU's own cache, and once that has lost it, of the host."""


EVERY_HIT = {"min_load_tokens": 0}
"""In `kv_connector_extra_config`: the prompts of tests are short, and computing them is faster."""


def connector(num_slots: int = 2000, **extra: Any) -> dict[str, Any]:
    """The `kv_transfer_config` of our connector, checking itself after every step."""
    return {
        "kv_connector": "SafeCPUOffloadConnector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "num_cpu_blocks": num_slots,
            "check_invariants": True,
            "transfer_timeout_s": LONG_WAIT_S,
            **EVERY_HIT,
            **extra,
        },
    }


def tier_at(url: Path | str, **more: Any) -> dict[str, Any]:
    """A tier: a directory, or what a url names."""
    url = f"file://{url}" if isinstance(url, Path) else url
    return {"url": url, "wait_s": LONG_WAIT_S, "timeout_s": LONG_WAIT_S, **more}


def run(
    folder: Path,  # for what the children write
    *jobs: Job,
    child: str = "turns",  # module in `children/`, whose `scenario` runs
    environment: dict[str, str] | None = None,  # on top of `ENVIRONMENT`
) -> list[Report]:
    """Run the jobs, two at a time, each in a child process.

    Raises AssertionError if a child failed or took too long; the message has the end of its output.
    """
    environment = {**os.environ, **ENVIRONMENT, **(environment or {})}
    with ThreadPoolExecutor(MAX_CHILDREN) as executor:
        futures = [
            executor.submit(_run_one, folder / str(index), job, child, environment)
            for index, job in enumerate(jobs)
        ]
        return [future.result() for future in futures]


def _run_one(folder: Path, job: Job, child: str, environment: dict[str, str]) -> Report:
    folder.mkdir(parents=True)
    report_path, log_path = folder / "report.json", folder / "log"
    environment = environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not job.in_process))}
    process = start_engine(
        _run_child, child, asdict(job), report_path, log=log_path, environment=environment
    )
    try:
        process.join(CHILD_TIMEOUT_S)
        status = process.exitcode
        if status is None:
            status = f"none within {CHILD_TIMEOUT_S} s"
            # Python's fault handler then says where the engine's processes hang.
            _signal_group(process.pid, signal.SIGABRT)
            process.join(ABORT_TIMEOUT_S)
    finally:
        _signal_group(process.pid, signal.SIGKILL)  # vLLM's workers too
        process.join()
    text = log_path.read_text(errors="replace")
    if status != 0 or not report_path.exists():
        raise AssertionError(
            f"{child}: exit status {status}; the end of its output:\n{_tail(text)}"
        )
    return Report(json.loads(report_path.read_text()), text)


def _run_child(child: str, job: dict[str, Any], report_path: Path) -> None:
    engine.prepare(job)
    scenario = importlib.import_module(f"tests.engine.children.{child}").scenario
    report_path.write_text(json.dumps(scenario(job)))


def _signal_group(group_id: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group_id, number)


def _tail(text: str, num_lines: int = 120) -> str:
    return "\n".join(text.splitlines()[-num_lines:])
