"""All checks of a run whose engine is ``megatron``, before anything starts. Imports no Megatron."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anytron_megatron.checks.chunked_attention import length_diagnostics
from anytron_megatron.checks.experts import expert_diagnostics, routing_replay_diagnostics
from anytron_megatron.checks.generation import generation_diagnostics
from anytron_megatron.checks.hybrid import hybrid_layout_diagnostics
from anytron_megatron.checks.layout import (
    freeze_diagnostics,
    linear_attention_diagnostics,
    shared_keys_diagnostics,
    size_diagnostics,
    vision_diagnostics,
)
from anytron_megatron.checks.lora import lora_diagnostics
from anytron_megatron.checks.model import model_diagnostics, prediction_diagnostics, transformer_diagnostics
from anytron_megatron.checks.on_policy import bitwise_diagnostics
from anytron_megatron.checks.roles import critic_diagnostics, reward_model_diagnostics, teacher_diagnostics
from anytron_megatron.checks.sparse_attention import sparse_layout_diagnostics
from anytron_megatron.checks.subject import Subject
from anytron_megatron.checks.training import deterministic_diagnostics, optimizer_diagnostics, reduction_diagnostics
from anytron_megatron.models.weight_files import weight_diagnostics
from anytron_megatron.options import MegatronOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.diagnostics import Diagnostic
    from anytron.config.schema import RunConfig


def run_diagnostics(run: RunConfig) -> Iterator[Diagnostic]:
    """Find settings that Megatron would refuse only after minutes, or with which it would compute wrongly."""
    options, policy = MegatronOptions.of(run), Subject.policy(run)
    critic, teacher = Subject.critic(run), Subject.teacher(run)
    yield from deterministic_diagnostics(run)
    yield from optimizer_diagnostics(run)
    yield from reduction_diagnostics(policy, run, options)
    yield from transformer_diagnostics(policy, options)
    of_policy = list(_of_any_model(policy, run, options))
    yield from of_policy
    yield from prediction_diagnostics(policy, options)
    yield from freeze_diagnostics(policy, run)
    yield from routing_replay_diagnostics(policy, run, options)
    yield from lora_diagnostics(run, options)
    yield from generation_diagnostics(policy, run, options)
    yield from bitwise_diagnostics(policy, run, options)
    if run.critic is not None:
        yield from critic_diagnostics(critic or policy, policy, run)
    if teacher is not None:
        yield from teacher_diagnostics(teacher, policy)
    for whose, model in (("critic", critic), ("teacher", teacher)):
        for found in [] if model is None else _of_any_model(model, run, options):
            if found not in of_policy:  # facts of the layout concern no model
                yield replace(found, message=f"the {whose}'s model: {found.message}")
    if (scoring := Subject.reward_model(run)) is not None:
        yield from _of_reward_model(scoring, policy, run, options)


def split_diagnostics(run: RunConfig, model: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Check, for an engine with its own models, whether Megatron can split the policy as the run requires.

    Args:
        run: The run; its ``engine.options`` belong to the other engine and are not read.
        model: The policy's Hugging Face config.
    """
    policy, options = replace(Subject.policy(run), config=model), MegatronOptions()
    yield from size_diagnostics(policy, run, options)
    yield from expert_diagnostics(policy, run, options)


def _of_reward_model(model: Subject, policy: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check a reward model in its own layout; if its head is wrong, report only that."""
    wrong = list(reward_model_diagnostics(model, policy))
    yield from wrong
    if not wrong:
        for found in _of_any_model(model, run.of_reward_model, options.of_reward_model):
            sizes = found.key.startswith("parallel.")
            yield replace(
                found,
                key=f"reward_model.{found.key}" if sizes else found.key,
                message=f"the reward model: {found.message}",
                fix=found.fix.replace("parallel.", "reward_model.parallel."),
            )


def _of_any_model(model: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Do the checks that policies, critics, teachers and reward models must all pass."""
    yield from model_diagnostics(model, options)
    if model.path is not None:
        yield from weight_diagnostics(model.key, model.path, model.config, scores=model.scores)
    yield from size_diagnostics(model, run, options)
    yield from linear_attention_diagnostics(model, run)
    yield from sparse_layout_diagnostics(model, run)
    yield from hybrid_layout_diagnostics(model, run, options)
    yield from shared_keys_diagnostics(model, run)
    yield from length_diagnostics(model, run)
    yield from vision_diagnostics(model, run, options)
    yield from expert_diagnostics(model, run, options)
