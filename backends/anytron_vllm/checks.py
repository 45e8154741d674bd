"""Check a run whose rollout engine is ``vllm``, before anything starts. Imports no vLLM."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from anytron.config.diagnostics import Diagnostic
from anytron.task.data.model_files import THINKER, has_experts, stated_config
from anytron.task.data.pretrained import processor_files
from anytron_vllm.features import feature_diagnostics
from anytron_vllm.installation import INSTALL, find_installation
from anytron_vllm.options import VllmOptions
from anytron_vllm.release import IMAGES_TESTED, SUPPORTED, flaw, is_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron.device.platform import Platform
    from anytron_vllm.installation import Installation

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's attention on a CPU (vllm/v1/attention/backends/cpu_attn.py, get_supported_head_sizes, 0.32)."""
PROVED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families whose log-probs a test compares with Hugging Face's after every update (tests/backends/vllm)."""
PROVED_WITH_IMAGES = ("qwen2_5_vl", "qwen3_vl")
"""Families whose log-probs a test compares with Hugging Face's for prompts with images."""
OWN_ARGUMENTS = {
    "dtype": "model.dtype",
    "quantization": "rollout.quantization",
    "max_num_seqs": "rollout.max_batch_size",
    "seed": "trainer.seed",
    "model": "model.path",
    "tokenizer": "model.tokenizer",
} | {name: f"rollout.options.{name}" for name in VllmOptions.model_fields if name != "engine_args"}
"""Arguments of vLLM, each with the key of the configuration that sets it."""
FIXED_ARGUMENTS = (
    "async_scheduling",
    "aux_output_config",
    "disable_log_stats",
    "enable_batch_sharded_sampling",
    "enable_lora",
    "enable_return_routed_experts",
    "enable_sleep_mode",
    "generation_config",
    "kv_cache_memory_bytes",
    "language_model_only",
    "load_format",
    "logprobs_mode",
    "lora_dtype",
    "lora_target_modules",
    "max_cpu_loras",
    "max_logprobs",
    "max_lora_rank",
    "max_loras",
    "mm_device_do_normalize",
    "pipeline_parallel_size",
    "data_parallel_size",
    "skip_tokenizer_init",
    "speculative_config",
    "trust_remote_code",
    "worker_extension_cls",
)
"""Arguments of vLLM that only Anytron sets: correct numbers depend on them, or they run code of a model directory."""


def diagnostics(run: RunConfig, platform: Platform) -> Iterator[Diagnostic]:
    """Find settings that vLLM would refuse after minutes of loading, or compute wrongly."""
    try:
        options = VllmOptions.model_validate(run.rollout.options)
    except ValidationError:
        return  # reported with the other options
    installation = find_installation(run.rollout.python)
    yield from _installation(installation, run.rollout.python)
    yield from _arguments(options)
    key, config = model_config(run)
    if not config:
        return
    text: Mapping[str, Any] = config.get("text_config") or config
    yield from _family(key, config, installation)
    vision: Mapping[str, Any] | None = config.get("vision_config")
    if vision is not None and ("spatial_merge_size" not in vision or THINKER in config):
        # vLLM builds its class for images, which asks for a processor of them; the core gives such a model none.
        message = f"no test has run {config.get('model_type')}, whose images Anytron does not read, with vLLM"
        yield Diagnostic("error", key, message, "set rollout.engine=transformers")
    elif vision is not None:
        yield from _images(run, installation)
    yield from _splits(key, text, vision or {}, options)
    yield from _lengths(text, run, options)
    version = None if installation is None else installation.version
    yield from feature_diagnostics(run, config, options, version, accelerator=platform.accelerator)
    if not platform.accelerator:
        yield from _processor(key, text, installation)
        yield from _whole_prompts(text, options)


def _installation(installation: Installation | None, python: str | None) -> Iterator[Diagnostic]:
    where = "this environment" if python is None else f"the environment of {python}"
    if python is not None and not Path(python).exists():
        return  # reported by the core, or it is on other machines
    other = "" if python else "; or set rollout.python to the interpreter of an environment that has it"
    install = INSTALL if python is None else f"{shlex.quote(python)} -m {INSTALL}"
    if installation is None:
        yield Diagnostic("error", "rollout.engine", f"vLLM is not installed in {where}", f"{install}{other}")
    elif not installation.supported:
        message = f"vLLM {installation.version} is installed in {where}, but only {SUPPORTED} is supported"
        yield Diagnostic("error", "rollout.engine", message, f"{install}{other}")


def _arguments(options: VllmOptions) -> Iterator[Diagnostic]:
    for name in options.engine_args:
        key = f"rollout.options.engine_args.{name}"
        if name in OWN_ARGUMENTS:
            message = "Anytron has its own key for this argument"
            yield Diagnostic("error", key, message, f"set {OWN_ARGUMENTS[name]} instead")
        elif name in FIXED_ARGUMENTS:
            message = "Anytron sets this argument itself, because correct or safe results depend on it"
            yield Diagnostic("error", key, message, "remove it")


def model_config(run: RunConfig) -> tuple[str, Mapping[str, Any]]:
    """Return the key of a run's model, and its Hugging Face config.

    Args:
        run: The run's configuration.

    Returns:
        ``model.path`` or ``model.config``, and the fields: none if the config is malformed, which the core reports.
    """
    key = "model.config" if run.model.path is None else "model.path"
    return key, stated_config(run.model.path, run.model.config)


