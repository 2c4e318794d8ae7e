"""Reads the arguments of `vllm serve` with vLLM; run by `vllm_facts.VllmProbe`.

Nothing is started and no weight is read. The model is built of tensors without memory, which gives
the exact bytes of its KV cache for every kind of attention.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from safe_offload.commands.doctor.vllm_facts import MARK
from safe_offload.compat import versions
from safe_offload.config.transfer_config import CONNECTOR_NAME
from safe_offload.errors import ConfigError
from safe_offload.start import plugin
from safe_offload.start.checks import take_offloading_size

ENOUGH_BYTES: Final = 1 << 46  # of a pool that is never taken: the longest request has to fit


def main(arguments: Sequence[str]) -> int:
    """Print all known facts in a line after each step; the last line counts."""
    known: dict[str, Any] = {}

    def print_facts(**facts: Any) -> None:
        known.update(facts)
        print(MARK, json.dumps(known, default=str), flush=True)

    print_facts(installed=versions.installed_package())
    try:
        import torch

        cuda, hip = torch.version.cuda or "", torch.version.hip or ""
        print_facts(torch_version=torch.__version__, torch_cuda=cuda, torch_hip=hip)
        print_facts(num_gpus=torch.cuda.device_count())
        import vllm
        from vllm.plugins import load_general_plugins

        print_facts(version=versions.installed_version() or vllm.__version__)
        load_general_plugins()
    except Exception as error:
        print_facts(problem=_in_words(error), is_complete=True)
        return 0
    try:
        print_facts(connector=_connector_module())
    except Exception as error:
        print_facts(connector_problem=_in_words(error))
        plugin.register()  # as the fix will, to find out what else there is
    _read_arguments(arguments, print_facts)
    print_facts(is_complete=True)
    return 0


def _connector_module() -> str:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return str(KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME).__module__)


def _read_arguments(arguments: Sequence[str], print_facts: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    complaint = io.StringIO()
    try:
        parser = versions.make_serve_parser()
        with contextlib.redirect_stderr(complaint):
            namespace = parser.parse_args(list(arguments))
            if namespace.model_tag is not None:
                vars(namespace)["model"] = namespace.model_tag
            engine_args = AsyncEngineArgs.from_cli_args(namespace)
            other_offloading_gib = engine_args.kv_offloading_size
            take_offloading_size(engine_args)
    except SystemExit:
        print_facts(arguments_problem=_of_pydantic(complaint.getvalue().strip().splitlines()))
        return
    except Exception as error:
        print_facts(arguments_problem=_in_words(error))
        return
    facts = {**_from_arguments(engine_args), "other_offloading_gib": other_offloading_gib}
    print_facts(engine=facts)
    if engine_args.model == parser.get_default("model"):
        return
    print_facts(model_name=engine_args.model)
    try:
        print_facts(engine=facts | _from_config(engine_args.create_engine_config()))
    except Exception as error:
        print_facts(engine_problem=_in_words(error))
    try:
        print_facts(model=_model_facts(engine_args))
    except Exception as error:
        print_facts(model_problem=_in_words(error))


def _from_arguments(args: Any) -> dict[str, Any]:
    """Return the facts of an engine without its model."""
    num_ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    return {
        "prefix_caching": args.enable_prefix_caching is not False,
        "hash_algorithm": args.prefix_caching_hash_algo,
        "transfer_config": _fields_of(args.kv_transfer_config),
        "num_ranks": num_ranks,
        "num_local_ranks": num_ranks
        // (args.nnodes or 1)
        * (args.data_parallel_size_local or args.data_parallel_size),
    }


def _from_config(config: Any) -> dict[str, Any]:
    from safe_offload.compat import engine_config

    parallel = config.parallel_config
    return {
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "hash_algorithm": config.cache_config.prefix_caching_hash_algo,
        "transfer_config": _fields_of(config.kv_transfer_config),
        "num_ranks": parallel.world_size,
        "num_local_ranks": engine_config.num_ranks_on_host(parallel)
        if engine_config.are_workers_here(parallel)
        else 1,
    }


def _fields_of(transfer_config: Any) -> dict[str, Any]:
    if transfer_config is None:
        return {}
    names = ("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config")
    return {name: getattr(transfer_config, name) for name in names}


def _model_facts(args: Any) -> dict[str, Any]:
    """Build the model of one rank of tensors without memory, and plan its KV cache."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    from safe_offload.compat import specs, whole_blocks

    one_rank = dataclasses.replace(
        args,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        kv_transfer_config=None,
        kv_offloading_size=None,
    )
    config = one_rank.create_engine_config()
    with set_current_vllm_config(config):
        # One process that meets no other: a store in memory, no port and no file.
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device("meta"):
            initialize_model(vllm_config=config)
        spec = get_kv_cache_spec(config)
        whole_blocks.settle_kv_cache_layout(config)
        kv_cache = specs.plan_kv_cache(config, spec, ENOUGH_BYTES)
        return {
            "block_bytes": specs.block_bytes(kv_cache),
            "num_request_blocks": specs.num_blocks_of_longest_request(config, kv_cache),
            "max_model_len": config.model_config.max_model_len,
            "num_groups": len(kv_cache.kv_cache_groups),
            "is_mla": bool(config.model_config.use_mla),
        }


def _in_words(error: Exception) -> str:
    return _of_pydantic(str(error).splitlines()) or type(error).__name__


def _of_pydantic(lines: Sequence[str]) -> str:
    """Return the problem without the words of pydantic and argparse around it."""
    for line in lines:
        problem, is_ours, _ = line.partition(f" [type={ConfigError.__name__}")
        if is_ours:
            return problem.strip()
        _, is_pydantic, rest = line.partition("Value error, ")
        if is_pydantic:
            return rest.partition(" [type=value_error")[0]
    found = next((line for line in lines if " error: " in line), lines[0] if lines else "")
    return found.partition(" error: ")[2] or found


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    sys.exit(main(sys.argv[1:]))
