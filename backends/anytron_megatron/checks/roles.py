"""Check that critic, teacher and reward model of a run match its policy. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.config.diagnostics import Diagnostic
from anytron.task.data.model_files import EXPERT_COUNTS
from anytron_megatron.models.weight_files import stored_shapes
from anytron_megatron.models.weight_names import SCORE_HEAD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig
    from anytron_megatron.checks.subject import Subject


def critic_diagnostics(critic: Subject, policy: Subject, run: RunConfig) -> Iterator[Diagnostic]:
    """Check a critic against the policy; without ``critic.path`` both have the same model.

    :mod:`anytron_megatron.checks.run` adds the checks that every model must pass.
    """
    without = "remove the section critic and set algorithm.advantage=grpo"
    if run.model.lora is not None:
        message = "a critic is not tested together with a policy that trains adapters"
        yield Diagnostic("error", "critic", message, f"remove model.lora, or {without}")
    if policy.config.get("vision_config") or critic.config.get("vision_config"):
        message = "a critic is for language models only, but the policy or the critic is a vision-language model"
        yield Diagnostic("error", "critic", message, without)
    layers, policy_layers = critic.text.get("num_hidden_layers"), policy.text.get("num_hidden_layers")
    if layers != policy_layers and any((critic.text.get(name) or 0) > 1 for name in EXPERT_COUNTS):
        # megatron/core/transformer/moe/moe_utils.py, save_to_aux_losses_tracker: one for all models of a process
        yield Diagnostic(
            "error",
            critic.key,
            f"a mixture of experts with {layers} layers cannot be the critic of a policy with {policy_layers} layers: "
            "Megatron records auxiliary losses by layer, as if there were one model",
            f"give a critic with {policy_layers} layers, or a critic without experts",
        )
    for name in ("vocab_size", "max_position_embeddings"):
        known, needed = critic.text.get(name), policy.text.get(name)
        if known and needed and known < needed:
            message = f"the critic's {name} is {known}, less than the policy's {needed}"
            fix = "give a critic with the policy's tokenizer and at least its context length"
            yield Diagnostic("error", critic.key, message, fix)


def teacher_diagnostics(teacher: Subject, policy: Subject) -> Iterator[Diagnostic]:
    """Check a teacher against the policy; the driver compares the tokenizers."""
    if policy.config.get("vision_config") or teacher.config.get("vision_config"):
        message = "distillation is not tested with a vision-language model as teacher or student"
        fix = (
            "choose a teacher and a policy that take text only; or, for rewards alone, remove the section teacher, and "
            "set algorithm.distillation_coefficient=0 and an algorithm.advantage other than none"
        )
        yield Diagnostic("error", teacher.key, message, fix)
    known, needed = teacher.text.get("vocab_size"), policy.text.get("vocab_size")
    if known and needed and known < needed:
        yield Diagnostic(
            "error",
            teacher.key,
            (
                f"the teacher's vocabulary has {known} tokens, but the policy's has {needed}: the teacher gives no "
                "probability to some tokens that the policy can write"
            ),
            "give a teacher whose vocab_size is at least the policy's",
        )


_CLASSIFIER = "give a model of transformers' AutoModelForSequenceClassification with num_labels=1"


def reward_model_diagnostics(model: Subject, policy: Subject) -> Iterator[Diagnostic]:
    """Check that a reward model can score what the policy writes; the driver compares their tokenizers.

    Both models must take text only. The reward model needs a head with one output, and at least as many vocabulary
    entries as the policy.
    """
    if model.path is None or not model.config:
        return
    if policy.config.get("vision_config") or model.config.get("vision_config"):
        message = "reward models are not tested with a vision-language model as policy or reward model"
        fix = (
            "choose a policy and a reward model that take text only; or remove the section reward_model, and replace "
            "the reward reward_model by a function"
        )
        yield Diagnostic("error", model.key, message, fix)
    labels, shapes = model.config.get("id2label"), stored_shapes(model.path)
    head = None if shapes is None else shapes.get(SCORE_HEAD)
    if shapes and head is None:
        known = ", ".join(model.config.get("architectures") or ()) or "not stated"
        message = f"{model.path} has no scoring head: no tensor {SCORE_HEAD} (architectures in its config: {known})"
        yield Diagnostic("error", model.key, message, _CLASSIFIER)
    elif head is not None and head[0] != 1:
        message = f"{SCORE_HEAD} gives {head[0]} numbers for a sequence (num_labels), but a reward is one number"
        yield Diagnostic("error", model.key, message, _CLASSIFIER)
    elif labels is not None and len(labels) != 1:
        message = f"the reward model's config has {len(labels)} labels (id2label), but a reward is one number"
        yield Diagnostic("error", model.key, message, _CLASSIFIER)
    known_tokens, needed = model.text.get("vocab_size"), policy.text.get("vocab_size")
    if known_tokens and needed and known_tokens < needed:
        message = (
            f"the reward model's vocabulary has {known_tokens} tokens, but the policy's has {needed}: the policy can "
            "write tokens that the reward model does not know"
        )
        fix = "give a reward model whose vocab_size is at least the policy's"
        yield Diagnostic("error", model.key, message, fix)
