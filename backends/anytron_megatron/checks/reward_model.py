"""Check that this model gives one number for what this policy writes. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.config.diagnostics import Diagnostic
from anytron_megatron.models.weight_files import stored_shapes
from anytron_megatron.models.weight_names import SCORE_HEAD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron_megatron.checks.subject import Subject

_FIX = "give a model of transformers' AutoModelForSequenceClassification with num_labels=1"


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
        yield Diagnostic("error", model.key, message, _FIX)
    elif head is not None and head[0] != 1:
        message = f"{SCORE_HEAD} gives {head[0]} numbers for a sequence (num_labels), and a reward is one"
        yield Diagnostic("error", model.key, message, _FIX)
    elif labels is not None and len(labels) != 1:
        message = f"its config has {len(labels)} labels (id2label), and a reward is one number"
        yield Diagnostic("error", model.key, message, _FIX)
    known_tokens, needed = model.text.get("vocab_size"), policy.text.get("vocab_size")
    if known_tokens and needed and known_tokens < needed:
        message = f"the reward model knows {known_tokens} tokens, and the policy {needed}: it could write unknown ones"
        fix = "give a reward model whose vocab_size is at least the policy's"
        yield Diagnostic("error", model.key, message, fix)
