"""Check that critic, teacher and reward model of a run go with its policy. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.config.diagnostics import Diagnostic
from anytron_megatron.checks.experts import EXPERTS
from anytron_megatron.models.weight_files import stored_shapes
from anytron_megatron.models.weight_names import SCORE_HEAD

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


def teacher_diagnostics(teacher: Subject, policy: Subject) -> Iterator[Diagnostic]:
    """Check a teacher against the policy; checks of any model are elsewhere, that of tokenizers is the driver's."""
    if policy.config.get("vision_config") or teacher.config.get("vision_config"):
        message = "no test distils from or into a vision-language model"
        yield Diagnostic("error", teacher.key, message, "leave teacher out, or train a language model")
    known, needed = teacher.text.get("vocab_size"), policy.text.get("vocab_size")
    if known and needed and known < needed:
        yield Diagnostic(
            "error",
            teacher.key,
            (
                f"the teacher knows {known} tokens, and the policy {needed}: it could write tokens that have no "
                "probability there"
            ),
            "give a teacher whose vocab_size is at least the policy's",
        )


_CLASSIFIER = "give a model of transformers' AutoModelForSequenceClassification with num_labels=1"


def reward_model_diagnostics(model: Subject, policy: Subject) -> Iterator[Diagnostic]:
    """Check a reward model, its head first; checks of any model are elsewhere, that of tokenizers is the driver's."""
    if model.path is None or not model.config:
        return
    if policy.config.get("vision_config") or model.config.get("vision_config"):
        message = "no test scores with a vision-language model, or scores responses to images"
        yield Diagnostic("error", model.key, message, "leave reward_model out, or train a language model")
    labels, shapes = model.config.get("id2label"), stored_shapes(model.path)
    head = None if shapes is None else shapes.get(SCORE_HEAD)
    if shapes and head is None:
        known = ", ".join(model.config.get("architectures") or ()) or "nothing that it names"
        message = f"{model.path} has no {SCORE_HEAD}, so it cannot score (it is {known})"
        yield Diagnostic("error", model.key, message, _CLASSIFIER)
    elif head is not None and head[0] != 1:
        message = f"{SCORE_HEAD} gives {head[0]} numbers for a sequence (num_labels), and a reward is one"
        yield Diagnostic("error", model.key, message, _CLASSIFIER)
    elif labels is not None and len(labels) != 1:
        message = f"its config has {len(labels)} labels (id2label), and a reward is one number"
        yield Diagnostic("error", model.key, message, _CLASSIFIER)
    known_tokens, needed = model.text.get("vocab_size"), policy.text.get("vocab_size")
    if known_tokens and needed and known_tokens < needed:
        message = f"the reward model knows {known_tokens} tokens, and the policy {needed}: it could write unknown ones"
        fix = "give a reward model whose vocab_size is at least the policy's"
        yield Diagnostic("error", model.key, message, fix)
