"""How vLLM is started: the environment that it reads, and its arguments."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from anytron.trainer.initial_model import model_directory
from anytron_vllm.adapter import adapter_arguments

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig
    from anytron_vllm.options import VllmOptions

CPU_CACHE_GIB = 1.0
"""Memory for keys and values on a processor, unless the options say: vLLM would take half of the machine's."""


def set_environment(options: VllmOptions) -> None:
    """Set what vLLM reads as it is imported; what the user has set stays, but for the first one."""
    # The scheduler runs in this process: a step is over when the next one begins, and no port is opened.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    values = {
        "VLLM_NO_USAGE_STATS": "1",
        # Otherwise it pins threads to the first processors, where training ranks are.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if options.enforce_eager:
        values["TORCHDYNAMO_DISABLE"] = "1"  # samplers are compiled even so: 50 s at the first token
    for name, value in values.items():
        os.environ.setdefault(name, value)


def engine_arguments(config: RunConfig, options: VllmOptions, *, accelerator: bool) -> dict[str, Any]:
    """The arguments of ``vllm.EngineArgs``. Those set here are refused among the user's (anytron_vllm.checks)."""
    from vllm.config import WeightTransferConfig

    cache = options.kv_cache_gib or (None if accelerator else CPU_CACHE_GIB)
    optional = {
        "max_model_len": options.max_model_len,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
    }
    alone = config.rollout.lora == "alone"
    return {
        "model": str(model_directory(config)),
        "dtype": config.model.dtype,
        # The training engine has the only weights, but for those that adapters are added to.
        "load_format": "safetensors" if alone else "dummy",
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # not the checkpoint's own sampling defaults and end tokens
        "logprobs_mode": "raw_logprobs",  # of logits at the temperature: anytron_vllm.worker
        "max_logprobs": -1,
        "async_scheduling": False,  # each step's tokens are known before the next one: versions and stop strings
        "disable_log_stats": True,
        "max_num_seqs": config.rollout.max_batch_size,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enforce_eager": options.enforce_eager,
        "weight_transfer_config": WeightTransferConfig(backend="anytron"),
        "worker_extension_cls": "anytron_vllm.worker.WorkerExtension",
        **(adapter_arguments(config.model.lora) if alone and config.model.lora else {}),
        **{name: value for name, value in optional.items() if value is not None},
        **options.engine_args,
    }
