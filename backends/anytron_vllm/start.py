"""The environment variables and arguments with which vLLM is started."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.run.trainer.models import model_directory
from anytron.task.data.model_files import CONFIG_FILE, as_known, published_config
from anytron.task.data.pretrained import WEIGHT_FILES, load_tokenizer, save_processor
from anytron_vllm.options import BUFFER_RANKS, CPU_CACHE_GIB
from anytron_vllm.release import normalizes_images

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import LoraSection, RunConfig
    from anytron_vllm.options import VllmOptions


def set_environment(options: VllmOptions) -> None:
    """Set the variables that vLLM reads at import; the user's are kept, except VLLM_ENABLE_V1_MULTIPROCESSING."""
    # The scheduler runs in this process: a step is over when the next one begins, and no port is opened.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    values = {
        "VLLM_NO_USAGE_STATS": "1",
        # Otherwise it pins threads to the first processors, where training ranks are.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if options.enforce_eager:
        values["TORCHDYNAMO_DISABLE"] = "1"  # enforce_eager alone would not stop vLLM from compiling samplers: 50 s
    for name, value in values.items():
        os.environ.setdefault(name, value)


PREPARED_IMAGES: dict[str, Any] = {"limit_mm_per_prompt": {"video": 0}, "mm_processor_cache_gb": 0}
"""Arguments for models that take images: vLLM receives images prepared (anytron_vllm.requests)."""

NORMALIZED_IMAGES = {"mm_device_do_normalize": False}
"""Argument where vLLM's vision tower would normalise patches that the image processor has normalised."""

WHOLE_PROMPTS = {"enable_chunked_prefill": False}
"""Arguments on a CPU. After a part of a prompt vLLM rewinds the random generator of a seeded request, which torch's
generators for CPUs do not allow (vllm/v1/worker/gpu_model_runner.py, ``_bookkeeping_sync``, 0.32)."""


QUANTIZED = {"quantization": "fp8_per_channel"}
"""Argument for ``rollout.quantization: fp8``. vLLM rounds weights as they are loaded, with one scale for each output,
and the inputs of each layer with one scale for each token. (Its ``fp8`` has one scale for a whole layer.)"""

RECORDED_ROUTING = {"enable_return_routed_experts": True}
"""Argument for ``rollout.replay_routing``."""


@contextmanager
def start_directory(config: RunConfig, *, takes_images: bool) -> Iterator[Path]:
    """Yield the model directory that vLLM starts from.

    For a model with images, vLLM needs a tokenizer and an image processor, to know how many tokens an image may have.
    The run's tokenizer and image processor may differ from the ones in ``model.path``; so they are written to a
    temporary directory, with the model's config. A directory whose ``config.json`` Anytron reads as another one
    (:func:`anytron.task.data.model_files.as_known`) also gets a temporary directory: with the config that the rest
    of Anytron takes, and links to the files of weights.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    model = model_directory(config)
    published = published_config(model)
    known = as_known(published)
    if not takes_images and known is published:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="anytron-vllm-") as name:
        directory = Path(name)
        if known is not published:
            for pattern in WEIGHT_FILES:
                for file in model.glob(pattern):
                    (directory / file.name).symlink_to(file.resolve())
            named = {"architectures": [CLASSES[known["model_type"]]], **known}  # vLLM finds its class by it
            (directory / CONFIG_FILE).write_text(json.dumps(named), encoding="utf-8")
            yield directory
            return
        load_tokenizer(config.model).save_pretrained(directory)
        save_processor(config.model, directory)
        shutil.copyfile(model / CONFIG_FILE, directory / CONFIG_FILE)
        yield directory


def engine_arguments(
    config: RunConfig,
    options: VllmOptions,
    directory: Path,
    *,
    version: str,
    accelerator: bool,
    takes_images: bool,
) -> dict[str, Any]:
    """The arguments of ``vllm.EngineArgs``; anytron_vllm.checks refuses users' arguments of the same names."""
    cache = options.kv_cache_gib or (None if accelerator else CPU_CACHE_GIB)
    optional = {
        "max_model_len": options.max_model_len,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
    }
    alone = config.rollout.lora == "alone"
    return {
        "model": str(directory),
        "dtype": config.model.dtype,
        # Weights come from the training engine, except base weights to which adapters are added.
        "load_format": "safetensors" if alone else "dummy",
        "skip_tokenizer_init": not takes_images,  # token ids in, token ids out; the processor has a tokenizer
        "generation_config": "vllm",  # not the checkpoint's own sampling defaults and end tokens
        "logprobs_mode": "raw_logprobs",  # of logits at the temperature: anytron_vllm.transfer
        "max_logprobs": -1,
        "async_scheduling": False,  # each step's tokens are known before the next one: versions and stop strings
        "disable_log_stats": True,
        "max_num_seqs": config.rollout.max_batch_size,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enforce_eager": options.enforce_eager,
        "worker_extension_cls": "anytron_vllm.transfer.WorkerExtension",
        **({} if accelerator else WHOLE_PROMPTS),
        **(PREPARED_IMAGES if takes_images else {}),
        **(NORMALIZED_IMAGES if takes_images and normalizes_images(version) else {}),
        **(adapter_arguments(config.model.lora) if alone and config.model.lora else {}),
        **({"enable_sleep_mode": True} if config.rollout.sleep else {}),
        **(QUANTIZED if config.rollout.quantization else {}),
        **(RECORDED_ROUTING if config.rollout.replay_routing else {}),
        **{name: value for name, value in optional.items() if value is not None},
        **options.engine_args,
    }


def adapter_arguments(section: LoraSection) -> dict[str, Any]:
    """The arguments of ``vllm.EngineArgs`` for one adapter."""
    room = min(rank for rank in BUFFER_RANKS if rank >= section.rank)
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}
