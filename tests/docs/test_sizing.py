"""The table of docs/guides/sizing.md, against how vLLM lays out the KV cache of such a model.

Layers of the shape that the table gives go through vLLM's own layout, and through the same code
that counts tokens and longest requests for our line at the start.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from safe_offload.compat import specs
from safe_offload.config.options import OffloadConfig
from tests.simulator.vllm_setup import EngineShape, make_config

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PAGE = (GUIDES / "sizing.md").read_text()
BLOCK_TOKENS = 16
CONVERSATION_TOKENS = 32_768
KIB, GIB = 1 << 10, 1 << 30


class Row(NamedTuple):
    model: str
    num_full: int
    num_heads: int
    head_dim: int
    kib_per_token: float
    num_windowed: int
    window_tokens: int
    conversation_gib: float


def rows() -> list[Row]:
    found = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 7 and cells[1].isdigit():
            num_windowed, window = re.findall(r"\d+", cells[5]) or ("0", "0")
            shape = (int(cells[1]), int(cells[2]), int(cells[3]), float(cells[4]))
            windows = (int(num_windowed), int(window))
            found.append(Row(cells[0], *shape, *windows, float(cells[6].split()[0])))
    return found


ROWS = rows()


def kv_cache_of(row: Row) -> tuple[Any, Any]:
    """vLLM's configuration and layout for a model of this shape, of one rank."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    config = make_config(EngineShape())
    config.model_config.max_model_len = CONVERSATION_TOKENS
    config.cache_config.block_size = BLOCK_TOKENS
    config.cache_config.num_gpu_blocks = None
    config.cache_config.kv_cache_layout = "NHD"
    shape: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": row.num_heads,
        "head_size": row.head_dim,
        "dtype": torch.bfloat16,
    }
    full = MLAAttentionSpec(**shape) if "MLA" in row.model else FullAttentionSpec(**shape)
    layers = {f"full.{index}": full for index in range(row.num_full)}
    for index in range(row.num_windowed):
        window = SlidingWindowSpec(**shape, sliding_window=row.window_tokens)
        layers[f"windowed.{index}"] = window
    return config, specs.plan_kv_cache(config, layers, 100 * GIB)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model)
def test_a_row_is_what_vllm_lays_out(row):
    config, kv_cache_config = kv_cache_of(row)
    block_bytes = specs.block_bytes(kv_cache_config)
    assert round(block_bytes / BLOCK_TOKENS / KIB, 1) == row.kib_per_token
    num_blocks = specs.num_blocks_of_longest_request(config, kv_cache_config)
    assert round(num_blocks * block_bytes / GIB, 1) == row.conversation_gib


def test_the_worked_answer_is_right():
    (row,) = (row for row in ROWS if row.model == "Qwen3-32B")
    pool_bytes = int(row.kib_per_token * KIB) * CONVERSATION_TOKENS * 40
    command = PAGE.split("vllm serve Qwen/Qwen3-32B")[1].split("\n\n")[0]
    (written,) = re.findall(r"'(\{.*\})'", command)
    extra = json.loads(written)["kv_connector_extra_config"]
    assert OffloadConfig.from_extra_config(extra, world_size=1).cpu_bytes_per_rank == pool_bytes
    assert f"{pool_bytes / 0.95 / GIB:.0f} GiB" in PAGE, "with the share that stays free"


def test_which_tier_pays_follows_from_its_formula():
    page = (GUIDES / "fleets.md").read_text()
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.split("## Which tier pays?")[1].split("##")[0].splitlines()
        if line.startswith("|")
    )
    rates = [float(column.rpartition(", ")[2]) for column in head[4:]]
    assert len(rows) == 6
    for model, tokens_per_s, kib, needed, *cells in rows:
        needed_gb = float(tokens_per_s.replace(",", "")) * float(kib) * KIB / 1e9
        assert float(needed) == pytest.approx(needed_gb, abs=0.05), model
        gains = [f"{rate / needed_gb:.1f}" if rate > needed_gb else "-" for rate in rates]
        assert cells == gains, model
