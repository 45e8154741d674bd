"""What of a critic cannot be trained, found before anything is imported. Light to import."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic
from anytron_megatron.checks.experts import EXPERTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from anytron.config.schema import RunConfig


def critic_diagnostics(config: RunConfig, policy: Mapping[str, Any], critic: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Find what a critic does not go with.

    Args:
        config: The run, with a critic.
        policy: The Hugging Face config of the policy; empty if there is none.
        critic: That of the critic.
    """
    if config.model.lora is not None:
        why = "a critic beside a policy with adapters was never tried"
        yield Diagnostic("error", "critic", why, "leave model.lora out, or set algorithm.advantage=grpo")
    if policy.get("vision_config") or critic.get("vision_config"):
        why = "critics of vision-language models cannot be trained: the value head is for language models"
        yield Diagnostic("error", "critic", why, "set algorithm.advantage=grpo")
    ours_of, theirs_of = policy.get("text_config", policy).get, critic.get("text_config", critic).get
    layers, others = ours_of("num_hidden_layers"), theirs_of("num_hidden_layers")
    if layers != others and any((theirs_of(name) or 0) > 1 for name in EXPERTS):
        # megatron/core/transformer/moe/moe_utils.py, save_to_aux_losses_tracker: one for all models of a process
        why = f"a mixture of experts with {others} layers cannot be the critic of a model with {layers}: Megatron "
        why += "notes auxiliary losses by layer, as of one model"
        yield Diagnostic("error", "critic.path", why, "give a model with as many layers, or a dense one")
    for key, what in (("vocab_size", "tokens"), ("max_position_embeddings", "positions")):
        ours, theirs = ours_of(key), theirs_of(key)
        if ours and theirs and theirs < ours:
            why = f"the critic knows {theirs} {what}, and the policy {ours}"
            yield Diagnostic("error", "critic.path", why, "give a model with the policy's tokenizer and context")


def as_policy(config: RunConfig) -> RunConfig:
    """Make the run whose policy would be the critic's model, for the checks that any model has to pass.

    Args:
        config: A run with ``critic.path``.
    """
    assert config.critic is not None
    model = {"path": config.critic.path, "config": None, "freeze": [], "lora": None}
    policy_only = ("mtp_loss_coefficient", "router_replay")
    options = {name: value for name, value in config.engine.options.items() if name not in policy_only}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "engine": config.engine.model_copy(update={"options": options}),
        }
    )


def of_critic(found: Iterable[Diagnostic], known: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """Say of diagnostics of :func:`as_policy` that they are of the critic; leave out those that are known."""
    known = list(known)
    for diagnostic in found:
        if diagnostic not in known:
            key = diagnostic.key.replace("model.path", "critic.path")
            yield replace(diagnostic, key=key, message=f"the critic's model: {diagnostic.message}")
