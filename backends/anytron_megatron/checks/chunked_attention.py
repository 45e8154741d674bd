"""Check that Llama 4 is trained on sequences within a chunk, and has the layers that mcore-bridge builds.

Imports no Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic
from anytron_megatron.models.chunked_attention import longest_whole
from anytron_megatron.options import ENGINE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron_megatron.checks.subject import Subject

_FAMILY = "llama4"
_INTERVAL = 4
"""mcore_bridge/config/parser.py, line 386: ``no_rope_freq``."""


def length_diagnostics(subject: Subject, run: RunConfig) -> Iterator[Diagnostic]:
    """Check that no sequence of the run can be longer than a chunk of Llama 4's attention."""
    if (limit := longest_whole(subject.config)) is None:
        return
    context = subject.text.get("max_position_embeddings")
    if context is not None and context <= limit:
        return
    why = (
        f"{_FAMILY} attends to chunks of attention_chunk_size tokens and scales queries from position floor_scale - 1 "
        f"on; mcore-bridge does neither, which makes no difference for sequences of at most {limit} tokens"
    )
    shorter = f"set max_position_embeddings={limit} in text_config of the model's config"
    prompt, response = run.data.max_prompt_tokens, 0 if run.supervised else run.rollout.max_new_tokens
    if run.environment is not None or (run.validation is not None and (run.supervised or run.rollout.engine == ENGINE)):
        what = "conversations" if run.environment is not None else "sequences of validation"
        message = f"{what} may have as many tokens as the model's context. {why}"
        yield Diagnostic("error", subject.key, message, shorter)
    elif prompt is None or prompt + response > limit:
        length = "as many tokens as the model's context" if prompt is None else f"{prompt + response} tokens"
        room = limit - response
        fix = f"set data.max_prompt_tokens={room}" if room > 0 else f"set rollout.max_new_tokens below {limit}"
        message = f"sequences may have {length}. {why}"
        yield Diagnostic("error", "data.max_prompt_tokens", message, f"{fix}, or {shorter}")


def layer_diagnostics(key: str, family: str, text: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Check that Megatron has Llama 4's kinds of layers in its order, and one expert for each token."""
    if family != _FAMILY:
        return
    layers = 48 if text.get("num_hidden_layers") is None else text["num_hidden_layers"]
    interval, step = text.get("no_rope_layer_interval", _INTERVAL), text.get("interleave_moe_layer_step", 1)
    rotary = text.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if layers % _INTERVAL or rotary[:layers] != [int((layer + 1) % _INTERVAL != 0) for layer in range(layers)]:
        yield Diagnostic(
            "error",
            key,
            f"the layers without rotary embeddings (no_rope_layers) of this {family} are not every {_INTERVAL}th of a "
            f"multiple of {_INTERVAL}, and mcore-bridge builds no others",
            "train a model with such layers, as the published ones are",
        )
    with_experts = text.get("moe_layers")
    if with_experts is not None and list(with_experts) != list(range(step - 1, layers, step)):
        yield Diagnostic(
            "error",
            key,
            f"moe_layers of this {family} is {with_experts}, but mcore-bridge builds experts by "
            f"interleave_moe_layer_step, {step}",
            "train a model in which both agree, as in the published ones",
        )
    if (chosen := text.get("num_experts_per_tok", 1)) != 1:
        # megatron/core/transformer/moe/experts.py, line 229
        yield Diagnostic(
            "error",
            key,
            f"num_experts_per_tok of this {family} is {chosen}, but Megatron weighs the inputs of experts, as Llama 4 "
            "does, for one expert of each token only",
            "train a model with num_experts_per_tok=1, as the published ones",
        )
