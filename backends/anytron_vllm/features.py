"""Check what a run asks of vLLM beyond responses: adapters, experts of tokens, sleep, 8 bits. Imports no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic
from anytron.task.data.model_files import has_experts
from anytron_vllm.options import BUFFER_RANKS
from anytron_vllm.release import Asked, flaw

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import LoraSection, RunConfig
    from anytron_vllm.options import VllmOptions

PROVED_WITH_ADAPTERS = ("ernie4_5", "llama", "qwen2", "qwen3")
"""Families for which a test compares log-probs with adapters that are sent alone to log-probs with merged weights."""
REFUSED_ADAPTERS = {
    "glm4": "vLLM (0.32) takes adapters of gate_proj and up_proj only, and here both are one layer, gate_up_proj"
}
"""Families whose adapters vLLM does not load, and why: each was tried."""
PROVED_WITH_ROUTING = ("qwen3_moe",)
"""Families for which a test compares the experts that vLLM records with what transformers chooses."""


def feature_diagnostics(
    run: RunConfig,
    config: Mapping[str, Any],
    options: VllmOptions,
    version: str | None,
    *,
    accelerator: bool,
) -> Iterator[Diagnostic]:
    """Refuse features that vLLM lacks for this model, version or platform.

    Args:
        run: The run.
        config: The model's Hugging Face config.
        options: The engine's options.
        version: Version of the installed vLLM; None = none is installed, which is reported elsewhere.
        accelerator: Whether the platform is an accelerator.
    """
    family, text = str(config.get("model_type")), config.get("text_config") or config
    if run.rollout.lora == "alone" and run.model.lora is not None:
        yield from _adapters(family, text, run.model.lora, accelerator=accelerator)
    if run.rollout.sleep:
        yield from _sleep(run, accelerator=accelerator)
    if run.rollout.quantization is not None:
        yield from _quantized(run, text, version, accelerator=accelerator)
    if run.rollout.replay_routing:
        yield from _routing(run, family, options, version, accelerator=accelerator)


def _adapters(family: str, text: Mapping[str, Any], lora: LoraSection, *, accelerator: bool) -> Iterator[Diagnostic]:
    """Check whether vLLM can run adapters that are sent alone; merged ones are ordinary weights."""
    if lora.rank > BUFFER_RANKS[-1]:
        message = f"rank {lora.rank} is too large: vLLM supports adapters up to rank {BUFFER_RANKS[-1]}"
        yield Diagnostic("error", "model.lora.rank", message, "lower the rank, or set rollout.lora=merged")
    if family in PROVED_WITH_ADAPTERS:
        return
    fix = "set rollout.lora=merged"
    if family in REFUSED_ADAPTERS:
        yield Diagnostic("error", "rollout.lora", REFUSED_ADAPTERS[family], fix)
    elif not accelerator and has_experts(text):
        message = "vLLM uses Triton kernels for experts that have adapters, and these kernels do not run on a CPU"
        yield Diagnostic("error", "rollout.lora", message, fix)
    else:
        message = (
            f"no test compares vLLM's log-probs of {family} with adapters to its log-probs with merged weights "
            f"(tested: {', '.join(PROVED_WITH_ADAPTERS)})"
        )
        yield Diagnostic("error", "rollout.lora", message, fix)


def _sleep(run: RunConfig, *, accelerator: bool) -> Iterator[Diagnostic]:
    key, fix = "rollout.sleep", "set rollout.sleep=false"
    if not accelerator:
        # vllm/platforms/interface.py, is_sleep_mode_available
        message = "vLLM's sleep mode frees memory of accelerators only, and vLLM does not start with it on a CPU"
        yield Diagnostic("error", key, message, f"{fix}, or rollout.engine=transformers")
    if run.rollout.quantization is not None:
        message = "no test knows which scales of rounded weights (rollout.quantization) vLLM's sleep discards"
        yield Diagnostic("error", key, message, fix)


def _quantized(
    run: RunConfig, text: Mapping[str, Any], version: str | None, *, accelerator: bool
) -> Iterator[Diagnostic]:
    key, fix = "rollout.quantization", "remove it, or set rollout.engine=transformers"
    if run.model.dtype != "bfloat16":
        # vllm/model_executor/layers/quantization/online/base.py, get_supported_act_dtypes
        message = f"vLLM rounds the weights of bfloat16 models only, and model.dtype is {run.model.dtype}"
        yield Diagnostic("error", key, message, f"set model.dtype=bfloat16; or {fix}")
    if not accelerator and has_experts(text):
        message = "vLLM's build for CPUs lacks dynamic_per_token_scaled_fp8_quant, with which it rounds experts"
        yield Diagnostic("error", key, message, fix)
    if version is None:
        return
    if why := flaw(version, "quantized weights"):
        yield Diagnostic("error", key, f"vLLM {version} cannot round weights: {why}", fix)
    elif not accelerator and (why := flaw(version, "quantized weights on a processor")):
        yield Diagnostic("error", key, f"vLLM {version} cannot round weights on a processor: {why}", fix)


def _routing(
    run: RunConfig, family: str, options: VllmOptions, version: str | None, *, accelerator: bool
) -> Iterator[Diagnostic]:
    key, fix = "rollout.replay_routing", "remove it, or set rollout.engine=transformers"
    if family not in PROVED_WITH_ROUTING:
        message = (
            f"no test compares the experts that vLLM records for {family} with what transformers chooses (tested: "
            f"{', '.join(PROVED_WITH_ROUTING)})"
        )
        yield Diagnostic("error", key, message, fix)
    if version is None:
        return
    continued = run.rollout.continue_over_updates or run.rollout.endpoint is not None
    asked: tuple[tuple[bool, Asked, str], ...] = (
        (not accelerator, "routing on a processor", "cannot record the experts of tokens on a processor"),
        (continued, "routing of responses that continue", "cannot record experts over an update of the weights"),
        (
            not options.enable_prefix_caching,
            "routing without a prefix cache",
            "cannot record experts with rollout.options.enable_prefix_caching=false",
        ),
    )
    for wanted, name, what in asked:
        if wanted and (why := flaw(version, name)):
            yield Diagnostic("error", key, f"vLLM {version} {what}: {why}", fix)
