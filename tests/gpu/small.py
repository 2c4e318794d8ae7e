"""`python -m tests.benchmarks` on the CPU; engines are forks of one that has imported vLLM."""

import os
import sys
from multiprocessing.connection import Connection
from unittest import mock

from safe_offload.commands.bench import engine_process
from safe_offload.commands.bench.engine_process import EngineOptions
from tests.benchmarks.__main__ import main
from tests.engine.children.engine import force_prefix_caching
from tests.fresh_process import ENVIRONMENT, engine_server

answer_calls = engine_process._answer_calls


def answer_calls_here(connection: Connection, options: EngineOptions) -> None:
    """Run an engine that caches prefixes of an MLA model, too."""
    force_prefix_caching()
    answer_calls(connection, options)


if __name__ == "__main__":
    os.environ |= ENVIRONMENT
    with engine_server(), mock.patch.object(engine_process, "_answer_calls", answer_calls_here):
        sys.exit(main())
