"""Check that a teacher means by each number the token that the policy means, before a worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.data.pretrained import read_hf_config, read_tokenizer
from anytron.errors import ConfigError

if TYPE_CHECKING:
    from anytron.config.roles import TeacherSection

SHOWN = 3
"""Tokens that an error names."""


def check_vocabulary(teacher: TeacherSection, tokenizer: Any) -> None:
    """Compare the teacher's tokenizer with the policy's, token by token.

    It scores the numbers that the policy writes. Tokens that it has besides do no harm: the policy never writes them.

    Args:
        teacher: The section.
        tokenizer: The policy's, a ``transformers.PreTrainedTokenizerBase``.

    Raises:
        ConfigError: A token of the policy has another number in the teacher's tokenizer, or none.
    """
    own, theirs = tokenizer.get_vocab(), read_tokenizer(Path(teacher.path), "teacher.path").get_vocab()
    differing = sorted((number, token) for token, number in own.items() if theirs.get(token) != number)
    if not differing:
        return
    shown = (f"{token!r} is {number}, and {theirs.get(token, 'nothing')}" for number, token in differing[:SHOWN])
    raise ConfigError(
        "The teacher has another vocabulary than the policy.",
        where=f"teacher.path = {teacher.path}",
        why=f"{len(differing)} of the policy's {len(own)} tokens have another number, or none: {'; '.join(shown)}",
        fix="give a teacher of the same family, whose tokenizer is the policy's; to learn from another one, have it "
        "write responses and train on these",
    )


def context_length_of(teacher: TeacherSection) -> int | None:
    """Tokens that the teacher can see; None = unlimited.

    Raises:
        ConfigError: Its directory has no usable config.
    """
    length: int | None = getattr(read_hf_config(Path(teacher.path)).get_text_config(), "max_position_embeddings", None)
    return length
