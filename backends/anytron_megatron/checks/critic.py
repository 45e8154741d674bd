"""Check that this critic can be trained beside this policy. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.config.diagnostics import Diagnostic
from anytron_megatron.checks.experts import EXPERTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig
    from anytron_megatron.checks.subject import Subject


def critic_diagnostics(critic: Subject, policy: Subject, run: RunConfig) -> Iterator[Diagnostic]:
    """Check a critic, whose model is the policy's if it has none of its own; checks of any model are elsewhere."""
    without = "set algorithm.advantage=grpo"
    if run.model.lora is not None:
        message = "no test trains a critic together with a policy with adapters"
        yield Diagnostic("error", "critic", message, f"leave model.lora out, or {without}")
    if policy.config.get("vision_config") or critic.config.get("vision_config"):
        message = "the value head is for language models, and this is a vision-language model"
        yield Diagnostic("error", "critic", message, without)
    layers, policy_layers = critic.text.get("num_hidden_layers"), policy.text.get("num_hidden_layers")
    if layers != policy_layers and any((critic.text.get(name) or 0) > 1 for name in EXPERTS):
        # megatron/core/transformer/moe/moe_utils.py, save_to_aux_losses_tracker: one for all models of a process
        yield Diagnostic(
            "error",
            critic.key,
            f"a mixture of experts with {layers} layers cannot be the critic of a model with {policy_layers}: "
            "Megatron records auxiliary losses by layer, as if there were one model",
            "give a model with as many layers, or a dense one",
        )
    for name, what in (("vocab_size", "tokens"), ("max_position_embeddings", "positions")):
        known, needed = critic.text.get(name), policy.text.get(name)
        if known and needed and known < needed:
            message = f"the critic knows {known} {what}, and the policy {needed}"
            yield Diagnostic("error", critic.key, message, "give a model with the policy's tokenizer and context")
