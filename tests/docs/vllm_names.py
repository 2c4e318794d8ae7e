"""Names of the interfaces that the installed vLLM offers, printed as JSON.

A process of its own, because vLLM's server and its metrics exist once in a process.
"""

import dataclasses
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any, get_args


def routes() -> dict[str, list[str]]:
    """Query parameters of every route of the server, by path."""
    from vllm.entrypoints.launchers.app import build_app

    app = build_app(_parser().parse_args(["--model", "m"]), supported_tasks=("generate",))
    found: dict[str, list[str]] = {}
    for route in app.routes:
        queries = getattr(getattr(route, "dependant", None), "query_params", ())
        found.setdefault(route.path, []).extend(query.name for query in queries)
    return found


def _parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def metrics() -> list[str]:
    """Metrics of the server, as /metrics names them."""
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlPromMetrics
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    from tests.simulator.vllm_setup import EngineShape, make_config

    shape = EngineShape(extra={"tiers": [{"url": "file:///mnt/kv"}]})  # which have metrics too
    config = make_config(shape)
    logger = PrometheusStatLogger(config, [0])
    logger.kv_connector_prom.observe({})  # the connector makes some with the first statistics
    kinds: dict[Any, Any] = {kind: kind for kind in (Counter, Gauge, Histogram)}
    NixlPromMetrics(config, kinds, ["engine"], {0: ["0"]})  # of a connector beside ours
    suffix = {"counter": "_total"}
    return [family.name + suffix.get(family.type, "") for family in REGISTRY.collect()]


def main() -> None:
    """Print everything."""
    os.environ.pop("VLLM_SERVER_DEV_MODE", None)
    for_clients = routes()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    import vllm
    from vllm import LLM, SamplingParams, envs
    from vllm.config import KVTransferConfig
    from vllm.config.kv_transfer import KVRole
    from vllm.distributed.kv_events import BlockStored
    from vllm.engine.arg_utils import EngineArgs

    reset = inspect.signature(LLM.reset_prefix_cache).parameters
    fields = [field.name for field in dataclasses.fields(KVTransferConfig)]
    names = {
        "routes": routes(),
        "routes_for_clients": list(for_clients),
        "flags": sorted({o for action in _parser()._actions for o in action.option_strings}),
        "variables": sorted(envs.environment_variables),
        "metrics": metrics(),
        "fields": fields,
        "roles": get_args(KVRole),
        "event_fields": list(BlockStored.__struct_fields__),
        "calls": {
            "LLM": [
                *inspect.signature(LLM).parameters,
                *(field.name for field in dataclasses.fields(EngineArgs)),
            ],
            "LLM.reset_prefix_cache": list(reset),
            "SamplingParams": list(inspect.signature(SamplingParams).parameters),
            "KVTransferConfig": fields,
        },
        "root": str(Path(vllm.__file__).parent),
    }
    sys.stdout.write(f"\n{json.dumps(names)}\n")


if __name__ == "__main__":
    main()
