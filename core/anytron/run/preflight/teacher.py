"""Check that a teacher, or a reward model, means by each number the token that the policy means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError
from anytron.config.roles import TeacherSection
from anytron.task.data.pretrained import read_hf_config, read_tokenizer

if TYPE_CHECKING:
    from anytron.config.roles import RewardModelSection

SHOWN = 3
"""Tokens that an error names."""


def check_vocabulary(asked: TeacherSection | RewardModelSection, tokenizer: Any) -> None:
    """Compare a model's tokenizer with the policy's, token by token.

    It scores the numbers that the policy writes. Tokens that it has besides do no harm: the policy never writes them.

    Args:
        asked: The section of the model.
        tokenizer: The policy's, a ``transformers.PreTrainedTokenizerBase``.

    Raises:
        ConfigError: A token of the policy has another number in the model's tokenizer, or none.
    """
    teaches = isinstance(asked, TeacherSection)
    key = "teacher.path" if teaches else "reward_model.path"
    own, theirs = tokenizer.get_vocab(), read_tokenizer(Path(asked.path), key).get_vocab()
    differing = sorted((number, token) for token, number in own.items() if theirs.get(token) != number)
    if not differing:
        return
    shown = (f"{token!r} is {number}, and {theirs.get(token, 'nothing')}" for number, token in differing[:SHOWN])
    raise ConfigError(
        "The teacher has another vocabulary than the policy."
        if teaches
        else "The reward model has another vocabulary than the policy.",
        where=f"{key} = {asked.path}",
        why=f"{len(differing)} of the policy's {len(own)} tokens have another number, or none: {'; '.join(shown)}",
        fix="give a teacher of the same family, whose tokenizer is the policy's; to learn from another one, have it "
        "write responses and train on these"
        if teaches
        else "give a reward model of the same family, whose tokenizer is the policy's: responses are not tokenized "
        "again; one of another family can be asked by a reward function of your own",
    )


def context_length_of(asked: TeacherSection | RewardModelSection) -> int | None:
    """Tokens that a model can see; None = unlimited.

    Raises:
        ConfigError: Its directory has no usable config.
    """
    length: int | None = getattr(read_hf_config(Path(asked.path)).get_text_config(), "max_position_embeddings", None)
    return length
