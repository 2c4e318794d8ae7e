"""What processes of engines have imported when they are forked: vLLM and this package."""

from __future__ import annotations

import atexit
import gc

import compressed_tensors
import vllm.distributed.elastic_ep.elastic_execute
import vllm.entrypoints.launchers.api_server.entry
import vllm.entrypoints.llm
import vllm.model_executor.layers.quantization.online.base
import vllm.model_executor.models.deepseek_v2
import vllm.model_executor.models.gemma3
import vllm.model_executor.models.llama
import vllm.plugins.lora_resolvers.filesystem_resolver
import vllm.utils.cpu_triton_utils
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.core.sched.scheduler
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker

import safe_offload.connector
import safe_offload.scheduler.planner
import safe_offload.worker.opening  # noqa: F401

gc.collect()
atexit.register(gc.unfreeze)
gc.freeze()  # a collection in a fork neither looks at it nor copies its pages
