"""Prompts come back from host memory, for every kind of attention that has its own way of caching."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from safe_offload.bench.tiny_models import ModelKind, count_prompt_blocks
from tests.engine.engines import Report, connector, make_job, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

def test_x(model, tmp_path):
    import os
    for kind in os.environ["KINDS"].split(","):
        kw = dict(num_blocks=102)
        if kind == "gemma3":
            n = count_prompt_blocks(kind, 2008, block_size=32, max_num_batched_tokens=512)
            kw["num_blocks"] = int(1.6*n)
        if kind == "deepseek":
            kw = dict(num_blocks=100, num_prompt_tokens=993, block_size=16, max_num_batched_tokens=2048, force_prefix_caching=True)
        rs = run(tmp_path/kind, make_job(model(kind), kv_transfer_config=connector(), **kw), make_job(model(kind), **kw))
        for r in rs:
            print(kind, kw["num_blocks"])
            for a in r.answers: print(a)
            print({k:v for k,v in r.data.items() if k!="answers"})