def _family(key: str, config: Mapping[str, Any], installation: Installation | None) -> Iterator[Diagnostic]:
    family = str(config.get("model_type"))
    proved = PROVED_WITH_IMAGES if "vision_config" in config else PROVED
    known = frozenset() if installation is None else installation.architectures()
    named = config.get("architectures") or ()
    if known and named and not known.intersection(named):
        yield Diagnostic(
            "error",
            key,
            f"vLLM {installation.version if installation else ''} does not implement {', '.join(named)}",
            "set rollout.engine=transformers",
        )
    elif family not in proved:
        yield Diagnostic(
            "warning",
            key,
            f"no test compares vLLM's log-probs of {family} with Hugging Face's after a weight update (tested: "
            f"{', '.join(proved)})",
            "set trainer.rollout_log_prob_tolerance, and run anytron verify before you train",
        )


def _images(run: RunConfig, installation: Installation | None) -> Iterator[Diagnostic]:
    """Check what vLLM needs for a model that takes images, even if no prompt has an image."""
    if installation is not None and not installation.torchvision:
        where = "this environment" if run.rollout.python is None else f"the environment of {run.rollout.python}"
        message = (
            f"vLLM {installation.version} needs torchvision for a model that takes images, and it is not installed "
            f"in {where}"
        )
        fix = "install the torchvision that was built for vLLM's torch, or set rollout.engine=transformers"
        yield Diagnostic("error", "rollout.engine", message, fix)
    if installation is not None and not is_in(installation.version, IMAGES_TESTED):
        message = (
            f"no test has run a model that takes images with vLLM {installation.version} (tested: {IMAGES_TESTED})"
        )
        fix = "set trainer.rollout_log_prob_tolerance, and run anytron verify before you train"
        yield Diagnostic("warning", "rollout.engine", message, fix)
    if run.model.processor is None and not (run.model.path and processor_files(Path(run.model.path))):
        message = "vLLM needs an image processor for this model, and neither model.path nor model.processor has one"
        fix = "set model.processor to a directory with preprocessor_config.json, or to 'file.py:function'"
        yield Diagnostic("error", "model.processor", message, fix)


def _splits(key: str, text: Mapping[str, Any], vision: Mapping[str, Any], options: VllmOptions) -> Iterator[Diagnostic]:
    tensor, tensor_key = options.tensor_parallel_size, "rollout.options.tensor_parallel_size"
    for fields, name, what in (
        (text, "num_attention_heads", "attention heads"),
        (text, "intermediate_size", "units of intermediate_size"),
        (vision, "num_heads", "heads of the vision tower"),
    ):
        if fields.get(name) and fields[name] % tensor:
            message = f"{fields[name]} {what} of {key} cannot be split over {tensor} processes"
            yield Diagnostic("error", tensor_key, message, f"use a size that divides {fields[name]}")
    groups = text.get("num_key_value_heads")
    if groups and groups % tensor and tensor % groups:
        message = f"{groups} key/value heads are neither a multiple nor a divisor of the size {tensor}"
        yield Diagnostic("error", tensor_key, message, f"use a size that divides {groups} or is a multiple of it")


def _lengths(text: Mapping[str, Any], run: RunConfig, options: VllmOptions) -> Iterator[Diagnostic]:
    longest, length_key = options.max_model_len, "rollout.options.max_model_len"
    context = text.get("max_position_embeddings")
    if longest is not None and longest <= run.longest_response:
        trains = run.longest_response == run.rollout.max_new_tokens
        key = "rollout.max_new_tokens" if trains else "validation.sets[].max_new_tokens"
        message = f"responses of {run.longest_response} tokens leave no room for a prompt in {longest} tokens"
        yield Diagnostic("error", length_key, message, f"raise {length_key}, or lower {key}")
    if longest is not None and context and longest > context:
        message = f"{longest} tokens are more than the model's context of {context}"
        yield Diagnostic("error", length_key, message, f"set at most {context}")


def _whole_prompts(text: Mapping[str, Any], options: VllmOptions) -> Iterator[Diagnostic]:
    """Refuse options with which vLLM would compute a prompt in parts (anytron_vllm.start.WHOLE_PROMPTS)."""
    why = "on a CPU, vLLM can draw seeded responses only if it computes each prompt in one step"
    if options.engine_args.get("enable_chunked_prefill"):
        yield Diagnostic("error", "rollout.options.engine_args.enable_chunked_prefill", why, "remove it")
    longest = options.max_model_len or text.get("max_position_embeddings")
    if longest and (options.max_num_batched_tokens or longest) < longest:
        message = f"{why}, and sequences may have {longest} tokens"
        fix = f"set it to {longest} or more, or lower rollout.options.max_model_len"
        yield Diagnostic("error", "rollout.options.max_num_batched_tokens", message, fix)


def _processor(key: str, text: Mapping[str, Any], installation: Installation | None) -> Iterator[Diagnostic]:
    """Check what vLLM's kernels for the processor cannot do."""
    why = None
    if installation is not None and has_experts(text):
        why = flaw(installation.version, "experts on a processor")
    if why is not None and installation is not None:
        message = f"vLLM {installation.version} cannot run a model with experts on a processor: {why}"
        yield Diagnostic(
            "error", "rollout.engine", message, "install another version of vLLM, or set rollout.engine=transformers"
        )
    if text.get("kv_lora_rank"):
        return  # latent attention has kernels of its own
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    size = text.get("head_dim") or (hidden // heads if hidden and heads else None)
    if size and size not in CPU_HEAD_SIZES:
        yield Diagnostic(
            "error",
            key if key == "model.path" else f"{key}.head_dim",
            f"vLLM's CPU attention supports head sizes {', '.join(map(str, CPU_HEAD_SIZES))}, not {size}",
            "set rollout.engine=transformers",
        )
