"""Begins what the copies of a worker need when vLLM creates it, before it loads the model.

The connector is created only once vLLM has profiled the model, right before the KV cache.

Source: vLLM 0.31 to 0.33, `WorkerWrapperBase.init_worker` in vllm/v1/worker/worker_base.py and
`Worker.initialize_from_config` in gpu_worker.py.
"""

import logging
from collections.abc import Callable
from typing import Any

from safe_offload.compat.wrapping import wrap
from safe_offload.config.transfer_config import settings_of

logger = logging.getLogger(f"vllm.{__name__}")


def wrap_creation(worker_class: Any) -> None:
    """Let workers prepare their copies as they are created; a failure changes nothing."""

    def around(create: Callable[..., None], worker: Any, /, *args: Any, **kwargs: Any) -> None:
        create(worker, *args, **kwargs)
        try:
            _prepare(worker.vllm_config)
        except Exception:
            logger.debug("Copies are not prepared ahead", exc_info=True)

    wrap(worker_class, "__init__", around)


def _prepare(vllm_config: Any) -> None:
    for config in settings_of(vllm_config.kv_transfer_config):
        # Only workers import the code that copies (tests/test_layering.py).
        from safe_offload.worker.copies.choice import prepare

        prepare(str(vllm_config.device_config.device_type), config)
