"""A prompt before and after tokenisation."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anytron.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Prompt:
    """What a source gives.

    Attributes:
        id: Names the prompt in errors and samples.
        text: The prompt; tokenised as it stands, with the special tokens that the tokenizer adds.
        tokens: Instead of ``text``: token ids.
        data: Whatever rewards need, for example the right answer.
    """

    id: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    data: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if (self.text is None) == (self.tokens is None):
            raise DataError("A prompt has either text or tokens.", where=f"prompt {self.id}")


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt that has been checked against the model.

    Attributes:
        id: As in :class:`Prompt`.
        text: As given, or decoded.
        tokens: Token ids, at least one.
        data: As in :class:`Prompt`.
    """

    id: str
    text: str
    tokens: tuple[int, ...]
    data: Mapping[str, Any]


def tokenize(
    prompts: Sequence[Prompt], tokenizer: Any, *, context_length: int | None, vocab_size: int, max_new_tokens: int
) -> list[TokenizedPrompt]:
    """Tokenise all prompts of a run and check that the model can answer them.

    Args:
        prompts: What the source gave.
        tokenizer: A Hugging Face tokenizer.
        context_length: Tokens that the model can see, prompt and response together; None = unlimited.
        vocab_size: Token ids are below this.
        max_new_tokens: Room that a response needs.

    Raises:
        DataError: There is no prompt; or one is empty, leaves no room for its response, or has a
            token that the model does not know.
    """
    if not prompts:
        raise DataError("There are no prompts.", where="data.source", fix="check the source and data.options")
    with_text = [prompt for prompt in prompts if prompt.text is not None]
    encoded = tokenizer([prompt.text for prompt in with_text])["input_ids"] if with_text else []
    ids = {id(prompt): tuple(tokens) for prompt, tokens in zip(with_text, encoded, strict=True)}
    tokenized = []
    for prompt in prompts:
        tokens = ids[id(prompt)] if prompt.tokens is None else prompt.tokens
        _check(prompt.id, tokens, context_length, vocab_size, max_new_tokens)
        text = tokenizer.decode(list(tokens)) if prompt.text is None else prompt.text
        tokenized.append(TokenizedPrompt(prompt.id, text, tokens, prompt.data))
    return tokenized


def _check(name: str, tokens: Sequence[int], context_length: int | None, vocab_size: int, max_new_tokens: int) -> None:
    if not tokens:
        raise DataError("A prompt has no tokens.", where=f"prompt {name}", fix="remove it from the data")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise DataError(
            "A prompt has a token that the model does not know.",
            where=f"prompt {name}",
            why=f"ids from {min(tokens)} to {max(tokens)}, the model's vocabulary has {vocab_size}",
            fix="use the tokenizer that belongs to the model (model.tokenizer)",
        )
    if context_length is not None and len(tokens) + max_new_tokens > context_length:
        room = context_length - len(tokens)
        raise DataError(
            "A prompt is longer than the model's context."
            if room < 0
            else "A prompt leaves too little room for its response.",
            where=f"prompt {name}",
            why=f"{len(tokens)} tokens of prompt and {max_new_tokens} of response, the context has {context_length}",
            fix="shorten or remove the prompt, or lower rollout.max_new_tokens",
        )
